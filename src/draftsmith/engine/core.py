"""The core that all interfaces drive: requests come and go between steps, and a step serves all that are in.

    waiting → reading (a slot, and the prompt piece by piece) → decoding → finished

Not thread-safe: one caller at a time; `AsyncEngine` is for many.
"""

import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count

import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter, NoDrafter, workers
from draftsmith.engine.limits import DRAFT_ROOM, Limits
from draftsmith.engine.made import Made
from draftsmith.engine.policy import Choice, Policy
from draftsmith.engine.reasons import ASKED
from draftsmith.engine.requests.request import Request
from draftsmith.engine.requests.scheduler import Piece, Scheduler, whole
from draftsmith.engine.steps.clock import Clock
from draftsmith.engine.steps.commit import NOT_FINITE
from draftsmith.engine.steps.compiled import runner_for
from draftsmith.engine.steps.groups import Groups
from draftsmith.engine.steps.logprobs import logprobs_of
from draftsmith.engine.steps.prefill import PromptReader
from draftsmith.engine.steps.reread import reread
from draftsmith.engine.steps.rows import Penalties
from draftsmith.engine.steps.runner import Runner
from draftsmith.engine.steps.step import PREDICTED, Stepper, lists_of, union_of_taps
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import BLOCK, Blocks, Target
from draftsmith.types import CompileLevel, DraftsmithError


@dataclass(slots=True)
class Progress:
    """What a step brought to one request: tokens, and whether it has finished, so that its `completion` is ready.

    `made` says how the step produced the tokens; None for the first token of a text, which comes with the prompt.
    `first` is how many tokens its text had before.
    """

    request: Request
    tokens: list[int]
    finished: bool
    made: Made | None = None
    first: int = 0


