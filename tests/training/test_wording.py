"""Numbers in what a run says agree with their nouns."""

from collections import Counter
from pathlib import Path

import pytest

from draftsmith.training.build import build_drafter
from draftsmith.training.data.survey import Survey
from draftsmith.training.plan import plan_lines
from draftsmith.training.progress import early_in_words
from draftsmith.training.wording import counted
from draftsmith.workflows.estimate import Pace
from draftsmith.workflows.sizes import by_time
from tests.helpers import training_toy as toy


@pytest.mark.parametrize(
    ("count", "noun", "expected"),
    [
        (1, "minute", "1 minute"), (1.0, "minute", "1 minute"), (0.5, "minute", "0.5 minutes"), (0, "step", "0 steps"),
        (20.0, "minute", "20 minutes"), (1200, "step", "1,200 steps"), (1.0000001, "minute", "1 minute"),
    ],
)
def test_a_noun_agrees_with_the_number_that_is_shown(count: float, noun: str, expected: str):
    assert counted(count, noun) == expected


def test_the_minutes_of_a_run_are_grammatical(tmp_path: Path):
    recipe = toy.recipe(tmp_path, tmp_path, "stage1.steps=1", "stage2.steps=1")
    pace = Pace(first=0.5, second=1.0, text=0.25, measurement=6.0, save=0.0, parameters=10**6, depth=3)
    for minutes, words in ((1.0, "40% of 1 minute (--minutes)"), (2.5, "40% of 2.5 minutes (--minutes)")):
        assert by_time(Survey([10], Counter(), whole=False), recipe, pace, minutes)[0].why.startswith(words)


def test_a_plan_of_single_things_is_grammatical(tmp_path: Path):
    recipe = toy.recipe(
        tmp_path, toy.write_data(tmp_path), "stage1.steps=1", "stage1.batch=1", "stage2.batch=1",
        "drafter.n_predict=1", "drafter.top_k_tokens_per_head=[2]",
    )
    first, second, drafter = plan_lines(recipe, build_drafter(recipe, toy.target()))
    assert first.startswith("stage 1: 1 step × 1 sequence, at most 32 tokens, ")
    assert second.startswith("stage 2: 4 steps × 1 sequence, ") and drafter.endswith(", 1 token deep")
    record = {
        "stage": "1", "steps": 2, "planned_steps": 9, "stage_best": 1.5, "stage_loss": None, "measurements_since": 1,
    }
    assert "of 9 steps: 1 measurement in a row without" in early_in_words(record)
