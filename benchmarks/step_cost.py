"""What one decoding step costs that verifies M tokens, batch 1, bf16 on a CPU: ours against PyTorch and llama.cpp.

    python benchmarks/step_cost.py --llama-cpp

Contestants, all with the same weights and on the same token ids:

native       `Target`, one native operator for the whole model
eager        the transformers model itself with its own cache
fp32         the same with the weights in fp32, which processors without instructions for bf16 read sooner (only when
             asked for)
inductor     `Target(native=False)` under level "full": torch.compile, frozen weights, max_autotune
prepacked    `Target(native=False)` at level "off": eager, with weights in oneDNN's layout (only when asked for)
native:NAME  native, on the instruction set of that name (only when asked for)
llama.cpp    `llama_decode` on the weights exported as bf16 GGUF, logits behind every token (with `--llama-cpp`)

A step reads M tokens behind 64 to 164 cached ones and gives the logits behind all M. Choosing tokens and taking guesses
back belong to no side's step. All contestants and M take turns in one process: in every round each is visited once, in
random order, at the same context; a visit is one untimed step, which also refills the processor's caches as decoding
alone would have left them, and then some timed ones, each with one token more behind it. Before that the logits of all
contestants are compared. Medians are over all timed steps, with 95 % bootstrap intervals that resample whole rounds.
The "inductor" contestant compiles anew for each M in each run, which takes most of the script's time; by default it is
measured at some M only, and not for the largest model.

"Products" says how much of the native step at M = 1 is reading weights: in the same rounds the operator
`torch.ops.draftsmith.linear` is called on each packed linear layer of the model, head included, with one row, and the
median time of all these calls is divided by the median step. Weights are far larger than rows, so these products are
hardly more than reading them. But every call starts an operator and wakes the threads, which the whole step does once,
so this leans high and may pass 1. The share is therefore given a second time without what as many calls on layers of
128 × 256 take, whose weights never leave the cache; that leans low. "GB/s" is the bytes of the packed weights over the
time.

Shapes: M tokens of a step, L tokens in all, V vocabulary, N outputs, K inputs.
"""

import argparse
import gc
import random
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from common import (
    GEOMETRIES,
    arguments,
    as_json,
    bootstrap,
    finish,
    main,
    median_of,
    model_folder,
    ratio_of,
    say,
    show_table,
    span,
    start,
)
from gguf_export import about_llama_cpp, add_peer_site, find_packages, llama_cpp_of
from step_contestants import (
    Logits,
    Step,
    eager_step,
    llama_cpp_step,
    native_step,
    packed_layers,
    products_step,
    runner_step,
    small_layers,
)
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.engine.steps.compiled import Compiled
from draftsmith.evaluation.measuring.interleaving import interleaved
from draftsmith.native import kernels_in_use, use_kernels, why_missing
from draftsmith.targets import Target
from draftsmith.targets.backend import NativeForward
from draftsmith.types import DraftsmithError

NATIVE, EAGER, WIDE, INDUCTOR = "native", "eager", "fp32", "inductor"
PREPACKED, LLAMA_CPP = "prepacked", "llama.cpp"
PRODUCTS, CALLS = "products", "calls"
INSTRUCTIONS = ("amx", "avx512bf16", "avx512", "avx2", "portable")
# How far apart the logits of two contestants may be, relative to their size; bf16 gives 0.01 to 0.03.
TOLERANCE = 0.1

Timings = dict[tuple[str, int], list[list[float]]]
"""Milliseconds of every timed step of every round, by contestant and M."""


# Measuring


def measure(
    steps: Mapping[str, Step], sizes: Mapping[str, Sequence[int]], contexts: Sequence[int], timed: int, warmups: int,
    seed: int, label: str,
) -> Timings:
    """Visit every contestant with each of its M once a round, in random order; see the head of this file."""
    rng = random.Random(seed)
    visits = [(name, nodes) for name in steps for nodes in sizes[name]]
    timings: Timings = {visit: [] for visit in visits}
    begun = time.perf_counter()
    places = [contexts[0]] * warmups + list(contexts)
    for number, (index, (name, nodes), counts) in enumerate(interleaved(visits, len(contexts), rng, warmups), 1):
        spent = [1000 * steps[name](places[index] + i, nodes)[0] for i in range(timed + 1)]
        if counts:
            timings[name, nodes].append(spent[1:])
        if number % len(visits) == 0 and (index + 1 == warmups or (index + 1) % 8 == 0):
            say(f"{label}: round {index + 1} of {len(contexts) + warmups}, {time.perf_counter() - begun:.0f} s")
    return timings


