"""How long a step takes by its number behind a prompt, with guesses and without: the first ones find cold caches.

    python benchmarks/warming.py

The same prompts are written on in four ways that take turns in random order, each on an engine of its own: without
guesses, with a chain at every step, with a chain from step `BEGIN` on, and from there on by turns of `TURN` steps with
and without. Shown are medians over rounds of the seconds that the engine tells its policy.
"""

import random
import statistics
from collections.abc import Callable, Sequence

from common import arguments, finish, main, open_drafter, print_table, say, start

from draftsmith import assets
from draftsmith.engine import Choice, Engine, Load, Policy, RowHistory
from draftsmith.evaluation.measuring.interleaving import interleaved
from draftsmith.evaluation.prompts import cut, embedded_prompts
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target
from draftsmith.types import SamplingParams, require_finished

BEGIN, TURN = 20, 8
DRAFTS: dict[str, Callable[[int], bool]] = {
    "no guesses": lambda step: False,
    "a chain": lambda step: True,
    f"a chain from step {BEGIN}": lambda step: step >= BEGIN,
    f"from step {BEGIN} by turns": lambda step: step >= BEGIN and (step - BEGIN) // TURN % 2 == 0,
}
"""For each way, whether the rows draft at a step."""
SHOWN = (0, 1, 2, 3, 5, 7, 9, 11, 15, 19, 20, 21, 23, 27, 28, 29, 31, 35)
WARMUPS = 3


class Scripted(Policy):
    """Drafts at the steps it is told, and keeps what each step took; `begin` before every text."""

    def __init__(self, plan: Plan, drafts: Callable[[int], bool]) -> None:
        self._choices, self._drafts = (Choice(NO_DRAFT), Choice(plan)), drafts
        self.begin()

    def begin(self) -> None:
        """Forget the last text."""
        self.took: list[float] = []

    @property
    def choices(self) -> tuple[Choice, ...]:
        return self._choices

    def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
        return [self._choices[self._drafts(len(self.took))]] * len(rows)

    def timed(self, seconds: float) -> None:
        self.took.append(seconds)


def run() -> None:
    """Time every way with every number of rows."""
    parser = arguments(__doc__, "warming")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--chain", type=int, default=3, help="guesses of a chain")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=24)
    args = start(parser)
    target = Target.from_pretrained(args.target or assets.demo_target(), dtype=args.dtype, device=args.device)
    plan, found = Plan((1,) * args.chain), []
    # Even if all guesses stay, no row ends before the last step that is shown.
    new_tokens = (SHOWN[-1] + 2) * (plan.depth + 1)
    for rows in args.rows:
        prompts = cut(target, embedded_prompts(), args.prompt_tokens, rows * args.rounds)
        engines = {
            way: Engine(
                target, open_drafter(args.drafter, target), policy=Scripted(plan, drafts), max_batch=rows,
                max_length=args.prompt_tokens + new_tokens, share_prefixes=False,
            )
            for way, drafts in DRAFTS.items()
        }
        params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
        took: dict[str, list[list[float]]] = {way: [] for way in DRAFTS}
        for turn in interleaved(list(DRAFTS), args.rounds, random.Random(args.seed), WARMUPS):
            engine = engines[turn.way]
            policy = engine.core.policy
            assert isinstance(policy, Scripted)
            policy.begin()
            begin = turn.number * rows
            some = [prompts[(begin + row) % len(prompts)] for row in range(rows)]
            require_finished(engine.generate(some, params))
            if turn.timed:
                took[turn.way].append(policy.took)
        for way, all_rounds in took.items():
            steps = min(map(len, all_rounds))
            medians = [1000 * statistics.median(one[step] for one in all_rounds) for step in range(steps)]
            found.append({"rows": rows, "way": way, "ms": medians})
        say(f"{rows} rows: done")
    print_table(
        f"Milliseconds of a step by its number, {target.name}, {args.dtype}, chains of {args.chain}",
        ["rows", "way", *map(str, SHOWN)],
        [[str(one["rows"]), one["way"], *(f"{one['ms'][step]:.2f}" for step in SHOWN)] for one in found],
    )
    finish(args, {"steps": found}, target=target.name, read_by=target.backend.description)


if __name__ == "__main__":
    main(run)
