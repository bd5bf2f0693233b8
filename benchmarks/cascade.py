"""What a cascade saves its copy, and what guesses beside its chains would bring: counts, not times.

    python benchmarks/cascade.py
    python benchmarks/cascade.py --inner ngram suffix --ahead 2 3 4 5 --chains 6 8 10 --tails 0

Greedy, one held-out prompt after the other. A pass of the copy reads a token and up to `ahead` guesses of the inner
drafter; `tail` guesses at the end of a chain are read by the target alone. The second table takes the chains that the
copy drafts alone: how many of them stop at a wrong guess, and how often the inner drafter's likeliest other token, from
the target's own state, would have been right there. That is the most that a branch beside every guess could bring.
"""

from collections.abc import Sequence
from typing import Any

import torch
from common import arguments, finish, main, make_prompts, show_table, start

from draftsmith import assets
from draftsmith.drafters.models.cascade import Cascade
from draftsmith.drafters.models.inner import all_inside
from draftsmith.drafters.models.quantised_self import QuantisedSelf
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Engine
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import Completion, Context, Draft, SamplingParams

OWN = "own"
"""Stands for the drafter of the command, the embedded one by default."""
BRANCHES = 4
"""Of the inner drafter's likeliest tokens, those but the copy's own are tried beside a wrong guess."""


def cascade() -> None:
    """Count."""
    parser = arguments(__doc__, "cascade")
    inner = [OWN, "ngram", f"ngram+{OWN}"]
    parser.add_argument("--inner", nargs="+", default=inner, help="drafters, several joined by +")
    parser.add_argument("--chains", nargs="+", type=int, default=[8])
    parser.add_argument("--ahead", nargs="+", type=int, default=[0], help="0 is what is usual for each")
    parser.add_argument("--tails", nargs="+", type=int, default=[0, 2])
    parser.add_argument("--tasks", nargs="+", default=["code", "prose"])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt-tokens", type=int, default=48)
    parser.add_argument("--new-tokens", type=int, default=64)
    args = start(parser)
    target = Target.from_pretrained(args.target or assets.demo_target(), dtype=args.dtype)
    own = args.drafter or str(assets.demo_drafter())
    copy = Noted(target, "int4", max(args.chains))
    copy.drafts = []
    prompts = {task: make_prompts(target, task, args.prompt_tokens, args.prompts, args.seed) for task in args.tasks}
    params = SamplingParams(max_tokens=args.new_tokens, ignore_eos=True)
    cells: list[dict[str, Any]] = []
    for task in args.tasks:
        for chain in args.chains:
            done = Engine(target, copy, max_batch=1).generate(prompts[task], params, Plan((1,) * chain))
            cells.append(cell(task, "no", chain, 0, 0, done, chain, 1.0))
            for name in args.inner:
                for ahead in args.ahead:
                    for tail in args.tails:
                        words = [own if word == OWN else word for word in name.split("+")]
                        loaded = {word: load_drafter(word, target) for word in words}
                        drafter = Cascade(copy, all_inside(loaded, ahead), chain, tail)
                        done = Engine(target, drafter, max_batch=1).generate(prompts[task], params)
                        steps = sum(one.statistics.steps for one in done)
                        per_pass = drafter.tokens_read / drafter.passes
                        cells.append(cell(task, name, chain, ahead, tail, done, drafter.passes / steps, per_pass))
    show_table(
        f"{target.name}, greedy: a step", ["task", "inner", "chain", "ahead", "tail", "τ", "passes", "tokens a pass"],
        [
            [one["task"], one["inner"], *(str(one[key]) for key in ("chain", "ahead", "tail")),
             f"{one['tau']:.2f}", f"{one['passes']:.2f}", f"{one['read']:.2f}"]
            for one in cells
        ],
    )
    beside = [misses(target, copy, own, prompts[task], params, args.chains[0]) for task in args.tasks]
    show_table(
        f"Chains of {args.chains[0]} that the copy drafts alone", ["", *args.tasks],
        [[key, *(str(one[key]) for one in beside)] for key in beside[0]],
    )
    finish(args, {"steps": cells, "beside": dict(zip(args.tasks, beside, strict=True))})


def cell(
    task: str, inner: str, chain: int, ahead: int, tail: int, done: Sequence[Completion], passes: float, read: float
) -> dict[str, Any]:
    """Return one line of the first table."""
    steps, accepted = (sum(getattr(one.statistics, key) for one in done) for key in ("steps", "accepted"))
    return {
        "task": task, "inner": inner, "chain": chain, "ahead": ahead, "tail": tail, "tau": 1 + accepted / steps,
        "passes": passes, "read": read,
    }


class Noted(QuantisedSelf):
    """Keeps what it drafted, with the length of the text before it."""

    drafts: list[tuple[int, list[int]]]

    def propose(self, context: Context, plan: Plan) -> Draft:
        draft = super().propose(context, plan)
        self.drafts += zip(context.lengths_B.tolist(), draft.tokens_BN.tolist(), strict=True)
        return draft


def misses(
    target: Target, copy: Noted, inner: str, prompts: Sequence[list[int]], params: SamplingParams, chain: int
) -> dict[str, int]:
    """Count the steps whose chain has a wrong guess, and the inner drafter's other tokens that are right there."""
    drafter = load_drafter(inner, target)
    found = {"steps": 0, "with a wrong guess": 0, "likeliest other right": 0, f"of {BRANCHES - 1} others one right": 0}
    for prompt in prompts:
        copy.drafts = []
        (done,) = Engine(target, copy, max_batch=1).generate([prompt], params, Plan((1,) * chain))
        text = prompt + done.tokens
        for length, drafted in copy.drafts:
            found["steps"] += 1
            pairs = zip(drafted, text[length:], strict=False)
            wrong = next((at for at, (guess, right) in enumerate(pairs) if guess != right), None)
            if wrong is not None:
                others = others_behind(target, drafter, text[: length + wrong], drafted[wrong])
                found["with a wrong guess"] += 1
                found["likeliest other right"] += text[length + wrong] in others[:1]
                found[f"of {BRANCHES - 1} others one right"] += text[length + wrong] in others
    return found


def others_behind(target: Target, drafter: Any, text: list[int], own: int) -> list[int]:
    """Return what the drafter guesses behind a text, from the target's state, but for the copy's own guess."""
    states_1TF, _ = target.encode(torch.tensor([text[:-1]]), drafter.taps)
    ones_1, zeros_1 = torch.ones(1, dtype=torch.long), torch.zeros(1, dtype=torch.long)
    context = Context(
        torch.tensor([text[-1:]]), states_1TF[:, -1:], ones_1, ones_1 * len(text), zeros_1, zeros_1.float(), zeros_1
    )
    guesses: list[int] = drafter.propose(context, Plan((BRANCHES,))).tokens_BN[0].tolist()
    return [guess for guess in guesses if guess != own][: BRANCHES - 1]


if __name__ == "__main__":
    main(cascade)
