"""Proves that the text stays the target's own behind the server, where requests come and go beside each other.

It answers the questions of `prove` for `serving.Service` with one engine of 1, 4 and 16 rows: greedy text is compared
token by token, sampled text by its joint distribution. More clients than there are rows ask for texts of different
lengths, some for several at once, and some hang up. Every row changes its plan at every step, also to sampled plans.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from draftsmith.drafters.base import Drafter
from draftsmith.engine import Engine, Policy
from draftsmith.engine.arm import Arm
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.known import Known
from draftsmith.engine.profile import Profile
from draftsmith.engine.requests.admission import SEED_STRIDE
from draftsmith.evaluation.measuring.losslessness import Divergence, first_divergence, is_targets_own
from draftsmith.evaluation.proof.changing_policy import NAME, PLANS, ChangingPolicy
from draftsmith.evaluation.proof.exact_distribution import (
    ExactDistribution,
    apart_from,
    enumerate_distribution,
    read_by_decoding,
    read_plainly,
)
from draftsmith.evaluation.proof.greedy import GreedyProof, MakeEngine, OnProgress, explain_all
from draftsmith.evaluation.proof.prove import Proof, SmallPair, Workload
from draftsmith.evaluation.proof.rounding import measure_movement
from draftsmith.evaluation.proof.sampling import MOST_APART, Cell, SamplingProof, cell_of_draws, middling
from draftsmith.evaluation.proof.small_target import PROMPT
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.serving.errors import ApiError
from draftsmith.serving.service import Call, Service
from draftsmith.serving.settings import Settings
from draftsmith.serving.speculation import Drafting
from draftsmith.targets import Target
from draftsmith.types import Completion, DraftsmithError, SamplingParams, Statistics, require_finished

BATCHES = (1, 4, 16)
SERVER = "server"
KEYS = ("one", "another")
"""Prompts with the same key share what they have in common, which is read once; for two keys it is read twice."""
COPIES, LONGER = (1, 3, 1, 2, 4), (0, 5, 1, 9, 2, 0, 3)
"""Texts per request, and tokens beyond the tested ones; they vary so that rows end one by one."""
LEAVER = 5
"""One visitor in this many hangs up after the first piece of its answer; what it received is not tested."""
SHARE = 400
"""Per row of the batch, the number of draws is that of the small alphabet in `prove` divided by this."""
SHARE_HERE = 100
LEAST = 200
FITTED, ALIKE = "what pays, by what stayed", "what pays, all rows alike"
SHORT_STEP = 0.001
"""Seconds of a plain step, so short that the policy lets all rows draft alike."""
MEASURED_PREFIXES = 8
T = TypeVar("T")


@dataclass(frozen=True)
class Visit:
    """One request; its answer counts unless the visitor hangs up."""

    call: Call
    leaves: bool = False


def prove_served(
    target: Target,
    drafter: Drafter,
    plan: Plan,
    prompts: Sequence[Sequence[int]],
    small: SmallPair,
    work: Workload,
    *,
    sampling_prompts: Sequence[Sequence[int]] | None = None,
    batches: Sequence[int] = BATCHES,
    make_engine: MakeEngine = Engine,
    on_progress: OnProgress = lambda what, done, total: None,
) -> Proof:
    """Prove or disprove that drafts do not change the text on the path that served requests take.

    Args:
        prompts: token ids.
        small: the small target, whose draws tell the most.
        work: tokens of the greedy texts, and the number of draws, which is reduced here.
        sampling_prompts: short prompts to draw after; None takes the first 8 tokens of the others.
        batches: numbers of rows of the engine behind the server, tested one after the other.
        make_engine: builds the engine behind the server; tests replace it to plant faults.
        on_progress: called with what is being done, how much of it is done, and how much there is.

    Raises:
        DraftsmithError: a plan that drafts nothing, or one that is meant to change sampled text.
    """
    if plan.depth == 0:
        raise DraftsmithError("the plan drafts nothing, so there is nothing to prove; give a drafter and a plan.")
    if not plan.lossless:
        raise DraftsmithError("the plan is lossy by choice, so behind a server too; prove an exact one there.")
    server = _Server(make_engine, tuple(batches), on_progress)
    greedy = _greedy(server, target, drafter, plan, prompts, work.new_tokens)
    starts = sampling_prompts if sampling_prompts is not None else [list(prompt[:8]) for prompt in prompts]
    cells, apart = _cells_here(server, target, drafter, plan, starts, work, greedy.movement.bit_identical)
    cells += _cells_small(server, small, work)
    return Proof(greedy, SamplingProof(cells, apart, MOST_APART[target.dtype], shared=False))


def answers(
    service: Service, visits: Sequence[Visit], rows: int, done: Callable[[int], None]
) -> list[list[Completion]]:
    """Return the texts of every visit, none for those that hung up. There are more visitors at a time than rows.

    Args:
        done: called with the number of texts finished since the last call.
    """
    found: list[list[Completion]] = [[] for _ in visits]

    async def main() -> None:
        coming = iter(enumerate(visits))

        async def client() -> None:
            for at, visit in coming:
                found[at] = await _answer(service, visit)
                done(len(found[at]))

        async with service.engine:
            clients = [asyncio.create_task(client()) for _ in range(rows + rows // 2 + 1)]
            try:
                await asyncio.gather(*clients)
            finally:
                for one in clients:
                    one.cancel()
                await asyncio.gather(*clients, return_exceptions=True)

    try:
        _run(main())
    except ApiError as error:
        if error.status in (500, 503):  # its message refers to a log, which is not written here
            raise DraftsmithError(
                f"a request of the proof was not answered (status {error.status}): a step of the engine failed."
            ) from error
        raise DraftsmithError(f"the server refused a request of the proof: {error.message}") from error
    return found


async def _answer(service: Service, visit: Visit) -> list[Completion]:
    ends: dict[int, Completion] = {}
    async with aclosing(service.run(visit.call)) as pieces:
        async for piece in pieces:
            if visit.leaves:
                return []
            if piece.chunk.completion is not None:
                ends[piece.choice] = piece.chunk.completion
    return [ends[choice] for choice in sorted(ends)]


def _run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine in a thread of its own, because the caller may already be in an event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


@dataclass(frozen=True)
class _Server:
    """Makes servers; knows for which numbers of rows, and who receives the progress of the proof."""

    make_engine: MakeEngine
    batches: tuple[int, ...]
    on_progress: OnProgress

    def service(self, target: Target, drafter: Drafter, policy: Policy, rows: int, length: int) -> Service:
        """Return a service that is not running yet."""
        # Unlike in `serve`, drafters are not guarded: one that fails has to be noticed.
        engine = self.make_engine(target, drafter, policy=policy, max_batch=rows, max_length=length)
        return Service(engine, Settings(names=(SERVER,)), {})


def _call(prompts: Sequence[Sequence[int]], params: SamplingParams, number: int) -> Call:
    key, deadline = KEYS[number % len(KEYS)], time.monotonic() + 3600
    return Call([list(prompt) for prompt in prompts], params, Drafting(), key, deadline)


# ---- greedy


def _greedy(
    server: _Server, target: Target, drafter: Drafter, plan: Plan, prompts: Sequence[Sequence[int]], new_tokens: int
) -> GreedyProof:
    params = SamplingParams(max_tokens=new_tokens, ignore_eos=True)
    length = max(len(prompt) for prompt in prompts) + new_tokens
    plain = require_finished(Engine(target, max_batch=1, max_length=length).generate(prompts, params))
    different: list[tuple[int, bool, Divergence]] = []
    statistics, done, total = Statistics(), 0, len(server.batches) * len(prompts)

    def advance(texts: int) -> None:
        nonlocal done
        done += texts
        server.on_progress("greedy text behind the server", done, total)

    for rows in server.batches:
        # Every third text ends half-way, so that rows leave and new ones come.
        lengths = [max(1, new_tokens // 2) if index % 3 == 1 else new_tokens for index in range(len(prompts))]
        visits = []
        for index, prompt in enumerate(prompts):
            own = replace(params, max_tokens=lengths[index])
            visits.append(Visit(_call([prompt], own, index)))
            if index % LEAVER == 0:
                visits.append(Visit(_call([prompt], params, index), leaves=True))
        service = server.service(target, drafter, ChangingPolicy(_plans(plan, drafter)), rows, length)
        texts = require_finished([text for texts in answers(service, visits, rows, advance) for text in texts])
        for index, (ours, theirs) in enumerate(zip(plain, texts, strict=True)):
            statistics += theirs.statistics
            item = first_divergence(index, ours.tokens[: lengths[index]], theirs.tokens)
            if item is not None:
                different.append((rows, True, item))
    foreign = [index for index, completion in enumerate(plain) if not is_targets_own(target, completion)]
    movement = measure_movement(target, [text.prompt_tokens + text.tokens for text in plain[:MEASURED_PREFIXES]])
    return GreedyProof(
        len(prompts), sum(len(text.tokens) for text in plain), total,
        explain_all(target, plain, different, movement), foreign, movement, statistics.tokens_per_step, server.batches,
    )


def _plans(plan: Plan, drafter: Drafter) -> list[Plan]:
    """Return plans for rows to switch between: none, the user's own, others, and sampled ones if the drafter can."""
    short = plan.shortened(2)
    plans = [NO_DRAFT, plan, Plan((1,)), short]
    if drafter.can_sample:
        chain, tree = Plan((1,) * short.depth, sampled=True), Plan((2, *(1,) * (short.depth - 1)), sampled=True)
        plans += [chain, tree, replace(chain, acceptance="block")]
    return list(dict.fromkeys(plans))


