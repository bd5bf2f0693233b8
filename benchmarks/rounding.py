"""What other roundings of the 4-bit copy would bring, and what 3 bits would: how often it guesses what the target says.

    python benchmarks/rounding.py

`packed` is how `int4-self` rounds, and `calibrate=N` how it does with that option. The others are put into the copy's
own weights, so that all are read by the same kernels: `even` has levels evenly over the whole range of a
group; `searched` tries more scales and zero points than the packing does; `weighted` does so with the mean squares
of the inputs over so many tokens of embedded training texts; `fed back` lets later inputs of a group make up for the
errors of earlier ones, and `across` those of all later groups (GPTQ), as `calibrate` does with the target's own text,
within blocks. The prompts are held out.

Chains are read along the target's own texts, over its own keys and values, as the copy reads them when it drafts, from
every few tokens on. On greedy texts a guess agrees or does not; on texts drawn at temperature 1 a guess is kept with
the probability 1 - TV, the sum of the lesser of both probabilities. A chain's tokens a step follow without bias: of a
drawn text, a token that the copy finds less likely than the target counts for their ratio.

What that would be worth is reckoned with the costs that quantised_self.py measured on a padded target, in plain steps:
tokens a step over the cost of so many guesses and a verification, with the best chain. A guess in 3 bits is taken to
cost what its bytes are of those in 4 bits, the least that it can. Intervals resample prompts; differences and ratios
are paired by prompt. Shapes: B texts, T tokens, D depth.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import (
    RESULTS,
    arguments,
    as_json,
    bootstrap,
    finish,
    main,
    make_prompts,
    say,
    show_table,
    span,
    start,
)
from roundings import ASIDES, GROUP, SHARES, Rounded, even, fed_across, fed_back, in_groups, rounded, searched
from torch import Tensor, nn

from draftsmith import assets
from draftsmith.engine import Engine
from draftsmith.evaluation.measuring.intervals import Interval
from draftsmith.evaluation.prompts import cut, embedded_prompts
from draftsmith.native.layers import Int4Linear, PackedExperts, PackedLayer
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError, SamplingParams

TODAY = "packed"
INT4 = "int4-self"
DETAILS = 16
"""Bits of the scale and the zero point of a group."""
PIECE = 64
"""Tokens of a piece of training text."""
WAYS = {0.0: "greedy", 1.0: "temperature 1"}
COSTS = {0.0: "quantised_self-padded.json", 1.0: "quantised_self-padded-sampled.json"}
Rounder = Callable[[str, Tensor], Tensor]
"""Returns the packed weights of a layer, given its name and its weights (N, G, I)."""
Key = tuple[str, float, str, int]
"""Task, temperature, rounding, bits."""


@dataclass(frozen=True)
class Chains:
    """What chains along B texts did: the mean of one guess (B), and how many chains get as far as D tokens (B, D)."""

    guess_B: np.ndarray
    reach_BD: np.ndarray


def run() -> None:
    """Round, measure, reckon and write."""
    parser = arguments(__doc__, "rounding")
    parser.add_argument("--tasks", nargs="+", default=["code", "prose"])
    parser.add_argument("--prompts", type=int, default=24, help="a task")
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=100)
    parser.add_argument("--chain", type=int, default=8, help="the longest")
    parser.add_argument("--every", type=int, default=4, help="tokens from one chain's start to the next")
    parser.add_argument("--tokens", nargs=2, type=int, default=[512, 8192], help="of training text, few and many")
    parser.add_argument("--calibrate", nargs="+", type=int, default=[512, 2048, 8192], help="of the target's own text")
    parser.add_argument("--costs", type=Path, default=RESULTS, help="the folder with what quantised_self.py measured")
    args = start(parser)
    costs = costs_of(args.costs)
    target = Target.from_pretrained(args.target or assets.demo_target(), dtype=args.dtype)
    copy = target.quantised("int4")
    if any(isinstance(module, PackedExperts) for module in copy.model.modules()):
        raise DraftsmithError(f"{target.name} is a mixture; give a target without experts.")
    weights = dict(weights_of(target))
    texts = {(task, heat): written(target, task, heat, args) for task in args.tasks for heat in WAYS}
    found: dict[Key, Chains] = {}
    errors = {}
    for name, bits, rounder in settings(target, args):
        errors[name, bits] = put(copy, weights, rounder)
        for (task, heat), text_BT in texts.items():
            found[task, heat, name, bits] = read_along(target, copy, text_BT, heat, args)
        say(f"{bits} bits, {name}: error {errors[name, bits]:.4f}")
    cells = [cell(found, key, costs, args) | {"error": errors[key[2:]]} for key in found]
    results = {"costs": costs, "cells": sorted(cells, key=lambda one: (one["temperature"], one["task"]))}
    show(results, target, args)
    finish(args, results, target=target.name, dtype=args.dtype)


def settings(target: Target, args: Any) -> Iterator[tuple[str, int, Rounder]]:
    """Give the settings: a name, bits, and what rounds the weights of a layer, by its name."""
    yield TODAY, 4, made(target, 0)
    for tokens in args.calibrate:
        yield f"calibrate={tokens}", 4, made(target, tokens)
    few, many = (products_of(target, tokens, args.seed) for tokens in args.tokens)
    short, long = (f"{tokens:,} tokens" for tokens in args.tokens)
    for bits in (4, 3):
        levels = 2**bits
        yield "even", bits, lambda _, w, n=levels: rounded(w, even(w, n), n).packed()
        if bits != 4:
            few_tried = partial(by_search, shares=SHARES, asides=ASIDES, fits=0)
            yield TODAY, bits, lambda _, w, n=levels, way=few_tried: way(w, None, n).packed()
        yield "searched", bits, lambda _, w, n=levels: by_search(w, None, n).packed()
        for name, way, products in (
            (f"weighted, {short}", by_search, few), (f"fed back, {short}", fed_back, few),
            (f"across, {short}", fed_across, few), (f"across, {long}", fed_across, many),
        ):
            yield name, bits, lambda layer, w, n=levels, way=way, p=products: way(w, p[layer], n).packed()


def made(target: Target, tokens: int) -> Rounder:
    """Return what takes the weights of a copy made as users make it."""
    model = target.quantised("int4", calibrate=tokens).model
    return lambda layer, _: model.get_submodule(layer).get_buffer("packed")


def by_search(weight_NGI: Tensor, products_KK: Tensor | None, levels: int, **options: Any) -> Rounded:
    """Round by the scales and zero points with the least error, weighted where products are given."""
    groups = weight_NGI.shape[1]
    importance_GI = torch.ones(groups, GROUP)
    if products_KK is not None:
        mean_squares = products_KK.diagonal()
        importance_GI = (mean_squares + 1e-4 * mean_squares.mean()).float().unflatten(0, (-1, GROUP))
    return rounded(weight_NGI, searched(weight_NGI, importance_GI, levels, **options), levels)


def weights_of(target: Target) -> Iterator[tuple[str, Tensor]]:
    """Give the weights of every linear layer (N, G, I)."""
    for name, module in target.model.named_modules():
        if isinstance(module, nn.Linear | PackedLayer):
            if module.weight.shape[1] % GROUP:
                raise DraftsmithError(f"{name} reads {module.weight.shape[1]} inputs, which are no whole groups.")
            yield name, in_groups(module.weight.detach())


def products_of(target: Target, tokens: int, seed: int) -> dict[str, Tensor]:
    """Return the mean products (K, K) of the inputs of every linear layer over embedded training texts."""
    wide = target.widened()
    prompts = [prompt for prompt in embedded_prompts(split="train") if prompt.task != "dialogue"]
    order = np.random.default_rng(seed).permutation(len(prompts))
    text_BT = torch.tensor(cut(wide, [prompts[i] for i in order], PIECE, tokens // PIECE))
    sums: dict[str, Tensor] = {}

    def note(module: nn.Module, given: tuple[Tensor, ...], name: str) -> None:
        rows = given[0].detach().flatten(0, -2)
        sums[name] = sums.get(name, torch.zeros(())) + rows.T @ rows / text_BT.numel()

    hooks = [
        module.register_forward_pre_hook(partial(note, name=name))
        for name, module in wide.model.named_modules()
        if isinstance(module, nn.Linear)
    ]
    for piece_BT in text_BT.split(16):
        wide.encode(piece_BT, (), logits=True, by_model=True)
    for hook in hooks:
        hook.remove()
    return sums


def put(copy: Target, weights: Mapping[str, Tensor], rounder: Rounder) -> float:
    """Round the copy's weights anew, in place; return the root of their mean squared error, by their own."""
    off, size = 0.0, 0.0
    for name, weight_NGI in weights.items():
        layer = copy.model.get_submodule(name)
        assert isinstance(layer, Int4Linear)
        layer.packed.copy_(rounder(name, weight_NGI))
        off += float((layer.unpacked().float() - weight_NGI.flatten(1)).square().sum())
        size += float(weight_NGI.square().sum())
    return (off / size) ** 0.5


