"""Blocks are given out, shared, forked and forgotten, and every slot reads what it wrote all the time."""

import random
import sys

import pytest
import torch
from torch import Tensor

from draftsmith.targets import Blocks, KVCache, OutOfBlocks
from draftsmith.targets.cache.blocks import WARM
from draftsmith.targets.cache.cache import BLOCK

SLOTS, CAPACITY, MANY = 5, 6 * BLOCK, 10


def new_cache(blocks: int = MANY, features: int = 3, slots: int = SLOTS) -> KVCache:
    return KVCache([(1, 2, 2, 1)] * 2, slots, CAPACITY, torch.float64, torch.device("cpu"), blocks, features)


def values_of(text: list[int]) -> Tensor:
    """Return what a text leaves in the cache at its places: numbers that depend on all tokens up to there."""
    values, value = [], 1
    for token in text:
        value = (value * 31 + token + 7) % 1_000_003
        values.append(float(value))
    return torch.tensor(values, dtype=torch.float64)


def write(cache: KVCache, slot: int, text: list[int], begin: int) -> None:
    """Do as a forward that reads a text from some place on."""
    places_1P = torch.arange(begin, len(text)).unsqueeze(0)
    entries_P = cache.entries(torch.tensor([slot]), places_1P)[0]
    values_P = values_of(text)[begin:]
    for number, tensor in enumerate(cache.tensors):
        tensor.flatten(0, 1)[entries_P] = (values_P + number).view(-1, 1, 1)
    cache.store_states(torch.tensor([slot]), places_1P, values_P.view(1, -1, 1).expand(-1, -1, 3))


def held(cache: KVCache, slot: int, length: int) -> list[Tensor]:
    entries_P = cache.entries(torch.tensor([slot]), torch.arange(length).unsqueeze(0))[0]
    return [tensor.flatten(0, 1)[entries_P] for tensor in cache.tensors]