# ---- sampled


@dataclass(frozen=True)
class _Drawn:
    """Continuations, the mean number of accepted guesses per step, and the seconds that all of it took."""

    texts: list[list[int]]
    accepted_per_step: float
    seconds: float


def _draw(
    service: Service, prompt: Sequence[int], params: SamplingParams, count: int, rows: int, seed: int,
    done: Callable[[int], None],
) -> _Drawn:
    """Draw `count` continuations of `params.max_tokens` tokens; which ones count is decided before any is drawn."""
    length, visits, planned, number = params.max_tokens, list[Visit](), 0, 0
    room = service.engine.engine.max_length - len(prompt)
    while planned < count:
        copies, leaves = min(COPIES[number % len(COPIES)], count - planned), number % LEAVER == LEAVER - 1
        own = replace(
            params, n=copies,
            max_tokens=min(room, length + (2 * max(LONGER) if leaves else LONGER[number % len(LONGER)])),
            seed=(seed * 1_000_003 + (planned + (count if leaves else 0)) * SEED_STRIDE) % 2**63,
        )
        visits.append(Visit(_call([prompt], own, number), leaves))
        planned += 0 if leaves else copies
        number += 1
    begun = time.perf_counter()
    found = require_finished([text for texts in answers(service, visits, rows, done) for text in texts])
    steps, accepted = sum(one.statistics.steps for one in found), sum(one.statistics.accepted for one in found)
    return _Drawn([one.tokens[:length] for one in found], accepted / max(1, steps), time.perf_counter() - begun)


