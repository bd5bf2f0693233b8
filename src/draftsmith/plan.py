"""The shape of a draft, and the rule that verifies it."""

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal, get_args

from draftsmith.types import DraftsmithError

AcceptanceRule = Literal["exact", "block", "typical"]


@dataclass(frozen=True)
class Plan:
    """The shape of the next draft, and the rule that verifies it (docs/verification.md).

    A plan with one child a node is a chain, however its nodes are limited, and is stored as a plain chain: (1, 1, 1)
    with two nodes becomes (1, 1).

    Args:
        branching: children of every node, depth by depth; () drafts nothing. With `choices` it follows from them: one
            more than the highest rank of each depth.
        choices: the nodes of an irregular static tree. Each is the list of ranks of the guesses from the root down to
            it: (0,) is the best first guess, (0, 1) the second best guess after that (Medusa, arXiv:2401.10774,
            section 2.3.3). () is a regular tree. They are stored sorted.
        paths: keep only this many root-to-leaf paths, best summed log-probability first; None keeps all.
        nodes: keep at most this many nodes of those paths, best summed log-probability first; None keeps all.
        beam: expand only this many nodes a depth, best summed log-probability first; None expands all.
        sampled: draw children from the drafter's distribution (without replacement) by noise of their own. Otherwise
            they are the drafter's likeliest tokens or, for a sampled row, those that the target's own noise draws first
            from that distribution.
        acceptance: "exact" verifies guess by guess; "block" verifies a sampled chain as a whole, which is exact too;
            "typical" keeps what is likely enough, which changes the distribution of sampled text: it is lossy.
        epsilon: for typical acceptance: a guess more probable than this always stays.
        delta: for typical acceptance: a guess more probable than delta × exp(-entropy) stays too.
        factor: for drafts that are looked up: at most this many guesses for every token of a match, as what follows a
            longer match is likelier to come again (the idea of SuffixDecoding, arXiv:2411.04975, section 4); None
            leaves it to the drafter, `NO_COPY` looks nothing up. Other drafters ignore it.
        confidence: for drafters that know how likely their guesses are: leave out guesses whose probability, times that
            of all guesses before them, is below this, so that a draft ends where its drafter becomes unsure. A guess
            for a sampled row counts as likely as the likeliest token there, see `grow`. None keeps all; `NEVER_SURE`
            leaves out all. Drafters that look guesses up ignore it. In chains of a quantised copy that shares the
            target's cache it is the chance that the target chooses the same. The guess at which that falls below it is
            the last one, so there is always one.
    """

    branching: tuple[int, ...] = ()
    paths: int | None = None
    nodes: int | None = None
    beam: int | None = None
    sampled: bool = False
    acceptance: AcceptanceRule = "exact"
    epsilon: float = 0.09
    delta: float = 0.3
    choices: tuple[tuple[int, ...], ...] = ()
    factor: float | None = None
    confidence: float | None = None

    def __post_init__(self) -> None:
        if self.choices:
            self._settle_choices()
        if any(b < 1 for b in self.branching):
            given = ",".join(map(str, self.branching))
            raise DraftsmithError(f"the plan {given} has a depth without children; use positive numbers.")
        for name in ("paths", "nodes", "beam"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DraftsmithError(f"{name} is {value}; use a positive number, or leave it out.")
        if self.sampled and (self.paths is not None or self.nodes is not None or self.beam is not None):
            raise DraftsmithError(
                "a sampled draft cannot be pruned by rank, because the survivors would no longer be samples; "
                "leave out paths, nodes and beam, or sampled."
            )
        if self.factor is not None and not 0 <= self.factor < float("inf"):
            raise DraftsmithError(f"factor is {self.factor}; use 0 or a positive number, or leave it out.")
        if self.confidence is not None:
            if not 0 < self.confidence <= 1:
                raise DraftsmithError(
                    f"confidence is {self.confidence}; use a probability above 0 and no more than 1, or leave it out."
                )
            if self.sampled or (self.choices and not self.is_chain):
                raise DraftsmithError(
                    "confidence leaves unlikely guesses out of chains and of trees of the likeliest guesses; leave it "
                    f"out, or {'sampled' if self.sampled else 'choices'}."
                )
        if self.acceptance not in get_args(AcceptanceRule):
            raise DraftsmithError(
                f"acceptance is {self.acceptance!r}; use one of {', '.join(get_args(AcceptanceRule))}."
            )
        if self.acceptance == "block" and not (self.sampled and all(children == 1 for children in self.branching)):
            raise DraftsmithError(
                f"block verification takes a sampled chain as a whole, but the plan is {self.branching}, "
                f"{'sampled' if self.sampled else 'not sampled'}; give every depth one child, and sample it."
            )
        if not 0 < self.epsilon < 1:
            raise DraftsmithError(f"epsilon is {self.epsilon}; it must be above 0 and below 1.")
        if not 0 < self.delta <= 1:
            raise DraftsmithError(f"delta is {self.delta}; it must be above 0 and at most 1.")
        if self.is_chain:
            self._settle_chain()

    def _settle_choices(self) -> None:
        """Check the choices, sort them, and let the branching follow from them."""
        choices = tuple(sorted(tuple(path) for path in self.choices))
        known = {(), *choices}
        for path in choices:
            if not path or min(path) < 0:
                raise DraftsmithError(f"the choice {list(path)} is no list of ranks; give one or more, counted from 0.")
            if path[:-1] not in known:
                raise DraftsmithError(
                    f"the choice {list(path)} hangs in the air, because {list(path[:-1])} is missing; add that, or "
                    "leave it out."
                )
        if len(known) <= len(choices):
            twice = next(path for path, following in pairwise(choices) if path == following)
            raise DraftsmithError(f"the choice {list(twice)} is given twice; leave one out.")
        if self.sampled or self.paths is not None or self.nodes is not None or self.beam is not None:
            raise DraftsmithError(
                "choices name every node of a tree of the likeliest guesses; leave out paths, nodes, beam and sampled, "
                "or the choices."
            )
        depth = max(map(len, choices))
        branching = tuple(1 + max(path[d] for path in choices if len(path) > d) for d in range(depth))
        if self.branching not in ((), branching):
            raise DraftsmithError(f"branching is {self.branching}, but the choices make it {branching}; leave it out.")
        # The dataclass is frozen for its users, who have not seen this object yet.
        object.__setattr__(self, "choices", choices)
        object.__setattr__(self, "branching", branching)

    def _settle_chain(self) -> None:
        """Bring a chain into one form, so that chains that draft the same compare equal."""
        object.__setattr__(self, "branching", self.branching[: self.nodes])
        object.__setattr__(self, "choices", ())
        for name in ("paths", "nodes", "beam"):
            object.__setattr__(self, name, None)

    def shortened(self, depth: int) -> "Plan":
        """Return the plan without what lies deeper than `depth`."""
        if not self.choices:
            return replace(self, branching=self.branching[:depth])
        return replace(self, branching=(), choices=tuple(path for path in self.choices if len(path) <= depth))

    def ranked(self) -> "Plan":
        """Return a plan whose nodes can be chosen by probability: `choices` become a beam of the same branching."""
        if not self.choices:
            return self
        return replace(self, choices=(), beam=max(self.branching))

    @property
    def depth(self) -> int:
        """The longest chain of guesses, and so the most tokens a step can accept."""
        return len(self.branching)

    @property
    def is_chain(self) -> bool:
        """Whether the draft is one or more guesses in a row, every node having one child."""
        return bool(self.branching) and max(self.branching) == 1

    @property
    def lossless(self) -> bool:
        """Whether every request gets the target's own text or, sampling, text distributed as the target's own."""
        return self.acceptance != "typical" or not self.branching

    @property
    def max_nodes(self) -> int:
        """The number of node slots (N) that a draft of this plan has."""
        if self.choices:
            return len(self.choices)
        full, frontier = 0, 1
        for children in self.branching:
            frontier = children * (frontier if self.beam is None else min(frontier, self.beam))
            full += frontier
        if self.paths is not None:
            full = min(full, self.paths * self.depth)
        return full if self.nodes is None else min(full, self.nodes)


NO_DRAFT = Plan()
NEVER_SURE = 1.0
"""A confidence for plans: no guess is that likely, so that only what is looked up is drafted."""
NO_COPY = 0.0
"""A factor for plans: no match is worth a guess, so that nothing is looked up."""
