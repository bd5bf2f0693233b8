"""What the benchmarks share: models, drafters, plans, interleaved rounds, intervals, output.

Run every script from the repository root, with the package installed (or `PYTHONPATH=src`). Shapes: D depth.
"""

import argparse
import os
import random
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

from draftsmith import assets
from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.drafters.heads.mlp_config import MLPConfig
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Engine
from draftsmith.evaluation.bench import Peer, TimedCall, run_engine, run_peer
from draftsmith.evaluation.measuring.interleaving import interleaved
from draftsmith.evaluation.measuring.intervals import RESAMPLES, Interval
from draftsmith.evaluation.measuring.losslessness import TextComparison, compare_texts, last_logits, tie_or_fault
from draftsmith.evaluation.prompts import cut, embedded_prompts
from draftsmith.evaluation.reporting.result_files import ensure_writable, markdown_table, write_json
from draftsmith.memory import keep_freed_memory
from draftsmith.plan import AcceptanceRule, Plan
from draftsmith.provenance import provenance
from draftsmith.targets import Target
from draftsmith.types import CompileLevel, Completion, DraftsmithError, Statistics

RESULTS = Path(__file__).parent / "results"
PLAIN = "plain"
SAMPLED = "sampled:"
"""What the text of a plan begins with whose guesses are drawn."""
BLOCK = "block:"
"""And of one whose chain is verified as a whole, too."""
TREE = "tree:"
"""And of one that keeps the likeliest nodes."""
TRANSFORMERS = "transformers"
FILE_WIDTH = 200
NATIVE = "native"
"""The level of the native kernels; the others are PyTorch alone, at a level of compilation."""

Setting = Callable[[list[int]], TimedCall]
"""Decodes one prompt, timed."""


