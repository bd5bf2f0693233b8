"""Reads server-sent events from bytes, however these are cut into pieces."""


class Events:
    """Assembles events. An event ends with an empty line; of its fields only `data` matters here."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[bytes] = []

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of the events that this piece completes."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        found = []
        for line in lines:
            line = line.removesuffix(b"\r")
            if line.startswith(b"data:"):
                self._data.append(line[5:].removeprefix(b" "))
            elif not line and self._data:
                found.append(b"\n".join(self._data))
                self._data = []
        return found

    def end(self) -> list[bytes]:
        """Return the data of a last event that no empty line ended."""
        return self.feed(b"\n\n") if self._rest or self._data else []
