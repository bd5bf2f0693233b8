"""One continuation while it is decoded: what was asked for, what was generated, and when it ends."""

import time
from dataclasses import dataclass, field

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftsmith.drafters.lookup.prediction import Prediction
from draftsmith.engine.policy import Choice, RowHistory
from draftsmith.engine.reasons import Reason
from draftsmith.engine.requests.guide import Guide
from draftsmith.engine.text import TextStream
from draftsmith.plan import NO_COPY, Plan
from draftsmith.targets import Namespace
from draftsmith.types import Completion, SamplingParams, Statistics, TokenLogprob

NO_SLOT = -1


@dataclass
class Request:
    """The state of one continuation.

    Args:
        index: its place in the caller's order, for messages.
        plan: the shape of its drafts; None leaves it to the engine's policy.
        drafter: the name of the drafter for `plan`; None is the engine's first.
        namespace: prompts are shared among requests of the same namespace.
        shows_drafts: whether `Progress` contains the guesses of every step.
        priority: the larger, the sooner its turn comes.
        deadline: the time (`time.monotonic`) at which it ends with what it has; None for never.
        id: unique for the life of the core that decodes it; drafters with a memory know the row by it.
        slot: where the cache keeps its keys and values while it runs.
        guide: what its constraint allows; None without a constraint.
        prediction: the text that is expected, and how far the output has followed it; None without a prediction.
        keeps_logits: whether `raw_logits` is filled, which costs a row of the vocabulary's width for every token.
        read: prompt tokens whose keys and values the cache holds.
        shared: how many of these were there already from another request.
        told: how many of the shared ones were shown to drafters with a memory.
        reserved: places of its slot that have memory, as far as was asked for.
        came, began_at: the times (`time.monotonic`) at which it was made and at which it got a slot.
    """

    index: int
    prompt: list[int]
    params: SamplingParams
    seed: int
    end_tokens: frozenset[int]
    text: TextStream
    plan: Plan | None = None
    drafter: str | None = None
    namespace: Namespace = 0
    shows_drafts: bool = False
    priority: int = 0
    deadline: float | None = None
    id: int = -1
    slot: int = NO_SLOT
    guide: Guide | None = None
    prediction: Prediction | None = None
    keeps_logits: bool = False
    read: int = 0
    shared: int = 0
    told: int = 0
    reserved: int = 0
    came: float = field(default_factory=time.monotonic)
    began_at: float | None = None
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    raw_logits: list[Tensor] = field(default_factory=list)
    """The target's logits that chose the tokens, fp32: one tensor a step (its tokens, vocabulary)."""
    statistics: Statistics = field(default_factory=Statistics)
    finish_reason: str | None = None
    error: str | None = None
    is_unfit: bool = False
    """Whether the error comes from its constraint: no token could follow under it, or finding out took too long."""
    accepted: list[int] = field(default_factory=list)
    """For every step, how many guesses stayed."""
    drafted: int = 0
    """Guesses that were verified."""
    accepted_prediction: int = 0
    """Guesses of its prediction that stayed."""
    rejected_prediction: int = 0
    """Guesses of its prediction that were verified and refused."""
    deepest: int = 0
    """The most guesses that any step could have accepted."""
    began: dict[str, float] = field(default_factory=dict)
    """The core's `_spent` when this request began to decode."""
    choice: Choice | None = None
    """What it drafts at every step if it has a plan of its own; else None."""
    why: Reason | None = None
    """Why it drafts as it does in the next step; None without a reason."""
    never_drafts: bool = False
    """Whether no drafter will ever guess for it, so that drafters need not know it; set by the core. Its prediction may
    still be verified."""
    history: RowHistory = field(init=False)

    def __post_init__(self) -> None:
        self.history = RowHistory(
            self.params.temperature > 0, len(self.prompt), constrained=self.guide is not None,
            most=self.params.max_tokens,
        )
        self.statistics.prompt_tokens = len(self.prompt)

    @classmethod
    def make(
        cls,
        index: int,
        prompt: list[int],
        params: SamplingParams,
        seed: int,
        eos: frozenset[int],
        tokenizer: PreTrainedTokenizerBase | None,
        guide: Guide | None = None,
    ) -> "Request":
        """Make a request that ends at the caller's stop tokens and, unless ignored, the target's end tokens `eos`."""
        ends = (frozenset() if params.ignore_eos else eos) | frozenset(params.stop_token_ids)
        return cls(index, prompt, params, seed, ends, TextStream(tokenizer, params.stop, prompt), guide=guide)

    @property
    def length(self) -> int:
        """All committed tokens, prompt and root included."""
        return len(self.prompt) + len(self.tokens)

    @property
    def wants_logits(self) -> bool:
        """Whether steps have to return the logits that chose its tokens."""
        return self.keeps_logits or self.params.logprobs is not None

    def commit(self, tokens: list[int]) -> int:
        """Append tokens up to the first that ends the request; return how many were taken."""
        if self.guide is not None:
            return self._commit_guided(tokens, self.guide)
        room = self.params.max_tokens - len(self.tokens)
        if len(tokens) < room and not self.text.watches and self.end_tokens.isdisjoint(tokens):
            self.tokens += tokens
            self.text.extend(tokens)
            return len(tokens)
        for taken, token in enumerate(tokens, start=1):
            self.tokens.append(token)
            stopped = self.text.push(token)
            if stopped or token in self.end_tokens:
                self.finish("stop")
            elif taken == room:
                self.finish("length")
            if self.finish_reason is not None:
                return taken
        return len(tokens)

    def _commit_guided(self, tokens: list[int], guide: Guide) -> int:
        """Do as `commit`, but take no tokens after the end of the text that the constraint describes."""
        taken = 0
        for token in tokens:
            if not guide.take(token):
                break
            taken += 1
            self.tokens.append(token)
            if self.text.push(token) or token in self.end_tokens:
                self.finish("stop")
                return taken
            if len(self.tokens) == self.params.max_tokens:
                break
        guide.look_ahead()
        if guide.error is not None:
            self.is_unfit = True
            self.fail(f"after {len(self.tokens)} tokens of row {self.index}, {guide.error}")
        elif guide.is_over:
            self.finish("stop")
        elif len(self.tokens) == self.params.max_tokens:
            self.finish("length")
        return taken

    def record(self, taken: int, drafted: int, depth: int, plan: Plan, part: int, stayed: int) -> None:
        """Record a step: the tokens it committed, the guesses it verified, the most it could have accepted, its plan.

        Args:
            part: which part of the drafter guessed, see `Draft.parts`.
            stayed: guesses that were right, those behind the end of the text included.
        """
        if self.guide is not None:
            drafted -= self.guide.refused
        self.accepted.append(taken - 1)
        self.drafted += drafted
        if self.prediction is not None and self.prediction.guessed:
            # The text may end with a guess, or before some that were right and are not needed any more.
            self.accepted_prediction += min(taken, stayed)
            self.rejected_prediction += max(0, drafted - stayed)
            self.prediction.guessed = 0
        else:
            # Where nothing was looked up, nobody guessed behind a lookup.
            self.history.note(taken - 1, drafted, plan, part > 0 and plan.factor != NO_COPY)
        if depth > self.deepest:
            self.deepest = depth

    def finish(self, reason: str) -> None:
        """End the request; what was committed before stands."""
        self.finish_reason = reason
        try:
            self.text.finish()
        except Exception as error:  # a tokenizer is third-party code
            self.break_text(error)
            return
        if reason == "length" and self.text.stopped:  # what was held back completed a stop string
            self.finish_reason = "stop"

    def fail(self, error: str) -> None:
        """End the request with a sentence that says why."""
        self.error = error
        self.finish("error")

    def break_text(self, error: Exception) -> None:
        """End the request because its tokens cannot be decoded into text; the text so far stands."""
        self.error = f"the text of this request could not be written ({type(error).__name__}: {error})."
        self.finish_reason = "error"

    def completion(self) -> Completion:
        """Return the finished result."""
        assert self.finish_reason is not None
        accepted = self.accepted
        statistics = self.statistics
        statistics.new_tokens = len(self.tokens)
        statistics.steps, statistics.accepted = len(accepted), sum(accepted)
        statistics.drafted = self.drafted
        statistics.cached_tokens = self.shared
        statistics.waiting_s = (time.monotonic() if self.began_at is None else self.began_at) - self.came
        if self.prediction is not None:
            statistics.accepted_prediction = self.accepted_prediction
            statistics.rejected_prediction = self.rejected_prediction
        statistics.accepted_by_depth = [sum(1 for count in accepted if count > d) for d in range(self.deepest)]
        return Completion(
            prompt_tokens=self.prompt,
            tokens=self.tokens,
            text=self.text.text,
            finish_reason=self.finish_reason,
            statistics=statistics,
            accepted_lengths=accepted,
            logprobs=self.logprobs if self.params.logprobs is not None else None,
            error=self.error,
            is_unfit=self.is_unfit,
            prompt_logprobs=self.prompt_logprobs if self.params.prompt_logprobs is not None else None,
        )
