"""A fitted policy over a lookup with another drafter behind it: each is known by its own guesses."""

from dataclasses import replace

from draftsmith.engine.arm import Arm, Behind
from draftsmith.engine.evidence import FIRST_WAIT
from draftsmith.engine.fitted import Fitted
from draftsmith.engine.known import Known
from draftsmith.engine.policy import RowHistory
from draftsmith.engine.profile import Profile, Sampled
from draftsmith.engine.purse import LOST_LITTLE
from draftsmith.engine.reasons import Weighed
from draftsmith.plan import NEVER_SURE, NO_COPY, NO_DRAFT, Plan
from tests.helpers.profiles import load, tokens_found

BOTH = Plan((1,) * 4, factor=1.0, confidence=0.1)
ALONE = replace(BOTH, confidence=NEVER_SURE)
UNAIDED = Plan((1, 1), factor=NO_COPY)
USUAL = Sampled()


def profile(behind_costs: float = 0.2, sampled: Sampled = USUAL) -> Profile:
    """Four guesses are found at every fifth step, of which three stay; elsewhere two may be guessed; one stays."""
    kept, looked_up = (0.9, 0.8, 0.7, 0.6), 1.0 + 0.2 * 4 * 0.1
    alone = Arm(ALONE, kept, (looked_up,), tokens_found(0.2, 3.0), (1.4,), 4.0)
    took = looked_up + 0.8 * 2 * behind_costs
    both = Arm(BOTH, kept, (took,), tokens_found(0.2, 3.0, 1.0), (1.4,), 4.0, Behind((0.6, 0.4), 2.0, (behind_costs,)))
    return Profile((1,), (Arm(NO_DRAFT, (), (1.0,)), alone, both), sampled=sampled)


def policy(behind_costs: float = 0.2, sampled: Sampled = USUAL) -> Fitted:
    return Fitted(Known(profile(behind_costs, sampled), hope=100.0))


def go(asked: Fitted, history: RowHistory, steps: int, found: int, stay: int, stay_behind: int) -> list[Plan]:
    """Ask and answer: every so many steps, 0 being none, something is found; return what was drafted."""
    plans = []
    for step in range(steps):
        (choice,) = asked.choose(load(1), [history])
        plans.append(choice.plan)
        if choice.plan == NO_DRAFT:
            history.note(0, 0, choice.plan)
        elif found and step % found == 0:
            history.note(stay, 4, choice.plan)
        else:
            history.note(stay_behind if choice.plan == BOTH else 0, 2 if choice.plan == BOTH else 0, choice.plan,
                         choice.plan == BOTH)
    return plans


def test_the_lookup_goes_on_alone_where_what_is_guessed_behind_it_fails():
    assert go(policy(), RowHistory(False, 5), 200, found=3, stay=4, stay_behind=0)[-100:].count(ALONE) > 85


def test_what_is_guessed_behind_it_goes_on_where_it_stays_and_little_is_found():
    plans = go(policy(), RowHistory(False, 5), 200, found=9, stay=1, stay_behind=2)
    assert plans[-100:] == [BOTH] * 100


def test_nothing_is_drafted_where_neither_helps():
    assert go(policy(), RowHistory(False, 5), 400, found=2, stay=0, stay_behind=0)[-100:].count(NO_DRAFT) > 75


def test_a_lookup_that_is_known_from_steps_of_both_needs_no_trial_of_its_own():
    asked, history = policy(0.1), RowHistory(False, 5)
    assert go(asked, history, 500, found=5, stay=4, stay_behind=2) == [BOTH] * 500
    (why,) = asked.reasons(load(1), [history])
    assert isinstance(why, Weighed) and why.label == "pays" and why.behind > 1.0
    assert why.sentence().startswith("chain of up to 4 with 1 guess for each matched token and guesses at least 10 %")


def test_what_one_text_tells_of_either_is_how_the_next_one_begins():
    asked = policy()
    go(asked, RowHistory(False, 5), 300, found=3, stay=4, stay_behind=0)
    assert go(asked, RowHistory(False, 5), 1, 0, 0, 0) == [ALONE]


