"""Messages about files that are missing or damaged, and lists of many things."""

import csv
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tokenize import TokenError

from fastgpu.process.launch import UserError
from fastgpu.storage.file import not_found

MAX_LISTED = 20
"""Things that a message lists."""
MAX_ERROR_CHARS = 200
DAMAGE = (
    *(OSError, ValueError, LookupError, EOFError, ArithmeticError, MemoryError, SyntaxError, TypeError, RuntimeError),
    *(csv.Error, TokenError, zipfile.BadZipFile, zlib.error),
)
"""What parsers raise for damaged bytes."""


def list_first(items: Sequence[str], separator: str = ", ") -> str:
    """The first of some texts, and how many more there are."""
    n_more = len(items) - MAX_LISTED
    return separator.join([*items[:MAX_LISTED], *([f"and {n_more:,} more"] if n_more > 0 else [])])


@contextmanager
def explain_errors(path: object, expected: str) -> Iterator[None]:
    """Turn the errors of a file that is missing or damaged into a UserError. expected: what the file should be.

    A fifo, a socket or a device is refused, since it might be waited for without end.
    """
    file = Path(str(path).partition("::")[0])
    try:
        if file.exists() and not file.is_file() and not file.is_dir():
            raise UserError(f"{file} is a fifo, a socket or a device; give a regular file")
        yield
    except UserError:  # which is a ValueError, too
        raise
    except FileNotFoundError:
        raise not_found(path) from None
    except (PermissionError, IsADirectoryError) as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except DAMAGE as error:
        text = " ".join(str(error).split())[:MAX_ERROR_CHARS]
        cure = "fetch it again"
        if isinstance(error, UnicodeDecodeError):
            cure = "save it as UTF-8, such as by `iconv -f CP949 -t UTF-8` for Korean text"
        elif "Object arrays" in text or "Python objects" in text:  # in .npz and .npy files
            cure = "save it with a dtype of numbers, such as by array.astype('float32')"
        raise UserError(f"{path} is not {expected}: {text}; {cure}") from None
