"""The engine: prompts in, continuations out, any number of rows, each advancing by its own number of tokens."""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from draftsmith.drafters.base import Drafter, NoDrafter
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine.admission import Prompt, admit
from draftsmith.engine.clock import Clock
from draftsmith.engine.compiled import Compiler
from draftsmith.engine.request import Request
from draftsmith.engine.reread import reread
from draftsmith.engine.rows import Rows, join, leave
from draftsmith.engine.step import NOT_FINITE, Stepper, StepResult
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.target import Target
from draftsmith.types import CompileLevel, Completion, Context, DraftsmithError, SamplingParams, TokenLogprob, unbroken

DRAFT_ROOM = 256
PREFILL_TOKENS = 8192
GPU_LENGTH = 4096


@dataclass(frozen=True)
class Chunk:
    """A piece of one continuation as it streams: its tokens, its text, and the completion with the last piece."""

    index: int
    tokens: list[int]
    text: str
    completion: Completion | None


class Engine:
    """Decodes with a drafter, or plainly; the text is the target's own either way, unless a plan asks for less.

    Args:
        target: the model.
        drafter: what guesses ahead; None is plain decoding.
        plan: shape of the drafts; None takes the drafter's own.
        max_batch: most rows at a time; further prompts wait.
        max_length: most tokens a row, prompt and output; None takes the target's context, on a GPU at most 4,096 of
            it, because there the cache is memory from the start.
        draft_rows: most rows at a time with which it still drafts; a busier engine decodes plainly, because then the
            hardware has no idle arithmetic to check guesses with. None always drafts.
        compile: "off", "trace" or "full", see `Compiler`; `prepare` pays and tells the cost beforehand. Where
            target and drafter are native there is nothing to compile, and every level is "off".
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        plan: Plan | None = None,
        max_batch: int = 8,
        max_length: int | None = None,
        draft_rows: int | None = None,
        compile: CompileLevel = "off",
    ) -> None:
        if max_batch < 1:
            raise DraftsmithError(f"max_batch is {max_batch}; use at least 1.")
        self.target = target
        self.drafter = drafter if drafter is not None else NoDrafter()
        self.plan = plan if plan is not None else self.drafter.default_plan()
        if draft_rows is not None and draft_rows < 0:
            raise DraftsmithError(f"draft_rows is {draft_rows}; use 0 (never draft) or a positive number.")
        self.max_batch = max_batch
        self.draft_rows = draft_rows
        if max_length is not None and max_length < 2:
            raise DraftsmithError(f"max_length is {max_length}; a prompt and its continuation need at least 2.")
        roomy = target.max_length if target.device.type == "cpu" else min(target.max_length, GPU_LENGTH)
        self.max_length = roomy if max_length is None else min(max_length, target.max_length)
        self.is_native = target.is_native and self.drafter.is_native
        self._compiler = Compiler(compile, target.device, self.is_native)
        self._slots = self._compiler.slots(max_batch)
        self._cache = target.new_cache(self._slots, self.max_length + DRAFT_ROOM)
        self._stepper = Stepper(target, self.drafter, self._cache, self._compiler)
        self._running = False

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
        max_batch: int = 8,
        max_length: int | None = None,
        draft_rows: int | None = None,
        compile: CompileLevel = "off",
    ) -> "Engine":
        """Load target and drafter by hub name or folder.

        Raises:
            DraftsmithError: when either is missing or damaged, or the drafter belongs to another target.
        """
        loaded = Target.from_pretrained(target, dtype=dtype, device=device, trust_remote_code=trust_remote_code)
        guesser = load_drafter(drafter, loaded) if drafter is not None else None
        return cls(
            loaded, guesser, plan=plan, max_batch=max_batch, max_length=max_length, draft_rows=draft_rows,
            compile=compile,
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
            prompts: texts or token ids.
            params: one for all, or one for each; greedy by default.
            plan: shape of the drafts of this call; `NO_DRAFT` is plain decoding through the same engine.
            on_progress: called after every step with the number of tokens it committed.

        Raises:
            DraftsmithError: for no prompts, an empty prompt, token ids the target does not have, or a prompt that
                does not fit the context together with its `max_tokens`.
        """
        requests = admit(prompts, params, self.target, self.max_length)
        for committed in self._run(requests, plan):
            if on_progress is not None:
                on_progress(sum(len(tokens) for _, tokens in committed))
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
        requests = admit(prompts, params, self.target, self.max_length)
        for committed in self._run(requests, plan):
            for request, tokens in committed:
                done = request.completion() if request.finish_reason is not None else None
                yield Chunk(request.index, tokens, request.text.take(), done)

    def prepare(self, batch: int = 1, plan: Plan | None = None) -> float:
        """Run a few tokens so that everything of this batch size and plan is compiled; return the seconds it took."""
        chosen = plan if plan is not None else self.plan
        clock = Clock(self.target.device)
        clock.start("all")
        params = SamplingParams(max_tokens=3 * (chosen.depth + 1), ignore_eos=True)
        unbroken(self.generate([[0]] * batch, params, chosen))
        return clock.stop()["all"]

    def pace(self, batch: int = 1, plan: Plan = NO_DRAFT, steps: int = 8) -> float:
        """Return the seconds a step takes now, by decoding a few from an arbitrary prompt."""
        params = SamplingParams(max_tokens=max(2, min(1 + steps, self.max_length - 1)), ignore_eos=True)
        unbroken(self.generate([[0]] * batch, params, plan))
        statistics = [completion.statistics for completion in self.generate([[0]] * batch, params, plan)]
        return sum(one.decode_s for one in statistics) / max(one.steps for one in statistics)

    def at_level(self, compile: CompileLevel) -> "Engine":
        """Return an engine of the same parts and sizes at another level of compilation."""
        return Engine(
            self.target, self.drafter, plan=self.plan, max_batch=self.max_batch, max_length=self.max_length,
            draft_rows=self.draft_rows, compile=compile,
        )

    @property
    def compiled(self) -> CompileLevel:
        """The level of compilation in force."""
        return self._compiler.level

    @torch.no_grad()
    def _run(self, requests: list[Request], plan: Plan | None) -> Iterator[list[tuple[Request, list[int]]]]:
        """Decode to the end, yielding what every round committed; frees all rows however it ends."""
        chosen = plan if plan is not None else self.plan
        if chosen.max_nodes >= DRAFT_ROOM:
            raise DraftsmithError(
                f"the plan drafts {chosen.max_nodes} nodes, but there is room for {DRAFT_ROOM - 1}; "
                "give it fewer children, or keep fewer paths or nodes."
            )
        if self._running:
            raise DraftsmithError("this engine is still streaming; finish or close that stream before the next call.")
        self._running = True
        for request in requests:
            request.statistics.lossless = chosen.lossless or request.params.temperature == 0
        self.drafter.attach(self._cache, chosen)
        waiting = deque(requests)
        rows: Rows | None = None
        clock = Clock(self.target.device)
        try:
            while waiting or rows is not None:
                running = rows.count if rows else 0
                if waiting and running < self.max_batch:
                    group = self._next_group(waiting, self.max_batch - running)
                    clock.start("prefill")
                    arrivals, result = self._stepper.prefill(group, chosen.depth + 1, self._free(rows)[: len(group)])
                    yield self._commit(arrivals, result, clock)
                    bucket = self._compiler.bucket((rows.count if rows else 0) + arrivals.count, self._slots)
                    rows = join(
                        rows, arrivals, self.target.vocab_size, self.target.device, bucket, self._cache.slots
                    )
                else:
                    assert rows is not None
                    busy = self.draft_rows is not None and rows.count > self.draft_rows
                    if busy and chosen.depth:
                        self.drafter.follow(rows.context)
                    before = rows.context
                    result = self._stepper.step(rows, NO_DRAFT if busy else chosen, clock)
                    yield self._commit(rows, result, clock, before)
                rows = self._dismiss(rows)
        finally:
            self._running = False
            self.drafter.reset_rows([request.index for request in requests])

    def _free(self, rows: Rows | None) -> list[int]:
        """Return the slots that no request has."""
        taken = _slots_of(rows)[: rows.count] if rows else []
        return [slot for slot in range(self._cache.slots) if slot not in taken]

    def _next_group(self, waiting: deque[Request], most: int) -> list[Request]:
        """Take the next prompts that fit the free slots and, padded to the longest, a bounded amount of work."""
        group = [waiting.popleft()]
        longest = len(group[0].prompt)
        while waiting and len(group) < most:
            longest = max(longest, len(waiting[0].prompt))
            if longest * (len(group) + 1) > PREFILL_TOKENS:
                break
            group.append(waiting.popleft())
        return group

    def _commit(
        self, rows: Rows, result: StepResult, clock: Clock, before: Context | None = None
    ) -> list[tuple[Request, list[int]]]:
        """Hand the tokens of a round to their requests, with their share of the time.

        Args:
            before: the context that a step began with; None after a prefill.
        """
        table = result.table_BX.tolist()  # the one transfer from the device in a step
        seconds = clock.stop()
        begun = time.perf_counter()
        committed: list[tuple[Request, list[int]]] = []
        for b, request in enumerate(rows.requests):
            count, drafted, *tokens = table[b]
            raw_TV = None if result.raw_logits_BTV is None else result.raw_logits_BTV[b]
            if drafted == NOT_FINITE and before is not None and result.depth:
                (count, drafted, *tokens), raw_TV = reread(self._stepper, rows, before, b, DRAFT_ROOM)
            if drafted == NOT_FINITE:
                request.fail(
                    f"{self.target.name} gave no finite logits after {request.length} tokens of row {request.index}; "
                    "its weights are damaged or its dtype is too narrow, so try fp32."
                )
                committed.append((request, []))
                continue
            taken = request.commit(tokens[:count])
            statistics = request.statistics
            if before is not None:
                accepted = taken - 1
                statistics.steps += 1
                statistics.drafted += drafted
                statistics.accepted += accepted
                by_depth = statistics.accepted_by_depth
                by_depth.extend([0] * (result.depth - len(by_depth)))
                for d in range(accepted):
                    by_depth[d] += 1
                request.accepted_lengths.append(accepted)
            if raw_TV is not None and request.params.logprobs is not None:
                request.logprobs += _logprobs(raw_TV[:taken], tokens, request.params.logprobs)
            committed.append((request, tokens[:taken]))
        for b in range(rows.count, len(table)):
            if table[b][1] == NOT_FINITE:  # padding wanders over the vocabulary too, and its slot will be a row's
                self._cache.wipe(_slots_of(rows)[b], 0, DRAFT_ROOM)
        seconds["rest" if before is not None else "prefill"] += time.perf_counter() - begun
        for request in rows.requests:
            statistics = request.statistics
            statistics.prefill_s += seconds.get("prefill", 0.0) / rows.count
            statistics.target_s += seconds.get("target", 0.0) / rows.count
            statistics.drafter_s += seconds.get("drafter", 0.0) / rows.count
            statistics.rest_s += seconds.get("rest", 0.0) / rows.count
        return committed

    def _dismiss(self, rows: Rows) -> Rows | None:
        """Free the rows whose requests ended."""
        ended = [b for b, request in enumerate(rows.requests) if request.finish_reason is not None]
        if not ended:
            return rows
        order = [b for b in range(rows.count) if b not in ended]
        for b in ended:
            if rows.requests[b].error is not None:
                # No forward writes further into a row: prompts are padded to the longest.
                self._cache.wipe(_slots_of(rows)[b], 0, rows.longest + DRAFT_ROOM)
        self.drafter.reset_rows([rows.requests[b].index for b in ended])
        if not order:
            return None
        bucket = self._compiler.bucket(len(order), self._slots)
        return leave(rows, order, self.target.vocab_size, self.target.device, bucket, self._cache.slots)


def _slots_of(rows: Rows) -> list[int]:
    assert rows.context.slots_B is not None
    slots: list[int] = rows.context.slots_B.tolist()
    return slots


def _logprobs(logits_TV: torch.Tensor, tokens: list[int], top: int) -> list[TokenLogprob]:
    logprobs_TV = torch.log_softmax(logits_TV.float() if logits_TV.dtype != torch.float64 else logits_TV, dim=-1)
    results = []
    for t in range(logprobs_TV.shape[0]):
        best = logprobs_TV[t].topk(top)
        alternatives = dict(zip(best.indices.tolist(), best.values.tolist(), strict=True))
        results.append(TokenLogprob(tokens[t], logprobs_TV[t, tokens[t]].item(), alternatives))
    return results
