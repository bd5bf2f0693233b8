"""Drafting without training and without a second model: prompt lookup, and the contract of all.

B rows, N drafted nodes, M = N + 1 verified nodes (root first), T context tokens.
"""

from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import torch

from draftsmith.drafters.base import Drafter
from draftsmith.drafters.lookup.ngram import NgramConfig, NgramDrafter, NgramIndex
from draftsmith.drafters.lookup.suffix import SuffixConfig, SuffixDrafter
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Engine, OffAbove
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import ROOT, Draft, DraftsmithError, SamplingParams
from tests.drafters.lookup.lookup_toy import context_of, counting_model, trees
from tests.helpers.contract import check_draft, check_drafter
from tests.helpers.tiny import VOCABULARY, greedy_reference, prompts, tiny_model, tiny_target

SPECS = [
    "ngram:min_length=1",
    "ngram:min_length=1,max_length=2,branches=3,match=frequent",
    "suffix",
    "lookahead:window=3,length=3,guesses=3",
]


def propose(drafter: Drafter, rows: dict[int, Sequence[int]], plan: Plan | None = None) -> Draft:
    plan = plan if plan is not None else drafter.default_plan()
    draft = drafter.propose(context_of(rows, width=3), plan)
    check_draft(draft, plan, len(rows), VOCABULARY, can_sample=False)
    return draft


def chain(draft: Draft) -> list[int]:
    [(tokens, parents)] = trees(draft)
    assert parents == list(range(-1, len(tokens) - 1))
    return tokens


def ngram(**options: Any) -> NgramDrafter:
    return NgramDrafter(NgramConfig(**options))


def suffix(**options: Any) -> SuffixDrafter:
    return SuffixDrafter(SuffixConfig(**options))


@pytest.fixture(scope="module")
def counting() -> Target:
    return Target(counting_model(), name="counting")


# The contract


@pytest.mark.parametrize("architecture", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("spec", SPECS)
def test_the_text_stays_the_targets(spec: str, architecture: str):
    target = tiny_target(architecture)
    plan = Plan((2, 2, 1), nodes=5) if architecture == "gpt2" else Plan((1, 1, 1), sampled=True)
    check_drafter(lambda: load_drafter(spec, target), target, tiny_model(architecture), plans=[None, plan])


def test_drafts_of_changing_size_make_few_compiled_shapes():
    question = [5, 6, 7, 5, 6]
    target = Target(tiny_model(), name="traced")
    engine = Engine(target, load_drafter("suffix:factor=2", target), max_batch=1, compile="trace")
    # With a draft or without: a third variant is an error.
    with torch._dynamo.config.patch(recompile_limit=2):
        [found] = engine.generate([question], SamplingParams(max_tokens=50))
    assert found.tokens == greedy_reference(tiny_model(), question, 50)
    assert 0 < found.statistics.drafted < found.statistics.steps * engine.plan.max_nodes


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("ngram:min_length=5,max_length=3", "min_length is 5; it must be at most max_length, which is 3"),
        ("ngram:guesses=0", "ngram:guesses is 0"),
        ("ngram:matches=recent", "did you mean ngram:match"),
        ("ngram:match=oldest", "ngram:match is 'oldest'"),
        ("suffix:factor=0", "suffix:factor is 0"),
        ("suffix:min_probability=2", "suffix:min_probability is 2"),
        ("lookahead:length=1", "lookahead:length is 1"),
    ],
)
def test_wrong_options_are_named(spec: str, message: str):
    with pytest.raises(DraftsmithError, match=message):
        load_drafter(spec, tiny_target())


# Prompt lookup


def test_the_continuation_of_the_match_is_drafted():
    assert chain(propose(ngram(guesses=3), {0: [1, 2, 3, 4, 5, 9, 1, 2]})) == [3, 4, 5]
    assert chain(propose(ngram(guesses=3), {0: [1, 2, 3, 4, 5, 9, 1, 2]}, Plan((1, 1)))) == [3, 4]


def test_longer_matches_come_first():
    text = [7, 1, 2, 8, 5, 1, 2, 9, 7, 1, 2]
    assert chain(propose(ngram(guesses=1, max_length=3), {0: text})) == [8]
    assert chain(propose(ngram(guesses=1, max_length=2), {0: text})) == [9]


def test_recent_and_frequent_matches():
    text = [1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 4, 5, 1, 2]
    assert chain(propose(ngram(guesses=2), {0: text})) == [4, 5]
    assert chain(propose(ngram(guesses=2, match="frequent"), {0: text})) == [3, 0]