def written(target: Target, task: str, heat: float, args: Any) -> Tensor:
    """Return held-out prompts with what the target writes behind them (B, T)."""
    prompts = make_prompts(target, task, args.prompt_tokens, args.prompts, args.seed)
    rules = [
        SamplingParams(max_tokens=args.new_tokens, ignore_eos=True, temperature=heat, seed=args.seed + number)
        for number in range(len(prompts))
    ]
    done = Engine(target, max_batch=8).generate(prompts, rules)
    return torch.tensor([one.prompt_tokens + one.tokens for one in done])


@torch.no_grad()
def read_along(target: Target, copy: Target, text_BT: Tensor, heat: float, args: Any) -> Chains:
    """Let the copy read chains along the texts, each over the target's keys and values of all before it."""
    texts, length = text_BT.shape
    cache = target.new_cache(texts, length)
    whole_BTV, _ = target.read_chain(cache, text_BT, torch.zeros(texts, dtype=torch.long), ())
    guesses, reaches = [], []
    for first in range(args.prompt_tokens - 1, length - args.chain, args.every):
        places = slice(first, first + args.chain)
        held_B = torch.full((texts,), first)
        copied_BDV, _ = copy.read_chain(cache, text_BT[:, places], held_B, ())
        target.read_chain(cache, text_BT[:, places], held_B, ())  # writes its own keys and values over the copy's
        p_BDV, q_BDV = whole_BTV[:, places].float(), copied_BDV.float()
        if heat:
            p_BDV, q_BDV = (p_BDV / heat).softmax(-1), (q_BDV / heat).softmax(-1)
            kept_BD = torch.minimum(p_BDV, q_BDV).sum(-1)
            next_BD1 = text_BT[:, first + 1 : first + 1 + args.chain, None]
            ratio_BD = (q_BDV.gather(-1, next_BD1) / p_BDV.gather(-1, next_BD1))[..., 0].clamp(max=1)
            before_BD = torch.cat([torch.ones(texts, 1), ratio_BD[:, :-1].cumprod(-1)], -1)
            reaches.append(before_BD * kept_BD)
        else:
            kept_BD = (p_BDV.argmax(-1) == q_BDV.argmax(-1)).float()
            reaches.append(kept_BD.cumprod(-1))
        guesses.append(kept_BD)
    guess_B = torch.stack(guesses).mean((0, 2))
    return Chains(guess_B.double().numpy(), torch.stack(reaches).mean(0).double().numpy())


