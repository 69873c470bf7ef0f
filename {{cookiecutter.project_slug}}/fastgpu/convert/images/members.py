"""Files in tar and zip archives. One pass lists their places; then any thread reads a file from its place."""

import os
import stat
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from posixpath import normpath
from typing import NamedTuple

import numpy as np

from fastgpu.convert.reader import explain_errors
from fastgpu.process.content import open_regular
from fastgpu.process.launch import UserError, warn

MAX_FILE_BYTES = 1 << 30
"""Maximum size of a file in an archive."""
COMPRESSED_BY = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"\x28\xb5\x2f\xfd": "zstd"}
"""{first bytes of a file: the program that compressed it}"""
ZIP_HEADER = struct.Struct("<4s22xHH")
"""Header of a file in a zip archive: ZIP_SIGNATURE, then the lengths of the name and of an extra field."""
ZIP_SIGNATURE = b"PK\x03\x04"
IS_ENCRYPTED = 1
"""Flag of an encrypted file in a zip archive."""


class Place(NamedTuple):
    """Position of a file in an archive."""

    offset: int
    """Position of its content; in a zip archive, of its header."""
    n_stored: int
    """Number of bytes in the archive."""
    n_bytes: int
    """Size of the file."""
    checksum: int = -1
    """CRC-32 in a zip archive; -1 in a tar archive."""
    is_deflated: bool = False


PLACES = np.dtype(
    [
        ("offset", "i8"),
        ("n_stored", "i8"),
        ("n_bytes", "i8"),
        ("checksum", "i8"),
        ("is_deflated", "?"),
        ("archive", "i4"),
    ]
)
"""A `Place` with the number of its archive."""


def list_members(archive: Path) -> dict[str, Place]:
    """{name: place} of the files in a tar or zip archive, which is read once.

    Raises UserError if the archive is damaged or compressed as a whole, and for links, paths that lead out of the
    archive, and duplicate names.
    """
    members: dict[str, Place] = {}
    is_zip = archive.suffix.lower() == ".zip"
    with explain_errors(archive, "a zip archive" if is_zip else "a tar archive"), open_regular(archive) as file:
        head = file.read(8)
        if packer := next((name for magic, name in COMPRESSED_BY.items() if head.startswith(magic)), ""):
            cure = "uncompress it to a .tar"
            raise UserError(f"{archive} is compressed by {packer}, so that no file in it can be read alone; {cure}")
        for name, place in _list_zip(archive) if is_zip else _list_tar(archive):
            path = normpath(name)  # of `tar cf x.tar .`, ./a is a
            if path.startswith(("/", "../")):
                raise UserError(
                    f"{archive} has the file {name}, which is in no folder of it; pack it with another name"
                )
            if path in members:
                raise UserError(f"{archive} has the file {name} twice; pack it again")
            if (n_bytes := max(place.n_stored, place.n_bytes)) > MAX_FILE_BYTES:
                raise UserError(f"{archive}: {name} has {n_bytes:,} bytes; allowed are {MAX_FILE_BYTES:,}")
            members[path] = place
    return members


def _list_tar(path: Path) -> Iterator[tuple[str, Place]]:
    with tarfile.open(path, "r:") as archive:
        end = 0
        while member := archive.next():
            archive.members.clear()  # type: ignore[attr-defined]  # or all headers stay in memory
            if member.size < 0 or member.offset_data < end:
                raise ValueError(f"the header of {member.name} is damaged")
            end = member.offset_data + member.size
            if member.isdir():
                continue
            if not member.isreg() or member.issparse():
                kind = "link" if member.islnk() or member.issym() else "special file"
                raise UserError(f"{path}: {member.name} is a {kind}; pack files alone (links: tar --dereference)")
            yield member.name, Place(member.offset_data, member.size, member.size)
        _check_end(path, archive.offset)


def _check_end(path: Path, offset: int) -> None:
    """Raise ValueError unless only zeros follow the last file: tarfile also stops at a damaged header."""
    with path.open("rb") as file:
        file.seek(offset)
        if not (rest := file.read(1 << 20)):
            warn(f"{path} has no mark of its end: if it was cut off, files are missing")
        while rest:
            if any(rest):
                raise ValueError(f"there is no header of a file at byte {offset:,}, and other bytes follow")
            rest = file.read(1 << 20)


def _list_zip(path: Path) -> Iterator[tuple[str, Place]]:
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if member.is_dir():
                continue
            if stat.S_ISLNK(member.external_attr >> 16):
                raise UserError(f"{path}: {member.filename} is a link; pack files alone")
            if member.flag_bits & IS_ENCRYPTED or member.compress_type not in (
                zipfile.ZIP_STORED,
                zipfile.ZIP_DEFLATED,
            ):
                raise UserError(f"{path}: {member.filename} is encrypted, or compressed by another method than deflate")
            is_deflated = member.compress_type == zipfile.ZIP_DEFLATED
            yield (
                member.filename,
                Place(member.header_offset, member.compress_size, member.file_size, member.CRC, is_deflated),
            )


def read_member(archive: Path, place: Place) -> bytes:
    """The content of a file in an archive. Any thread may call this. Raises OSError, ValueError or zlib.error."""
    with open_regular(archive) as file:
        offset, is_zip = place.offset, place.checksum >= 0
        if is_zip:
            signature, *lengths = ZIP_HEADER.unpack(os.pread(file.fileno(), ZIP_HEADER.size, offset))
            if signature != ZIP_SIGNATURE:
                raise ValueError("its header in the archive is damaged")
            offset += ZIP_HEADER.size + sum(lengths)
        content = os.pread(file.fileno(), place.n_stored, offset)
    if len(content) != place.n_stored:
        raise ValueError("the archive ends before it does")
    if place.is_deflated:
        # At most one byte too many is unpacked: enough to notice, and no zip bomb fills the memory.
        content = zlib.decompressobj(-zlib.MAX_WBITS).decompress(content, place.n_bytes + 1)
    if is_zip and (len(content) != place.n_bytes or zlib.crc32(content) != place.checksum):
        raise ValueError("its bytes do not match their checksum in the archive")
    return content
