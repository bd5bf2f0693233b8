"""What the frozen target costs in training: whole texts read at once (`Target.encode`), natively and by PyTorch.

    python benchmarks/encode.py

Both sides take turns in random order on the same random token ids; states alone are asked for, or the logits of all
tokens too. Medians with 95 % bootstrap intervals; the ratio is PyTorch's time over ours, in the same rounds.

Shapes: B texts, T tokens.
"""

import random
import time
from typing import Any

import numpy as np
import torch
from common import (
    GEOMETRIES,
    arguments,
    as_json,
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

from draftsmith.evaluation.measuring.interleaving import interleaved
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError

NATIVE, PYTORCH = "native", "pytorch"


def read_size(text: str) -> tuple[int, int]:
    """Read "16x256"."""
    try:
        batch, length = (int(word) for word in text.split("x"))
    except ValueError:
        raise DraftsmithError(f"the size {text!r} cannot be read; write it like 16x256.") from None
    return batch, length


@torch.no_grad()
def measure(targets: dict[str, Target], size: tuple[int, int], logits: bool, args: Any) -> dict[str, list[list[float]]]:
    """Return milliseconds of both sides, by round."""
    rng = random.Random(args.seed)
    spent: dict[str, list[list[float]]] = {name: [] for name in targets}
    tokens_BT = torch.from_numpy(np.random.default_rng(args.seed).integers(0, targets[NATIVE].vocab_size, size))
    for _, name, timed in interleaved(targets, args.rounds, rng, args.warmups):
        begun = time.perf_counter()
        targets[name].encode(tokens_BT, logits=logits)
        if timed:
            spent[name].append([1000 * (time.perf_counter() - begun)])
    return spent


def run() -> None:
    """Measure, print and write."""
    parser = arguments(__doc__, "encode")
    parser.add_argument("--models", nargs="+", default=["demo", "134m"], choices=["demo", *GEOMETRIES])
    parser.add_argument("--sizes", nargs="+", default=["1x64", "16x64", "16x256", "4x1024"], help="B x T")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--warmups", type=int, default=2)
    args = start(parser)
    cells: list[dict[str, Any]] = []
    for model in args.models:
        with model_folder(model, args.target, torch.bfloat16) as folder:
            targets = {
                NATIVE: Target.from_pretrained(folder, dtype="bf16", device="cpu"),
                PYTORCH: Target.from_pretrained(folder, dtype="bf16", device="cpu", native=False),
            }
        for size in map(read_size, args.sizes):
            for logits in (False, True):
                spent = measure(targets, size, logits, args)
                medians = {name: median_of(rounds, args.seed) for name, rounds in spent.items()}
                ratio = ratio_of(spent[PYTORCH], spent[NATIVE], args.seed)
                cells.append({"model": model, "size": size, "logits": logits, "ms": medians, "times_native": ratio})
                say(f"{model}, {size[0]} x {size[1]}, {'logits' if logits else 'states'}: {span(ratio)}")
    table = [
        [
            cell["model"], f"{cell['size'][0]} x {cell['size'][1]}", "logits" if cell["logits"] else "states",
            span(cell["ms"][NATIVE], 1), span(cell["ms"][PYTORCH], 1), span(cell["times_native"]),
        ]
        for cell in cells
    ]
    show_table("Reading whole texts, ms", ["model", "B x T", "asked for", NATIVE, PYTORCH, "pytorch / native"], table)
    for cell in cells:
        cell["ms"] = {name: as_json(value) for name, value in cell["ms"].items()}
        cell["times_native"] = as_json(cell["times_native"])
    finish(args, {"cells": cells}, dtype=args.dtype)


if __name__ == "__main__":
    main(run)
