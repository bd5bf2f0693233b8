"""How long a prompt takes to be read, up to its first new token, in bf16 on a CPU: ours against others.

    python benchmarks/prefill.py --llama-cpp --vllm-python ENVIRONMENT/bin/python

Contestants, all with the same weights and on the same token ids, one prompt at a time:

draftsmith    `Engine.generate` of one token
transformers  one forward with its own cache, logits of the last token only
fp32          the same in fp32, which processors without instructions for bf16 read sooner (with `--fp32`)
compiled      the same under torch.compile with its defaults, one graph for each length, without keeping keys and values
llama.cpp     `llama_decode` on the weights exported as bf16 GGUF, in pieces of 512, logits of the last token only
vllm          its `LLM.generate` of one token, nothing kept from prompt to prompt, compiled as it is by default, on as
              many threads as ours

They take turns in random order, a new prompt each round, after rounds that are thrown away. Medians with 95 % bootstrap
intervals; "times ours" is the ratio of medians over the same rounds.
"""

import argparse
import gc
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from common import (
    GEOMETRIES,
    Geometry,
    arguments,
    as_json,
    finish,
    main,
    median_of,
    ratio_of,
    say,
    show_table,
    span,
    start,
)
from gguf_export import about_llama_cpp, add_peer_site, find_packages, llama_cpp_of
from transformers import AutoModelForCausalLM
from vllm_peer import VLLM, add_vllm, vllm_of

from draftsmith import assets
from draftsmith.engine import Engine
from draftsmith.evaluation.measuring.interleaving import interleaved
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError, SamplingParams

OURS, EAGER, WIDE, COMPILED, LLAMA_CPP = "draftsmith", "transformers", "fp32", "compiled", "llama.cpp"
PIECE = 512

Reader = Callable[[list[int]], float]
"""Reads a prompt; returns the seconds until its first new token."""


def reader_of_ours(target: Target) -> Reader:
    """Read through the engine."""
    engine = Engine(target, None, share_prefixes=False)
    params = SamplingParams(max_tokens=1)

    def read(prompt: list[int]) -> float:
        begun = time.perf_counter()
        engine.generate([prompt], params)
        return time.perf_counter() - begun

    return read


def reader_of_model(model: Any, use_cache: bool) -> Reader:
    """Read through a transformers model, and choose the first token."""

    @torch.no_grad()
    def read(prompt: list[int]) -> float:
        tokens_1M = torch.tensor([prompt])
        begun = time.perf_counter()
        model(tokens_1M, use_cache=use_cache, logits_to_keep=1).logits.argmax(-1).item()
        return time.perf_counter() - begun

    return read


def reader_of_llama_cpp(opened: Any) -> Reader:
    """Read through llama.cpp; writing ids and positions into its batch is not timed."""

    def read(prompt: list[int]) -> float:
        opened.cut(0)
        spent = 0.0
        for begin in range(0, len(prompt), PIECE):
            opened.stage(prompt[begin : begin + PIECE], which="last" if begin + PIECE >= len(prompt) else "none")
            begun = time.perf_counter()
            opened.read_staged()
            spent += time.perf_counter() - begun
        return spent

    return read


def geometry_of(name: str, longest: int) -> Geometry | None:
    """Return the sizes of a random model whose context holds the longest prompt; None for the demo target."""
    if name == "demo":
        return None
    chosen = GEOMETRIES[name]
    return replace(chosen, context=max(chosen.context, longest + 1))


