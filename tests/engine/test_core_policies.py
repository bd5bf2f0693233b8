"""The core asks a policy what every row drafts, tells it what was known before, and takes none but its choices."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from draftsmith.drafters.lookup.ngram import NgramConfig, NgramDrafter
from draftsmith.engine import Engine
from draftsmith.engine.policy import Choice, Fixed, Load, OffAbove, RowHistory
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.types import DraftsmithError, SamplingParams
from tests.helpers.contract import run_out
from tests.helpers.oracle import oracle_for
from tests.helpers.tiny import VOCABULARY, greedy_reference, prompts, tiny_model, tiny_target

CHAIN, TREE = Plan((1, 1, 1)), Plan((3, 2, 1))


def test_rows_draft_by_plans_of_their_own():
    questions = prompts(4)
    oracle = oracle_for(tiny_model(), questions)
    engine = Engine(tiny_target(), oracle, plan=TREE, max_batch=4)
    requests = []
    for question, plan in zip(questions, [None, CHAIN, NO_DRAFT, Plan((2,))], strict=True):
        requests += engine.admit_call([question], SamplingParams(max_tokens=13), plan)
    for request in requests:
        engine.core.add(request)
    run_out(engine)
    completions = [request.completion() for request in requests]
    assert [c.tokens for c in completions] == [greedy_reference(tiny_model(), q, 13) for q in questions]
    assert [c.accepted_lengths for c in completions] == [[3] * 3, [3] * 3, [0] * 12, [1] * 6]
    assert [c.statistics.drafted for c in completions] == [3 * TREE.max_nodes, 3 * 3, 0, 6 * 2]


class Exponentials(TorchDispatchMode):
    """Notes of how many rows the logits are turned into probabilities, which takes exponentials over the vocabulary."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.exp.default and out.shape[-1] == VOCABULARY:
            self.rows.append(len(out))
        return out


def test_greedy_rows_stay_on_the_greedy_way_beside_sampled_ones():
    """Probabilities are computed for the rows that need them, and for no other."""
    questions = prompts(5)
    engine = Engine(tiny_target(), oracle_for(tiny_model(), questions), plan=CHAIN, max_batch=5)
    greedy, sampled = SamplingParams(max_tokens=9), SamplingParams(max_tokens=9, temperature=1.0, seed=2)
    with Exponentials() as taken:
        engine.generate(questions, [greedy, sampled, greedy, sampled, greedy])
    assert set(taken.rows) <= {1, 2} and taken.rows


def test_a_policy_is_told_what_was_known_before():
    class Curious(Fixed):
        def __init__(self) -> None:
            super().__init__(CHAIN)
            self.seen: list[list[tuple[int, int]]] = []

        @property
        def is_fixed(self) -> bool:
            return False

        def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
            self.seen.append([(sum(row.accepted), sum(row.drafted)) for row in rows])
            return super().choose(load, rows)

    policy = Curious()
    question = prompts(1)[0]
    engine = Engine(tiny_target(), oracle_for(tiny_model(), [question]), policy=policy)
    engine.generate([question], SamplingParams(max_tokens=13))
    assert [seen for seen in policy.seen if seen] == [[(3 * n, 3 * n)] for n in range(3)]


def test_off_above_a_load():
    policy = OffAbove(CHAIN, 1)
    load = Load(decoding=2, reading=0, waiting=0, max_batch=4)
    history = RowHistory(False, 3)
    assert policy.choose(load, [history] * 2) == [Choice(NO_DRAFT)] * 2
    assert policy.choose(replace(load, decoding=1), [history]) == [Choice(CHAIN)]
    with pytest.raises(DraftsmithError, match="draft_rows is -1"):
        OffAbove(CHAIN, -1)


def test_a_policy_and_a_plan_exclude_each_other():
    with pytest.raises(DraftsmithError, match="policy"):
        Engine(tiny_target(), plan=CHAIN, policy=Fixed(CHAIN))
    with pytest.raises(DraftsmithError, match="empty"):
        Engine(tiny_target(), {})


def test_a_policy_may_name_only_what_is_there():
    with pytest.raises(DraftsmithError, match="names the drafter 'other', but there is drafter"):
        Engine(tiny_target(), NgramDrafter(NgramConfig()), policy=Fixed(CHAIN, "other"))

    class Surprising(OffAbove):
        def choose(self, load: Load, rows: Sequence[RowHistory]) -> Sequence[Choice]:
            return [Choice(TREE)] * len(rows)

    engine = Engine(tiny_target(), NgramDrafter(NgramConfig()), policy=Surprising(CHAIN, 3))
    with pytest.raises(DraftsmithError, match="none of its choices"):
        engine.generate(prompts(1), SamplingParams(max_tokens=4))
