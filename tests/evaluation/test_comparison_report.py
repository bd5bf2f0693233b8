"""What a comparison says of its measurements: the verdict, orderings, tables and pictures."""

from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from draftsmith.cli.compare import print_table
from draftsmith.evaluation.comparison.orderings import ordering_rows, orderings, summary
from draftsmith.evaluation.comparison.plots import figures
from draftsmith.evaluation.comparison.tables import cell_table, losers, short_table, too_short, verdict
from draftsmith.workflows.entries import DEFAULT_POSITIONS


def cell(
    name: str, speedup: float, task: str = "code", mode: str = "greedy", steps: tuple[int, ...] = (10, 20), **more: Any
) -> dict[str, Any]:
    tokens = [60] * len(steps)
    guessed = {
        "tokens_per_step": sum(tokens) / sum(steps), "tokens_per_step_ci": [1.0, 9.0], "tokens_by_prompt": tokens,
        "steps_by_prompt": list(steps), "accepted_by_depth": [0.5, 0.25],
    }
    return {
        "method": name, "task": task, "mode": mode, "speedup": speedup, "speedup_ci": [speedup - 0.1, speedup + 0.1],
        "plan": "chain 2", "sampled": False, "identical": 12, "rounds": 12, "step_cost": 1.5, "share_drafting": 0.25,
        "tokens_per_step_timed": 1.2, "ms_per_token": 1.0, "chain": guessed, "tree": guessed,
        "seconds_by_round": [slow / speedup for slow in (1.0, 2.0, 4.0)], **more,
    }


def test_families_that_learnt_little_are_said_to_have():
    assert too_short([{"name": "ngram"}, {"name": "mlp", "training_positions": DEFAULT_POSITIONS}]) == []
    (one,) = too_short([{"name": "ngram"}, {"name": "mlp", "training_positions": 4608}])
    assert one.startswith("mlp learnt from 4,608 positions only, so all of this says more of the budget than of this")
    (two,) = too_short([{"name": "mlp", "training_positions": 4608}, {"name": "medusa", "training_positions": 768}])
    assert two.startswith("mlp, medusa learnt from 768 to 4,608 positions only") and "these families" in two


def test_the_verdict_says_by_how_much_and_why_not():
    cells = [cell("mlp", 1.8), cell("ngram", 1.5), cell("slow", 0.8)]
    said = verdict(cells, ["code"])
    assert said[0].startswith("code, greedy: use mlp (chain 2), 1.80× plain decoding (1.70–1.90)")
    # Every round is 1.8 / 1.5 times as long for the one as for the other, however long it is.
    assert "next is ngram with 1.50×, clearly slower: in the same rounds mlp is 1.20× (1.20–1.20) as fast." in said[0]
    assert losers(cells) == [
        "slow does not beat plain decoding: at its best (code, greedy, chain 2, 0.80×) a step brings 1.20 tokens and "
        "costs 1.50 plain steps, 0.38 of them drafting; drafting is too slow, 0.07 would be the limit."
    ]
    assert "it guesses too little" in losers([cell("blind", 0.8, tokens_per_step_timed=1.1)])[0]
    assert "nowhere clearly faster" in losers([cell("mlp", 1.05)])[0]
    assert "decode plainly; the fastest, mlp with 1.05× (0.95–1.15), is no clear gain" in verdict(
        [cell("mlp", 1.05)], ["code"]
    )[0]
    assert "is slower." in verdict([cell("mlp", 0.8)], ["code"])[0]


def test_the_second_is_measured_by_the_rounds_it_shared_with_the_fastest():
    # The intervals over plain decoding overlap, (1.70–1.90) and (1.65–1.85), but one is behind in every round.
    close = [cell("mlp", 1.8), cell("hydra", 1.75)]
    assert "hydra with 1.75×, clearly slower: in the same rounds mlp is 1.03× (1.03–1.03) as fast" in verdict(
        close, ["code"]
    )[0]
    # They lie apart, (1.70–1.90) and (1.40–1.60), but the rounds do not agree on who is ahead: 6 s against 5 s in sum,
    # and in the first alone 0.5 s against 1 s.
    apart = [cell("mlp", 1.8, seconds_by_round=[1.0, 2.0, 2.0]), cell("hydra", 1.5, seconds_by_round=[0.5, 2.5, 3.0])]
    assert "hydra with 1.50×, not told apart: in the same rounds mlp is 1.20× (0.50–1.50) as fast" in verdict(
        apart, ["code"]
    )[0]
    # Nor does a clear second settle it for those behind it.
    apart[1:1] = [cell("eagle", 1.6, seconds_by_round=[1.1, 2.2, 2.2])]
    said = verdict([*apart, cell("slow", 0.5, seconds_by_round=[2.0, 4.0, 4.0])], ["code"])[0]
    assert "eagle with 1.60×, clearly slower: in the same rounds mlp is 1.10× (1.10–1.10) as fast" in said
    assert said.endswith("; further down, not told apart: hydra, 1.20× (0.50–1.50).")