def distances(steps: Mapping[str, Step], context: int, nodes: int, label: str) -> dict[str, float]:
    """Compare every contestant's logits with the first one's, relative to their size; end here if they differ."""
    logits_MV = {name: step(context, nodes)[1]() for name, step in steps.items()}
    first_MV = next(iter(logits_MV.values()))
    size = (first_MV - first_MV.mean(-1, keepdim=True)).norm()
    found = {name: float((own_MV - first_MV).norm() / size) for name, own_MV in logits_MV.items()}
    wrong = [f"{name} by {distance:.3f}" for name, distance in found.items() if not distance < TOLERANCE]
    if wrong:
        first = next(iter(steps))
        raise DraftsmithError(f"{label}: logits differ from those of {first}, {', '.join(wrong)}; measuring stops.")
    return found


# Reporting


def products_share(timings: Timings, read_bytes: int, seed: int) -> dict[str, Any]:
    """Say how much of the native step at M = 1 its products take."""
    step, products, calls = (np.array(timings[name, 1]) for name in (NATIVE, PRODUCTS, CALLS))

    def net(taken: np.ndarray) -> float:
        return float((np.median(products[taken]) - np.median(calls[taken])) / np.median(step[taken]))

    return {
        "products_ms": as_json(median_of(timings[PRODUCTS, 1], seed)),
        "share": ratio_of(timings[PRODUCTS, 1], timings[NATIVE, 1], seed),
        "share_without_calls": bootstrap(len(step), net, seed),
        "packed_bytes": read_bytes,
        "products_gb_per_s": read_bytes / float(np.median(products)) / 1e6,
        "step_gb_per_s": read_bytes / float(np.median(step)) / 1e6,
    }


def cells_of(timings: Timings, seed: int) -> list[dict[str, Any]]:
    """Turn timings into cells: median, how many times the native step, how many times the own step at M = 1."""
    cells = []
    for (name, nodes), rounds in timings.items():
        cell: dict[str, Any] = {"contestant": name, "tokens": nodes, "ms": median_of(rounds, seed)}
        for key, other in (("times_native", (NATIVE, nodes)), ("times_own_single", (name, 1))):
            cell[key] = ratio_of(rounds, timings[other], seed) if other in timings else None
        cells.append(cell | {"ms_rounds": rounds})
    return cells


def written(cell: Mapping[str, Any]) -> dict[str, Any]:
    """Write the intervals of a cell for JSON."""
    return {key: as_json(value) if hasattr(value, "ends") else value for key, value in cell.items()}


def skipped(texts: Sequence[str], models: Sequence[str]) -> set[tuple[str, str]]:
    """Read "500m:inductor"."""
    pairs = set()
    for text in texts:
        model, colon, name = text.partition(":")
        if not colon or (model not in models):
            raise DraftsmithError(f"--skip {text!r} cannot be read; write it like 500m:inductor.")
        pairs.add((model, name))
    return pairs


# Models


def on_instructions(step: Step, name: str) -> Step:
    """Let a native step run on one instruction set, and the others on their own."""
    own = kernels_in_use()
    if not use_kernels(name):
        raise DraftsmithError(f"this processor has no {name}.")
    use_kernels(own)

    def switched(context: int, nodes: int) -> tuple[float, Logits]:
        use_kernels(name)
        spent = step(context, nodes)
        use_kernels(own)
        return spent

    return switched


