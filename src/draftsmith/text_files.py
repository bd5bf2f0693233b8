"""Texts that users give: UTF-8 with or without a byte order mark; of another encoding, the place is named.

Bytes of another encoding are never replaced by marks: nobody writes these, so a drafter would learn what never comes.
"""

import codecs
from collections.abc import Sequence
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

from draftsmith.types import DraftsmithError

ENCODING = "utf-8-sig"
"""UTF-8, whose byte order mark, which some programs put before a text, is no part of the text."""
MARKS = (
    (codecs.BOM_UTF32_LE, "UTF-32"), (codecs.BOM_UTF32_BE, "UTF-32"), (codecs.BOM_UTF16_LE, "UTF-16"),
    (codecs.BOM_UTF16_BE, "UTF-16"),
)
"""The marks of wider encodings, the longer ones first, since a shorter one begins them."""
SHOWN, SHOWN_NAMES = 40, 8
"""Messages show so many characters of a value, and so many names."""


class NotUtf8(DraftsmithError):
    """A file is text of another encoding, or no text."""


def read_text(path: Path) -> str:
    """Return the text of a file; NotUtf8 names the first place that is of another encoding, OSError as usual."""
    content = path.read_bytes()  # once, since a pipe gives them only once
    check_width(path, BytesIO(content))
    try:
        text = content.decode(ENCODING)
    except UnicodeDecodeError as error:
        raise not_utf8(path, BytesIO(content)) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def check_width(path: Path, opened: BinaryIO | None = None) -> None:
    """Refuse a file whose beginning is that of a text in UTF-16 or UTF-32.

    Args:
        opened: its bytes from the beginning, where they are not those on the disk.

    Raises:
        NotUtf8: it is such a text; the message says how to convert it.
    """
    if opened is None:
        with path.open("rb") as handle:
            begin = handle.read(4)
    else:
        begin = opened.read(4)
    name = next((name for mark, name in MARKS if begin.startswith(mark)), None)
    if name is None and len(begin) == 4 and [byte == 0 for byte in begin] in ([False, True] * 2, [True, False] * 2):
        name = "UTF-16"
    if name is not None:
        raise NotUtf8(f"{path} is {name} instead of UTF-8; convert it, for example by iconv -f {name} -t UTF-8.")


def not_utf8(path: Path, opened: BinaryIO | None = None) -> NotUtf8:
    """Return the error for a file that is not UTF-8, with the first line that is not.

    Args:
        opened: see `check_width`.
    """
    if opened is None:
        with path.open("rb") as handle:
            return not_utf8(path, handle)
    for number, line in enumerate(opened, 1):
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            return NotUtf8(
                f"{path}, line {number}, is not UTF-8 text (byte 0x{line[error.start]:02x}); convert the file, for "
                "example by iconv -f LATIN1 -t UTF-8 if it is Latin-1."
            )
    return NotUtf8(f"{path} is not UTF-8 text; convert it.")


def excerpt(text: str, most: int = SHOWN) -> str:
    """Return the beginning of a text on one line, for a message."""
    line = " ".join(text[: 4 * most].split())
    return line if len(line) <= most and len(text) <= 4 * most else f"{line[: most - 1]}…"


def names_in_words(names: Sequence[str]) -> str:
    """Return the first of some names, for a message; "(none)" if there are none."""
    shown = ", ".join(excerpt(name) for name in names[:SHOWN_NAMES])
    return f"{shown} and {len(names) - SHOWN_NAMES} more" if len(names) > SHOWN_NAMES else shown or "(none)"
