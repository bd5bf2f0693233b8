"""Which prompts wait for another one that begins alike."""

import random

import torch

from draftsmith.engine.requests.request import Request
from draftsmith.engine.requests.scheduler import Scheduler
from draftsmith.targets import BLOCK, Blocks, KVCache
from draftsmith.types import SamplingParams

SLOTS, CAPACITY = 6, 5 * BLOCK


def new_scheduler() -> Scheduler:
    cache = KVCache([(1, 1, 1, 1)], SLOTS, CAPACITY, torch.float32, torch.device("cpu"), 3 * SLOTS * CAPACITY // BLOCK)
    return Scheduler(
        Blocks(cache), SLOTS, SLOTS * CAPACITY, piece=100, largest_piece=300, room=1, share=True, tells=False
    )


def blocks_alike(one: list[int], other: list[int]) -> int:
    """Return how many whole blocks two texts begin with alike, block by block."""
    pairs = zip(one, other, strict=False)
    same = next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
    return same // BLOCK


def waits_for(request: Request, scheduler: Scheduler) -> list[Request]:
    """Return the earlier requests that are about to read more of its beginning than is stored, by definition."""
    stored = scheduler.blocks.findable(request.prompt, request.namespace) // BLOCK
    earlier = scheduler.reading[: scheduler.reading.index(request)]
    shareable = request.prompt[:-1]  # the last token is always read
    return [
        other for other in earlier
        if other.namespace == request.namespace and blocks_alike(shareable, other.prompt) > stored
    ]


def test_a_prompt_waits_for_those_that_read_more_of_its_beginning_and_for_no_others():
    assert sum(waits_in_a_crowd(seed) for seed in range(30)) > 30


def waits_in_a_crowd(seed: int) -> int:
    """Check every step over prompts with few different blocks, some of which end with a block; return how many waited.

    They are in two namespaces and have two priorities.
    """
    chance = random.Random(seed)
    scheduler, waited = new_scheduler(), 0
    for number in range(40):
        tokens = [chance.choice((1, 1, 1, 2)) for _ in range(chance.randint(1, 4))]
        prompt = [token for token in tokens for _ in range(BLOCK)] + [7] * chance.choice((0, 1, 20))
        request = Request.make(number, prompt, SamplingParams(max_tokens=2), number, frozenset(), None)
        request.id, request.namespace, request.priority = number, chance.randrange(2), chance.randrange(2)
        scheduler.add(request)
    while scheduler.has_work:
        pieces = scheduler.pieces()
        assert pieces
        read = {piece.request.id for piece in pieces}
        last = scheduler.reading.index(pieces[-1].request)
        for request in scheduler.reading[:last]:
            # Nothing was published since: what was passed over waits, and what is read for the first time does not.
            if request.read == 0:
                assert bool(waits_for(request, scheduler)) == (request.id not in read)
                waited += request.id not in read
        for piece in pieces:
            piece.request.read = piece.end
            scheduler.blocks.publish(piece.request.slot, piece.request.prompt[: piece.end])
            if piece.ends_prompt:
                scheduler.done_reading(piece.request)
                scheduler.remove(piece.request, piece.request.prompt)
    return waited
