"""What a long measurement has done so far: one JSON record a line, so that an interrupted run goes on where it was."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.files import JsonLines


class MeasurementLog:
    """Records by key, in a file; a line that was cut short by a kill is dropped and measured again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.log = JsonLines(path, "delete the file to measure again", "run the same command again")
        self.records: dict[str, Any] = {}
        for number, record in enumerate(self.log.read(), 1):
            if not isinstance(record, dict) or record.keys() != {"key", "value"}:
                raise self.log.damaged(number)
            self.records[record["key"]] = record["value"]

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the record of this key; make it, and write it down, if there is none. Values are plain JSON."""
        if key not in self.records:
            value = make()
            self.log.append({"key": key, "value": value})
            self.records[key] = value
        return self.records[key]
