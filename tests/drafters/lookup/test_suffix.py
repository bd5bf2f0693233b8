"""Suffix drafting: what the tree holds, what is remembered and what is forgotten."""

from collections.abc import Sequence
from random import Random

import pytest

from draftsmith.drafters.lookup.suffix import Memory
from draftsmith.engine import Engine
from draftsmith.engine.guarded import Guarded
from draftsmith.plan import NO_DRAFT
from draftsmith.types import ROOT, SamplingParams
from tests.drafters.lookup.lookup_toy import trees
from tests.drafters.lookup.test_lookup import chain, propose, suffix
from tests.helpers.tiny import VOCABULARY, prompts, tiny_target


def test_the_likeliest_continuations_make_the_tree():
    text = [1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2]
    # 3 followed in two of three cases, both times with 1 and 2 behind it; 4 in one, and then all of it over again.
    wide = propose(suffix(factor=3, min_probability=0.2), {0: text})
    assert trees(wide) == [([3, 1, 2, 4, 3, 4], [ROOT, 0, 1, ROOT, 2, 2])]
    assert chain(propose(suffix(factor=3, min_probability=0.5), {0: text})) == [3, 1, 2]
    assert chain(propose(suffix(factor=3, branches=1, nodes=4), {0: text})) == [3, 1, 2, 3]


def test_a_match_of_p_tokens_is_worth_factor_times_p_guesses():
    text = [*range(10, 40), 5, *range(10, 16)]
    for factor, guesses in ((0.5, 3), (1.0, 6), (1.5, 9), (4.0, 12)):
        assert chain(propose(suffix(factor=factor), {0: text})) == list(range(16, 16 + guesses))
    assert chain(propose(suffix(factor=1, max_length=4), {0: text})) == [16, 17, 18, 19]


def test_the_shorter_match_wins_where_it_promises_more():
    # After 9, 1 one of three tokens followed, each once; after 1 alone it was 7 eight times more.
    text = [9, 1, 2, 9, 1, 3, 9, 1, 7, *[5, 1, 7] * 8, 9, 1]
    assert chain(propose(suffix(factor=1, branches=1), {0: text})) == [7]
    assert propose(suffix(factor=1, branches=1, min_probability=0.9), {0: text}).depth == 0


def test_tokens_may_come_in_any_pieces():
    random = Random(1)
    text = [random.randrange(5) for _ in range(200)]
    pieces, whole = suffix(factor=2), suffix(factor=2)
    start = 0
    while start < len(text):
        stop = start + random.randint(1, 4)
        in_pieces = trees(propose(pieces, {0: text[start:stop]}))
        start = stop
    assert in_pieces == trees(propose(whole, {0: text})) != [([], [])]


def occurrences(pattern: list[int], texts: Sequence[list[int]]) -> int:
    return sum(text[i : i + len(pattern)] == pattern for text in texts for i in range(len(text)))


def test_the_memory_counts_what_it_holds_and_forgets_the_oldest():
    random = Random(2)
    memory, most, depth = Memory(depth=6, most=60), 60, 6
    given: list[list[int]] = []
    seen = set()
    for _ in range(60):
        given.append([random.randrange(3) for _ in range(random.randint(1, 30))])
        memory.add(given[-1])
        memory.count(random.choice((1, 40, None)))
        memory.count()
        held: list[list[int]] = []
        for text in reversed(given):
            if sum(map(len, held)) + len(text) > most:
                break
            held.append(text)
        assert memory.tokens == sum(map(len, held)) <= most
        for _ in range(40):
            pattern = [random.randrange(3) for _ in range(random.randint(1, depth))]
            match = memory.trie.find(pattern)
            expected = occurrences(pattern, held)
            seen.add(min(expected, 3))
            assert (0 if match is None else match.times) == expected
    assert seen == {0, 1, 2, 3}


def test_what_waits_to_be_counted_is_counted_in_pieces_and_forgotten_like_the_rest():
    memory = Memory(depth=4, most=12)
    for first in (10, 20, 30):
        memory.add(list(range(first, first + 4)))
    assert memory.tokens == 12 and all(memory.trie.find([first, first + 1]) is None for first in (10, 20, 30))
    memory.count(1)
    assert memory.trie.find([10, 11]) is not None and memory.trie.find([20, 21]) is None
    memory.add(list(range(40, 48)))  # the first two make room, one counted and one not
    memory.count()
    found = [first for first in (10, 20, 30, 40) if memory.trie.find([first, first + 1]) is not None]
    assert memory.tokens == 12 and found == [30, 40]


def test_a_text_longer_than_the_memory_leaves_its_end():
    memory = Memory(depth=4, most=5)
    memory.add(list(range(9)))
    memory.count()
    assert memory.tokens == 5
    assert memory.trie.find([3, 4]) is None and memory.trie.find([7, 8]) is not None


def test_earlier_outputs_are_drafted_if_asked():
    output = [21, 22, 23, 24, 25]
    for remember, expected in ((True, [23, 24]), (False, [])):
        drafter = suffix(remember=remember)
        propose(drafter, {0: [9, *output[:1]]})
        for token in output[1:]:
            assert propose(drafter, {0: [token]}).depth == 0
        drafter.reset_rows([0])
        propose(drafter, {0: [8, 21]})
        assert chain(propose(drafter, {0: [22]})) == expected


def test_the_second_time_everything_is_remembered():
    question = prompts(1, seed=4)[0]
    engine = Engine(tiny_target(), suffix(factor=4, remember=True))
    params = SamplingParams(max_tokens=60, temperature=1.0, seed=8)
    [plain] = engine.generate([question], params, plan=NO_DRAFT)
    [first] = engine.generate([question], params)
    [second] = engine.generate([question], params)
    assert plain.tokens == first.tokens == second.tokens
    assert first.statistics.tokens_per_step < 2 and second.statistics.tokens_per_step > 5


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("piece", [100, 64, 7])
def test_prompts_are_not_remembered_however_they_are_read(piece: int, guarded: bool):
    [question] = prompts(1, shortest=90, longest=90)
    own = suffix(remember=True, max_length=16)
    drafter = Guarded(own, "suffix", VOCABULARY) if guarded else own
    engine = Engine(tiny_target(), drafter, max_length=120, piece_tokens=piece)
    for _ in range(2):  # the second one begins with what the first has left in the cache
        engine.generate([question], SamplingParams(max_tokens=20))
    own.catch_up()
    # Of each the end of the prompt, by which it is found, and the output, but for its last step.
    assert 2 * (16 + 8) < own.memory.tokens <= 2 * (16 + 19)
