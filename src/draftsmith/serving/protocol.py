"""uvicorn's HTTP/1.1 with two time limits: for request heads that do not come, and for clients that do not read."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

from draftsmith.serving.settings import Settings

_TOLD = b'{"error":{"message":"the head came too slowly","type":"timeout_error","param":null,"code":null}}'
LATE = (
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_TOLD), _TOLD)
)


def patient_for(settings: Settings) -> type[H11Protocol]:
    """Return a protocol that closes a connection if a request's head does not come, or if the client does not read.

    A client that does not read its answer holds a place that others wait for.
    """

    class Patient(H11Protocol):
        _timer: asyncio.TimerHandle | None = None
        _full: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            # These are the first bytes of a further request on this connection.
            if self._timer is None and (self.cycle is None or self.cycle.response_complete):
                self._wait()
            super().data_received(data)

        def handle_events(self) -> None:
            super().handle_events()
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_waiting()

        def pause_writing(self) -> None:
            super().pause_writing()
            # Abort, because closing would first wait to send the rest.
            self._full = self.loop.call_later(settings.send_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            self._stop_aborting()
            super().resume_writing()

        def timeout_keep_alive_handler(self) -> None:
            if self.transport.get_write_buffer_size():
                self.transport.abort()
            else:
                super().timeout_keep_alive_handler()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            self._stop_aborting()
            super().connection_lost(exc)

        def _wait(self) -> None:
            self._timer = self.loop.call_later(settings.head_seconds, self._give_up)

        def _stop_waiting(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _stop_aborting(self) -> None:
            if self._full is not None:
                self._full.cancel()
                self._full = None

        def _give_up(self) -> None:
            self._timer = None
            if not self.transport.is_closing():
                self.transport.write(LATE)
                self.transport.close()

    return Patient
