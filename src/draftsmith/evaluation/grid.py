"""What `bench` measures: batch sizes, numbers of candidates and prompt lengths, and the plan of each number."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.types import DraftsmithError, SamplingParams

BASELINE = 0
CANDIDATES = (0, 1, 2, 4, 8, 16, 32)
PEERS = ("transformers",)


@dataclass(frozen=True)
class Grid:
    """What to measure.

    Args:
        batches: rows decoded together.
        candidates: root-to-leaf paths verified in each step; 0 is the baseline. None measures `branching` or `choices`
            whole. Without these, it measures the drafter's own plan and, if that plan keeps the best paths of a tree,
            also those of `CANDIDATES` that the tree has.
        prompt_tokens: prompt lengths.
        new_tokens: N, generated exactly.
        trials: timed rounds of each (batch, prompt length).
        warmups: untimed rounds before them.
        branching: of the tree before pruning to the candidates; None takes the drafter's own.
        choices: a static tree instead, see `Plan.choices`. It is measured whole, whatever `candidates` are.
        seed: of the order of runs, of sampling and of the bootstrap.
        rules: a plan without branching, from which the drafts take everything but their shape.
        temperature: 0 is greedy.
    """

    batches: tuple[int, ...] = (1, 2, 4)
    candidates: tuple[int, ...] | None = None
    prompt_tokens: tuple[int, ...] = (64,)
    new_tokens: int = 100
    trials: int = 16
    warmups: int = 1
    branching: tuple[int, ...] | None = None
    choices: tuple[tuple[int, ...], ...] = ()
    seed: int = 0
    rules: Plan = NO_DRAFT
    temperature: float = 0.0

    def __post_init__(self) -> None:
        for name, least in (("batches", 1), ("candidates", 0), ("prompt_tokens", 1)):
            values = getattr(self, name)
            if values is not None and (not values or min(values) < least):
                given = ",".join(map(str, values)) or "empty"
                raise DraftsmithError(f"{name} is {given}; give one or more numbers of at least {least}.")
        for name, least in (("new_tokens", 2), ("trials", 1), ("warmups", 0)):
            if getattr(self, name) < least:
                raise DraftsmithError(f"{name} is {getattr(self, name)}; it must be at least {least}.")
        SamplingParams(temperature=self.temperature)  # refuses an impossible temperature
        if self.choices:
            replace(self.rules, choices=self.choices)  # refuses rules that would choose nodes as well

    @property
    def drafts(self) -> bool:
        """Whether anything but the baseline is asked for."""
        return bool(self.choices) or self.candidates is None or any(count != BASELINE for count in self.candidates)

    @property
    def is_open(self) -> bool:
        """Whether nothing says what is drafted, so that what pays is measured as well."""
        return self.candidates is None and self.branching is None and not self.choices and self.rules == NO_DRAFT

    @property
    def rounds(self) -> int:
        """How often every setting runs, warm-up included."""
        return len(self.batches) * len(self.prompt_tokens) * (self.trials + self.warmups)

    def plans(self, default: Plan) -> dict[int, Plan]:
        """Return the plan of every number of candidates, the baseline among them; `default` is the drafter's own."""
        if self.choices:
            return {BASELINE: NO_DRAFT, path_count(self.choices): replace(self.rules, choices=self.choices)}
        if self.candidates is not None:
            counts = sorted({BASELINE, *self.candidates})
            return {count: plan_for(default, count, self.branching, self.rules) for count in counts}
        if self.branching is not None:
            return {BASELINE: NO_DRAFT, prod(self.branching): replace(self.rules, branching=self.branching)}
        return self._defaults(default)

    def _defaults(self, default: Plan) -> dict[int, Plan]:
        """Return the plans to measure by default: the drafter's own, and the same with fewer or more paths."""
        found = {BASELINE: NO_DRAFT}
        if not default.branching:
            return found
        if default.choices and self.rules == NO_DRAFT:
            return found | {path_count(default.choices): default}
        if default.paths is not None or self.rules != NO_DRAFT:
            leaves = 1 if self.rules.sampled else prod(default.branching)
            counts = {count for count in CANDIDATES if BASELINE < count <= leaves} | {default.paths or 1}
            return found | {count: plan_for(default, count, None, self.rules) for count in sorted(counts)}
        return found | {prod(default.branching): default}


def plan_for(
    default: Plan, candidates: int, branching: tuple[int, ...] | None = None, rules: Plan = NO_DRAFT
) -> Plan:
    """Return the plan that verifies K candidates: the drafter's tree (or `branching`) pruned to the best K paths.

    A tree that has fewer leaves than K gets more children at the root, so that K candidates exist. A static tree gives
    only its widths, which are searched with a beam. Sampled guesses cannot be pruned: there the K candidates are K
    chains as deep as the tree. Everything else comes from `rules`.
    """
    if candidates == BASELINE:
        return NO_DRAFT
    shape = branching or default.branching
    if not shape:
        raise DraftsmithError(
            f"{candidates} candidates need a drafter that drafts; give one with --drafter, or measure the baseline "
            "alone with --candidates 0."
        )
    if default.choices and branching is None and rules.beam is None:
        # A tree of these widths has too many paths to search them all.
        rules = replace(rules, beam=None if rules.sampled else max(candidates, *shape))
    if rules.sampled:
        return replace(rules, branching=(candidates, *(1,) * (len(shape) - 1)))
    if prod(shape) < candidates:
        shape = (ceil(candidates / prod(shape[1:])), *shape[1:])
    return replace(rules, branching=shape, paths=candidates)


def path_count(choices: Sequence[tuple[int, ...]]) -> int:
    """Return how many root-to-leaf paths a static tree has: a path for each node without children."""
    return len(choices) - len({path[:-1] for path in choices} - {()})


def check_peer(peer: str | None, temperature: float) -> None:
    """Raise DraftsmithError for an unknown peer, and for a peer at a temperature above 0, as peers decode greedily."""
    if peer is not None and peer not in PEERS:
        raise DraftsmithError(f"--peer is {peer!r}; known is {', '.join(PEERS)}.")
    if peer is not None and temperature != 0:
        raise DraftsmithError(f"--peer decodes greedily, but --temperature is {temperature}; leave one of them out.")
