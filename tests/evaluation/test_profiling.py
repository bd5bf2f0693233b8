"""What measuring plans finds out about guesses: nothing is cut off, and nothing counts as impossible."""

from itertools import cycle, pairwise

import pytest

from draftsmith.engine import Engine
from draftsmith.engine.arm import Arm
from draftsmith.engine.pace import COLD_STEPS
from draftsmith.evaluation.measuring.profiling import Contest
from draftsmith.evaluation.measuring.sampler import Brought, Sampler
from draftsmith.evaluation.measuring.steps import step_seconds
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.types import Context, Draft, SamplingParams
from tests.helpers.oracle import OracleDrafter, oracle_for
from tests.helpers.tiny import VOCABULARY, prompts, tiny_model, tiny_target

CHAIN = Plan((1,) * 6)
BOTH = Plan((1,) * 6, factor=1.0, confidence=0.1)
TOKENS = 10


def sampler(drafter: OracleDrafter, asked: list[list[int]]) -> Sampler:
    return Sampler(Engine(tiny_target(), drafter, plan=CHAIN, max_batch=2), asked, TOKENS)


def test_the_step_in_which_a_text_ends_counts_whole():
    asked = prompts(4)
    found = sampler(oracle_for(tiny_model(), asked, 40), asked)
    for rows in (1, 2):
        assert found.seconds(CHAIN, rows) > 0
    assert found.arm(CHAIN).survival == (1.0,) * 6
    assert found.brought[CHAIN].steps == 3 * 2, "seven tokens each, behind that of the prompt"


def test_a_plan_whose_guesses_stay_is_timed_for_no_more_steps_than_others():
    asked = prompts(4)
    engine = Engine(tiny_target(), oracle_for(tiny_model(), asked, 40), plan=CHAIN, max_batch=2)
    found = Sampler(engine, asked, 40, steps=3)
    for plan in (CHAIN, NO_DRAFT):
        found.seconds(plan, 2)
        assert found.brought[plan].steps == 3 * 2


def test_a_slow_target_is_timed_for_fewer_steps_and_drafts_for_more_than_plain_decoding():
    asked = prompts(4)
    engine = Engine(tiny_target(), oracle_for(tiny_model(), asked, 60, error_rate=1.0), plan=CHAIN, max_batch=2)
    for plain_s, most in ((0.0001, (30, 30, 30)), (0.02, (15, 11, 6)), (1.0, (6, 6, 6))):
        found = Sampler(engine, asked, 40, steps=30, turn_s=0.3)
        found.plain_s = plain_s
        for (plan, rows), steps in zip(((CHAIN, 1), (CHAIN, 2), (NO_DRAFT, 1)), most, strict=True):
            found.brought.clear()
            found.seconds(plan, rows)
            assert found.brought[plan].steps == steps * rows


class Silent(OracleDrafter):
    """Guesses nothing."""

    def propose(self, context: Context, plan: Plan) -> Draft:
        draft = super().propose(context, plan)
        return Draft(draft.tokens_BN[:, :0], draft.parents_BN[:, :0], depth=0)


def test_what_was_not_seen_is_seldom_and_not_impossible():
    asked = prompts(4)
    found = sampler(oracle_for(tiny_model(), asked, 40, Silent), asked)
    found.seconds(CHAIN, 1)
    shares = found.arm(CHAIN).survival
    assert shares[0] < 0.5 / (1 + found.brought[CHAIN].steps)
    assert all(0 < deep < share for share, deep in pairwise(shares))
    wrong = sampler(oracle_for(tiny_model(), asked, 40, error_rate=1.0), asked)
    wrong.seconds(CHAIN, 1)
    steps = wrong.brought[CHAIN].steps
    assert steps == TOKENS - 1 and wrong.arm(CHAIN).survival[:2] == (0.5 / (1 + steps), 0.25 / (1 + steps))


def test_how_guesses_fare_in_sampled_texts_is_measured():
    """The oracle knows the greedy texts and nothing of others."""
    asked = prompts(4)
    found = sampler(oracle_for(tiny_model(), asked, 40), asked)
    found.seconds(CHAIN, 1)
    always = Arm(CHAIN, found.arm(CHAIN).survival, (1.0,))
    assert always.kept() == 6.0
    fare = found.sampled(always)
    assert 0 < fare.stayed < 0.5 and (fare.found, fare.length) == (1.0, 1.0), "as many guesses at every step"
    assert fare == found.sampled(always), "the same texts, drawn alike"
    seldom = found.sampled(Arm(CHAIN, (0.001,) * 6, (1.0,)))
    assert seldom.stayed > 1.0, "some stay, where next to none did"


class Scripted(Sampler):
    """Takes as many seconds as it was told to."""

    def __init__(self, plain: list[float], drafted: list[float]) -> None:
        super().__init__(Engine(tiny_target(), None), prompts(1), TOKENS)
        self._plain, self._drafted = cycle(plain), cycle(drafted)

    def seconds(self, plan: Plan, rows: int) -> float:
        return next(self._drafted if plan.depth else self._plain)


