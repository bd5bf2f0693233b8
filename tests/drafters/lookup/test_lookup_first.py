"""A lookup where it finds something, and another drafter where it does not."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from draftsmith.drafters.attention.eagle import Eagle
from draftsmith.drafters.attention.eagle_config import EagleConfig
from draftsmith.drafters.base import Drafter, NoDrafter, workers
from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.drafters.heads.mlp_config import MLPConfig
from draftsmith.drafters.lookup.lookup_first import LookupFirst
from draftsmith.drafters.lookup.ngram import NgramConfig, NgramDrafter
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Choice, Engine, Load, Policy, RowHistory
from draftsmith.engine.core import Progress
from draftsmith.engine.guarded import Guarded
from draftsmith.plan import NEVER_SURE, NO_COPY, NO_DRAFT, Plan
from draftsmith.types import UNUSED, Context, Draft, DraftsmithError, SamplingParams
from tests.drafters.lookup.lookup_toy import context_of, trees
from tests.helpers.contract import check_drafter, check_forward_agreement
from tests.helpers.tiny import CONTEXT, VOCABULARY, WIDTH, greedy_reference, prompts, tiny_model, tiny_target

PLAN = Plan((1, 1, 1))


class Counting(Drafter):
    """Guesses the numbers behind the root, and keeps the rows and the tokens that it was handed."""

    taps = ()
    sure_behind = 0.1

    def __init__(self, reads_prompt: bool = False, fails: bool = False) -> None:
        self.reads_prompt, self.fails = reads_prompt, fails
        self.asked: list[list[int]] = []
        self.told: list[list[int]] = []
        self.forgot: list[int] = []

    def reset_rows(self, rows: list[int]) -> None:
        self.forgot += rows

    def default_plan(self) -> Plan:
        return Plan((1, 1))

    @property
    def max_depth(self) -> int:
        return 2

    def propose(self, context: Context, plan: Plan) -> Draft:
        assert plan.depth <= 2
        if self.fails:
            raise ValueError("broken")
        self.asked.append(context.rows_B.tolist())
        root_B = context.root()[0]
        tokens_BN = (root_B.unsqueeze(1) + torch.arange(1, plan.depth + 1)) % VOCABULARY
        parents_BN = torch.arange(-1, plan.depth - 1).expand(len(root_B), -1)
        return Draft(tokens_BN, parents_BN, plan.depth, branching=plan.branching)

    def follow(self, context: Context) -> None:
        if self.fails:
            raise ValueError("broken")
        self.told.append(context.rows_B.tolist())


def first_of(then: Drafter) -> LookupFirst:
    return LookupFirst(NgramDrafter(NgramConfig(min_length=1)), then)


@pytest.mark.parametrize("reads_prompt", [False, True])
def test_every_row_has_the_guesses_of_the_one_or_the_other(reads_prompt: bool):
    then = Counting(reads_prompt)
    drafter = first_of(then)
    rows: dict[int, Sequence[int]] = {4: [7, 8, 9, 7], 2: [1, 2, 3], 9: [5, 5], 1: [30, 20]}
    found = trees(drafter.propose(context_of(rows), PLAN))
    assert [tokens for tokens, _ in found] == [[8, 9, 7], [4, 5], [5, 5, 5], [21, 22]]
    assert then.asked == [[2, 1]] and then.told == ([[4, 9]] if reads_prompt else [])
    # All find something, and then nobody does.
    found = trees(drafter.propose(context_of({4: [8], 9: [5]}), PLAN))
    assert [tokens for tokens, _ in found] == [[9, 7, 8], [5, 5, 5]]
    assert then.told == ([[4, 9]] * 2 if reads_prompt else [])
    found = trees(drafter.propose(context_of({2: [40], 1: [41]}), PLAN))
    assert [tokens for tokens, _ in found] == [[41, 42], [42, 43]]


def speculator() -> MLPSpeculator:
    config = MLPConfig(
        hidden_size=WIDTH, vocab_size=VOCABULARY, inner_dim=16, top_k_tokens_per_head=(3, 2, 2), n_candidates=4
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return MLPSpeculator(config).eval()


BOUNDED = Plan((1, 1, 1), factor=0.5, confidence=0.02)
ALONE = replace(BOUNDED, confidence=NEVER_SURE)


@pytest.mark.parametrize("lookup", ["ngram:min_length=1", "suffix"])
def test_the_text_stays_the_targets(lookup: str):
    target = tiny_target()
    plans = [None, BOUNDED, ALONE, Plan((3, 2)), Plan((1, 1), sampled=True)]
    check_drafter(lambda: LookupFirst(load_drafter(lookup, target), speculator()), target, tiny_model(), plans=plans)


def test_the_text_stays_the_targets_with_a_memory_behind_the_lookup():
    target = tiny_target("mistral")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        eagle = Eagle.new(EagleConfig(depth=3), target, None).double().eval()
    plans = [Plan((1, 1, 1)), Plan((1, 1, 1), confidence=0.02), ALONE]
    check_drafter(lambda: first_of(eagle), target, tiny_model("mistral"), plans=plans)


class Half(NgramDrafter):
    """A lookup that looks at every second row only, and at the others at every second step."""

    steps = 0

    def propose(self, context: Context, plan: Plan) -> Draft:
        draft = super().propose(context, plan)
        self.steps += 1
        if draft.tokens_BN.shape[1]:
            draft.parents_BN = draft.parents_BN.clone()
            draft.parents_BN[self.steps % 2 :: 2] = UNUSED
        return draft


def test_what_it_drafts_there_is_what_it_would_draft_alone():
    """Behind steps for which the lookup drafted, in its own row or in others."""
    target = tiny_target()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        eagle = Eagle.new(EagleConfig(depth=3), target, None).double().eval()
    check_forward_agreement(eagle, target, lambda then: LookupFirst(Half(NgramConfig(min_length=1)), then), 11)


class InTurns(Policy):
    """Lets everybody draft by the next choice at every step."""

    def __init__(self, *choices: Choice) -> None:
        self._choices, self._step = choices, 0

    @property
    def choices(self) -> tuple[Choice, ...]:
        return self._choices

    def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
        self._step += 1
        return [self._choices[(self._step + at) % len(self._choices)] for at in range(len(rows))]


def test_an_engine_may_have_the_parts_as_drafters_too():
    """Each is told everything once, whoever drafts, so that its guesses stay what they would be alone."""
    target, then = tiny_target(), Counting(reads_prompt=True)
    lookup = NgramDrafter(NgramConfig(min_length=1))
    drafters = {"both": LookupFirst(lookup, then), "lookup": lookup, "counting": then}
    choices = [Choice(PLAN, "both"), Choice(PLAN, "lookup"), Choice(NO_DRAFT), Choice(Plan((1, 1)), "counting")]
    engine = Engine(target, drafters, policy=InTurns(*choices), max_batch=3)
    questions = prompts(5, seed=3)
    found = engine.generate(questions, SamplingParams(max_tokens=12))
    assert [c.tokens for c in found] == [greedy_reference(tiny_model(), question, 12) for question in questions]
    heard = [row for rows in (*then.asked, *then.told) for row in rows]
    assert sorted(then.forgot) == sorted(set(heard))
    pieces = len(questions)  # each prompt is read at once
    assert len(heard) == pieces + sum(c.statistics.steps for c in found)


@pytest.mark.parametrize("reads_prompt", [False, True])
def test_a_part_that_fails_costs_its_guesses_and_nothing_else(reads_prompt: bool):
    target = tiny_target()
    guarded = Guarded(first_of(Counting(reads_prompt, fails=True)), "both", VOCABULARY)
    questions = prompts(3, seed=3)
    found = Engine(target, guarded, plan=PLAN).generate(questions, SamplingParams(max_tokens=12))
    assert [c.tokens for c in found] == [greedy_reference(tiny_model(), question, 12) for question in questions]
    assert guarded.failures > 0 and sum(c.statistics.drafted for c in found) > 0


def test_a_guarded_part_is_the_same_wherever_it_is_named():
    both = first_of(Counting(reads_prompt=True))
    named = [Guarded(both, "both", VOCABULARY), Guarded(both.lookup, "lookup", VOCABULARY)]
    assert [one.inner for one in workers(named) if isinstance(one, Guarded)] == [both.lookup, both.then]


def test_what_is_not_read_again_of_a_prompt_is_looked_up_all_the_same():
    """Its beginning is shared with an earlier text, and the lookup hears of it: it finds as much as alone."""
    target, question = tiny_target(), [*range(1, 70), 7, 8]
    rules = SamplingParams(max_tokens=6)
    drafted = {}
    for share in (True, False):
        engine = Engine(target, first_of(Counting()), plan=PLAN, share_prefixes=share, max_length=CONTEXT)
        engine.generate([question[:66]], rules)
        drafted[share] = [c.accepted_lengths for c in engine.generate([question], rules)]
        assert (engine.core.blocks.hits > 0) == share
        looked_up = [one.made for one in seen(engine, question, rules) if one.made is not None]
        drafted[share] += [made.drafted for made in looked_up]
    assert drafted[True] == drafted[False] and 3 in drafted[True], "some were looked up"


def seen(engine: Engine, question: list[int], rules: SamplingParams) -> list[Progress]:
    [request] = engine.admit_call([question], rules)
    engine.core.add(request)
    found = []
    while engine.core.has_work:
        found += engine.core.step()
    return found


def test_what_cannot_come_first_or_second_is_refused():
    with pytest.raises(DraftsmithError, match="begins with what finds its guesses in the text"):
        LookupFirst(Counting(), Counting())
    with pytest.raises(DraftsmithError, match="cannot hand on to a LookupFirst"):
        first_of(first_of(Counting()))
    with pytest.raises(DraftsmithError, match="no parts"):
        NoDrafter().with_parts([])
    for word, sentence in (
        ("lookup-first:then=lookup-first:then=ngram", "has two drafters already"),
        ("lookup-first:lookup=ngrams,then=suffix", "lookup-first: 'ngrams': .*did you mean ngram"),
        ("lookup-first", "then"),
    ):
        with pytest.raises(DraftsmithError, match=sentence):
            load_drafter(word, tiny_target())


def test_its_own_plan_is_bounded_by_both():
    drafter = LookupFirst(NgramDrafter(NgramConfig(guesses=4)), speculator())
    assert drafter.default_plan() == Plan((1,) * 4, factor=1.0, confidence=0.05)
    assert LookupFirst(NgramDrafter(NgramConfig(guesses=2)), speculator()).default_plan().depth == 3


@pytest.mark.parametrize("reads_prompt", [False, True])
def test_where_no_guess_is_likely_enough_the_lookup_drafts_alone(reads_prompt: bool):
    then = Counting(reads_prompt)
    drafter = first_of(then)
    draft = drafter.propose(context_of({4: [7, 8, 9, 7], 2: [1, 2, 3]}), replace(ALONE, factor=9.0))
    assert [tokens for tokens, _ in trees(draft)] == [[8, 9, 7], []] and draft.parts == 0
    assert then.asked == [] and then.told == ([[4, 2]] if reads_prompt else [])


def test_where_nothing_is_looked_up_the_other_drafter_drafts_in_every_row():
    then = Counting()
    drafter = first_of(then)
    rows: dict[int, Sequence[int]] = {4: [7, 8, 9, 7], 2: [1, 2, 3]}
    draft = drafter.propose(context_of(rows), replace(PLAN, factor=NO_COPY))
    assert [tokens for tokens, _ in trees(draft)] == [[8, 9], [4, 5]] and draft.parts == 1
    draft = drafter.propose(context_of({4: [7, 8, 9, 7], 2: [3, 1]}), replace(PLAN, factor=9.0))
    assert draft.parts == 0, "meanwhile the lookup has taken note of the text"


@pytest.mark.parametrize("lookup", ["ngram:min_length=1", "suffix"])
def test_a_lookup_by_itself_may_look_nothing_up(lookup: str):
    target, plan = tiny_target(), replace(PLAN, factor=NO_COPY)
    asked, params = prompts(3), SamplingParams(max_tokens=24)
    engine = Engine(target, load_drafter(lookup, target), plan=plan, max_batch=3)
    found = engine.generate(asked, params)
    assert [one.tokens for one in found] == [greedy_reference(tiny_model("llama"), prompt, 24) for prompt in asked]
    assert not any(one.statistics.drafted for one in found)
    again = engine.generate(asked, params, plan=PLAN)
    assert any(one.statistics.drafted for one in again)


def test_texts_stay_the_same_where_nothing_is_looked_up():
    target = tiny_target()
    plain = Engine(target, max_batch=3)
    drafted = Engine(target, first_of(speculator()), plan=replace(PLAN, factor=NO_COPY), max_batch=3)
    for params in (SamplingParams(max_tokens=24), SamplingParams(max_tokens=24, temperature=1.0, seed=3)):
        one, two = plain.generate(prompts(3), params), drafted.generate(prompts(3), params)
        assert [each.tokens for each in one] == [each.tokens for each in two]
        assert all(each.statistics.drafted for each in two)


def test_no_step_counts_as_behind_a_lookup_where_nothing_is_looked_up():
    engine = Engine(tiny_target(), first_of(Counting()), plan=replace(PLAN, factor=NO_COPY), max_batch=3)
    requests = engine.admit_call(prompts(3), SamplingParams(max_tokens=24))
    for request in requests:
        engine.core.add(request)
    while engine.core.has_work:
        engine.core.step()
    steps = [step for request in requests for step in request.history.steps(0)]
    assert any(drafted for _, drafted, _ in steps) and not any(behind for _, _, behind in steps)


def test_a_policy_is_told_at_which_steps_the_other_part_guessed():
    asked, engine = prompts(3), Engine(tiny_target(), first_of(Counting()), plan=PLAN, max_batch=3)
    requests = engine.admit_call(asked, SamplingParams(max_tokens=24), shows_drafts=True)
    for request in requests:
        engine.core.add(request)
    parts: dict[int, list[bool]] = {request.id: [] for request in requests}
    while engine.core.has_work:
        for one in engine.core.step():
            if one.made is not None and one.made.drafted:
                parts[one.request.id].append(one.made.part == "then")
    for request in requests:
        assert parts[request.id] == [behind for _, drafted, behind in request.history.steps(0) if drafted]
    assert {behind for some in parts.values() for behind in some} == {False, True}


def test_who_guessed_is_told_of_every_row():
    drafter = first_of(Counting())
    rows: dict[int, Sequence[int]] = {4: [7, 8, 9, 7], 2: [1, 2, 3], 9: [5, 5]}
    parts = drafter.propose(context_of(rows), PLAN).parts
    assert parts == [0, 1, 0]
    assert drafter.propose(context_of({4: [8], 9: [5]}), PLAN).parts == 0
    assert drafter.propose(context_of({2: [30], 4: [40]}), PLAN).parts == 1


@pytest.mark.parametrize("guarded", [False, True])
def test_tokens_come_from_the_part_that_guessed_them(guarded: bool):
    """The toy behind the lookup guesses numbers that follow each other, which the text seldom does."""
    model, asked = tiny_model(), prompts(3)
    names = ("words", "numbers")
    drafter: Drafter = LookupFirst(NgramDrafter(NgramConfig(min_length=1)), Counting(), names)
    engine = Engine(tiny_target(), Guarded(drafter, "both", VOCABULARY) if guarded else drafter, plan=PLAN, max_batch=3)
    seen = set()
    for shown in (True, False):
        requests = engine.admit_call(asked, SamplingParams(max_tokens=24), shows_drafts=shown)
        for request in requests:
            engine.core.add(request)
        while engine.core.has_work:
            for one in engine.core.step():
                if one.made is None or not one.made.drafted:
                    continue
                assert (one.made.part is not None) is shown
                if shown and one.made.tree is not None:
                    follows = one.made.tree.tokens[1] == (one.made.tree.tokens[0] + 1) % VOCABULARY
                    assert one.made.part == "numbers" if follows else one.made.part == "words"
                    seen.add(one.made.part)
        assert [request.tokens for request in requests] == [greedy_reference(model, prompt, 24) for prompt in asked]
    assert seen == set(names)