def costs_of(folder: Path) -> dict[str, Any]:
    """Return what was measured: the cost of a guess by temperature, and of a verification and the rest by guesses.

    In plain steps. What a step costs beside its guesses is a line through what was measured at both temperatures.
    """
    guesses, rest = {}, []
    for heat, file in COSTS.items():
        tasks = json.loads((folder / file).read_text(encoding="utf-8"))["tasks"].values()
        found = [item for task in tasks for item in task.items() if item[0].startswith(f"{INT4} ")]
        mine = [(int(name.split()[1].rstrip(",")), one) for name, one in found]
        guesses[heat] = float(np.mean([one["drafting"] / chain for chain, one in mine]))
        rest += [(chain, one["verifying"] + one["rest"]) for chain, one in mine]
    more, once = np.polyfit(*np.array(rest).T, 1)
    return {"guess": guesses, "once": float(once), "more": float(more)}


def speeds(chains: Chains, taken: np.ndarray, costs: Mapping[str, Any], heat: float, bits: int) -> np.ndarray:
    """Return how many times as fast as plain decoding chains of 1, 2, … guesses are over some prompts."""
    reach_D = chains.reach_BD[taken].mean(0)
    guesses_D = np.arange(1, len(reach_D) + 1)
    guess = costs["guess"][heat] * (bits + DETAILS / GROUP) / (4 + DETAILS / GROUP)
    return (1 + reach_D.cumsum()) / (guesses_D * (guess + costs["more"]) + costs["once"])


