"""The engine: prompts in, continuations out, any number of rows, each advancing by its own number of tokens."""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from draftsmith.drafters.base import Drafter, NoDrafter
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine.core import EngineCore, Progress
from draftsmith.engine.limits import LARGEST_PIECE, PIECE_TOKENS, Limits
from draftsmith.engine.made import Made
from draftsmith.engine.policy import Fixed, OffAbove, Policy
from draftsmith.engine.requests.admission import Prompt, admit
from draftsmith.engine.requests.grammars import Grammars
from draftsmith.engine.requests.request import Request
from draftsmith.engine.steps.clock import Clock
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.processor import use_threads
from draftsmith.targets import Namespace, Target
from draftsmith.types import (
    CompileLevel,
    Completion,
    DraftsmithError,
    SamplingParams,
    TokenLogprob,
    require_finished,
)

GPU_LENGTH = 4096
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Chunk:
    """A piece of one continuation as it streams: its tokens and its text; the last piece carries the completion.

    `logprobs` are those of its tokens, if they were asked for; `made` says how a step produced the tokens.
    `prompt_logprobs` come with the first piece, see `Completion`.
    """

    index: int
    tokens: list[int]
    text: str
    completion: Completion | None
    logprobs: list[TokenLogprob] | None = None
    made: Made | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


def check_timeout(seconds: float | None) -> None:
    """Raise DraftsmithError for a timeout that is not above 0."""
    if seconds is not None and not seconds > 0:
        raise DraftsmithError(f"timeout is {seconds}; give seconds above 0, or leave it out.")