@dataclass(frozen=True)
class Geometry:
    """Sizes of a Llama with random weights, for speed alone."""

    name: str
    layers: int
    hidden: int
    mlp: int
    heads: int
    vocabulary: int
    context: int = 2048

    def config(self) -> LlamaConfig:
        """Return the config, embedding and head untied."""
        return LlamaConfig(
            hidden_size=self.hidden,
            intermediate_size=self.mlp,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            vocab_size=self.vocabulary,
            max_position_embeddings=self.context,
            tie_word_embeddings=False,
            bos_token_id=None,
            eos_token_id=None,
        )

    def build(self, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> LlamaForCausalLM:
        """Make the model in place, with N(0, 0.02) weights from the seed."""
        before = torch.get_default_dtype()
        torch.manual_seed(seed)
        try:
            torch.set_default_dtype(dtype)
            with torch.device(device):
                return LlamaForCausalLM(self.config()).eval()
        finally:
            torch.set_default_dtype(before)


GEOMETRIES = {
    "134m": Geometry("llama-134m-random", 12, 768, 2048, 12, 32_000),
    "500m": Geometry("llama-500m-random", 14, 1536, 4096, 24, 32_000),
    "7b": Geometry("llama-2-7b-random", 32, 4096, 11_008, 32, 32_000, 4096),
    "tiny": Geometry("llama-tiny-random", 2, 64, 128, 4, 512),
}


def arguments(docstring: str | None, name: str, dtype: str = "bf16") -> argparse.ArgumentParser:
    """Return a parser with the options that every script has; results go to results/`name`.json."""
    parser = argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--target", help="folder or hub name; the embedded demo target by default")
    parser.add_argument("--drafter", help="folder or hub name; the embedded demo drafter by default")
    parser.add_argument("--dtype", default=dtype, help="bf16, fp32, …")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--threads", type=int, help="threads of PyTorch; its own choice by default")
    parser.add_argument("--seed", type=int, default=0, help="of prompts, order of runs and bootstrap")
    parser.add_argument("--json", type=Path, default=RESULTS / f"{name}.json", help="where the results go")
    return parser


def start(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Parse, check that the result can be written, keep freed memory, and set the number of threads."""
    transformers_logging.disable_progress_bar()
    args = parser.parse_args()
    ensure_writable(args.json)
    keep_freed_memory()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    return args


def main(run: Callable[[], None]) -> None:
    """Run a script; a user's mistake ends it with one sentence."""
    try:
        run()
    except DraftsmithError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def finish(args: argparse.Namespace, results: Mapping[str, Any], **more: Any) -> None:
    """Write provenance and results, and say where."""
    options = {
        key: value
        for key, value in vars(args).items()
        if key not in ("target", "drafter", "drafters", "json") and isinstance(value, (int, float, str, list, bool))
    }
    path: Path = args.json
    write_json(path, {"provenance": provenance(options=options, **more), **results})
    print(f"\nwritten: {shown(path)}")


def shown(path: Path) -> str:
    """Return a path without the folders above the repository."""
    root = Path(__file__).resolve().parents[1]
    full = path.resolve()
    return str(full.relative_to(root)) if full.is_relative_to(root) else path.name


def say(text: str) -> None:
    """Report progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def print_table(title: str, header: list[str], rows: list[list[str]]) -> None:
    """Print a titled Markdown table."""
    print(f"\n{title}\n\n{markdown_table(header, rows)}", flush=True)


def show_table(title: str, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table for the eye; first column to the left, numbers to the right."""
    table = Table(title=title, title_justify="left")
    for index, name in enumerate(header):
        table.add_column(name, justify="right" if index else "left")
    for row in rows:
        table.add_row(*row)
    console = Console(markup=False)  # brackets in the names of drafters are shown
    # Files get wide tables; only a terminal has an edge.
    (console if console.is_terminal else Console(width=FILE_WIDTH, markup=False)).print("", table)


def span(value: Interval, digits: int = 2) -> str:
    """Write an estimate with its interval."""
    return f"{value.value:.{digits}f} [{value.low:.{digits}f}, {value.high:.{digits}f}]"


def told(values: Sequence[float], digits: int = 2) -> str:
    """Write the median of a few values, and all of them."""
    return f"{np.median(values):.{digits}f} ({', '.join(f'{value:.{digits}f}' for value in sorted(values))})"


def as_json(value: Interval) -> dict[str, Any]:
    """Write an estimate with its interval for JSON."""
    return {"value": value.value, "ci95": value.ends}


def compile_level(level: str) -> CompileLevel:
    """Return how much an engine of this level compiles."""
    return "off" if level == NATIVE else cast(CompileLevel, level)


def split_levels(text: str) -> list[str]:
    """Turn "off,trace" into a list."""
    return [word.strip() for word in text.split(",") if word.strip()]


# Models


@contextmanager
def model_folder(
    geometry: str, target: str | None, dtype: torch.dtype, vocabulary: int | None = None
) -> Iterator[str]:
    """Give the folder or name of the target: the real one for "demo", or random weights saved for the moment.

    Random ones have the vocabulary of their geometry, or the one that is given.
    """
    if geometry == "demo":
        yield target or str(assets.demo_target())
        return
    with tempfile.TemporaryDirectory() as scratch:
        chosen = GEOMETRIES[geometry]
        if vocabulary is not None:
            chosen = replace(chosen, vocabulary=vocabulary)
        folder = Path(scratch) / chosen.name
        chosen.build(dtype).save_pretrained(folder)
        yield str(folder)


def open_drafter(path: str | None, target: Target) -> Any:
    """Load the drafter at the path, "random" for one with random weights, None for the embedded one."""
    return random_speculator(target) if path == "random" else load_drafter(path or assets.demo_drafter(), target)


def random_speculator(
    target: Target, stages: int = 5, tie_weights: bool = True, draft_vocab: int = 0, seed: int = 0
) -> MLPSpeculator:
    """Make an untrained speculator as wide as the target, in its dtype and place."""
    torch.manual_seed(seed)
    config = MLPConfig(
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        n_predict=stages,
        tie_weights=tie_weights,
        scale_input=True,
        draft_vocab_size=draft_vocab,
    )
    tokens = torch.randperm(target.vocab_size)[:draft_vocab] if draft_vocab else None
    return MLPSpeculator(config, tokens).for_decoding(target)


def make_plan(text: str) -> Plan:
    """Read "3,2,1/4": branching, and behind the slash the number of paths kept; "plain" drafts nothing.

    Guesses of "sampled:3,2,1" are drawn, and a chain of "block:1,1,1" is drawn and verified as a whole. "tree:2,2,2/9"
    keeps the likeliest nine nodes, as many of a depth being expanded as a node has children at most.
    """
    if text == PLAIN:
        return Plan()
    shape = text.removeprefix(SAMPLED).removeprefix(BLOCK).removeprefix(TREE)
    branching, _, paths = shape.partition("/")
    try:
        children = tuple(int(word) for word in branching.split(","))
        if text.startswith(TREE):
            return Plan(children, beam=max(children), nodes=int(paths))
        rule: AcceptanceRule = "block" if text.startswith(BLOCK) else "exact"
        return Plan(children, paths=int(paths) if paths else None, sampled=shape != text, acceptance=rule)
    except ValueError:
        raise DraftsmithError(
            f"the plan {text!r} cannot be read; write it like 1,1,1, 3,2,1/4, tree:2,2,2/9, sampled:1,1,1 or "
            "block:1,1,1."
        ) from None


def plans_within(texts: Sequence[str], drafter: Any) -> dict[str, Plan]:
    """Return the plans that the drafter is deep enough for, by their text."""
    plans = {text: make_plan(text) for text in texts}
    kept = {text: plan for text, plan in plans.items() if plan.depth <= drafter.max_depth}
    for text in plans.keys() - kept.keys():
        say(f"plan {text} left out: the drafter reaches {drafter.max_depth} tokens ahead")
    return kept


def make_prompts(target: Target, task: str | None, tokens: int, count: int, seed: int = 0) -> list[list[int]]:
    """Return held-out prompts of exactly so many tokens; random ids for a target without tokenizer."""
    if target.tokenizer is None:
        rng = random.Random(seed)
        return [[rng.randrange(target.vocab_size) for _ in range(tokens)] for _ in range(count)]
    prompts = embedded_prompts(task)
    random.Random(seed).shuffle(prompts)
    return cut(target, prompts, tokens, count)


# Rounds


def with_engine(engine: Engine, plan: Plan, new_tokens: int, temperature: float = 0.0) -> Setting:
    """Decode through the engine."""
    return lambda prompt: run_engine(engine, [prompt], plan, new_tokens, temperature)


def with_peer(peer: Peer, new_tokens: int) -> Setting:
    """Decode through transformers."""
    return lambda prompt: run_peer(peer, [prompt], new_tokens)


def interleave(
    settings: Mapping[str, Setting], prompts: Sequence[list[int]], warmups: int, seed: int, label: str = ""
) -> dict[str, list[TimedCall]]:
    """Run every setting once a round, in random order, on the same prompt; the first `warmups` rounds are thrown away.

    Each run checks by itself that it generated exactly as many tokens as asked for. Warm-up prompts are repeated later.
    """
    rng = random.Random(seed)
    runs: dict[str, list[TimedCall]] = {name: [] for name in settings}
    begun = time.perf_counter()
    shown = [*(prompts[at % len(prompts)] for at in range(warmups)), *prompts]
    for number, (index, name, timed) in enumerate(interleaved(settings, len(prompts), rng, warmups), 1):
        run = settings[name](shown[index])
        if timed:
            runs[name].append(run)
        if number % len(settings) == 0 and (index + 1 == warmups or (index + 1) % 16 == 0):
            say(f"{label} round {index + 1} of {len(prompts) + warmups}, {time.perf_counter() - begun:.0f} s")
    return runs


def walls(runs: Sequence[TimedCall]) -> np.ndarray:
    """Seconds of every run."""
    return np.array([run.wall_s for run in runs])


def tokens_of(runs: Sequence[TimedCall]) -> int:
    """Generated tokens, counted in the outputs."""
    return sum(len(row) for run in runs for row in run.tokens)


def statistics_of(runs: Sequence[TimedCall]) -> list[Statistics]:
    """Return the engine's own account of every run."""
    return [run.measurement.statistics for run in runs if run.measurement is not None]


def same_texts(runs: Sequence[TimedCall], others: Sequence[TimedCall], target: Target, wide: Target) -> dict[str, Any]:
    """Compare the texts of two settings; a divergence counts as a tie only if target and fp32 target both say so."""
    expected = completions(others)
    found = compare_texts(expected, completions(runs))
    explained = []
    for item in found.divergences:
        prefix = expected[item.index].prompt_tokens + expected[item.index].tokens[: item.position]
        explained.append(tie_or_fault(item, last_logits(target, prefix), last_logits(wide, prefix), target.dtype))
    return TextComparison(found.total, found.divergences, explained).summary()


def completions(runs: Sequence[TimedCall]) -> list[Completion]:
    """Return what the engine completed."""
    return [c for run in runs if run.measurement is not None for c in run.measurement.completions]


# Intervals


def bootstrap(
    count: int, statistic: Callable[[np.ndarray], float], seed: int = 0, resamples: int = RESAMPLES
) -> Interval:
    """Return a statistic of rounds with its 95 % percentile interval; it is handed the indices of the rounds taken."""
    rng = np.random.default_rng(seed)
    values = [statistic(rng.integers(0, count, count)) for _ in range(resamples)]
    low, high = np.quantile(values, [0.025, 0.975])
    return Interval(float(statistic(np.arange(count))), float(low), float(high))


def median_of(rounds: Sequence[Sequence[float]], seed: int) -> Interval:
    """Median over all values, resampling rounds."""
    table = np.array(rounds)
    return bootstrap(len(table), lambda t: float(np.median(table[t])), seed)


def ratio_of(tops: Sequence[Sequence[float]], bottoms: Sequence[Sequence[float]], seed: int) -> Interval:
    """Ratio of the medians, paired by round."""
    top, bottom = np.array(tops), np.array(bottoms)
    return bootstrap(len(top), lambda t: float(np.median(top[t]) / np.median(bottom[t])), seed)


def pooled_tau(accepted: np.ndarray, steps: np.ndarray) -> Callable[[np.ndarray], float]:
    """τ over the rounds taken: 1 + accepted / steps."""
    return lambda taken: 1 + float(accepted[taken].sum() / steps[taken].sum())


@contextmanager
def cache_folder() -> Iterator[dict[str, str]]:
    """Give the environment of a child process whose compiler cache starts empty."""
    with tempfile.TemporaryDirectory() as scratch:
        yield os.environ | {"TORCHINDUCTOR_CACHE_DIR": scratch}
