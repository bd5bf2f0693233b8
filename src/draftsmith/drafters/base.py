"""The contract of a drafter. Shapes: B rows, R = B × frontier nodes, S state width, F feature width, V vocabulary."""

import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from draftsmith.plan import Plan
from draftsmith.types import Context, Draft, DraftsmithError, empty_draft

if TYPE_CHECKING:
    from draftsmith.targets import KVCache


class Drafter(ABC):
    """Anything that guesses ahead. `taps` names the hidden states of the target it wants, in order.

    A tap is a layer index: -1 is the state after the final norm, i ≥ 0 the output of decoder layer i. The tapped
    states are concatenated on the last dimension to make the F-wide features.
    """

    taps: tuple[int, ...] = (-1,)
    reads_prompt: bool = False
    """Whether it must see the whole prompt, for drafters with a memory of their own.

    The prompt comes through `follow`, in one or several pieces, from its second token on; the context of the first
    draft holds only what was committed since.
    """
    follows_cheaply: bool = False
    """Of those that read the prompt: whether a step for which somebody else drafts, or nobody, costs it next to
    nothing."""
    factors: tuple[float, ...] = ()
    """Of drafters that look guesses up and make none where they find nothing: the bounds by the length of a match that
    are worth asking for in a plan, see `Plan.factor`; () for all others."""
    longest: int = 0
    """Of drafters with `factors`, the most guesses that they make behind a long match, more than their own plan has."""
    confidences: tuple[float, ...] = ()
    """Of drafters that know how likely their guesses are: the bounds by that which are worth asking for in a plan, see
    `Plan.confidence`; () where it would cost too much to ask."""
    in_python: bool = False
    """Whether it guesses row by row in Python, so that each row costs a step some time whatever the target."""
    borrows_layers: bool = False
    """Whether it runs layers of the target it was loaded for, and so decodes with that target alone.

    The engine keeps more room behind the text of every row for such drafters, which write into the target's cache.
    """
    can_sample: bool = False
    """Whether a sampled plan makes it draw its guesses from a q it hands over; the others guess deterministically
    whatever the plan, which leaves the text exact all the same."""
    can_compile: bool = False
    """Whether `propose` is made of PyTorch's operations alone, so that a compiler can take it in whole, and gains by
    that: native operators leave it nothing to do."""

    parts: tuple["Drafter", ...] = ()
    """The drafters that it hands contexts on to, where it does nothing else and remembers nothing itself. Engines
    attach them, let them follow and let them forget rows like all others, each once, whoever else hands on to them."""

    part_names: tuple[str, ...] = ()
    """What tokens that they guessed are said to come from, see `Draft.parts`."""

    def with_parts(self, parts: Sequence["Drafter"]) -> "Drafter":
        """Return the same with others in the place of its parts, in their order."""
        raise DraftsmithError(f"a {type(self).__name__} has no parts that others could stand for.")

    owner: "weakref.ref[object] | None" = None
    """Who it remembers rows of; whoever attaches it says so."""

    observes: bool = False
    """Whether `observe` is to be called; it costs an argmax over the vocabulary at every node."""

    @abstractmethod
    def propose(self, context: Context, plan: Plan) -> Draft:
        """Guess ahead of every row's root, in the shape the plan asks for."""

    @abstractmethod
    def default_plan(self) -> Plan:
        """Return the plan to use when nobody chose one."""

    @property
    def max_depth(self) -> int | None:
        """The deepest draft it can make; None of one that makes less of a deeper plan, and does not mind."""
        return None

    def parameter_count(self) -> int:
        """Return how many weights it has beside the target's."""
        return 0

    def memory_bytes(self) -> int:
        """Return the memory its weights take beside the target's."""
        return 0

    def attach(self, cache: "KVCache", plan: Plan) -> None:
        """Take note of the engine's storage before it decodes: how many rows and tokens it holds, and the target's K/V.

        Called when no row of the core is active and requests come in, with the largest plan that it may be asked for.
        All rows known from before are gone by then, also those of another core that was dropped halfway. Drafters
        without state do nothing.
        """
        return

    def follow(self, context: Context) -> None:
        """Take note of what was committed before a step for which another drafts or nobody, or of pieces of prompts.

        Drafters with a memory of their own read it as they do for a draft.
        """
        if self.reads_prompt:
            self.propose(context, Plan((1,)))

    def follow_prompts(self, context: Context) -> None:
        """Do as `follow` with pieces of prompts, for whoever has to know where prompts end."""
        self.follow(context)

    def observe(self, context: Context, draft: Draft, choice_BM: Tensor) -> None:
        """See the target's likeliest token after the root (entry 0) and after every node n (entry n + 1) of a draft.

        Called between the forward that verified the draft and the next `propose`, if the family `observes`; `context`
        is the one that the draft was made from. The tokens are the argmax of the plain logits, whatever the sampling.
        """
        return

    def note_for_user(self, texts: Sequence[str]) -> str | None:
        """Return a sentence that a user should know before decoding texts such as these; None where there is none."""
        return None

    def reset_rows(self, rows: list[int]) -> None:
        """Forget the state of rows whose requests ended; drafters without state do nothing."""
        return


def workers(drafters: Iterable[Drafter]) -> list[Drafter]:
    """Return those that do the work, each once: the drafters themselves, or their parts."""
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
    """A drafter that goes one depth at a time; `draftsmith.drafters.grow` turns its steps into trees."""

    can_sample = True

    @abstractmethod
    def begin(self, context: Context) -> tuple[Tensor, Any]:
        """Return the root tokens (B) and the state from which `step(0, …)` starts, its first dimension B."""

    @abstractmethod
    def step(self, depth: int, state: Any, tokens_R: Tensor) -> tuple[Tensor, Any]:
        """Read the tokens chosen one depth up; return log q of the next ones (R, V) in fp32 and the new state.

        Every tensor of the state has first dimension R, so that the grower can gather rows of it. It looks into tuples,
        lists and dictionaries only, so a dataclass can hold what all nodes of a row share (see `ParallelSteps`).
        """

    def top_k(
        self, depth: int, state: Any, tokens_R: Tensor, k: int, scores: bool
    ) -> tuple[Tensor | None, Tensor, Any]:
        """Do as `step`, but return only the k best tokens: log q (R, k) or None unless `scores`, ids (R, k), state.

        Families whose vocabulary is small or whose softmax is worth skipping override this.
        """
        log_q_RV, state = self.step(depth, state, tokens_R)
        log_q_Rk, tokens_Rk = best(log_q_RV, k)
        return (log_q_Rk if scores else None), tokens_Rk, state

    @property
    @abstractmethod
    def max_depth(self) -> int:
        """The deepest draft this drafter can make."""


def best(scores_RV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k best scores and their indices (R, k), best first; one is cheaper to find than a sorted few.

    DraftsmithError where there are fewer than k.
    """
    if k > scores_RV.shape[-1]:
        raise DraftsmithError(
            f"the plan asks for the {k} likeliest guesses, but the drafter scores {scores_RV.shape[-1]} tokens; lower "
            "its branching or the ranks of its choices."
        )
    if k == 1:
        values_R1, indices_R1 = scores_RV.max(dim=-1, keepdim=True)
        return values_R1, indices_R1
    values_Rk, indices_Rk = scores_RV.topk(k, dim=-1)
    return values_Rk, indices_Rk
