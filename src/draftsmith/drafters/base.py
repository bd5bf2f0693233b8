"""The contract of a drafter. Shapes: B rows, R = B × frontier nodes, S state width, F feature width, V vocabulary."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from draftsmith.plan import Plan
from draftsmith.types import Context, Draft, DraftsmithError, empty_draft

if TYPE_CHECKING:
    from draftsmith.targets import KVCache

NO_MEMORY = ()
"""What `Drafter.ready` returns where a draft needs nothing but its context and its weights."""


class Drafter(ABC):
    """Anything that guesses ahead. `taps` names the hidden states of the target that it needs, in order.

    A tap is a layer index: -1 is the state after the final norm, i ≥ 0 the output of decoder layer i. The tapped
    states are concatenated on the last dimension to make the F-wide features.
    """

    taps: tuple[int, ...] = (-1,)
    reads_prompt: bool = False
    """Whether it must see the whole prompt, for drafters with a memory of their own.

    `follow` brings the prompt, in one or several pieces, from its second token on; the context of the first draft then
    holds only the tokens committed since.
    """
    follows_cheaply: bool = False
    """For drafters that read the prompt: whether a step in which another drafter drafts, or none, costs it almost
    nothing."""
    factors: tuple[float, ...] = ()
    """For drafters that look guesses up and make none if they find nothing: the limits by the length of a match that
    are worth setting in a plan, see `Plan.factor`; () for all others."""
    longest: int = 0
    """For drafters with `factors`: the most guesses behind a long match, which is more than their own plan has."""
    confidences: tuple[float, ...] = ()
    """For drafters that know at which guess a chain should end, whatever the text: the limits that are worth setting in
    a plan, see `Plan.confidence`; () for all others."""
    sure_behind: float | None = None
    """For drafters that know how likely their guesses are: the confidence for chains behind a lookup that found none,
    see `LookupFirst`; None if computing it would cost too much."""
    in_python: bool = False
    """Whether it guesses row by row in Python, so that each row adds some time to a step, whatever the target."""
    borrows_layers: bool = False
    """Whether it runs layers of the target it was loaded for, and so can decode with that target only.

    Such drafters write into the target's cache, so the engine keeps more room behind the text of every row.
    """
    can_sample: bool = False
    """Whether it draws its guesses for a sampled plan, and returns the q they are drawn from; and follows the target's
    own noise in sampled rows of other plans, chains and trees. Other drafters guess deterministically whatever the
    plan; the text stays exact all the same."""
    can_compile: bool = False
    """Whether `propose` consists of PyTorch's operations only, so that a compiler can take all of it and make it
    faster; with native operators there is nothing to compile."""

    parts: tuple["Drafter", ...] = ()
    """The drafters to which it passes contexts on, if it does nothing else and has no memory itself. Engines attach
    them, let them follow and reset their rows like all others; a drafter that several pass on to is handled once."""

    part_names: tuple[str, ...] = ()
    """The names that reports give to guesses of these parts, see `Draft.parts`."""

    def with_parts(self, parts: Sequence["Drafter"]) -> "Drafter":
        """Return the same drafter with other parts, in the same order."""
        raise DraftsmithError(f"a {type(self).__name__} has no parts that others could stand for.")

    owner: "weakref.ref[object] | None" = None
    """The object whose rows it remembers; whoever attaches it sets this."""

    observes: bool = False
    """Whether to call `observe`, which costs an argmax over the vocabulary at every node."""

    @abstractmethod
    def propose(self, context: Context, plan: Plan) -> Draft:
        """Guess ahead of every row's root, in the shape that the plan gives."""

    @abstractmethod
    def default_plan(self) -> Plan:
        """Return the plan to use if none was chosen."""

    @property
    def max_depth(self) -> int | None:
        """The deepest draft it can make; None if it accepts any plan and drafts only a part of a deeper one."""
        return None

    def parameter_count(self) -> int:
        """Return how many weights it has besides the target's."""
        return 0

    def memory_bytes(self) -> int:
        """Return the memory of its weights besides the target's."""
        return 0

    def attach(self, cache: "KVCache", plan: Plan) -> None:
        """Note the engine's storage before it decodes: how many rows and tokens it holds, and the target's K/V.

        Called when no row of the core is active and requests come in, with the largest plan that may be used. All rows
        from before are gone by then, also those of another core that was dropped halfway. Drafters without state do
        nothing.
        """
        return

    @property
    def unguarded(self) -> "Drafter":
        """The drafter that raises where this one returns an empty draft instead; for most drafters the same."""
        return self

    @property
    def failures(self) -> int:
        """How often it returned an empty draft because `unguarded`, or a part of it, raised; most drafters never do."""
        return 0

    def ready(self, context: Context) -> Hashable | None:
        """Do what the host has to do before a draft from this context, so that the draft works on the device alone.

        Returns:
            what the draft then reads and writes besides the context and its weights, whose memory stays where it is;
            `NO_MEMORY` if there is nothing. None if a draft needs the host, or its shapes follow from more than the
            plan, the context's shapes and its `span`.
        """
        return NO_MEMORY if self.can_compile and not self.reads_prompt and not self.borrows_layers else None

    def follow(self, context: Context) -> None:
        """Note committed tokens before a step in which another drafter drafts, or none, and note pieces of prompts.

        Drafters with a memory of their own read the tokens as they do for a draft.
        """
        if self.reads_prompt:
            self.propose(context, Plan((1,)))

    def follow_prompts(self, context: Context) -> None:
        """Do as `follow` for pieces of prompts, in drafters that have to know where prompts end."""
        self.follow(context)

    def observe(self, context: Context, draft: Draft, choice_BM: Tensor) -> None:
        """Receive the target's likeliest token after a draft's root (entry 0) and after every node n (entry n + 1).

        If the family `observes`, it is called between the forward that verified the draft and the next `propose`;
        `context` is the one from which the draft was made. The tokens are the argmax of the plain logits, whatever the
        sampling.
        """
        return

    def note_for_user(self, texts: Sequence[str]) -> str | None:
        """Return a sentence that a user should know before decoding texts like these; None if there is none."""
        return None

    def reset_rows(self, rows: list[int]) -> None:
        """Forget the state of rows whose requests ended; drafters without state do nothing."""
        return