def test_text_that_should_be_the_plain_text_is_counted():
    other = cell("mlp", 1.8, identical=10)
    assert verdict([other], ["code"])[0].startswith("mlp, code, greedy: 2 of 12 texts differ from plain decoding")
    drawn = cell("mlp", 1.8, mode="T=1", identical=0, sampled=True)
    drawn["sampled_chain"] = drawn["chain"]
    assert verdict([drawn], ["code"])[0].startswith("code, T=1: use mlp")
    header, row, best_guesses = cell_table([drawn, cell("ngram", 1.2, mode="T=1")], "code", "T=1")
    assert row[header.index("same text")] == "sampled" and row[header.index("τ sampled")] == "4.00 (1.00–9.00)"
    assert best_guesses[header.index("same text")] == "12 of 12" and best_guesses[header.index("τ sampled")] == "–"


def facts(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "trained": name not in ("ngram", "suffix")} for name in names]


def test_orderings_are_paired_by_prompt():
    cells = [cell("mlp", 1.0, steps=(10, 20)), cell("medusa", 1.0, steps=(15, 30))]
    (found,) = orderings(cells, ["code"], facts("mlp", "medusa"))
    # 120 / 30 over 120 / 45, whichever prompts are drawn: the one takes two thirds of the other's steps on each.
    assert found["difference"] == pytest.approx(4 - 8 / 3) and found["prompts"] == 2
    # Of one prompt alone it is 3 - 2 or 6 - 4; unpaired, 3 - 4 could be drawn as well.
    assert found["difference_ci"] == pytest.approx([1.0, 2.0])
    assert ordering_rows([found])[0][0] == "mlp over medusa" and ordering_rows([found])[0][-1] == "yes"


def test_trained_drafters_are_held_against_the_best_lookup():
    cells = [
        cell(name, 1.0, "prose", mode, steps)
        for mode, taken in (
            ("greedy", {"mlp": (20, 21), "eagle": (9, 9), "ngram": (10, 11), "suffix": (12, 13)}),
            ("T=1", {"mlp": (40, 41), "eagle": (45, 60), "ngram": (60, 60), "suffix": (50, 55)}),
        )
        for name, steps in taken.items()
    ]
    found = orderings(cells, ["prose"], facts("mlp", "eagle", "ngram", "suffix"))
    assert [row[:3] + row[-1:] for row in ordering_rows(found)] == [
        ["mlp over ngram", "prose", "0", "no"],
        ["mlp over suffix", "prose", "1", "yes"],
        ["eagle over ngram", "prose", "0", "yes"],
        ["eagle over suffix", "prose", "1", "not told apart"],
    ]
    assert summary(found) == [
        f"Prose, {mode}: trained drafters that guess better than the best lookup ({lookup}): 1 of 2; worse: {worse}; "
        f"too close to tell: {1 - worse}."
        for lookup, mode, worse in (("ngram", "greedy", 1), ("suffix", "T=1", 0))
    ]
    assert orderings(cells, ["prose"], facts("mlp", "eagle")) == []


@pytest.mark.usefixtures("drawn_in_full")
def test_pictures_are_drawn_of_any_methods(tmp_path: Path):
    cells = [cell("mlp", 1.4), cell("ngram", 0.7, step_cost=0.9), cell("ngram", 2.0, "prose")]
    drawn = figures(cells, ["code", "prose"])
    assert list(drawn) == [
        "acceptance-code.png", "speedup-code.png", "acceptance-prose.png", "speedup-prose.png", "tau-and-cost.png",
    ]
    for name, figure in drawn.items():
        figure.savefig(tmp_path / name)
    shares = {text.get_text() for text in drawn["acceptance-code.png"].axes[0].texts}
    assert shares == {"50%", "25%"}
    assert {text.get_text() for text in drawn["tau-and-cost.png"].axes[0].texts} >= {"mlp", "ngram", "drafting pays"}


@pytest.mark.usefixtures("drawn_in_full")
def test_pictures_tell_fifteen_methods_apart_and_cut_no_title():
    names = [f"family-{i}" for i in range(15)]
    cells = [cell(name, 1 + i / 10, step_cost=1 + i / 9) for i, name in enumerate(names)]
    drawn = figures(cells, ["code"])
    points = drawn["tau-and-cost.png"].axes[0].texts
    assert len({text.get_color() for text in points if text.get_text() in names}) == 15
    for figure in drawn.values():
        figure.draw_without_rendering()
        (axes,) = figure.axes
        assert axes.get_xlabel() and axes.get_title(loc="left")
        for text in (axes._left_title, axes.xaxis.label, axes.yaxis.label):
            box = text.get_window_extent()
            assert not text.get_text() or (
                box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1
            ), text


def test_tables_fit_a_terminal_and_cut_no_number():
    header, *rows = short_table(
        [cell(name, 1.25, mode="T=1", plan="tree 2^12 nodes 12 sampled") for name in ("int8-self", "mlp:n_predict=7")],
        "code", "T=1",
    )
    console = Console(width=80, file=StringIO())
    print_table(console, "code", header, rows)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in printed and max(map(len, printed.splitlines())) <= 80
    assert printed.count("1.25× (1.15–1.35)") == 2 and "int8-self" in printed