def cell(found: Mapping[Key, Chains], key: Key, costs: Mapping[str, Any], args: Any) -> dict[str, Any]:
    """Return how a rounding guesses, what its best chain would bring, and both over what is packed."""
    task, heat, name, bits = key
    own, today, alike = found[key], found[task, heat, TODAY, 4], found[task, heat, name, 4]
    count = len(own.guess_B)

    def fastest(chains: Chains, t: np.ndarray, its_bits: int) -> float:
        return float(speeds(chains, t, costs, heat, its_bits).max())

    best = int(speeds(own, np.arange(count), costs, heat, bits).argmax()) + 1
    figures: dict[str, Callable[[np.ndarray], float]] = {
        "kept": lambda t: float(own.guess_B[t].mean()),
        "kept_over_packed": lambda t: float((own.guess_B - today.guess_B)[t].mean()),
        "tau": lambda t: 1 + float(own.reach_BD[t, :best].mean(0).sum()),
        "speedup": lambda t: fastest(own, t, bits),
        "times_packed": lambda t: fastest(own, t, bits) / fastest(today, t, 4),
        "times_4_bits": lambda t: fastest(own, t, bits) / fastest(alike, t, 4),
    }
    return {
        "task": task, "temperature": heat, "bits": bits, "rounding": name, "chain": best,
        **{what: as_json(bootstrap(count, figure, args.seed)) for what, figure in figures.items()},
        "reach": own.reach_BD.mean(0).tolist(),
    }


def show(results: Mapping[str, Any], target: Target, args: Any) -> None:
    """Print one table for each kind of text."""
    for heat, way in WAYS.items():
        rows = []
        for one in results["cells"]:
            if one["temperature"] != heat:
                continue
            kept, over, tau, speed, times, alike = (
                span(Interval(one[what]["value"], *one[what]["ci95"]), 3)
                for what in ("kept", "kept_over_packed", "tau", "speedup", "times_packed", "times_4_bits")
            )
            rows.append([one["task"], str(one["bits"]), one["rounding"], f"{one['error']:.4f}", kept, over,
                         str(one["chain"]), tau, speed, times, alike if one["bits"] != 4 else ""])
        show_table(
            f"{target.name}, {way}, {args.prompts} prompts a task, {args.new_tokens} tokens each (95 % intervals)",
            ["task", "bits", "rounding", "error", "a guess is kept", "over packed", "chain", "τ", "speed-up",
             "times packed", "times 4 bits"],
            rows,
        )
    costs = results["costs"]
    print(
        f"in plain steps: a guess {costs['guess'][0.0]:.3f}, at temperature 1 {costs['guess'][1.0]:.3f}; the rest of a "
        f"step {costs['once']:.3f} and {costs['more']:.3f} for each guess"
    )


if __name__ == "__main__":
    main(run)