def test_what_slows_the_machine_for_a_while_counts_as_so_many_seconds_and_not_so_many_times():
    """Steps of 2 and 3 s take 10 s longer in every fifth turn, and half a second longer in others."""
    slow = [0.0, 0.5, 0.0, 0.5, 10.0]
    script = Scripted([2.0 + longer for longer in slow], [3.0 + longer for longer in slow])
    contest = Contest(script, (1,), lambda _: None)
    for _ in range(5):
        contest.time(CHAIN, 1)
    assert contest.seconds(CHAIN, 1) == contest.seconds(NO_DRAFT, 1) + 1.0
    assert contest.seconds(NO_DRAFT, 1) in (2.0, 2.5)
    copying = Scripted([2.0, 4.0, 2.0, 4.0], [2.0, 5.0, 7.0, 5.0])  # the first drafted one warms up
    contest.time_full(copying, 4, 1)
    assert contest.full_seconds(4, 1) == contest.seconds(NO_DRAFT, 1) + 3.0
    contest.taken[CHAIN] = {1: [-0.2, -0.1]}
    assert contest.seconds(CHAIN, 1) == contest.seconds(NO_DRAFT, 1), "no draft is taken to cost less than none"


class Steady(Scripted):
    """Takes 1 s for a plain step and 0.1 s more for each guess, of which a given number stays."""

    def __init__(self, stays: dict[Plan, int]) -> None:
        super().__init__([1.0], [1.0])
        self.stays = stays

    def seconds(self, plan: Plan, rows: int) -> float:
        brought = self.brought.setdefault(plan, Brought([0] * plan.depth))
        for _ in range(100):
            brought.note(self.stays.get(plan, 0), plan.max_nodes)
        self.behind.setdefault(plan, Brought([0] * plan.depth))
        return 1.0 + 0.1 * plan.max_nodes


def test_of_a_slow_target_the_best_plans_of_every_size_are_timed_with_several_rows():
    """With one row the large ones win, which says nothing about many."""
    trees = {nodes: Plan((2,) * 4, beam=2, nodes=nodes) for nodes in (4, 5, 6, 8, 9, 12)}
    stays = {trees[4]: 2, trees[5]: 1, trees[6]: 2, trees[8]: 3, trees[9]: 4, trees[12]: 4}
    found = Contest(Steady(stays), (1, 4), lambda _: None).run(list(trees.values()))
    assert [arm.plan.max_nodes for arm in found.arms] == [0, 4, 9]


class Repeating(OracleDrafter):
    """Finds what comes at every second step of a text; what is guessed at the others is wrong."""

    def propose(self, context: Context, plan: Plan) -> Draft:
        draft = super().propose(context, plan)
        missed_B = context.lengths_B % 2
        draft.tokens_BN = (draft.tokens_BN + missed_B.unsqueeze(1)) % VOCABULARY
        draft.parts = missed_B.tolist()
        return draft


def test_trees_suit_drawn_texts_where_their_drafter_draws_them():
    """A lookup finds the same in every text, and a chain of any drafter is drawn where that can draw."""
    asked, tree = prompts(4), Plan((2, 1))
    engine = Engine(tiny_target(), oracle_for(tiny_model(), asked, 40), plan=CHAIN, max_batch=2)
    for draws in (False, True):
        found = Sampler(engine, asked, 20, draws=draws)
        for plan in (CHAIN, NO_DRAFT, tree):
            found.seconds(plan, 1)
        assert found.arm(tree).suits_draws is draws
        assert found.arm(CHAIN).suits_draws and found.arm(NO_DRAFT).suits_draws
    looking = Sampler(engine, asked, 20, looks_up=True)
    looking.seconds(tree, 1)
    assert looking.arm(tree).suits_draws


def test_what_is_looked_up_and_what_is_guessed_behind_it_are_told_apart():
    asked = prompts(4)
    engine = Engine(tiny_target(), oracle_for(tiny_model(), asked, 60, Repeating), plan=BOTH, max_batch=1)
    found = Sampler(engine, asked, 31, looks_up=True)
    found.seconds(BOTH, 1)
    steps = [(accepted, behind) for accepted, _, behind in engine_steps(found)]
    arm = found.arm(BOTH)
    assert arm.behind is not None and arm.kept() == 6.0 and 0 < arm.kept_behind() < 0.2, "all stay, or none does"
    looked_up = [accepted for accepted, behind in steps if not behind]
    assert set(looked_up) == {6} and {accepted for accepted, behind in steps if behind} == {0}
    tokens = sum(1 + accepted for accepted in looked_up)
    assert arm.found == tokens / (tokens + len(steps) - len(looked_up))
    assert abs(arm.usual_share - len(looked_up) / len(steps)) < 0.05
    assert (arm.guesses, arm.behind.made) == (6.0, 6.0)


def engine_steps(found: Sampler) -> list[tuple[int, int, bool]]:
    """Decode the same text again; return what is known of its steps."""
    params = SamplingParams(max_tokens=31 + BOTH.depth, ignore_eos=True)
    [request] = found.engine.admit_call(found.prompts[:1], params, BOTH)
    step_seconds(found.engine, [request], found.new_tokens)
    return list(request.history.steps(0))


def test_the_first_steps_behind_a_prompt_are_not_timed():
    """They find cold caches: by this clock each of them takes 1 s, and every later step 0.1 s."""
    engine = Engine(tiny_target(), None, max_batch=1)
    for tokens, took in ((3 * COLD_STEPS, 0.1), (COLD_STEPS, 1.0)):
        [request] = engine.admit_call([[1, 2, 3]], SamplingParams(max_tokens=tokens + 1, ignore_eos=True))

        def clock(steps: list[int] = request.accepted) -> float:
            return min(len(steps), COLD_STEPS) + 0.1 * max(0, len(steps) - COLD_STEPS)

        assert step_seconds(engine, [request], tokens, clock) == pytest.approx(took)
