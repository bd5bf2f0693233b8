"""Measures where the seconds of a step go, without waiting for the device in the middle."""

import time

import torch


class Clock:
    """Adds up seconds under names; on CUDA by events, which are read once at the end.

    Usage: `start("target")`, `start("rest")` …, then `stop()`.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[tuple[str, float | torch.cuda.Event]] = []

    def start(self, name: str) -> None:
        """Close the running part and open another."""
        self._marks.append((name, self._now()))

    def stop(self) -> dict[str, float]:
        """Close the running part and return seconds by name, ready for the next round."""
        last = self._now()
        self._marks.append(("", last))
        if isinstance(last, torch.cuda.Event):
            last.synchronize()  # not the whole device, which other threads may be recording on
        seconds: dict[str, float] = {}
        for (name, begun), (_, ended) in zip(self._marks, self._marks[1:], strict=False):
            if isinstance(begun, float) and isinstance(ended, float):
                spent = ended - begun
            else:
                assert isinstance(begun, torch.cuda.Event) and isinstance(ended, torch.cuda.Event)
                spent = begun.elapsed_time(ended) / 1000
            seconds[name] = seconds.get(name, 0.0) + spent
        self._marks.clear()
        return seconds

    def _now(self) -> "float | torch.cuda.Event":
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