def test_in_a_sampled_text_trials_cost_no_more_than_a_share_of_what_was_written():
    asked = policy(0.2, Sampled(0.05, 0.05, 1.0, 0.05))
    plans = go(asked, RowHistory(True, 5), 300, found=0, stay=0, stay_behind=0)
    assert plans.index(BOTH) > 2 * FIRST_WAIT
    lost = 0.4 * plans.count(BOTH)
    assert 0 < lost < 2 * LOST_LITTLE * len(plans), "looking up costs next to nothing where nothing is found"
    greedy = go(policy(), RowHistory(False, 5), 300, found=0, stay=0, stay_behind=0)
    assert greedy.count(BOTH) > plans.count(BOTH)


def test_short_matches_in_sampled_texts_make_no_guesses_behind_the_lookup_cheap():
    """Behind the lookup a confidence bounds the guesses, and not the length of a match."""
    for sampled in (Sampled(found=0.5, length=0.25, behind=0.3), Sampled(found=0.5, behind=0.3)):
        [plan] = go(policy(0.3, sampled), RowHistory(True, 5), 1, 0, 0, 0)
        assert plan == ALONE, "at a quarter of their cost, they would pay"


def with_unaided(takes: float = 1.4) -> Fitted:
    """The same, and the drafter behind the lookup may draft alone: it is as good there as behind it."""
    measured = profile()
    arms = (*measured.arms, Arm(UNAIDED, (0.6, 0.4), (takes,)))
    return Fitted(Known(Profile(measured.rows, arms), hope=100.0))


def go_with_unaided(asked: Fitted, history: RowHistory, steps: int, copied: int, guessed: int) -> list[Plan]:
    """Ask and answer: every second step something is found, of which so much stays; of other guesses so many."""
    plans = []
    for step in range(steps):
        (choice,) = asked.choose(load(1), [history])
        plans.append(choice.plan)
        if choice.plan == UNAIDED:
            history.note(guessed, 2, choice.plan)
        elif choice.plan != NO_DRAFT and step % 2:
            history.note(copied, 4, choice.plan)
        elif choice.plan == BOTH:
            history.note(guessed, 2, choice.plan, True)
        else:
            history.note(0, 0, choice.plan)
    return plans


def test_nothing_is_looked_up_where_matches_mislead():
    plans = go_with_unaided(with_unaided(), RowHistory(False, 5), 400, copied=0, guessed=2)
    assert plans[-200:].count(UNAIDED) > 180


def test_steps_that_tell_of_both_count_as_a_trial_of_both():
    """Neither what is looked up nor what is guessed stays: the pauses grow, whichever of them was tried."""
    plans = go_with_unaided(with_unaided(), RowHistory(False, 5), 600, copied=0, guessed=0)
    assert 0 < sum(plan != NO_DRAFT for plan in plans[300:]) < 60


def test_lookups_come_back_where_matches_do_not_mislead():
    asked, history = with_unaided(), RowHistory(False, 5)
    go_with_unaided(asked, history, 300, copied=0, guessed=1)
    plans = go_with_unaided(asked, history, 900, copied=4, guessed=1)
    assert plans[-100:].count(UNAIDED) < 10 and plans[-100:].count(NO_DRAFT) < 10


def test_a_drafter_that_was_unsure_behind_a_lookup_makes_all_its_guesses_by_itself():
    """While much is looked up, the part behind it is sure of one guess instead of two; then nothing is found any more.

    That part by itself makes two guesses at every step, as always, and is the cheapest then.
    """
    asked, history, plans = with_unaided(1.1), RowHistory(False, 5), list[Plan]()
    for step in range(300):
        (choice,) = asked.choose(load(1), [history])
        plans.append(choice.plan)
        if choice.plan == UNAIDED:
            history.note(1, 2, choice.plan)
        elif choice.plan != NO_DRAFT and step < 60 and step % 2:
            history.note(4, 4, choice.plan)
        else:
            history.note(int(choice.plan == BOTH), int(choice.plan == BOTH), choice.plan, choice.plan == BOTH)
    assert plans[20:60] == [BOTH] * 40 and plans[-100:].count(UNAIDED) > 80


def test_how_many_guesses_a_sampled_row_has_is_told_only_where_they_were_looked_up():
    history, copied = RowHistory(True, 5), replace(UNAIDED, factor=1.0)
    for plan, behind in ((replace(UNAIDED, confidence=0.1), False), (UNAIDED, False), (copied, True), (copied, False)):
        history.note(1, 3, plan, behind)
    assert history.drafted == [1, 1, 1, 3]