def make_steps(
    folder: str, names: Sequence[str], tokens_1L: Tensor, sizes: Sequence[int], args: Any, stack: ExitStack
) -> tuple[dict[str, Step], dict[str, float], int]:
    """Load and, where needed, compile; return the contestants, seconds of compilation, and bytes of the products."""
    steps: dict[str, Step] = {}
    compiling: dict[str, float] = {}
    packed_bytes = 0
    label = Path(folder).name
    if NATIVE in names:
        target = Target.from_pretrained(folder, dtype="bf16", device="cpu")
        if not isinstance(target.backend, NativeForward):
            reason = why_missing() or "it has no native form"
            raise DraftsmithError(f"{label} is read by {target.backend.description}, not natively; {reason}.")
        layers = packed_layers(target)
        packed_bytes = sum(packed.nbytes for packed, _, _ in layers)
        steps[NATIVE] = native_step(target, tokens_1L)
        steps[PRODUCTS] = products_step(layers)
        steps[CALLS] = products_step(small_layers(len(layers)))
    if EAGER in names or LLAMA_CPP in names:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, use_safetensors=True).eval()
        if EAGER in names:
            steps[EAGER] = eager_step(model, tokens_1L)
        if LLAMA_CPP in names:
            scratch = Path(stack.enter_context(TemporaryDirectory()))
            threads, room = torch.get_num_threads(), tokens_1L.shape[1]
            opened = stack.enter_context(llama_cpp_of(model, scratch, threads, room, args.flash_attention))
            steps[LLAMA_CPP] = llama_cpp_step(opened, tokens_1L)
    if WIDE in names:
        wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True).eval()
        steps[WIDE] = eager_step(wide, tokens_1L)
    for name in names:
        if name.startswith(f"{NATIVE}:"):
            steps[name] = on_instructions(native_step(target, tokens_1L), name.partition(":")[2])
    if PREPACKED in names:
        plain = Target.from_pretrained(folder, dtype="bf16", device="cpu", native=False)
        steps[PREPACKED] = native_step(plain, tokens_1L)
    if INDUCTOR in names:
        plain = Target.from_pretrained(folder, dtype="bf16", device="cpu", native=False)
        steps[INDUCTOR] = runner_step(Compiled(plain, "full"), plain, tokens_1L)
        for nodes in sorted(set(args.inductor_tokens) & set(sizes)):
            begun = time.perf_counter()
            for context in (args.first_context, args.last_context):
                steps[INDUCTOR](context, nodes)
            compiling[str(nodes)] = time.perf_counter() - begun
            say(f"{label}, inductor, {nodes} tokens: ready after {compiling[str(nodes)]:.1f} s")
    return steps, compiling, packed_bytes