def assert_holds(cache: KVCache, slot: int, text: list[int]) -> None:
    values_P = values_of(text)
    for number, found_PHD in enumerate(held(cache, slot, len(text))):
        assert torch.equal(found_PHD, (values_P + number).view(-1, 1, 1).expand_as(found_PHD))
    assert torch.equal(cache.read_states(slot, 0, len(text)), values_P.unsqueeze(1).expand(-1, 3))


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_every_slot_holds_its_own_text(seed: int):
    """Random texts of a few beginnings, in a cache that is often full."""
    chance = random.Random(seed)
    cache = new_cache()
    blocks = Blocks(cache)
    texts: dict[int, list[int]] = {}
    beginnings = [[n] * (3 * BLOCK) for n in range(2)]
    refused = 0

    def grow(slot: int, tokens: list[int]) -> None:
        nonlocal refused
        text = texts[slot]
        length = min(len(text) + len(tokens), CAPACITY)
        before = (blocks.free_blocks, blocks.blocks_of(slot))
        fits = blocks.missing(slot, length) <= blocks.free_blocks
        try:
            blocks.reserve(slot, length)
        except OutOfBlocks:
            refused += 1
            assert not fits and (blocks.free_blocks, blocks.blocks_of(slot)) == before
            return
        assert fits and blocks.room(slot) >= length
        begin = len(text)
        text += tokens[: length - begin]
        others = {block for other in texts if other != slot for block in blocks.blocks_of(other)}
        assert others.isdisjoint(blocks.blocks_of(slot)[begin // BLOCK : -(-length // BLOCK)]), "it writes to its own"
        write(cache, slot, text, begin)

    for _ in range(300):
        slot, action = chance.randrange(SLOTS), chance.random()
        if slot not in texts:
            text = chance.choice(beginnings)[: chance.randrange(1, 3 * BLOCK)] + [3] * chance.randrange(1, 40)
            count = blocks.share(slot, text, namespace=chance.randrange(2))
            assert count % BLOCK == 0 and count < len(text)
            texts[slot] = text[:count]
            grow(slot, text[count:])
        elif action < 0.5:
            grow(slot, [chance.randrange(3) for _ in range(chance.choice([1, 3, 70, 150]))])
        elif action < 0.75:
            blocks.publish(slot, texts[slot])
        elif action < 0.95:
            blocks.release(slot)
            del texts[slot]
        else:
            keep = chance.randrange(4 * BLOCK)
            blocks.trim(keep)
            assert blocks.cached_bytes <= keep / BLOCK * blocks.block_bytes
        for other, text in texts.items():
            assert_holds(cache, other, text)
        assert cache.tables_RJ is not None
        used = {block for other in texts for block in blocks.blocks_of(other)}
        assert {n for n in cache.tables_RJ.flatten().tolist() if n >= 0} == used
        assert blocks.held_tokens == len(used) * BLOCK and blocks.held_bytes == len(used) * blocks.block_bytes
        assert len(used) + blocks.free_blocks == MANY and blocks.limit == MANY * BLOCK
    assert refused and blocks.hits, "the cache was full at times, and texts were shared"
    for slot in texts:
        blocks.release(slot)
    assert blocks.free_blocks == MANY and blocks.held_tokens == 0
    blocks.trim()
    assert blocks.cached_bytes == 0 and blocks.free_blocks == MANY


def test_a_published_text_is_found_by_its_tokens_and_never_whole():
    cache = new_cache()
    blocks = Blocks(cache)
    text = list(range(3 * BLOCK))
    blocks.reserve(0, len(text))
    assert blocks.share(1, text) == 0
    for length in range(0, len(text) + 1, 16):
        blocks.publish(0, text[:length])
        assert blocks.findable([*text, 0]) == length // BLOCK * BLOCK
    blocks.release(1)
    assert blocks.share(1, text) == 2 * BLOCK, "the last token is left to be read"
    assert blocks.blocks_of(1) == blocks.blocks_of(0)[:2]
    assert blocks.share(2, [*text, 0]) == 3 * BLOCK
    assert blocks.share(3, [*text[:BLOCK], 7, *text[BLOCK:]]) == BLOCK
    assert blocks.share(4, [*text, 0], namespace=b"another model") == 0
    assert blocks.hits == 6 * BLOCK and blocks.held_tokens == 3 * BLOCK
    with pytest.raises(ValueError, match="slot 2 is not empty"):
        blocks.share(2, text)


def test_what_nobody_uses_is_found_until_its_memory_is_needed_and_the_oldest_goes_first():
    cache = new_cache(blocks=4)
    blocks = Blocks(cache)
    old, new = [1] * (2 * BLOCK), [2] * BLOCK
    for slot, text in ((0, old), (1, new)):
        blocks.reserve(slot, len(text))
        write(cache, slot, text, 0)
        blocks.publish(slot, text)
        blocks.release(slot)
    assert blocks.free_blocks == 4 and blocks.cached_bytes == 3 * blocks.block_bytes
    assert blocks.share(2, [*new, 0]) == BLOCK
    blocks.reserve(2, 3 * BLOCK)  # the free block, and the end of the older text
    assert blocks.share(3, [*old, 0]) == BLOCK
    assert_holds(cache, 3, old[:BLOCK])
    with pytest.raises(OutOfBlocks, match="1 blocks of 64 tokens are needed, and 0 of 4 are free"):
        blocks.reserve(3, BLOCK + 1)
    blocks.release(2)
    assert blocks.share(2, [*new, 0]) == BLOCK


def test_a_text_whose_beginning_was_forgotten_is_published_anew():
    cache = new_cache(blocks=4)
    blocks = Blocks(cache)
    text = [5] * (2 * BLOCK)
    for slot in (0, 1):  # read twice; the second finds the pieces of the first
        blocks.reserve(slot, BLOCK)
    blocks.publish(0, text[:BLOCK])
    blocks.reserve(1, 2 * BLOCK)
    blocks.publish(1, text)
    blocks.release(0)
    blocks.reserve(2, 2 * BLOCK)  # takes the block that the text begins with
    assert blocks.share(3, [*text, 0]) == 0
    blocks.publish(1, text)
    assert blocks.share(3, [*text, 0]) == 2 * BLOCK and blocks.blocks_of(3) == blocks.blocks_of(1)


@pytest.mark.skipif(sys.platform != "linux", reason="memory goes back to the system on Linux")
def test_memory_that_is_given_back_reads_as_zeros():
    cache = KVCache([(8, 16, 8, 16)], 2, CAPACITY, torch.float64, torch.device("cpu"), blocks=6)
    blocks = Blocks(cache)
    blocks.reserve(0, 2 * BLOCK)
    blocks.reserve(1, BLOCK)
    mine, others = blocks.blocks_of(0), blocks.blocks_of(1)
    for tensor in cache.tensors:
        tensor[:] = 1.0
    blocks.publish(0, [1] * BLOCK)
    blocks.release(0)
    for tensor in cache.tensors:
        assert tensor[mine[0]].all() and tensor[mine[1]].all() and tensor[others[0]].all()
    assert blocks.trim() == BLOCK
    for tensor in cache.tensors:
        assert tensor[others[0]].all()
        # Pages that reach into the next block stay; of a block of 64 KiB they are few.
        assert (tensor[[mine[0], mine[1]]] == 0).float().mean() > 0.9


def test_many_freed_blocks_go_back_at_once():
    many = 3 * WARM
    cache = KVCache([(8, 16, 8, 16)], 2, many * BLOCK, torch.float64, torch.device("cpu"), blocks=many + 1)
    blocks = Blocks(cache)
    blocks.reserve(1, BLOCK)
    blocks.reserve(0, many * BLOCK)
    for tensor in cache.tensors:
        tensor[:] = 1.0
    blocks.release(0)
    for tensor in cache.tensors:
        kept = int((tensor.flatten(1) != 0).any(dim=1).sum())
        assert WARM < kept < 2 * WARM and tensor[blocks.blocks_of(1)[0]].all()
    blocks.reserve(0, BLOCK)
    assert cache.tensors[0][blocks.blocks_of(0)[0]].all(), "the next block is one whose memory is still there"


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="has no blocks"):
        Blocks(KVCache([(1, 2, 1, 2)], 2, 8, torch.float32, torch.device("cpu")))
    blocks = Blocks(new_cache())
    with pytest.raises(ValueError, match=f"holds {CAPACITY} tokens, and {CAPACITY + 1}"):
        blocks.reserve(0, CAPACITY + 1)
    blocks.reserve(0, 10)
    with pytest.raises(ValueError, match="slot 0 is not empty"):
        blocks.share(0, [1, 2, 3])
    blocks.release(0)
    blocks.release(0)
    assert blocks.free_blocks == MANY
