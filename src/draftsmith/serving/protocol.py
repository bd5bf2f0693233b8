"""HTTP/1.1 as uvicorn speaks it, with an end to its patience: a head that does not come is not waited for for ever."""

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

_TOLD = b'{"error":{"message":"the head came too slowly","type":"timeout_error","param":null,"code":null}}'
LATE = (
    b"HTTP/1.1 408 Request Timeout\r\nconnection: close\r\ncontent-type: application/json\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_TOLD), _TOLD)
)


def patient_for(seconds: float) -> type[H11Protocol]:
    """Return a protocol that gives up on a connection whose next request has not come whole after so many seconds."""

    class Patient(H11Protocol):
        _timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            # The first bytes of a further request on this connection.
            if self._timer is None and (self.cycle is None or self.cycle.response_complete):
                self._wait()
            super().data_received(data)

        def handle_events(self) -> None:
            super().handle_events()
            if self.cycle is not None and not self.cycle.response_complete:
                self._stop_waiting()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_waiting()
            super().connection_lost(exc)

        def _wait(self) -> None:
            self._timer = self.loop.call_later(seconds, self._give_up)

        def _stop_waiting(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _give_up(self) -> None:
            self._timer = None
            if not self.transport.is_closing():
                self.transport.write(LATE)
                self.transport.close()

    return Patient
