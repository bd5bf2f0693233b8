"""Where chains of a quantised copy should end: how often its choice is the target's by its lead, and what rules bring.

    python benchmarks/copy_ends.py
    python benchmarks/copy_ends.py --drafters int8-self --guess 0.55

The target continues held-out prompts greedily, and the copy reads these texts. The first table says how often its
choice is the next token, by how far its best token leads, in spreads (`drafters/models/agreement.py`). The second says
how many times as fast as plain decoding chains would be that end by different rules, each at its best length and
threshold on these texts, calculated from what a guess (`--guess`), a step (`--step`) and each verified guess (`--node`)
cost, in plain steps. A guess behind a wrong one is taken from the text, not from the copy's own chain.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from common import arguments, finish, main, make_prompts, say, show_table, start
from torch import Tensor

from draftsmith import assets
from draftsmith.drafters.models.agreement import WORTH_IT, chance_of
from draftsmith.drafters.models.quantised_self import QuantisedSelf
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Engine
from draftsmith.plan import NO_DRAFT
from draftsmith.targets import Target
from draftsmith.types import SamplingParams

LEADS = (0.0, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0)
NEVER = 0.0
LEAST = (NEVER, 0.001, 0.003, 0.01, 0.03, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)


@dataclass(frozen=True)
class Place:
    """What the copy says of the next token of a text: whether its best and its second are that, and how sure it is."""

    right: bool
    other_right: bool
    chance: float
    probability: float
    lead: float


@dataclass(frozen=True)
class Rule:
    """Where chains end.

    Args:
        sureness: of a place; a chain ends where the product of those of its guesses falls below a threshold.
        keeps: whether the guess there is verified.
        others: whether the second best token is, where the target may well choose it.
    """

    sureness: Callable[[Place], float]
    keeps: bool = True
    others: bool = False


RULES = {
    "of one length": Rule(lambda _: 1.0),
    "by the copy's probability": Rule(lambda place: place.probability),
    "by the lead, without the last guess": Rule(lambda place: place.chance, keeps=False),
    "by the lead": Rule(lambda place: place.chance),
    "by the lead, and the other tokens": Rule(lambda place: place.chance, others=True),
}


def copy_ends() -> None:
    """Read, count and calculate."""
    parser = arguments(__doc__, "copy_ends")
    parser.add_argument("--drafters", nargs="+", default=["int4-self", "int4-self:calibrate=2048"])
    parser.add_argument("--tasks", nargs="+", default=["code", "prose"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[3, 4, 5, 6, 7, 8], help="most guesses of a chain")
    parser.add_argument("--guess", type=float, default=0.33)
    parser.add_argument("--step", type=float, default=1.0)
    parser.add_argument("--node", type=float, default=0.02)
    parser.add_argument("--prompts", type=int, default=40)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=64)
    args = start(parser)
    target = Target.from_pretrained(args.target or assets.demo_target(), dtype=args.dtype)
    engine = Engine(target, max_batch=8, max_length=args.prompt_tokens + args.new_tokens, share_prefixes=False)
    params = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True)
    results: dict[str, Any] = {}
    for name in args.drafters:
        drafter = load_drafter(name, target)
        if not isinstance(drafter, QuantisedSelf):
            parser.error(f"{name} is no copy that shares the target's cache; give int4-self or int8-self.")
        say(f"{name}: spread {drafter.spread:.3f}")
        results[name] = {"spread": drafter.spread, "tasks": {}}
        for task in args.tasks:
            prompts = make_prompts(target, task, args.prompt_tokens, args.prompts, args.seed)
            texts = [one.prompt_tokens + one.tokens for one in engine.generate(prompts, params, NO_DRAFT)]
            rows = [places_of(drafter, torch.tensor(text), args.prompt_tokens) for text in texts]
            everywhere = [place for row in rows for place in row]
            results[name]["tasks"][task] = {
                "agrees": share([place.right for place in everywhere]),
                "by_lead": [
                    (least, len(some) / len(everywhere), share([place.right for place in some]))
                    for least, some in by_lead(everywhere, drafter.spread)
                ],
                "times_as_fast": {rule: best_of(rows, one, args) for rule, one in RULES.items()},
            }
    told = [(name, task, one) for name, found in results.items() for task, one in found["tasks"].items()]
    show_table(
        "The copy's choice is the target's, by its lead in spreads (and the share of such places)",
        ["drafter", "task", "all", *(f"from {least:g}" for least in LEADS)],
        [
            [name, task, f"{one['agrees']:.3f}", *(f"{right:.2f} ({part:.2f})" for _, part, right in one["by_lead"])]
            for name, task, one in told
        ],
    )
    show_table(
        "Times as fast as plain decoding, calculated, each with its best length and threshold",
        ["chains end", *(f"{name}, {task}" for name, task, _ in told)],
        [
            [rule, *(f"{one['times_as_fast'][rule]['speed']:.2f} ({one['times_as_fast'][rule]['least']:g})"
                     for _, _, one in told)]
            for rule in RULES
        ],
    )
    finish(args, results)


def places_of(drafter: QuantisedSelf, text_T: Tensor, begin: int) -> list[Place]:
    """Return what the copy says of every token of a text from the second new one on."""
    logits_BTV = drafter.model.encode(text_T.unsqueeze(0), (), logits=True)[1]
    assert logits_BTV is not None
    scores_TV = logits_BTV[0, begin:-1].double()
    two, next_T = scores_TV.topk(2, dim=-1), text_T[begin + 1 :]
    leads_T = two.values[:, 0] - two.values[:, 1]
    columns = (
        two.indices[:, 0] == next_T, two.indices[:, 1] == next_T, chance_of(leads_T, drafter.spread),
        scores_TV.softmax(-1).max(-1).values, leads_T,
    )
    return [Place(*place) for place in zip(*(column.tolist() for column in columns), strict=True)]


def by_lead(places: Sequence[Place], spread: float) -> list[tuple[float, list[Place]]]:
    """Return the places whose lead is at least each of `LEADS`, in spreads, and below the next."""
    ends = [*LEADS[1:], float("inf")]
    return [
        (least, [place for place in places if least * spread <= place.lead < most * spread])
        for least, most in zip(LEADS, ends, strict=True)
    ]


def share(flags: Sequence[bool]) -> float:
    """Return how many of them are true."""
    return sum(flags) / len(flags) if flags else float("nan")


def best_of(rows: Sequence[Sequence[Place]], rule: Rule, args: Any) -> dict[str, float]:
    """Return the fastest length and threshold of a rule, with its tokens a step and its speed."""
    found = []
    for length in args.lengths:
        for least in (NEVER,) if rule is RULES["of one length"] else LEAST:
            tokens, guesses, nodes, steps = 0, 0, 0, 0
            for row in rows:
                at = 0
                while at < len(row):
                    stayed, made, verified = one_step(row[at : at + length], length, rule, least)
                    tokens, guesses, nodes, steps = tokens + stayed + 1, guesses + made, nodes + verified, steps + 1
                    at += stayed + 1
            cost = steps * args.step + guesses * args.guess + nodes * args.node
            found.append({"speed": tokens / cost, "length": length, "least": least, "tokens": tokens / steps})
    return max(found, key=lambda one: one["speed"])


def one_step(places: Sequence[Place], length: int, rule: Rule, least: float) -> tuple[int, int, int]:
    """Return how many guesses stay, how many passes the copy makes, and how many guesses are verified."""
    chance, certain, made, kept, beside = 1.0, 1.0, 0, 0, list[int]()
    for place in places:
        made += 1
        before, certain = certain, certain * place.chance
        chance *= rule.sureness(place)
        if chance < least and not rule.keeps:
            break
        if rule.others and before - certain >= WORTH_IT:
            beside.append(kept)
        kept += 1
        if chance < least:
            break
    beside = beside[::-1][: length - kept]  # as far as there is room, from the end
    wrong = next((at for at in range(kept) if not places[at].right), kept)
    return wrong + (wrong in beside and places[wrong].other_right), made, kept + len(beside)


if __name__ == "__main__":
    main(copy_ends)
