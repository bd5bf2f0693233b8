"""Lookahead decoding: columns that grow into n-grams, and what a drafter is shown that observes.

M = N + 1 verified nodes (root first) of B rows.
"""

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from draftsmith.drafters.lookup.lookahead import LookaheadConfig, LookaheadDrafter, LookaheadRow
from draftsmith.engine import Engine
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import ROOT, Context, Draft, SamplingParams
from tests.drafters.lookup.lookup_toy import context_of, counting_model, trees
from tests.helpers.contract import check_draft
from tests.helpers.tiny import VOCABULARY, prompts, tiny_model, tiny_target


def look(drafter: LookaheadDrafter, rows: dict[int, Sequence[int]], choices: list[list[int]]) -> list[Any]:
    """Draft, then let the drafter see what a target chose; return the trees."""
    context = context_of(rows)
    draft = drafter.propose(context, drafter.default_plan())
    check_draft(draft, drafter.default_plan(), len(rows), 1000, can_sample=False)
    drafter.observe(context, draft, torch.tensor(choices))
    return trees(draft)


def test_columns_grow_into_ngrams():
    drafter = LookaheadDrafter(LookaheadConfig(window=3, length=3, guesses=2, from_text=False))
    # Four columns of one token, of which the first begins with the root: the others are the trunk.
    assert look(drafter, {0: [1, 2, 3, 4]}, [[40, 12, 13, 14]]) == [([2, 3, 4], [ROOT, 0, 1])]
    # What came after them is appended, the first column goes, and the new first one begins with the new root.
    grown = look(drafter, {0: [40]}, [[3, 112, 50, 113, 51, 114]])
    assert grown == [([12, 3, 13, 4, 14], [ROOT, ROOT, 1, 1, 3])]
    # Now they were n-grams: 40 12 112, 3 13 113 and 4 14 114. The root is 3, so the second is verified, and the window
    # has columns 12 112, 13 113 and 14 114, the first beginning with the root.
    verified = look(drafter, {0: [3]}, [[4, 60, 61, 62, 63, 64, 65, 66]])
    assert verified == [([13, 113, 112, 14, 114], [ROOT, 0, ROOT, 0, 3])]


def test_the_latest_ngrams_of_a_text_are_verified():
    drafter = LookaheadDrafter(LookaheadConfig(window=1, length=3, guesses=2))
    text = [5, 1, 2, 5, 3, 4, 5, 6, 7, 5]
    # Of 5 1 2, 5 3 4 and 5 6 7 the latest two, and behind them the window: the root and a column of the token 5.
    assert look(drafter, {0: text}, [[0] * 6]) == [([6, 7, 3, 4, 5], [ROOT, 0, ROOT, 2, ROOT])]


class Auditor(LookaheadDrafter):
    """Compares what it is shown with what transformers says after the same tokens."""

    audited = 0

    def __init__(self, questions: Sequence[list[int]]) -> None:
        super().__init__(LookaheadConfig(window=2, length=3, guesses=2))
        self.texts = {row: question[:1] for row, question in enumerate(questions)}

    def _add(self, context: Context) -> None:
        for row, count, tokens in zip(
            context.rows_B.tolist(), context.counts_B.tolist(), context.tokens_BT.tolist(), strict=True
        ):
            self.texts[row] += tokens[:count]

    def follow(self, context: Context) -> None:
        self._add(context)
        super().follow(context)

    def propose(self, context: Context, plan: Plan) -> Draft:
        self._add(context)
        return super().propose(context, plan)

    def observe(self, context: Context, draft: Draft, choice_BM: torch.Tensor) -> None:
        model = tiny_model("gpt2")
        for row, (tokens, parents), choices in zip(
            context.rows_B.tolist(), trees(draft), choice_BM.tolist(), strict=True
        ):
            paths = [self.texts[row]]
            for token, parent in zip(tokens, parents, strict=True):
                paths.append([*paths[parent + 1], token])
            for path, choice in zip(paths, choices, strict=False):
                assert int(model(torch.tensor([path])).logits[0, -1].argmax()) == choice
                self.audited += 1
        super().observe(context, draft, choice_BM)


def test_a_drafter_that_observes_sees_the_choice_at_every_node():
    questions = prompts(3, seed=6, longest=8)
    auditor = Auditor(questions)
    params = [SamplingParams(max_tokens=n, temperature=t, seed=1) for n, t in ((12, 0.0), (5, 0.0), (9, 1.0))]
    Engine(tiny_target("gpt2"), auditor, max_batch=2).generate(questions, params)
    assert auditor.audited > 50


def test_lookahead_finds_what_no_text_holds():
    options = LookaheadConfig(window=6, length=4, guesses=3, from_text=False)
    engine = Engine(Target(counting_model()), LookaheadDrafter(options))
    [found] = engine.generate([[70, 80, 60]], SamplingParams(max_tokens=40))
    assert found.tokens == [(61 + i) % VOCABULARY for i in range(40)]
    # Columns count on from 70 and 80 while the text counts from 60 to 69; then n-grams wait for it.
    assert found.accepted_lengths[:9] == [0] * 9 and found.statistics.tokens_per_step > 1.5


@pytest.mark.parametrize("size", [1, 2, 3, 5, 50])
@pytest.mark.parametrize(("window", "length"), [(5, 4), (1, 2), (3, 6)])
def test_guesses_do_not_depend_on_the_pieces_of_a_prompt(size: int, window: int, length: int):
    [text] = prompts(1, shortest=23, below=6)
    options = LookaheadConfig(window=window, length=length, guesses=3)
    whole, divided = LookaheadRow(options), LookaheadRow(options)
    whole.extend(text)
    for start in range(0, len(text), size):
        divided.extend(text[start : start + size])
    for _ in range(8):
        drafts = [row.draft((9,) * 9, 60) for row in (whole, divided)]
        assert drafts[0].tokens == drafts[1].tokens and drafts[0].parents == drafts[1].parents
        for row in (whole, divided):
            row.advance([(3 * node) % 6 for node in range(len(drafts[0].tokens) + 1)])
            row.extend([2, 4])


def test_the_columns_begin_with_the_end_of_a_prompt():
    row = LookaheadRow(LookaheadConfig(window=3, length=3, from_text=False))
    row.extend([1, 2])
    row.extend([3, 4, 5, 6])
    assert row.draft((9,) * 9, 60).tokens == [4, 5, 6]


class Recorder(LookaheadDrafter):
    """Keeps what it drafted."""

    def __init__(self) -> None:
        super().__init__(LookaheadConfig())
        self.drafts: list[Any] = []

    def propose(self, context: Context, plan: Plan) -> Draft:
        draft = super().propose(context, plan)
        self.drafts.append(trees(draft))
        return draft


def test_rows_of_a_core_that_was_dropped_are_forgotten():
    """A new core counts its rows from the start again."""
    questions, params = prompts(2, seed=3, below=8), SamplingParams(max_tokens=20)
    used, fresh = Recorder(), Recorder()
    dropped = Engine(tiny_target(), used, max_batch=1)
    for request in dropped.admit_call(questions[:1], params):
        dropped.core.add(request)
    for _ in range(4):
        dropped.core.step()
    assert dropped.core.has_work and used.drafts
    del dropped
    gc.collect()
    used.drafts.clear()
    found, expected = (
        Engine(tiny_target(), drafter, max_batch=1).generate(questions[1:], params) for drafter in (used, fresh)
    )
    assert found[0].tokens == expected[0].tokens
    assert used.drafts == fresh.drafts and len(fresh.drafts) > 1