class EngineCore:
    """Takes requests in (`add`), takes them out (`abort`), and advances all that are in (`step`).

    Args:
        target: the model.
        drafters: what guesses ahead, by name. A choice of the policy that names none means the first. Without any
            drafter it decodes plainly.
        policy: decides what every row drafts.
        limits: see `Limits`.
        compile: "off", "trace" or "full", see `runner_for`.
        runner: how the pieces of a step are run; by default what fits the target, at the level of `compile`.
    """

    def __init__(
        self,
        target: Target,
        drafters: Mapping[str, Drafter] | None,
        policy: Policy,
        limits: Limits,
        compile: CompileLevel = "off",
        runner: Runner | None = None,
    ) -> None:
        self.target, self.policy, self.limits = target, policy, limits
        self.drafters = dict(drafters) if drafters else {"none": NoDrafter()}
        self._workers = workers(self.drafters.values())
        self.runner = runner_for(target, compile) if runner is None else runner
        slots = self.runner.slots(limits.max_batch)
        # Drafters that write into the target's own cache need room there.
        room = DRAFT_ROOM if any(drafter.borrows_layers for drafter in self._workers) else 1
        capacity = limits.max_length + DRAFT_ROOM + room
        blocks = -(-limits.max_tokens // BLOCK) + slots * ((DRAFT_ROOM + room) // BLOCK + 2)
        tells = any(drafter.reads_prompt for drafter in self._workers)
        keeps = any(drafter.reads_prompt and drafter.taps for drafter in self._workers)
        taps = union_of_taps(self._workers)
        self.cache = target.new_cache(
            slots, capacity, blocks=blocks,
            features=target.feature_size(taps) if keeps and limits.share else 0,
        )
        self.blocks = Blocks(self.cache)
        # Padding rows write into slots that nobody reads.
        spare_slots = list(range(limits.max_batch, slots))
        for slot in spare_slots:
            self.blocks.reserve(slot, DRAFT_ROOM + BLOCK)
        self.stepper = Stepper(target, self.drafters, self.cache, self.runner)
        self._penalties = Penalties(slots, target.vocab_size, target.device)
        self._prompts = PromptReader(self.stepper, self._penalties)
        self._groups = Groups(policy, self.runner, spare_slots, self._penalties, target.vocab_size)
        self.scheduler = Scheduler(
            self.blocks, limits.max_batch, limits.max_tokens, limits.piece, limits.largest_piece,
            room, limits.share, tells,
        )
        self._ids = count()
        self._requests: dict[int, Request] = {}
        self._clock = Clock(target.device)
        # One row's share of the seconds of all steps so far; a request's cost is the difference between two readings.
        self._spent = {"target": 0.0, "drafter": 0.0, "rest": 0.0}
        self._inboxes: dict[int, deque[Progress]] = {}
        # Whether the drafters were attached since the core last had no requests.
        self._attached = False
        # The largest plan of every worker under the policy; empty until it is needed.
        self._policy_plans: list[Plan] = []
        if PREDICTED in self.drafters:
            raise DraftsmithError(f"a drafter is named {PREDICTED!r}, which stands for predictions; name it otherwise.")
        for choice in policy.choices:
            if choice.drafter is not None and choice.drafter not in self.drafters:
                raise DraftsmithError(
                    f"the policy names the drafter {choice.drafter!r}, but there is {', '.join(self.drafters)}."
                )
            self.check_plan(choice.plan, choice.drafter)

    # ---- what callers use

    def add(self, request: Request, inbox: "deque[Progress] | None" = None) -> int:
        """Take a request in; it waits until there is room. Returns its id.

        Args:
            inbox: receives the `Progress` of this request from every step, whoever calls `step`.

        Raises:
            DraftsmithError: when `check` refuses it, or a drafter with a memory is busy in another core.
        """
        self.check(request)
        choices = self.policy.choices if request.plan is None else (Choice(request.plan, request.drafter),)
        if request.plan is not None:
            request.choice, request.why = choices[0], ASKED
        request.never_drafts = not any(choice.plan.depth for choice in choices)
        plans = [choice.plan for choice in choices]
        request.statistics.lossless = request.params.temperature == 0 or all(plan.lossless for plan in plans)
        self._attached &= self.scheduler.has_work
        if not (self._attached or request.never_drafts):
            # Requests that join this one before all have ended may draft as the policy says.
            self._attach(None if request.plan is None else choices[0])
        request.id = next(self._ids)
        self._requests[request.id] = request
        if inbox is not None:
            self._inboxes[request.id] = inbox
        if request.prediction is not None:
            self.stepper.predictions.give(request.id, request.prediction)
        self.scheduler.add(request)
        return request.id

    def abort(self, id: int) -> None:
        """End a request now, whether it waits, reads or decodes; an id that is not in the core is ignored."""
        request = self._requests.get(id)
        if request is not None:
            self._inboxes.pop(id, None)
            request.finish("abort")
            self._let_go(request)

    @property
    def has_work(self) -> bool:
        """Whether a step would do anything."""
        return self.scheduler.has_work

    def step(self) -> list[Progress]:
        """Advance every decoding row, give slots to requests that fit, read pieces of prompts; return what it brought.

        A request appears at most once in what is returned. If anything raises, all requests end with an error, because
        nobody knows how far their rows came; the core goes on with those that are added later.
        """
        if torch.is_grad_enabled():  # checking costs less than disabling gradients that are off already
            with torch.no_grad():
                return self.step()
        try:
            progress = [self._expire(request) for request in self.scheduler.overdue()]
            begun = time.perf_counter()
            if not self._groups.hold(bool(self.scheduler.reading)):
                self._groups.settle(list(self.scheduler.decoding.values()), self.scheduler.load())
            if self._groups.rows:
                progress += self._decode(time.perf_counter() - begun)
            pieces = self.scheduler.pieces()
            if pieces:
                progress += self._read(pieces)
        except BaseException as error:
            self._break_off(error)
            raise
        for one in progress:
            inbox = self._inboxes.get(one.request.id)
            if inbox is not None:
                inbox.append(one)
                if one.finished:
                    del self._inboxes[one.request.id]
        return progress

    def check(self, request: Request) -> None:
        """Raise DraftsmithError for a request that can never fit, or whose drafter or plan cannot be used."""
        if whole(request) > min(self.limits.max_length, self.limits.max_tokens):
            most = min(self.limits.max_length, self.limits.max_tokens)
            raise DraftsmithError(
                f"a request of {len(request.prompt)} tokens that asks for {request.params.max_tokens} more can never "
                f"fit into {most}; shorten its prompt, lower max_tokens, or give the engine more room."
            )
        if request.drafter is not None and request.drafter not in self.drafters:
            raise DraftsmithError(f"there is no drafter {request.drafter!r}; there is {', '.join(self.drafters)}.")
        if request.plan is not None:
            self.check_plan(request.plan, request.drafter)
        if request.drafter is not None and request.plan is None:
            raise DraftsmithError(f"a request names the drafter {request.drafter!r} without a plan; give it one.")

    def check_plan(self, plan: Plan, drafter: str | None = None) -> None:
        """Raise DraftsmithError for a plan with too many nodes, or too deep for the drafter (None means the first)."""
        name = next(iter(self.drafters)) if drafter is None else drafter
        deepest = self.drafters[name].max_depth
        if deepest is not None and plan.depth > deepest:
            raise DraftsmithError(
                f"the plan drafts {plan.depth} tokens ahead, but the drafter {name!r} reaches {deepest}; shorten it."
            )
        if plan.max_nodes >= DRAFT_ROOM:
            raise DraftsmithError(
                f"the plan drafts {plan.max_nodes} nodes, but there is room for {DRAFT_ROOM - 1}; "
                "give it fewer children, or keep fewer paths or nodes."
            )

    # ---- run

    def _read(self, pieces: list[Piece]) -> list[Progress]:
        """Read pieces of prompts; requests whose prompt ends begin to decode."""
        self._clock.start("prefill")
        found = self._prompts.read(pieces)
        lines = [first.table_BX.tolist() for first in found]
        seconds = self._clock.stop()["prefill"] / len(pieces)
        for piece in pieces:
            piece.request.statistics.prefill_s += seconds
            if piece.stored:
                piece.request.told = piece.end
            else:
                piece.request.read = piece.end
        progress = []
        for first, table in zip(found, lines, strict=True):
            for b, request in enumerate(first.rows.requests):
                self.scheduler.done_reading(request)
                request.began = dict(self._spent)
                self._groups.enter(request, first.rows.context, b)
                raw_TV = None if first.raw_logits_B1V is None else first.raw_logits_B1V[b]
                progress.append(self._take(request, table[b], raw_TV))
        # Where attention spreads NaN between tokens, a prompt is shared only after its end gave finite logits.
        for piece in pieces:
            request = piece.request
            still_there = self.limits.share and request.slot >= 0 and not piece.stored
            if still_there and (self.target.backend.reads_apart or piece.ends_prompt):
                self.blocks.publish(request.slot, request.prompt[: piece.end])
        return progress

    def _decode(self, settled_s: float) -> list[Progress]:
        """Advance every row, and hand its tokens to its request.

        Args:
            settled_s: how long it took to find out what the rows draft, which is a part of the step.
        """
        for rows in self._groups.rows:
            # A draft needs its nodes, and room for drafters that write here; plain decoding only one more place.
            room = rows.max_nodes + (self.scheduler.room if rows.depth else 1)
            for request in rows.requests:
                needed = len(request.prompt) + len(request.tokens) + room
                if needed > request.reserved:
                    self.blocks.reserve(request.slot, min(needed, self.cache.capacity))
                    request.reserved = self.blocks.room(request.slot)
        clock = self._clock
        results = self.stepper.step(self._groups.rows, clock)
        tables = lists_of(results)  # what the target said, in one transfer from the device
        seconds = clock.stop()
        begun = time.perf_counter()
        progress = []
        for rows, result, table in zip(self._groups.rows, results, tables, strict=True):
            raw_BTV = result.raw_logits_BTV
            drafter, parts = rows.choice.drafter or self.stepper.first, result.parts()
            for b, request in enumerate(rows.requests):
                line, raw_TV = table[b], None if raw_BTV is None else raw_BTV[b]
                if line[1] == NOT_FINITE and result.depth:
                    line, raw_TV = reread(self.stepper, rows, result.before, b, self._penalties)
                one = self._take(request, line, raw_TV, result.depth, rows.choice.plan, parts[b] if parts else 0)
                accepted = max(0, len(one.tokens) - 1)
                refused = 0 if request.guide is None else request.guide.refused
                drafted = max(0, line[1] - refused)
                one.made = Made(drafter, rows.choice.plan, drafted, accepted, why=request.why)
                if request.shows_drafts and one.made.drafted:
                    one.made.tree = result.tree(b, one.made.accepted)
                    names = self.stepper.drafters[drafter].part_names
                    one.made.part = names[parts[b]] if parts and parts[b] < len(names) else None
                progress.append(one)
        seconds["rest"] += time.perf_counter() - begun
        self.policy.timed(sum(seconds.values()))
        seconds["rest"] += settled_s
        rows_now = len(progress)
        for part in self._spent:
            self._spent[part] += seconds.get(part, 0.0) / rows_now
        for one in progress:
            if one.finished:  # once more, now that this step's seconds are known
                self._add_up(one.request)
        return progress

    # ---- finish

    def _take(
        self, request: Request, line: list[int], raw_TV: Tensor | None, depth: int | None = None,
        plan: Plan = NO_DRAFT, part: int = 0,
    ) -> Progress:
        """Hand a line of a step's table to its request; `depth` is None for the first token, which no step made."""
        count, drafted = line[0], line[1]
        if drafted == NOT_FINITE:
            wide = self.target.dtype in (torch.float32, torch.float64)
            fault = "so fetch them again" if wide else "or its dtype is too narrow, so try fp32"
            request.fail(
                f"{self.target.name} gave no finite logits after {request.length} tokens of row {request.index}; "
                f"its weights are damaged{',' if wide else ''} {fault}."
            )
            self._let_go(request)
            return Progress(request, [], True)
        tokens = line[2 : 2 + count]
        try:
            taken = request.commit(tokens)
        except Exception as error:  # a tokenizer is third-party code
            request.break_text(error)
            self._let_go(request)
            return Progress(request, [], True)
        request.history.written = len(request.tokens)
        if request.prediction is not None:
            request.prediction.extend(tokens[:taken])
        if taken < count:
            tokens = tokens[:taken]
        if depth is not None and taken:
            request.record(taken, drafted, depth, plan, part, count - 1)
        if raw_TV is not None and request.params.logprobs is not None:
            request.logprobs += logprobs_of(raw_TV[:taken], tokens, request.params.logprobs)
        if raw_TV is not None and request.keeps_logits:
            # A copy, because a view would keep the logits of all rows and of rejected guesses in memory.
            request.raw_logits.append(raw_TV[:taken].to(torch.float32, copy=True))
        if request.finish_reason is not None:
            self._let_go(request)
        return Progress(request, tokens, request.finish_reason is not None, first=len(request.tokens) - len(tokens))

    def _expire(self, request: Request) -> Progress:
        """End a request whose deadline has passed; its tokens so far stand."""
        request.finish("deadline")
        self._let_go(request)
        return Progress(request, [], True)

    def _let_go(self, request: Request) -> None:
        """Free what an ended request holds, for others to use or to share."""
        del self._requests[request.id]
        if request.began:
            self._add_up(request)
        self._groups.leave(request)
        try:
            if request.prediction is not None:
                self.stepper.predictions.reset_rows([request.id])
            if request.slot >= 0 and not request.never_drafts:
                for drafter in self._workers:
                    drafter.reset_rows([request.id])
        finally:  # even if a drafter raises: a row without its request must not be decoded
            self._free(request)

    def _free(self, request: Request) -> None:
        """Give back a request's slot, keeping what other prompts may share."""
        stored: list[int] | None = None
        if request.error is not None:
            pass  # a text that could not be read must not be shared
        elif request.tokens:
            stored = request.prompt + request.tokens[:-1]
        elif self.target.backend.reads_apart:
            stored = request.prompt[: request.read]
        self.scheduler.remove(request, stored)
        if not self.scheduler.decoding:
            self._groups.clear()

    def _add_up(self, request: Request) -> None:
        """Give a request its share of the seconds since it began to decode."""
        statistics, began = request.statistics, request.began
        statistics.target_s = self._spent["target"] - began["target"]
        statistics.drafter_s = self._spent["drafter"] - began["drafter"]
        statistics.rest_s = self._spent["rest"] - began["rest"]

    def _break_off(self, error: BaseException) -> None:
        """End all requests after a step that raised."""
        for request in list(self._requests.values()):
            request.fail(f"a step of the engine broke off ({type(error).__name__}: {error}); ask again.")
            # The device may be gone, and then freeing what lies on it raises as well.
            with suppress(Exception):
                self._let_go(request)
        self._requests.clear()
        self._inboxes.clear()
        self._groups.clear()
        self._clock = Clock(self.target.device)

    def _attach(self, asked: Choice | None) -> None:
        """Attach the drafters to this core's cache while they have no rows in it; they may have served another core.

        Args:
            asked: what the first request wants to draft; None leaves it to the policy.
        """
        remember = [one for one in self._workers if one.reads_prompt or one.borrows_layers or one.observes]
        for drafter in remember:
            owner = drafter.owner() if drafter.owner is not None else None
            if isinstance(owner, EngineCore) and owner is not self and owner.has_work:
                raise DraftsmithError(
                    "this drafter is drafting for another engine, and it remembers that one's rows; finish or close "
                    "what runs there, or load the drafter once more."
                )
        if not self._policy_plans:
            self._policy_plans = [self._largest_plan(drafter, self.policy.choices) for drafter in self._workers]
        plans = self._policy_plans
        if asked is not None:
            plans = [self._largest_plan(drafter, [asked, *self.policy.choices]) for drafter in self._workers]
        for drafter, plan in zip(self._workers, plans, strict=True):
            drafter.attach(self.cache, plan)
        for drafter in remember:
            drafter.owner = weakref.ref(self)
        self._attached = True

    def _largest_plan(self, drafter: Drafter, choices: Sequence[Choice]) -> Plan:
        """Return the largest plan that a worker may be given."""
        first = self.stepper.first
        plans = [choice.plan for choice in choices if drafter in workers([self.drafters[choice.drafter or first]])]
        # A request that is added while rows run may name any drafter, also one that the policy never lets draft.
        if not any(plan.depth for plan in plans):
            plans = [drafter.default_plan(), *(choice.plan for choice in self.policy.choices)]
        if drafter.max_depth is not None:
            plans = [plan.shortened(drafter.max_depth) for plan in plans]
        return max(plans, key=lambda plan: plan.max_nodes)
