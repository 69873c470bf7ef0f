"""Damaged variants of a file: of its bytes, or of its text. All follow from the seed."""

import random
import re

NUMBERS = (0, 1, 0x7F, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, 0x7FFFFFFFFFFFFFFF, 0xFFFFFFFFFFFFFFFF)
WORDS = (
    *("", "0", "-1", "--1", "1e999", "-1e999", "nan", "inf", "1_000", "0x1f", "1" + "0" * 30, "9" * 5000, "1e-400"),
    *("true", "null", "~", "2024-13-45", "!!python/object/apply:os.system [true]", "!!binary x", "&a [*a]", "*a"),
    *("{" * 3000, "[" * 3000, "{a: " * 3000, "- " * 3000, "a: &b [x]\nc: [*b, *b]\n", "<<: {a: 1}", "? [1, 2]"),
    *('"', "'", '"""', "\x00", "\ufeff", "\t", "\r", ",", ";", "|", "#", "%", "\U0001f600", "x" * 10_000),
    *("../../etc/passwd", "/dev/zero", "/dev/stdin", ".", "/", "*", "x::y", "http://x/"),
)
"""What takes the place of a word, number or mark of a text."""
NOT_UTF8 = (b"\xff", b"\xc3(", b"\xed\xa0\x80", b"\0", b"\x1b[31m")


def mutate(data: bytes, rng: random.Random, *, is_text: bool = False) -> bytes:
    """A damaged variant, by one to three mutations."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if is_text and rng.random() < 0.7:
            data = rng.choice((_other_word, _other_word, _other_lines, _bad_text))(data, rng)
        else:
            data = rng.choice((flip, _splice, _splice, _number))(data, rng)
    return data


def flip(data: bytes, rng: random.Random) -> bytes:
    """One to eight bits are the other way round."""
    changed = bytearray(data)
    for _ in range(rng.randint(1, 8) if data else 0):
        changed[_place(data, rng)] ^= 1 << rng.randrange(8)
    return bytes(changed)


def _place(data: bytes, rng: random.Random) -> int:
    """A byte; every second time near the beginning, where formats describe themselves."""
    return rng.randrange(max(1, min(len(data), 4096) if rng.random() < 0.5 else len(data)))


def _splice(data: bytes, rng: random.Random) -> bytes:
    """A span, or the whole end, is removed or overwritten, or something is inserted: zeros, noise, or another span."""
    start = _place(data, rng)
    size = rng.choice((1, 4, 8, 64, 512, 4096))
    stop = rng.choice((start, start + size, start + size, len(data)))
    other = _place(data, rng)
    return data[:start] + rng.choice((b"", bytes(size), rng.randbytes(size), data[other : other + size])) + data[stop:]


def _number(data: bytes, rng: random.Random) -> bytes:
    """An aligned integer of 2, 4 or 8 bytes is another one."""
    size = rng.choice((2, 4, 8))
    start = _place(data, rng) // size * size
    number = rng.choice(NUMBERS) & ((1 << 8 * size) - 1)
    return data[:start] + number.to_bytes(size, rng.choice(("little", "big"))) + data[start + size :]


def _other_word(data: bytes, rng: random.Random) -> bytes:
    """A word, number or mark, or the rest of a line, is another one, or has another one before it."""
    text = data.decode("utf-8", "surrogateescape")
    start, stop = rng.choice([match.span() for match in re.finditer(r"[\w.+-]+|[^\w\s]", text)] or [(0, 0)])
    line_end = text.find("\n", start)
    stop = rng.choice((start, stop, stop, line_end if line_end >= 0 else len(text)))
    return (text[:start] + rng.choice(WORDS) + text[stop:]).encode("utf-8", "surrogateescape")


def _other_lines(data: bytes, rng: random.Random) -> bytes:
    """A line is gone, there twice, elsewhere, or ends differently."""
    lines = data.splitlines(keepends=True) or [b""]
    number = rng.randrange(len(lines))
    line = lines.pop(number)
    where = rng.choice((number, rng.randint(0, len(lines))))
    lines[where:where] = rng.choice(([], [line, line], [line.strip() + b"\r\n"], [line.strip()], [b"  " + line]))
    return b"".join(lines)


def _bad_text(data: bytes, rng: random.Random) -> bytes:
    """Bytes that are no UTF-8, or another encoding altogether."""
    place = rng.randint(0, len(data))
    if rng.random() < 0.2:
        return data.decode("utf-8", "replace").encode(rng.choice(("utf-16", "utf-8-sig", "utf-32")))
    return data[:place] + rng.choice(NOT_UTF8) + data[place:]
