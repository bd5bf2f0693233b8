"""What a long measurement has done so far: one JSON record a line, so that a run that was cut goes on where it was."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from draftsmith.types import DraftsmithError


class Ledger:
    """Records by key, in a file; a line that a kill cut short is dropped and made again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.records: dict[str, Any] = {}
        if not path.exists():
            return
        whole = 0
        with path.open("rb") as lines:
            for line in lines:
                if not line.endswith(b"\n"):
                    break
                try:
                    record = json.loads(line)
                    self.records[record["key"]] = record["value"]
                except (ValueError, KeyError, TypeError) as error:
                    raise DraftsmithError(
                        f"line {len(self.records) + 1} of {path} is damaged; delete the file to measure again."
                    ) from error
                whole += len(line)
        os.truncate(path, whole)

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """Return the record of this key; make it, and write it down, if there is none. Values are plain JSON."""
        if key not in self.records:
            value = make()
            try:
                with self.path.open("a", encoding="utf-8") as handle:
                    handle.write(json.dumps({"key": key, "value": value}) + "\n")
                    handle.flush()
                    os.fsync(handle.fileno())
            except OSError as error:
                raise DraftsmithError(
                    f"cannot write {self.path} ({error.strerror}); free space and run the same command again."
                ) from error
            self.records[key] = value
        return self.records[key]
