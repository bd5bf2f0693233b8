"""Exported drafters in vLLM and here: tokens a step, the same prompts, greedily, chains of as many guesses.

    python benchmarks/exports.py --drafters NAME=FOLDER … --vllm-python /opt/vllm/bin/python

FOLDERs are those of trained drafters of the embedded target, or of `--target`. For the first EAGLE drafter among them
everything is decoded once more with the two halves of `fc.weight` exchanged in vLLM's copy, as if vLLM joined state and
embedding in the other order; that has to be noticed.
"""

import json
import tempfile
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from common import arguments, finish, main, say, show_table, start
from rich.console import Console

from draftsmith import assets
from draftsmith.evaluation.peers.acceptance import SideBySide, side_by_side
from draftsmith.evaluation.prompts import embedded_prompts
from draftsmith.targets import Target
from draftsmith.workflows.checking import ragged
from draftsmith.workflows.exporting import export

PLANTED = "planted: halves of fc.weight exchanged"


def exchange_halves(folder: Path) -> None:
    """Exchange what an EAGLE drafter multiplies embedding and state by."""
    weights = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(weights)
    first, second = tensors["fc.weight"].chunk(2, dim=1)
    tensors["fc.weight"] = torch.cat([second, first], dim=1).contiguous()
    safetensors.torch.save_file(tensors, weights, {"format": "pt"})


def run() -> None:
    """Measure and write."""
    parser = arguments(__doc__, "exports")
    parser.add_argument("--drafters", nargs="+", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--vllm-python", type=Path, required=True, help="the Python of an environment with vLLM")
    parser.add_argument("--prompts", type=int, default=24)
    parser.add_argument("--new-tokens", type=int, default=128)
    args = start(parser)
    name = args.target or str(assets.demo_target())
    target = Target.from_pretrained(name, dtype=args.dtype, device=args.device)
    prompts = ragged(target, embedded_prompts(), args.prompts, args.new_tokens, Console(quiet=True))
    found: dict[str, Any] = {}
    table: list[list[str]] = []

    def compare(label: str, drafter: Path, folder: Path) -> None:
        settings = json.loads((folder / "speculative_config.json").read_text())
        told = side_by_side(
            target, drafter, name, settings, args.vllm_python, prompts, args.new_tokens, False,
            lambda what, done, total: None,
        )
        found[label] = told.as_json() | {"guesses": settings["num_speculative_tokens"]}
        table.append(row_of(label, settings["num_speculative_tokens"], told))

    planted = False
    for label, drafter in (text.split("=", 1) for text in args.drafters):
        say(label)
        with tempfile.TemporaryDirectory() as place:
            result = export(drafter, name, out=Path(place) / "exported")
            compare(label, Path(drafter), result.folder)
            if result.settings["method"] == "eagle" and not planted:
                planted = True
                exchange_halves(result.folder)
                compare(PLANTED, Path(drafter), result.folder)
    show_table(
        f"Tokens a step, {args.dtype}, {len(prompts)} prompts, {args.new_tokens} new tokens each",
        ["drafter", "guesses a step", "here", "in vLLM", "ratio", "passes"], table,
    )
    finish(args, {"drafters": found})


def row_of(label: str, guesses: int, told: SideBySide) -> list[str]:
    """Return a line of the table."""
    ratio = told.ratio
    return [
        label, str(guesses), f"{told.tau:.2f}", f"{told.tau_there:.2f}",
        f"{ratio.value:.2f} ({ratio.low:.2f}–{ratio.high:.2f})", "yes" if told.passed else "no",
    ]


if __name__ == "__main__":
    main(run)
