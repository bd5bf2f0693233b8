"""The page at `/`: its files, and the headers that keep anything else out of it."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
HEADERS: Mapping[str, str] = MappingProxyType({
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
})
"""To be sent with every file of the page: nothing in line, nothing from elsewhere, in nobody's frame."""


@dataclass(frozen=True)
class PageFile:
    """A file of the page, with what it is sent as."""

    content: bytes
    kind: str


@cache
def page_files() -> Mapping[str, PageFile]:
    """Return the files by the name under which they are asked for, "" standing for the page itself.

    Names are compared whole, so no path a client sends reaches the file system.
    """
    found = {
        path.name: PageFile(path.read_bytes(), KINDS[path.suffix])
        for path in sorted(FOLDER.iterdir())
        if path.suffix in KINDS
    }
    return MappingProxyType({"": found[INDEX], **found})