def measure_model(name: str, lengths: Sequence[int], args: argparse.Namespace) -> dict[str, Any]:
    """Measure one model with its contestants at all lengths that its context holds."""
    with ExitStack() as stack:
        folder = str(args.target or assets.demo_target())
        geometry = geometry_of(name, max(lengths))
        if geometry is not None:
            folder = stack.enter_context(TemporaryDirectory())
            geometry.build(torch.bfloat16).save_pretrained(folder)
        label = "demo" if geometry is None else geometry.name
        target = Target.from_pretrained(folder, dtype="bf16", device="cpu")
        lengths = [length for length in lengths if length < target.max_length]
        say(f"{label}: {target.backend.description}")
        readers: dict[str, Reader] = {OURS: reader_of_ours(target)}
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, use_safetensors=True).eval()
        readers[EAGER] = reader_of_model(model, use_cache=True)
        if args.fp32:
            wide: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True).eval()
            readers[WIDE] = reader_of_model(wide, use_cache=True)
        if args.compiled:
            readers[COMPILED] = reader_of_model(torch.compile(model, dynamic=False), use_cache=False)
        threads = torch.get_num_threads()
        if args.llama_cpp:
            scratch = Path(stack.enter_context(TemporaryDirectory()))
            opened = stack.enter_context(llama_cpp_of(model, scratch, threads, max(lengths) + 1, True, PIECE))
            readers[LLAMA_CPP] = reader_of_llama_cpp(opened)
        vllm = stack.enter_context(vllm_of(args.vllm_python, folder, max(lengths) + 8, 1, threads))
        if vllm is not None:
            readers[VLLM] = lambda prompt: vllm.generate([prompt], 1)
        spent = measure(readers, lengths, target.vocab_size, args, label)
        gc.collect()
        return {
            "model": name, "name": label, "implementation": target.backend.description,
            "cells": cells_of(spent, args.seed),
            "vllm": None if vllm is None else vllm.version,
        }


def measure(
    readers: Mapping[str, Reader], lengths: Sequence[int], vocabulary: int, args: argparse.Namespace, label: str
) -> dict[tuple[str, int], list[float]]:
    """Let all contestants read a prompt of every length a round; return milliseconds."""
    rng = random.Random(args.seed)
    spent: dict[tuple[str, int], list[float]] = {(name, length): [] for length in lengths for name in readers}
    begun = time.perf_counter()
    for index in range(args.warmups + args.rounds):
        for length in lengths:
            prompt = [rng.randrange(vocabulary) for _ in range(length)]
            for _, name, _ in interleaved(readers, 1, rng):
                seconds = readers[name](prompt)
                if index >= args.warmups:
                    spent[name, length].append(1000 * seconds)
        say(f"{label}: round {index + 1} of {args.warmups + args.rounds}, {time.perf_counter() - begun:.0f} s")
    return spent


def cells_of(spent: Mapping[tuple[str, int], list[float]], seed: int) -> list[dict[str, Any]]:
    """Turn times into cells: median, and how many times ours."""
    cells = []
    for (name, length), times in spent.items():
        rounds, ours = [[value] for value in times], [[value] for value in spent[OURS, length]]
        cells.append({
            "contestant": name, "tokens": length, "ms": median_of(rounds, seed),
            "times_ours": ratio_of(rounds, ours, seed), "ms_rounds": times,
        })
    return cells


def run() -> None:
    """Measure, print and write."""
    parser = arguments(__doc__, "prefill")
    parser.add_argument("--models", nargs="+", default=["demo", "134m", "500m"], choices=["demo", *GEOMETRIES])
    parser.add_argument("--lengths", type=int, nargs="+", default=[64, 512, 1536])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--warmups", type=int, default=3)
    parser.add_argument("--compiled", action=argparse.BooleanOptionalAction, default=True, help="torch.compile too")
    parser.add_argument("--fp32", action="store_true", help="transformers in fp32 too")
    parser.add_argument("--llama-cpp", action="store_true", help="llama.cpp too; needs llama-cpp-python and gguf")
    add_peer_site(parser)
    add_vllm(parser)
    args = start(parser)
    if min(args.lengths) < 1 or args.rounds < 1:
        raise DraftsmithError("--lengths and --rounds have to be at least 1.")
    more = {}
    if args.llama_cpp:
        missing = find_packages(args.peer_site)
        if missing is not None:
            raise DraftsmithError(missing)
        more = about_llama_cpp()
    results = [measure_model(model, sorted(set(args.lengths)), args) for model in args.models]
    for result in results:
        rows = [
            [cell["contestant"], str(cell["tokens"]), span(cell["ms"], 1), span(cell["times_ours"])]
            for cell in sorted(result["cells"], key=lambda cell: cell["tokens"])
        ]
        show_table(f"{result['name']}, {result['implementation']}", ["", "tokens", "ms", "times ours"], rows)
        for cell in result["cells"]:
            cell["ms"], cell["times_ours"] = as_json(cell["ms"]), as_json(cell["times_ours"])
    finish(args, {"models": results}, peers=more, dtype=args.dtype)


if __name__ == "__main__":
    main(run)