def test_branches_differ_in_their_first_token():
    text = [1, 2, 3, 0, 1, 2, 3, 6, 1, 2, 4, 5, 1, 2]
    found = trees(propose(ngram(guesses=2, branches=3), {0: text}))
    assert found == [([4, 5, 3, 6], [ROOT, 0, ROOT, 2])]
    assert trees(propose(ngram(guesses=2, branches=3), {0: text}, Plan((2, 1), nodes=3))) == [
        ([4, 5, 3], [ROOT, 0, ROOT])
    ]


def test_a_copy_that_meets_its_own_end_goes_on():
    assert chain(propose(ngram(guesses=7), {0: [9, 5, 6, 5, 6]})) == [5, 6, 5, 6, 5, 6, 5]


@pytest.mark.parametrize("make", [ngram, suffix])
def test_a_plan_may_ask_for_guesses_by_the_length_of_the_match(make):
    """Four tokens stood before."""
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 9, 3, 4, 5, 6]
    for factor, guesses in {None: 4, 2.0: 4, 1.0: 4, 0.75: 3, 0.5: 2, 0.25: 1, 0.2: 0}.items():
        found = chain(propose(make(), {0: text}, Plan((1,) * 4, factor=factor)))
        assert found == [7, 8, 9, 1][:guesses], factor
    longer = [1, 2, 3, 4, 5, 6, 7, 8, 9, 9, *range(1, 7)]
    assert chain(propose(make(), {0: longer}, Plan((1,) * 4, factor=0.5))) == [7, 8, 9]


def test_a_factor_of_its_own_bounds_every_plan():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 9, 3, 4, 5, 6]
    for own, asked, guesses in ((0.5, None, 2), (0.5, 1.0, 2), (1.0, 0.5, 2), (0.5, 0.25, 1), (0.25, 9.0, 1)):
        for drafter in (ngram(factor=own), suffix(factor=own)):
            found = chain(propose(drafter, {0: text}, Plan((1,) * 4, factor=asked)))
            assert found == [7, 8, 9, 1][:guesses], (own, asked)
    assert ngram(factor=0.5).factors == (0.25,)


@pytest.mark.parametrize("word", ["ngram:factor=0", "ngram:factor=inf", "suffix:factor=nan"])
def test_a_factor_is_a_positive_number(word: str):
    with pytest.raises(DraftsmithError, match="factor"):
        load_drafter(word, tiny_target("llama"))


def test_every_branch_is_bounded_by_its_own_match():
    text = [5, 1, 2, 3, 7, 7, 4, 2, 3, 8, 8, 5, 1, 2, 3]
    both = trees(propose(ngram(branches=2, min_length=1), {0: text}, Plan((2, 1, 1, 1), factor=0.75)))
    assert both == [([7, 7, 4, 8], [ROOT, 0, 1, ROOT])], "a match of four, and one of two"


def test_only_a_lookup_that_knows_the_length_of_a_match_is_asked_for_guesses_by_it():
    assert ngram().factors == (1.0, 0.5) and suffix().factors == (0.5,) and suffix(factor=2).factors == (1.0,)
    assert load_drafter("lookahead", tiny_target("llama")).factors == ()


def test_without_a_match_nothing_is_drafted():
    draft = propose(ngram(), {0: [1, 2, 3, 4], 1: [5]})
    assert draft.tokens_BN.shape == (2, 0) and draft.depth == 0
    assert trees(propose(ngram(guesses=1), {2: [1, 2, 3, 1, 2], 3: [1, 2]})) == [([3], [ROOT]), ([], [])]


def test_rows_keep_their_texts_when_they_move_and_lose_them_when_they_end():
    drafter = ngram(guesses=1)
    propose(drafter, {4: [1, 2, 3, 1], 7: [1, 2, 8, 1], -1: [1]})
    assert trees(propose(drafter, {7: [2], -1: [2], 4: [2]})) == [([8], [ROOT]), ([], []), ([3], [ROOT])]
    drafter.reset_rows([4])
    assert trees(propose(drafter, {4: [1, 2], 7: [8]})) == [([], []), ([1], [ROOT])]


def searched(text: list[int], options: NgramConfig) -> list[int]:
    """Find what to draft by reading the whole text."""
    for n in range(options.max_length, options.min_length - 1, -1):
        for place in range(len(text) - 1, n - 1, -1):
            if text[place - n : place] == text[-n:] and len(text) > n:
                grown = list(text)
                for offset in range(options.guesses):
                    grown.append(grown[place + offset])
                return grown[len(text) :]
    return []


