"""The search for rate and start: by planted scores, and of a real family on a tiny target."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from draftsmith.types import DraftsmithError
from draftsmith.workflows.entries import Budget, read_entries
from draftsmith.workflows.search import Choice, search

RATES = {0.001: 1.2, 0.003: 1.3, 0.009: 1.25}


def planted(scores: Mapping[Any, float | None], made: list[tuple[Any, ...]]):
    """Return what looks trials up: by rate, or by rate and start."""

    def run(rate: float, options: Mapping[str, Any]) -> dict[str, Any]:
        key = (round(rate, 6), *options.values())
        made.append(key)
        return {"rate": rate, "options": dict(options), "tokens_per_step": scores.get(key, scores.get(key[0], 1.0))}

    return run


def rates_tried(scores: Mapping[Any, float | None]) -> tuple[Choice, list[Any]]:
    made: list[tuple[Any, ...]] = []
    return search(0.003, {}, {}, planted(scores, made)), [key[0] for key in made]


def test_the_best_of_three_rates_is_taken():
    found, tried = rates_tried(RATES)
    assert tried == [0.003, 0.001, 0.009] and found.rate == 0.003 and not found.at_edge
    assert [trial["tokens_per_step"] for trial in found.trials] == [1.3, 1.2, 1.25]


@pytest.mark.parametrize(
    ("beyond", "value", "rate", "at_edge"), [(0.027, 1.5, 0.027, True), (0.027, 1.3, 0.009, False)]
)
def test_one_more_is_tried_beyond_an_edge(beyond: float, value: float, rate: float, at_edge: bool):
    found, tried = rates_tried({0.001: 1.1, 0.003: 1.2, 0.009: 1.4, beyond: value})
    assert tried == [0.003, 0.001, 0.009, 0.027]
    assert found.rate == pytest.approx(rate) and found.at_edge == at_edge


def test_below_as_well():
    found, tried = rates_tried({0.001: 1.4, 0.003: 1.2, 0.009: None})
    assert tried == [0.003, 0.001, 0.009, 0.000333] and found.rate == 0.001 and not found.at_edge


def test_of_equals_the_suggested_rate_is_taken():
    assert rates_tried({})[0].rate == 0.003


def test_a_rate_that_fails_is_not_taken_and_all_failing_is_an_error():
    assert rates_tried({0.003: None, 0.001: 1.1, 0.009: None, 0.000333: 1.0})[0].rate == 0.001
    with pytest.raises(DraftsmithError, match="no loss was finite at rates from 0.001 to 0.009"):
        rates_tried(dict.fromkeys(RATES, None))


def test_starts_are_tried_at_the_best_rate():
    made: list[tuple[Any, ...]] = []
    scores = {(0.009, "both"): 1.5, (0.009, "none"): 1.6, (0.027, "both"): 1.4, (0.003, "none"): 9.0}
    found = search(0.003, {"start": "both"}, {"start": ("both", "one", "none")}, planted(scores, made))
    assert made == [(0.003, "both"), (0.001, "both"), (0.009, "both"), (0.027, "both"), (0.009, "one"), (0.009, "none")]
    assert (found.rate, found.options) == (0.009, {"start": "none"})


def test_what_was_asked_for_is_not_searched(tmp_path: Any):
    asked, free = read_entries(["mlp:init_from_target=none", "mlp"])
    assert asked.starts.keys() == {"init_width"} and free.starts.keys() == {"init_from_target", "init_width"}
    assert free.suggested().options["init_from_target"] == "embeddings+head"
    assert asked.suggested().options["init_from_target"] == "none" and asked.suggested().options["init_width"] == 1.0
    assert read_entries(["medusa"])[0].suggested().options == {"init_from_target": True}
    assert all(entry.family.trainable or not entry.starts for entry in read_entries([]))
    with pytest.raises(DraftsmithError, match="search_share is 1.5; give a number from 0 .no search. to 1"):
        Budget(tmp_path, search_share=1.5)


def test_a_budget_reads_whole_texts_and_counts_what_is_read_again(tmp_path: Path):
    budget = Budget(tmp_path)
    assert budget.steps(lambda: (1.0, 1.0)) * 16 == budget.texts_read == 2048
    assert "98,304 positions a family, of 2,048 texts" in budget.sentence()
    few = Budget(tmp_path, positions=1000, texts=2048)
    assert few.steps(lambda: (1.0, 1.0)) == 2 and few.texts_read == 32
    twice = Budget(tmp_path, positions=100_000)
    assert twice.texts_read == 1048, "131 steps take 2,096 texts, which are 1,048 read twice"
    assert Budget(tmp_path, minutes=1.0, texts=160).steps(lambda: (5.0, 1.0)) == 10 + 10
    assert Budget(tmp_path, minutes=0.5, texts=160).steps(lambda: (5.0, 1.0)) == 6
