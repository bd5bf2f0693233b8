"""The files of the page that the server shows at `/`."""

from pathlib import Path

from starlette.responses import Response
from starlette.staticfiles import StaticFiles
from starlette.types import Scope

FOLDER = Path(__file__).parent / "page"
INDEX = "index.html"
HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "font-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


class Page(StaticFiles):
    """Static files with headers that keep browsers from using them for anything but this page."""

    async def get_response(self, path: str, scope: Scope) -> Response:
        """Return a file."""
        response = await super().get_response(path, scope)
        response.headers.update(HEADERS)
        return response


def page_paths(folder: Path = FOLDER) -> list[str]:
    """Return the URL paths of the page's files; none where there is no page."""
    if not (folder / INDEX).is_file():
        return []
    files = [path.relative_to(folder).as_posix() for path in sorted(folder.rglob("*")) if path.is_file()]
    return ["/", *(f"/{file}" for file in files)]