def test_the_index_finds_what_a_search_finds():
    random = Random(0)
    options = NgramConfig(min_length=1, max_length=3, guesses=4)
    drafter, text = NgramDrafter(options), []
    drafted = 0
    for _ in range(120):
        new = [random.randrange(12) for _ in range(random.randint(1, 3))]
        text += new
        found = chain(propose(drafter, {0: new}))
        assert found == searched(text, options)
        drafted += bool(found)
    assert 60 < drafted < 120


def test_a_text_for_which_nothing_is_looked_up_is_not_read():
    class Watched(NgramDrafter):
        """Notes which rows were read."""

        def __init__(self) -> None:
            super().__init__(NgramConfig(min_length=1))
            self.read = 0

        def new_row(self) -> NgramIndex:
            self.read += 1
            return super().new_row()

    drafter = Watched()
    engine = Engine(tiny_target(), drafter, policy=OffAbove(Plan((1,)), rows=1), max_batch=2)
    engine.generate(prompts(2, seed=4), SamplingParams(max_tokens=20, ignore_eos=True))
    assert drafter.read == 0
    engine.generate(prompts(1, seed=4), SamplingParams(max_tokens=20, ignore_eos=True))
    assert drafter.read == 1


@pytest.mark.parametrize("make", [ngram, suffix])
def test_rows_are_read_while_nothing_is_drafted(make):
    drafter = make()
    drafter.follow(context_of({0: [1, 2, 3, 4], -1: [1]}))
    drafter.follow(context_of({0: [1], -1: [1]}))
    assert chain(propose(drafter, {0: [2]}, Plan((1, 1)))) == [3, 4]


# How much it brings


@pytest.mark.parametrize("spec", ["ngram:guesses=8", "suffix:factor=4,nodes=8,depth=8"])
def test_a_copied_text_is_accepted_whole(counting: Target, spec: str):
    question = [*range(10, 60), 0, *range(10, 14)]
    [found] = Engine(counting, load_drafter(spec, counting)).generate([question], SamplingParams(max_tokens=46))
    assert found.tokens == list(range(14, 60))
    assert found.accepted_lengths == [8, 8, 8, 8, 8]


@pytest.mark.parametrize("spec", ["ngram:guesses=8", "suffix:factor=4,nodes=8,depth=8"])
def test_an_edited_text_is_accepted_but_for_the_edits(counting: Target, spec: str):
    draft_of_text = list(range(10, 60))
    draft_of_text[14] = draft_of_text[30] = 1  # two mistakes that the target corrects
    question = [*draft_of_text, 0, *range(10, 14)]
    [found] = Engine(counting, load_drafter(spec, counting)).generate([question], SamplingParams(max_tokens=46))
    assert found.tokens == list(range(14, 60))
    assert found.statistics.accepted >= 46 - 12


# Guesses behind tokens that a row may never have


@pytest.mark.parametrize("drafter", [ngram(min_length=1), suffix()], ids=["ngram", "suffix"])
def test_a_lookup_goes_on_behind_guesses_and_forgets_them(drafter: NgramDrafter | SuffixDrafter):
    text = [5, 1, 2, 3, 4, 9, 8, 1, 2, 3]
    plan = Plan((1,) * 3)
    before = chain(propose(drafter, {0: text}, plan))
    [row] = drafter.take_in(context_of({0: [4]}, width=1))
    assert before[:2] == [4, 9]
    assert drafter.continue_row(row, [], 3)[:2] == [9, 8]  # type: ignore[arg-type]
    assert drafter.continue_row(row, [9], 1) == [8]  # type: ignore[arg-type]
    assert drafter.continue_row(row, [7, 5, 1], 2)[:1] == [2]  # type: ignore[arg-type]
    assert drafter.continue_row(row, [7], 2) == [], "it stands nowhere"  # type: ignore[arg-type]
    fresh = type(drafter)(drafter.config)  # type: ignore[arg-type]
    propose(fresh, {0: text}, plan)
    assert chain(propose(drafter, {0: [9]}, plan)) == chain(propose(fresh, {0: [4, 9]}, plan))


def test_prompt_lookup_copies_guesses_where_the_text_ends():
    drafter = ngram(min_length=2, guesses=8)
    [row] = drafter.take_in(context_of({0: [1, 2, 3, 4]}, width=4))
    assert row is not None
    assert drafter.continue_row(row, [1, 2], 6) == [3, 4, 1, 2, 3, 4]
    assert drafter.continue_row(row, [6, 2, 3], 3) == [4, 6, 2]
