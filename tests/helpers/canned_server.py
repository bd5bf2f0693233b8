"""A small HTTP server for tests, on a port of its own, that answers as a function of the test says."""

import json
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any, Self


@dataclass(frozen=True)
class Asked:
    """A request as it came: the body read as JSON, None without one."""

    method: str
    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Reply:
    """An answer: a body in one piece, or pieces that are sent one by one as they are made."""

    body: bytes | Iterable[bytes]
    status: int = 200
    kind: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)


def json_reply(value: Any, status: int = 200) -> Reply:
    return Reply(json.dumps(value).encode(), status)


def events(*chunks: Any) -> Iterable[bytes]:
    """Server-sent events of these chunks, each a piece of its own; "[DONE]" is sent as it is."""
    return [f"data: {chunk if isinstance(chunk, str) else json.dumps(chunk)}\n\n".encode() for chunk in chunks]


class CannedServer:
    """Serves while it is entered. `url` is where, `seen` what was asked, in the order in which it came."""

    def __init__(self, answer: Callable[[Asked], Reply]) -> None:
        self.seen: list[Asked] = []
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def answer(self) -> None:
                size = int(self.headers.get("Content-Length") or 0)
                read = self.rfile.read(size)
                asked = Asked(self.command, self.path, dict(self.headers.items()), json.loads(read) if read else None)
                owner.seen.append(asked)
                reply = answer(asked)
                self.send_response(reply.status)
                self.send_header("Content-Type", reply.kind)
                self.send_header("Connection", "close")
                for name, value in reply.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                try:
                    for piece in [reply.body] if isinstance(reply.body, bytes) else reply.body:
                        self.wfile.write(piece)
                        self.wfile.flush()
                except OSError:
                    pass  # whoever asked is gone

            do_GET = do_POST = answer

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, args=(0.05,), daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()
