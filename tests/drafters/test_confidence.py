"""Drafts that end where their drafter becomes unsure, against what the same drafter guesses without a bound."""

import math
from dataclasses import replace

import pytest
import torch

from draftsmith.drafters.grow import grow
from draftsmith.engine.policy import RowHistory
from draftsmith.plan import Plan
from draftsmith.types import ROOT, UNUSED, Draft, DraftsmithError
from tests.drafters.test_grow import RandomDrafter, context_of, search
from tests.helpers.contract import check_draft

LEAST = 0.12
CHAIN = Plan((1, 1, 1, 1))


def paths(draft: Draft, row: int) -> list[tuple[int, ...]]:
    """The guesses of a row, each with those before it, in the order of their nodes."""
    found: list[tuple[int, ...]] = []
    tokens, parents = draft.tokens_BN[row].tolist(), draft.parents_BN[row].tolist()
    for node, parent in enumerate(parents):
        found.append(() if parent == UNUSED else (*(found[parent] if parent != ROOT else ()), tokens[node]))
    return [path for path in found if path]


def likelihood(drafter: RandomDrafter, row: int, root: int, path: tuple[int, ...]) -> float:
    """The probability of guesses, worked out one by one."""
    return math.exp(sum(drafter.after(row, [root, *path[:at]])[token] for at, token in enumerate(path)))


@pytest.mark.parametrize(
    "plan",
    [CHAIN, Plan((6, 3, 2)), Plan((6, 3, 2), paths=4), Plan((6, 3, 2), nodes=7), Plan((4, 4, 4), beam=3),
     Plan((4, 2), paths=1)],
    ids=str,
)
def test_the_guesses_left_are_those_that_are_likely_enough(plan: Plan):
    drafter, context = RandomDrafter(), context_of(40)
    bounded = grow(drafter, context, replace(plan, confidence=LEAST))
    check_draft(bounded, plan, 40, 11)
    roots, dropped = context.root()[0].tolist(), 0
    for row, root in enumerate(roots):
        tokens, parents = search(drafter, row, root, plan)
        whole = paths(Draft(torch.tensor([tokens]), torch.tensor([parents]), plan.depth), 0)
        kept = [path for path in whole if likelihood(drafter, row, root, path) >= LEAST]
        assert paths(bounded, row) == kept
        dropped += len(whole) - len(kept)
    assert 0 < dropped < 40 * plan.max_nodes


def test_a_chain_is_no_longer_than_somebody_is_sure():
    drafter, context = RandomDrafter(), context_of(1)
    likely = drafter.after(0, [int(context.root()[0]), *grow(drafter, context, CHAIN).tokens_BN[0, :1].tolist()])
    first = max(drafter.after(0, [int(context.root()[0])]))
    between = math.exp(first + max(likely) / 2)
    draft = grow(drafter, context, replace(CHAIN, confidence=between))
    assert paths(draft, 0) == paths(grow(drafter, context, CHAIN), 0)[:1]
    assert draft.depth == draft.tokens_BN.shape[1] == 1, "no unused node is read for what is left out"
    nothing = grow(drafter, context, replace(CHAIN, confidence=0.999))
    assert (nothing.depth, nothing.tokens_BN.shape) == (0, (1, 0))


def test_whether_there_is_a_guess_does_not_say_which():
    """What shares the target's noise ends by the likeliest token of every place, whichever was drawn."""
    drafter, rows = RandomDrafter(spread=1.0), 4000
    context = context_of(rows, temperature=1.0)
    same = replace(
        context, tokens_BT=torch.zeros_like(context.tokens_BT), counts_B=torch.ones_like(context.counts_B),
        rows_B=torch.zeros_like(context.rows_B), lengths_B=torch.full_like(context.lengths_B, 9),
    )
    whole, bounded = (grow(drafter, same, plan) for plan in (CHAIN, replace(CHAIN, confidence=0.06)))
    peak = max(drafter.after(0, [0]))
    counts = set()
    for row in range(rows):
        drawn = whole.tokens_BN[row].tolist()
        sureness, length = peak, 0
        while length < CHAIN.depth and sureness >= math.log(0.06):
            length += 1
            if length < CHAIN.depth:
                sureness += max(drafter.after(0, [0, *drawn[:length]]))
        assert paths(bounded, row) == paths(whole, row)[:length]
        counts.add(length)
    assert len(counts) > 2


@pytest.mark.parametrize("value", [0.0, 1.01, -0.5, 1.5, float("nan")])
def test_a_confidence_is_a_probability(value: float):
    with pytest.raises(DraftsmithError, match="confidence is .*; use a probability above 0 and no more than 1"):
        Plan((1, 1), confidence=value)


def test_confidence_goes_with_the_likeliest_guesses():
    with pytest.raises(DraftsmithError, match="leave it out, or sampled"):
        Plan((1, 1), sampled=True, confidence=0.5)
    with pytest.raises(DraftsmithError, match="leave it out, or choices"):
        Plan(choices=((0,), (1,)), confidence=0.5)
    assert Plan(choices=((0,), (0, 0)), confidence=0.5) == Plan((1, 1), confidence=0.5)


def test_a_policy_does_not_learn_how_many_guesses_a_sampled_row_had():
    """How many there were may go by what was drawn for the first of them, with the noise of tokens to come."""
    bounded, plain = Plan((1, 1, 1), confidence=0.3), Plan((1, 1, 1))
    for sampled, plan, entry, stands_for in (
        (True, bounded, 1, 1.7), (True, plain, 1, 1.7), (False, bounded, 3, 3), (False, plain, 3, 3),
    ):
        history = RowHistory(sampled, 5)
        history.note(1, 3, plan)
        assert (history.accepted, history.drafted) == ([1], [entry])
        assert history.guesses(history.drafted[0], plan, 1.7) == stands_for


def test_a_policy_learns_how_many_guesses_a_lookup_had_and_not_how_many_were_made_behind_it():
    """What a lookup finds is known before the tokens to come are."""
    both = Plan((1, 1, 1), factor=1.0, confidence=0.3)
    for sampled, constrained, behind, entry, stands_for in (
        (True, False, True, 1, 1.7), (True, False, False, 3, 3), (False, False, True, 3, 3),
        (False, True, False, 1, 1.7), (False, True, True, 1, 1.7),
    ):
        history = RowHistory(sampled, 5, constrained=constrained)
        history.note(1, 3, both, behind)
        assert list(history.steps(0)) == [(1, entry, behind)]
        assert history.guesses(entry, both, 1.7, behind) == stands_for
