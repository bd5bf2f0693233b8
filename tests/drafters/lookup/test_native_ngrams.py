"""Prompt lookup by native operators drafts what the definition in Python drafts, guess for guess."""

from copy import deepcopy
from random import Random

import pytest
import torch

from draftsmith.drafters.lookup.ngram import NativeNgramDrafter, NgramDrafter
from draftsmith.drafters.lookup.ngram_config import NgramConfig
from draftsmith.drafters.lookup.unread import MOST_UNREAD
from draftsmith.native import LIBRARY
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import Context
from tests.helpers.tiny import tiny_target

pytestmark = pytest.mark.skipif(not LIBRARY, reason="needs the native kernels")

CONFIGS = {
    "usual": NgramConfig(),
    "one length": NgramConfig(min_length=3, max_length=3),
    "single tokens": NgramConfig(min_length=1, max_length=1, guesses=3),
    "long": NgramConfig(min_length=2, max_length=10, guesses=12),
    "bounded": NgramConfig(min_length=1, factor=0.6, guesses=6),
    "several branches": NgramConfig(min_length=1, branches=3, guesses=4),
    "frequent": NgramConfig(min_length=1, match="frequent"),
    "frequent branches": NgramConfig(min_length=1, max_length=6, match="frequent", branches=4, guesses=5),
}
PLANS = [
    Plan((1,)), Plan((1,) * 3), Plan((1,) * 20), Plan((2, 1)), Plan((4,) + (1,) * 7), Plan((3, 3, 1), nodes=5),
    Plan((1,) * 8, factor=1.0), Plan((1,) * 8, factor=0.5), Plan((3, 1), factor=0.7), Plan((1,) * 3, factor=0.1),
    Plan((2,) + (1,) * 5, nodes=4, factor=0.3), Plan((1,) * 4, factor=1e300),
]


def context(news: dict[int, list[int]], width: int) -> Context:
    """Return rows, by number, with what was committed of each; `width` is at least the longest of them."""
    tokens_BT = torch.full((len(news), width), 7)  # what stands behind a row's own tokens is none of them
    for b, tokens in enumerate(news.values()):
        tokens_BT[b, : len(tokens)] = torch.tensor(tokens)
    counts_B, rows_B = torch.tensor([len(tokens) for tokens in news.values()]), torch.tensor(list(news))
    nothing_B = torch.zeros(len(news))
    return Context(
        tokens_BT, torch.empty(len(news), width, 0), counts_B, counts_B, rows_B, nothing_B, torch.zeros_like(rows_B)
    )


def texts(random: Random, vocabulary: int) -> list[int]:
    """Return some tokens, with what repeats among them now and then."""
    tokens = [random.randrange(vocabulary) for _ in range(random.randint(1, 4))]
    return tokens * random.choice([1, 1, 1, 3])


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("vocabulary", [3, 40, 128_000])
def test_every_draft_is_that_of_the_definition(name: str, vocabulary: int):
    """Rows come and go, some steps draft and others do not, and one row is padding."""
    random, known = Random(vocabulary), NgramDrafter(CONFIGS[name])
    native = NativeNgramDrafter(CONFIGS[name])
    guesses, rows, latest = 0, [0, 1, 2], 2
    for step in range(150):
        if step % 40 == 39:
            gone = rows.pop(random.randrange(len(rows)))
            known.reset_rows([gone]), native.reset_rows([gone, 1_000])
            latest += 1
            rows.append(latest)
        news = {number: texts(random, vocabulary) for number in [*rows, -1]}
        seen = context(news, max(map(len, news.values())) + step % 2)
        if random.random() < 0.3:
            known.follow(seen), native.follow(seen)
            continue
        plan = random.choice(PLANS)
        one, other = known.propose(seen, plan), native.propose(seen, plan)
        assert torch.equal(one.tokens_BN, other.tokens_BN) and torch.equal(one.parents_BN, other.parents_BN)
        assert (one.depth, one.branching, other.q_BMV) == (other.depth, other.branching, None)
        guesses += one.tokens_BN.numel()
    assert guesses > 100 or vocabulary == 128_000


def test_what_stands_behind_guesses_is_that_of_the_definition():
    random = Random(3)
    for config in CONFIGS.values():
        known, native = NgramDrafter(config), NativeNgramDrafter(config)
        found = 0
        for _ in range(40):
            seen = context({5: texts(random, 6), 9: texts(random, 6)}, 12)
            for one, other in zip(known.take_in(seen), native.take_in(seen), strict=True):
                ahead = [random.randrange(6) for _ in range(random.randrange(4))]
                assert one is not None and other is not None
                guesses = known.continue_row(one, ahead, 4)
                assert native.continue_row(other, ahead, 4) == guesses
                found += len(guesses)
        assert found > 40
    assert native.take_in(context({-1: [1]}, 1)) == [None]


def test_texts_grow_far_beyond_their_first_tables():
    random, known, native = Random(4), NgramDrafter(NgramConfig()), NativeNgramDrafter(NgramConfig())
    text = [random.randrange(9) for _ in range(5_000)]
    for begin in range(0, len(text), 500):
        # What ends with a new token looks for shorter and shorter n-grams.
        seen = context({0: [*text[begin : begin + 497], 100 + begin, 5, 6]}, 500)
        one, other = known.propose(seen, Plan((1,) * 8)), native.propose(seen, Plan((1,) * 8))
        assert torch.equal(one.tokens_BN, other.tokens_BN) and one.depth == 8


def test_what_was_followed_for_long_is_read_in_pieces():
    random, known, native = Random(5), NgramDrafter(NgramConfig()), NativeNgramDrafter(NgramConfig())
    for step in range(3 * MOST_UNREAD):
        seen = context({0: texts(random, 6), 1: texts(random, 6)}, 12 + step // 5 % 2)
        known.follow(seen), native.follow(seen)
    one, other = known.propose(seen, Plan((1,) * 8)), native.propose(seen, Plan((1,) * 8))
    assert torch.equal(one.tokens_BN, other.tokens_BN) and one.depth == 8


def test_a_copy_has_no_texts():
    native = NativeNgramDrafter(NgramConfig(min_length=1, factor=3.0))
    native.follow(context({0: [4, 5, 4]}, 3))
    copied = deepcopy(native)
    assert (copied.config, copied.factors) == (native.config, (1.5,))
    assert copied.propose(context({0: [4]}, 1), Plan((1, 1))).tokens_BN.shape == (1, 0)
    assert native.propose(context({0: [5]}, 1), Plan((1, 1))).tokens_BN.tolist() == [[4, 5]]


def test_what_cannot_be_read_is_refused_whole():
    native = NativeNgramDrafter(NgramConfig(min_length=1))
    wrong = context({0: [4, 5], 1: [4, 5]}, 2)
    wrong.counts_B = torch.tensor([2, 3])
    with pytest.raises(IndexError, match="no 3 of 2 tokens"):
        native.propose(wrong, Plan((1,)))
    with pytest.raises(RuntimeError, match="behind a text"):
        native.continue_row(0, [4], 2)


def test_nothing_is_left_of_another_engine_s_rows():
    native = NativeNgramDrafter(NgramConfig(min_length=1))
    assert native.propose(context({0: [4, 5, 4]}, 3), Plan((1, 1))).tokens_BN.tolist() == [[5, 4]]
    native.follow(context({0: [4, 5, 4]}, 3))
    native.attach(target().new_cache(1, 16), Plan((1, 1)))
    assert native.propose(context({0: [4]}, 1), Plan((1, 1))).tokens_BN.shape == (1, 0)


def target() -> Target:
    return tiny_target()
