"""What the readers of other formats share: messages for files that are missing or damaged, and --on-error."""

import csv
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from tarfile import TarError
from typing import Literal

from fastgpu.process.launch import UserError
from fastgpu.rows.contract import Source
from fastgpu.storage.file import not_found

OnError = Literal["stop", "skip"]
"""What is done with a broken image or line: stop, or leave it out and list it."""
MAX_SKIPPED_SHARE = 0.01
"""If a larger share is broken, the data is not what it should be, and conversion stops."""


class SkippingSource(Source):
    """A source that may find out while it reads that a row is broken. Its fields have fixed shapes."""

    failed: dict[int, str]
    """{row: why it cannot be read}. `read` adds a broken row here and leaves its place undefined. Whoever takes rows
    from this source must leave out those that are listed here."""


@contextmanager
def explain_errors(path: object, expected: str) -> Iterator[None]:
    """Turn the errors of a file that is missing or damaged into a UserError. expected: what the file should be."""
    try:
        yield
    except UserError:  # which is a ValueError, too
        raise
    except FileNotFoundError:
        raise not_found(path) from None
    except (PermissionError, IsADirectoryError) as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    except (OSError, ValueError, KeyError, EOFError, csv.Error, TarError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"{path} is not {expected}: {error}; fetch it again") from None