_Run = tuple[str, Callable[[], Policy], int, int]
"""A name, a function that makes the policy, the number of draws, and the number of rows."""


def _cells_here(
    server: _Server, target: Target, drafter: Drafter, plan: Plan, prompts: Sequence[Sequence[int]], work: Workload,
    exact_shapes: bool,
) -> tuple[list[Cell], float]:
    """Draw from the real target with a top-k; return the cells, and the distance between the target's two forwards."""
    params = SamplingParams(temperature=1.0, top_k=work.top_k, max_tokens=work.joint_tokens, ignore_eos=True)
    reader = read_plainly(target) if target.dtype in (torch.float32, torch.float64) else read_by_decoding(target)
    prompt = middling(target, reader, prompts, params, work.joint_tokens)
    exact = enumerate_distribution(reader, target, prompt, params, work.joint_tokens)
    apart = apart_from(exact, target, prompt, params, work.joint_tokens, exact_shapes)
    plans = _plans(plan, drafter)
    runs: list[_Run] = [
        (NAME, lambda: ChangingPolicy(plans), max(LEAST, work.draws // SHARE_HERE * rows), rows)
        for rows in server.batches
    ]
    cells = _cells(
        server, "this target", "the drafter itself", target, drafter, prompt, params, exact,
        0.0 if exact_shapes else 2 * apart, runs, work.seed,
    )
    return cells, apart


def _cells_small(server: _Server, small: SmallPair, work: Workload) -> list[Cell]:
    """Draw from the small target, with a policy that changes its plans and with one that learns what pays."""
    params = SamplingParams(temperature=1.0, max_tokens=work.joint_tokens, ignore_eos=True)
    exact = enumerate_distribution(read_plainly(small.target), small.target, PROMPT, params, work.joint_tokens)
    policies: list[tuple[str, Callable[[], Policy]]] = [
        (NAME, lambda: ChangingPolicy(PLANS)), (FITTED, lambda: Fitted(Known(sampled_profile()))),
        (ALIKE, lambda: Fitted(Known(sampled_profile(SHORT_STEP)))),
    ]
    runs: list[_Run] = [
        (name, make_policy, max(LEAST, work.small_draws // SHARE * rows), rows)
        for name, make_policy in policies for rows in server.batches
    ]
    return _cells(
        server, "small alphabet", small.drafter_name, small.target, small.drafter, PROMPT, params, exact, 0.0, runs,
        work.seed,
    )


def _cells(
    server: _Server, where: str, drafter_name: str, target: Target, drafter: Drafter, prompt: Sequence[int],
    params: SamplingParams, exact: ExactDistribution, rounding: float, runs: Sequence[_Run], seed: int,
) -> list[Cell]:
    length, total = len(prompt) + params.max_tokens + 2 * max(LONGER), sum(count for _, _, count, _ in runs)
    cells, done = [], 0
    for number, (name, make_policy, count, rows) in enumerate(runs):

        def advance(drawn: int, name: str = name) -> None:
            nonlocal done
            done += drawn
            server.on_progress(f"draws behind the server, {where}: {name}", done, total)

        service = server.service(target, drafter, make_policy(), rows, length)
        found = _draw(service, prompt, params, count, rows, seed + number, advance)
        cells.append(cell_of_draws(
            where, f"{name}, batch {rows}", drafter_name, exact, found.texts, seed, found.seconds,
            found.accepted_per_step, rounding,
        ))
    return cells


def sampled_profile(step: float = 1.0) -> Profile:
    """Return costs at which sampled chains of one and two guesses pay in some texts and not in others.

    Args:
        step: seconds of a plain step with one row.
    """
    arms = [Arm(NO_DRAFT, (), (step, 4 * step))]
    for depth in (1, 2):
        cost = (1 + 0.15 * depth) * step
        arms.append(Arm(Plan((1,) * depth, sampled=True), (0.5, 0.25)[:depth], (cost, 4 * cost)))
    return Profile((1, 4), tuple(arms))
