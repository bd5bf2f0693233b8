"""What trials cost: a share of all tokens, however many texts there are, and of what drafts gain."""

from itertools import groupby

import pytest

from draftsmith.engine.arm import Arm
from draftsmith.engine.evidence import FIRST_WAIT, TRIAL, Evidence, RowEvidence
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.known import Known
from draftsmith.engine.policy import Load, RowHistory
from draftsmith.engine.profile import Profile
from draftsmith.engine.purse import LENT, LENT_LITTLE, LOST, LOST_LITTLE, MOST_CHARGED, SAVED, Purse, share_lost
from draftsmith.engine.trials import CALL, SHORT, Offer, Trials
from draftsmith.plan import NO_DRAFT, Plan
from tests.helpers.profiles import go, profile


def test_a_trial_is_paid_from_what_was_written_or_lent():
    purse = Purse()
    assert purse.tokens_until(False, 2.0, 0.0) == 2.0 / LOST
    purse.earn(False, 1.0 / LOST)
    assert not purse.pay(False, 2.0, 0.0) and purse.pay(False, 2.0, 1.5), "half a token is owed now, and more"
    assert not purse.pay(False, 1.0, 1.5) and purse.tokens_until(False, 1.0, 1.5) == 0.5 / LOST
    purse.earn(False, 0.0, 1e9)
    assert purse.pay(False, SAVED, 0.0) and not purse.pay(False, 0.1, 0.0), "no more than so much is saved up"
    assert not purse.pay(True, 0.1, 0.0), "sampled texts have a purse of their own"


def test_what_short_texts_lose_by_trials_is_a_share_of_all_of_them():
    """Every text begins anew, and no guess ever stays: a step with a guess costs 0.3 steps more for each guess."""
    for sampled, share, lent in ((False, LOST, LENT), (True, LOST_LITTLE, 0.0)):
        policy = Fitted(Known(profile(cost=0.3)))
        for _ in range(20):  # it learns that nothing stays
            go(policy, RowHistory(sampled, 5), 50, 0)
        depths = [depth for _ in range(100) for depth in go(policy, RowHistory(sampled, 5), 50, 0)]
        # A trial was expected to lose less: some of its guesses might have stayed.
        assert 0 < 0.3 * sum(depths) < 1.5 * share * len(depths) + lent


@pytest.mark.parametrize(("sampled", "count"), [(False, 2), (True, 1)])
def test_a_trial_that_loses_more_than_expected_is_paid_for_later(sampled: bool, count: int):
    """No guess ever stays, and the first step of a trial takes as long as was measured, or four times as long."""
    tries = []
    for slow in (1, 4):
        # The steps take so short that all rows draft alike.
        arms = (Arm(NO_DRAFT, (), (1e-3, 2e-3)), Arm(Plan((1,)), (0.6,), (1.3e-3, 2.6e-3)))
        policy, before, tried = Fitted(Known(Profile((1, 2), arms)), learns_times=True), 0, []
        rows = [RowHistory(sampled, 5) for _ in range(count)]
        for _ in range(4000):
            [choice] = set(policy.choose(Load(count, 0, 0, 2), rows))
            depth = choice.plan.depth
            policy.timed(arms[depth].seconds[count - 1] * (slow if depth and not before else 1))
            for row in rows:
                row.note(0, depth, choice.plan)
            before = depth
            tried.append(depth > 0)
        tries.append(sum(tried[200:]))
    assert 0 < tries[1] < 0.7 * tries[0]


def test_several_rows_lose_less_to_trials_than_one():
    assert share_lost(False) == LOST > LOST_LITTLE == share_lost(True) == share_lost(False, rows=2)
    purse = Purse()
    purse.earn(False, 1 / LOST_LITTLE, rows=4)
    assert purse.pay(False, 1.0, 0.0, rows=4) and not purse.pay(False, 0.1, 0.0, rows=4)
    purse.charge(False, -1.0, rows=4)
    assert purse.pay(False, 1.0, 0.0, rows=4), "what a trial did not lose is given back"
    purse.charge(False, 1e9, rows=4)
    assert not purse.pay(False, 0.1, MOST_CHARGED, rows=4) and purse.pay(False, 0.0, MOST_CHARGED, rows=4)
    for _ in range(9):
        purse.charge(False, MOST_CHARGED, rows=64)
    purse.earn(False, SAVED * 64 / LOST)
    assert purse.pay(False, 0.0, 0.0), "no more than so much is owed"


def test_where_trials_lead_to_drafts_more_can_be_tried():
    failing, fruitful = (Fitted(Known(profile(cost=0.3))) for _ in range(2))
    for _ in range(20):
        go(failing, RowHistory(False, 5), 50, 0)
    row = RowHistory(False, 5)
    go(fruitful, row, 300, 4)
    tries = []
    for policy in (failing, fruitful):
        depths = go(policy, RowHistory(False, 5), 300, 0)
        tries.append(sum(depth > 0 for depth in depths[20:]))
    assert tries[1] > tries[0]


def test_less_is_lent_where_other_drafts_pay_and_nothing_in_sampled_texts():
    """Two guessers with a plan each; steps take no time, so that a trial loses just what its plan brings less."""
    asks = (
        (LENT - 1, 0, False, 1, False, 2), (LENT + 1, 0, False, 1, False, 0), (LENT_LITTLE - 1, 1, False, 1, False, 2),
        (LENT_LITTLE + 1, 1, False, 1, False, 1), (1.0, 0, True, 1, False, 0), (LENT_LITTLE - 1, 0, False, 4, False, 2),
        (LENT_LITTLE / CALL - 0.5, 0, False, 4, True, 2), (LENT_LITTLE / CALL + 0.5, 0, False, 4, True, 0),
    )
    for loss, chosen, sampled, rows, closes, taken in asks:
        trials = Trials([-1, 0, 1], [(), (0,), (1,)], 2, [1.0, 9.0, 9.0])
        evidence = [Evidence(20, since=since) for since in (0, FIRST_WAIT)]
        values = [1.0, 1.0, 1.0 - loss / TRIAL]
        offer = Offer(values, 0.0, [0.0] * 3, [0.0] * 3, left=SHORT + 1, rows=rows, closes=closes)
        row = RowEvidence(evidence, 0, arm=chosen, sampled=sampled)
        assert trials.due(row, offer, chosen, extra=0.0) == taken, (loss, chosen, sampled, rows, closes)


def test_what_was_tried_in_vain_does_not_stay_instead_of_what_was_drafted_before():
    """Of two drafters the first was measured to be better, but of either all guesses stay."""
    first, second = (
        Profile((1,), (Arm(NO_DRAFT, (), (1.0,)), Arm(Plan((1,) * 2), (kept, kept), (1.3,)))) for kept in (0.8, 0.76)
    )
    policy, history, names = Fitted(Known(first, "first"), Known(second, "second")), RowHistory(False, 5), []
    for _ in range(2000):
        (choice,) = policy.choose(Load(1, 0, 0, 1), [history])
        assert choice.drafter is not None
        names.append(choice.drafter)
        history.note(2, 2, choice.plan)
    runs = [(name, len(list(alike))) for name, alike in groupby(names)]
    tried = [steps for name, steps in runs if name == "second"]
    assert tried and max(tried) <= TRIAL and runs[0][0] == "first"
