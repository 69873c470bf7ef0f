"""Messages about files that are missing or damaged, and lists of many things."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from fastgpu.process.launch import UserError

MAX_LISTED = 20
"""Things that a message lists."""


def list_first(items: Sequence[str], separator: str = ", ") -> str:
    """The first of some texts, and how many more there are."""
    n_more = len(items) - MAX_LISTED
    return separator.join([*items[:MAX_LISTED], *([f"and {n_more:,} more"] if n_more > 0 else [])])


@contextmanager
def explain_errors(path: object, expected: str) -> Iterator[None]:
    """Turn the errors of a file that is missing or damaged into a UserError. expected: what the file should be."""
    try:
        yield
    except (UserError, ModuleNotFoundError):
        raise
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; check its name") from None
    except Exception as error:  # parsers raise anything for damaged bytes
        text = " ".join(str(error).split())[:200]
        raise UserError(f"{path} cannot be read as {expected}: {text}") from None