@torch.no_grad()
def measure_model(name: str, names: Sequence[str], args: Any) -> dict[str, Any]:
    """Measure one model with its contestants."""
    sizes = sorted(set(args.tokens))
    with model_folder(name, args.target, torch.bfloat16) as folder, ExitStack() as stack:
        label = Path(folder).name
        say(label)
        vocabulary = GEOMETRIES[name].vocabulary if name in GEOMETRIES else vocabulary_of(folder)
        # Whole spans, so that compiled code never meets an odd one at the end of the cache.
        length = -(-(args.last_context + args.steps + sizes[-1] + 1) // 64) * 64
        tokens_1L = torch.from_numpy(np.random.default_rng(args.seed).integers(0, vocabulary, (1, length)))
        steps, compiling, packed_bytes = make_steps(folder, names, tokens_1L, sizes, args, stack)
        readers = {key: step for key, step in steps.items() if key not in (PRODUCTS, CALLS)}
        each = {key: sizes if key in readers else [1] for key in steps}
        if INDUCTOR in steps:
            each[INDUCTOR] = sorted(set(args.inductor_tokens) & set(sizes))
        apart = {}
        for nodes in sizes:
            comparing = {key: step for key, step in readers.items() if nodes in each[key]}
            apart[str(nodes)] = distances(comparing, args.first_context, nodes, f"{label}, {nodes} tokens")
        last = max(args.first_context, args.last_context - args.steps)
        contexts = np.linspace(args.first_context, last, args.rounds).round().astype(int).tolist()
        timings = measure(steps, each, contexts, args.steps, args.warmups, args.seed, label)
        gc.collect()
    result: dict[str, Any] = {
        "model": name,
        "name": label,
        "cells": cells_of({key: rounds for key, rounds in timings.items() if key[0] in readers}, args.seed),
        "contexts": contexts,
        "logits_apart": apart,
        "compile_seconds": compiling,
        "products": None,
    }
    if NATIVE in names and 1 in sizes:
        share = products_share(timings, packed_bytes, args.seed)
        result["products"] = share | {"ms_rounds": {key: timings[key, 1] for key in (PRODUCTS, CALLS)}}
    return result


def vocabulary_of(folder: str) -> int:
    """Return the number of token ids of a saved model."""
    return int(AutoConfig.from_pretrained(folder).vocab_size)


def report(results: Sequence[Mapping[str, Any]], names: Sequence[str], args: Any) -> None:
    """Print the tables."""
    times, ratios, shares = [], [], []
    for result in results:
        cells = {(cell["contestant"], cell["tokens"]): cell for cell in result["cells"]}
        for nodes in sorted(set(args.tokens)):
            mine = [cells.get((name, nodes)) for name in names]
            head = [result["name"], str(nodes)]
            times.append(head + [span(cell["ms"]) if cell else "" for cell in mine])
            own = cells.get((NATIVE, nodes))
            if own is not None:
                single = span(own["times_own_single"]) if own["times_own_single"] else ""
                ratios.append(head + [span(cell["times_native"]) if cell else "" for cell in mine[1:]] + [single])
        if result["products"]:
            found = result["products"]
            rates = [f"{found[key]:.1f}" for key in ("products_gb_per_s", "step_gb_per_s")]
            shares.append([result["name"], span(found["share"], 3), span(found["share_without_calls"], 3), *rates])
    about = f"bf16, batch 1, {torch.get_num_threads()} threads"
    about += f", {args.first_context} to {args.last_context} cached tokens (medians, 95 % intervals)"
    show_table(f"Milliseconds of a step, {about}", ["model", "M", *names], times)
    if ratios:
        header = ["model", "M", *names[1:], "native over its M = 1"]
        show_table("Step time over the native one (ratio of medians, paired by round)", header, ratios)
    if shares:
        header = ["model", "products / step", "without calls", "products, GB/s", "step, GB/s"]
        show_table("Reading weights in the native step, M = 1", header, shares)


def run() -> None:
    """Measure and write."""
    parser = arguments(__doc__, "step_cost")
    parser.set_defaults(threads=2)
    parser.add_argument("--models", nargs="+", default=["demo", "134m", "500m"], choices=["demo", *GEOMETRIES])
    parser.add_argument(
        "--contestants", nargs="+", default=[NATIVE, EAGER, INDUCTOR],
        choices=[NATIVE, EAGER, WIDE, INDUCTOR, PREPACKED, *(f"{NATIVE}:{name}" for name in INSTRUCTIONS)]
    )
    parser.add_argument("--llama-cpp", action="store_true", help="also llama.cpp; needs llama-cpp-python and gguf")
    parser.add_argument(
        "--skip", nargs="*", default=["500m:inductor"], metavar="MODEL:CONTESTANT", help="left out; 500m:inductor is, "
        "since compiling takes long; give --skip alone to measure all"
    )
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 2, 4, 8, 16], help="M")
    parser.add_argument("--inductor-tokens", type=int, nargs="+", default=[1, 4, 16], help="the M of inductor")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--warmups", type=int, default=2, help="rounds thrown away")
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a visit")
    parser.add_argument("--first-context", type=int, default=64)
    parser.add_argument("--last-context", type=int, default=164)
    parser.add_argument(
        "--flash-attention", action=argparse.BooleanOptionalAction, default=True, help="llama.cpp's fused attention"
    )
    add_peer_site(parser)
    args = start(parser)
    if args.device != "cpu" or args.dtype != "bf16":
        raise DraftsmithError("this benchmark is about bf16 on a CPU; --device and --dtype cannot be changed.")
    if min(args.tokens) < 1 or args.rounds < 1 or args.steps < 1 or args.first_context < 1:
        raise DraftsmithError("--tokens, --rounds, --steps and --first-context have to be at least 1.")
    skip = skipped(args.skip, ["demo", *GEOMETRIES])
    names, more = list(args.contestants), {}
    if args.llama_cpp:
        missing = find_packages(args.peer_site)
        if missing is None:
            names.append(LLAMA_CPP)
            more = about_llama_cpp()
        else:
            say(f"llama.cpp is left out: {missing}")
    results = [
        measure_model(model, [name for name in names if (model, name) not in skip], args) for model in args.models
    ]
    report(results, names, args)
    for result in results:
        result["cells"] = [written(cell) for cell in result["cells"]]
        result["products"] = written(result["products"]) if result["products"] else None
    finish(args, {"models": results}, peers=more, dtype=args.dtype)


if __name__ == "__main__":
    main(run)