class Engine:
    """Decodes with a drafter, or plainly; either way the text is the target's own, unless a plan is lossy.

    Calls may overlap: while one streams, another may start, and every step serves both.

    Args:
        target: the model.
        drafter: what guesses ahead, or several by name for a policy to choose from; None is plain decoding.
        plan: shape of the drafts; None takes the drafter's own.
        policy: chooses the draft of every row before every step, instead of `plan` and `draft_rows`.
        max_batch: most rows at a time; further prompts wait.
        max_length: most tokens a row, prompt and output; None takes the target's context, on a GPU at most 4,096
            tokens, because there the cache is allocated from the start.
        max_tokens_in_flight: most tokens of all rows together, each with its prompt and `max_tokens`, which bounds the
            memory of keys and values; further prompts wait. None allows every row its `max_length`.
        draft_rows: drafts only while at most this many rows decode. With more it decodes plainly, because then the
            hardware has no idle arithmetic to check guesses with. None always drafts.
        piece_tokens: most prompt tokens that a step reads, which bounds how long a running row waits; None takes 512,
            and 2,048 while no row decodes.
        share_prefixes: read and store common beginnings of prompts only once, also across calls.
        compile: "off", "trace" or "full", see `Compiled`; `prepare` compiles in advance and returns the seconds that
            took. Where one native operator reads the target there is nothing to compile, and every level is "off".
        threads: how many to compute with on a CPU. Like `torch.set_num_threads`, it sets one number for the whole
            process from now on; only Python threads that have already computed keep the number they began with. None
            changes nothing, except that a number which nobody chose is lowered to a container's quota. Under the
            native kernels no bit of a text depends on it.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | Mapping[str, Drafter] | None = None,
        *,
        plan: Plan | None = None,
        policy: Policy | None = None,
        max_batch: int = 8,
        max_length: int | None = None,
        max_tokens_in_flight: int | None = None,
        draft_rows: int | None = None,
        piece_tokens: int | None = None,
        share_prefixes: bool = True,
        compile: CompileLevel = "off",
        threads: int | None = None,
    ) -> None:
        if max_batch < 1:
            raise DraftsmithError(f"max_batch is {max_batch}; use at least 1.")
        if max_length is not None and max_length < 2:
            raise DraftsmithError(f"max_length is {max_length}; a prompt and its continuation need at least 2.")
        if max_tokens_in_flight is not None and max_tokens_in_flight < 2:
            raise DraftsmithError(
                f"max_tokens_in_flight is {max_tokens_in_flight}; a prompt and its continuation need at least 2."
            )
        if policy is not None and (plan is not None or draft_rows is not None):
            raise DraftsmithError("a policy chooses every draft; leave out plan and draft_rows, or the policy.")
        self.target = target
        drafters = drafter if isinstance(drafter, Mapping) else {"drafter": drafter or NoDrafter()}
        if not drafters:
            raise DraftsmithError("the mapping of drafters is empty; name at least one, or give none.")
        self.drafter = next(iter(drafters.values()))
        self.plan = plan if plan is not None else self.drafter.default_plan()
        if policy is None:
            policy = Fixed(self.plan) if draft_rows is None else OffAbove(self.plan, draft_rows)
        self.max_batch = max_batch
        roomy = target.max_length if target.device.type == "cpu" else min(target.max_length, GPU_LENGTH)
        self.max_length = roomy if max_length is None else min(max_length, target.max_length)
        in_flight = max_batch * self.max_length if max_tokens_in_flight is None else max_tokens_in_flight
        if piece_tokens is not None and piece_tokens < 1:
            raise DraftsmithError(f"piece_tokens is {piece_tokens}; use at least 1.")
        self._piece_tokens = piece_tokens
        beside, alone = (PIECE_TOKENS, LARGEST_PIECE) if piece_tokens is None else (piece_tokens, piece_tokens)
        limits = Limits(max_batch, self.max_length, in_flight, beside, alone, share_prefixes)
        _settle_threads(threads)
        self.grammars = Grammars(target)
        """The grammars of constraints; its `compiled` can prepare one before the request that needs it arrives."""
        self.core = EngineCore(target, drafters, policy, limits, compile)
        """What decodes; adding requests to it and stepping it by hand is as much a public interface as the others."""

    @classmethod
    def from_pretrained(
        cls,
        target: str | Path,
        drafter: str | Path | None = None,
        *,
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
        trust_remote_code: bool = False,
        plan: Plan | None = None,
        policy: Policy | None = None,
        max_batch: int = 8,
        max_length: int | None = None,
        max_tokens_in_flight: int | None = None,
        draft_rows: int | None = None,
        piece_tokens: int | None = None,
        share_prefixes: bool = True,
        compile: CompileLevel = "off",
        threads: int | None = None,
    ) -> "Engine":
        """Load target and drafter by hub name or folder.

        Raises:
            DraftsmithError: when either is missing or damaged, or the drafter belongs to another target.
        """
        _settle_threads(threads)  # before loading, which computes too
        loaded = Target.from_pretrained(target, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        guesser = load_drafter(drafter, loaded) if drafter is not None else None
        return cls(
            loaded, guesser, plan=plan, policy=policy, max_batch=max_batch, max_length=max_length,
            max_tokens_in_flight=max_tokens_in_flight, draft_rows=draft_rows, piece_tokens=piece_tokens,
            share_prefixes=share_prefixes, compile=compile,
        )

    def generate(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        plan: Plan | None = None,
        on_progress: Callable[[int], None] | None = None,
    ) -> list[Completion]:
        """Continue every prompt; results in order of the prompts, `n` consecutive ones for each.

        A row for which the target has no finite logits (NaN or infinite) ends there, with `finish_reason` "error" and
        a sentence in `error`; the other rows go on, and their text is what it would be without it.

        Args:
            prompts: texts, token ids, what a tokenizer returned, or conversations; see `Prompt`.
            params: one for all, or one for each; greedy by default.
            plan: shape of the drafts of this call; `NO_DRAFT` is plain decoding through the same engine.
            on_progress: called after every step with the number of tokens it committed.

        Raises:
            DraftsmithError: for no prompts, an empty prompt, token ids the target does not have, or a prompt that
                does not fit the context together with its `max_tokens`.
        """
        requests = self.admit_call(prompts, params, plan)
        with torch.no_grad():
            for committed in self._run(requests):
                if on_progress is not None:
                    on_progress(sum(len(progress.tokens) for progress in committed))
        return [request.completion() for request in requests]

    def stream(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        plan: Plan | None = None,
    ) -> Iterator[Chunk]:
        """Yield pieces as they are committed; the last piece of each continuation carries its completion.

        A row without finite logits ends as in `generate`.
        """
        requests = self.admit_call(prompts, params, plan)
        for committed in self._run(requests):
            for progress in committed:
                yield chunk_of(progress)

    def prepare(self, batch: int = 1, plan: Plan | None = None) -> float:
        """Decode a few tokens, so that all code for this batch size and plan is compiled; return the seconds taken."""
        chosen = plan if plan is not None else self.plan
        clock = Clock(self.target.device)
        clock.start("all")
        params = SamplingParams(max_tokens=min(3 * (chosen.depth + 1), self.max_length - 1), ignore_eos=True)
        require_finished(self.generate([[0]] * batch, params, chosen))
        return clock.stop()["all"]

    def pace(self, batch: int = 1, plan: Plan = NO_DRAFT, steps: int = 8) -> float:
        """Return the seconds a step takes now, measured by decoding a few steps from an arbitrary prompt."""
        params = SamplingParams(max_tokens=max(2, min(1 + steps, self.max_length - 1)), ignore_eos=True)
        require_finished(self.generate([[0]] * batch, params, plan))
        statistics = [completion.statistics for completion in self.generate([[0]] * batch, params, plan)]
        return sum(one.decode_s for one in statistics) / max(one.steps for one in statistics)

    def at_level(self, compile: CompileLevel) -> "Engine":
        """Return an engine of the same parts and sizes at another level of compilation."""
        engine = self._again(self.core.policy, compile, self.max_batch)
        engine.plan = self.plan
        return engine

    def under(self, policy: Policy, max_batch: int | None = None) -> "Engine":
        """Return an engine of the same parts under another policy, and with another `max_batch` if one is given."""
        return self._again(policy, self.compiled, self.max_batch if max_batch is None else max_batch)

    def _again(self, policy: Policy, compile: CompileLevel, max_batch: int) -> "Engine":
        limits = self.core.limits
        return Engine(
            self.target, self.core.drafters, policy=policy, max_batch=max_batch, max_length=limits.max_length,
            max_tokens_in_flight=limits.max_tokens, piece_tokens=self._piece_tokens, share_prefixes=limits.share,
            compile=compile,
        )

    @property
    def compiled(self) -> CompileLevel:
        """The level of compilation in force."""
        return self.core.runner.level

    def admit_call(
        self,
        prompts: Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        plan: Plan | None = None,
        priority: int = 0,
        timeout: float | None = None,
        *,
        drafter: str | None = None,
        namespace: Namespace = 0,
        shows_drafts: bool = False,
    ) -> list[Request]:
        """Check a whole call before any of it runs; return its requests, ready for `EngineCore.add`.

        Args:
            priority: the larger, the sooner their turn comes.
            timeout: seconds after which they end with what they have; None for no limit.
            drafter: which drafter makes the drafts of `plan`, by its name in the engine's mapping; None is the first.
            namespace: prompts share common beginnings only with calls of the same namespace.
            shows_drafts: let `Chunk.made` show the guesses of every step.
        """
        check_timeout(timeout)
        requests = admit(prompts, params, self.target, self.max_length, self.grammars)
        call = object()
        for request in requests:
            request.plan, request.drafter, request.priority = plan, drafter, priority
            request.history.call = call
            request.namespace, request.shows_drafts = namespace, shows_drafts
            request.deadline = None if timeout is None else time.monotonic() + timeout
            self.core.check(request)
        return requests

    def _run(self, requests: list[Request]) -> Iterator[list[Progress]]:
        """Step until these requests have ended, yielding what every step brought; take them out however it ends."""
        core, inbox = self.core, deque[Progress]()
        told: set[int] = set()
        try:
            for request in requests:
                core.add(request, inbox)
            left = list(requests)
            while True:
                if inbox:
                    committed = list(inbox)
                    inbox.clear()
                    told.update(progress.request.id for progress in committed if progress.finished)
                    yield committed
                while left and left[-1].finish_reason is not None:
                    left.pop()
                if not left and not inbox:
                    break
                if not inbox:
                    core.step()
            # Another caller may have ended some of them.
            silent = [request for request in requests if request.id not in told]
            if silent:
                yield [Progress(request, [], True) for request in silent]
        finally:
            for request in requests:
                core.abort(request.id)


def chunk_of(progress: Progress) -> Chunk:
    """Return what a step brought to a request as a piece of its text; call it exactly once for each `Progress`.

    If other steps have followed since, this piece has their characters too, and their own pieces have none.
    """
    request = progress.request
    text = request.text.take()
    logprobs = None
    if request.params.logprobs is not None:
        logprobs = request.logprobs[progress.first : progress.first + len(progress.tokens)]
    scored = None
    if request.params.prompt_logprobs is not None and progress.tokens and progress.first == 0:
        scored = request.prompt_logprobs
    done = request.completion() if progress.finished else None
    return Chunk(request.index, progress.tokens, text, done, logprobs, progress.made, scored)


def _settle_threads(threads: int | None) -> None:
    note = use_threads(threads)
    if note is not None:
        log.info(note)