def workers(drafters: Iterable[Drafter]) -> list[Drafter]:
    """Return the drafters that do the work, each once: the drafters themselves, or their parts."""
    return list(dict.fromkeys(one for drafter in drafters for one in drafter.parts or (drafter,)))


class NoDrafter(Drafter):
    """Drafts nothing: the plain baseline, through the same engine."""

    taps = ()
    can_sample = True

    def propose(self, context: Context, plan: Plan) -> Draft:
        return empty_draft(context)

    def default_plan(self) -> Plan:
        return Plan()


class StagewiseDrafter(Drafter):
    """A drafter that guesses one depth at a time; `draftsmith.drafters.grow` builds trees from its steps."""

    can_sample = True

    @abstractmethod
    def begin(self, context: Context) -> tuple[Tensor, Any]:
        """Return the root tokens (B) and the state from which `step(0, …)` starts, its first dimension B."""

    @abstractmethod
    def step(self, depth: int, state: Any, tokens_R: Tensor) -> tuple[Tensor, Any]:
        """Read the tokens chosen one depth up; return log q of the next tokens (R, V) in fp32, and the new state.

        Every tensor of the state has first dimension R, so that the grower can gather rows of it. The grower looks into
        tuples, lists and dictionaries only, so a dataclass can hold what all nodes of a row share (see
        `ParallelSteps`).
        """

    def top_k(
        self, depth: int, state: Any, tokens_R: Tensor, k: int, scores: bool
    ) -> tuple[Tensor | None, Tensor, Any]:
        """Do as `step`, but return only the k best tokens: log q (R, k) or None unless `scores`, ids (R, k), state.

        Families with a small vocabulary, or with a softmax that is worth skipping, override this.
        """
        log_q_RV, state = self.step(depth, state, tokens_R)
        log_q_Rk, tokens_Rk = best(log_q_RV, k)
        return (log_q_Rk if scores else None), tokens_Rk, state

    @property
    @abstractmethod
    def max_depth(self) -> int:
        """The deepest draft this drafter can make."""


def check_width(k: int, scored: int) -> None:
    """Raise DraftsmithError if there are fewer than k tokens to guess."""
    if k > scored:
        raise DraftsmithError(
            f"the plan asks for the {k} best guesses, but the drafter scores {scored} tokens; lower its branching or "
            "the ranks of its choices."
        )


def best(scores_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best scores and their indices (R, k), best first; a single best is found without sorting.

    DraftsmithError if there are fewer than k.
    """
    check_width(k, scores_RV.shape[-1])
    if k == 1:
        values_R1, indices_R1 = scores_RV.max(dim=-1, keepdim=True)
        return values_R1, indices_R1
    values_Rk, indices_Rk = scores_RV.topk(k, dim=-1)
    return values_Rk, indices_Rk
