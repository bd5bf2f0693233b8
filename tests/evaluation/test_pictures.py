"""Pictures and tables can be read: everything named, nothing cut."""

from io import StringIO

import pytest
from rich.console import Console

from draftsmith.cli.bench import show
from draftsmith.evaluation.measuring.intervals import Interval
from draftsmith.evaluation.reporting.plots import (
    acceptance_by_depth,
    before_and_after,
    coloured_text,
    latency_by_candidates,
    ranked_bars,
    ratio_bars,
    training_curve,
)

pytestmark = pytest.mark.usefixtures("drawn_in_full")

SOME = Interval(1.4, 1.2, 1.7)
CELL = {"prompt_tokens": 64, "batch": 1, "ms_per_token": 1.0, "ms_per_token_ci": [0.9, 1.2]}
PICTURES = {
    "bars": lambda: ratio_bars({task: {"copy": SOME, "trained": SOME} for task in ("code", "prose")}),
    "ranked": lambda: ranked_bars({f"family {i} · chain {i}": SOME for i in range(12)}, "times as fast", "Speed-up"),
    "acceptance": lambda: acceptance_by_depth({f"{2**i} candidates": [0.9, 0.5, 0.3] for i in range(7)}),
    "latency": lambda: latency_by_candidates([{**CELL, "candidates": count} for count in (0, 1, 2, 4)], 64),
    "before": lambda: before_and_after({"code": 2.0, "prose": 2.2}, {"code": 2.5, "prose": 3.1}),
    "curve": lambda: training_curve([(float(i), 3 / (i + 1)) for i in range(20)]),
}


@pytest.mark.parametrize("name", PICTURES)
def test_pictures_have_names_for_axes_and_lines_and_cut_nothing(name: str):
    picture = PICTURES[name]()
    picture.draw_without_rendering()
    (axes,) = picture.axes
    assert axes.get_xlabel() and axes.get_title(loc="left") and (axes.get_ylabel() or name == "ranked")
    legend = axes.get_legend()
    texts = [axes.title, axes._left_title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
    if legend is not None:
        named = [text.get_text() for text in legend.get_texts()]
        assert len(set(named)) == len(named)
        lines = {(line.get_color(), line.get_marker()) for line in axes.get_lines() if line.get_label() in named}
        assert len(lines) in (0, len([n for n in named if n in {line.get_label() for line in axes.get_lines()}]))
        inside = axes.get_window_extent()
        box = legend.get_window_extent()
        assert inside.x0 <= box.x0 and box.x1 <= inside.x1 and inside.y0 <= box.y0 and box.y1 <= inside.y1
    for text in texts:
        box = text.get_window_extent()
        assert not text.get_text() or (box.x0 >= 0 and box.x1 <= picture.bbox.x1 and box.y1 <= picture.bbox.y1), text


def test_a_sample_in_colour_says_what_green_means_and_cuts_nothing():
    text = "def add(a, b):\n    return a + b  # " + "and so on, " * 12
    half = len(text) // 2
    picture = coloured_text([(text[:half], True), (text[half:], False)], columns=60)
    picture.draw_without_rendering()
    drawn = sorted(picture.texts, key=lambda one: (-one.get_position()[1], one.get_position()[0]))
    said = "".join(one.get_text() for one in drawn)
    assert said.startswith("green: drafted and accepted; the rest is the target's own")
    assert said.endswith(text.replace("\n", ""))
    assert len(picture.artists) + len(picture.patches) >= half - 1 + len("green")
    for one in drawn:
        box = one.get_window_extent()
        assert box.x0 >= 0 and box.x1 <= picture.bbox.x1 and box.y0 >= 0 and box.y1 <= picture.bbox.y1


def test_a_wide_table_is_printed_in_pieces_and_no_number_is_cut():
    cells = [
        {
            "prompt_tokens": 64, "batch": batch, "candidates": count, "engine": "draftsmith", "trials": 12,
            "new_tokens": 100, "ms_per_token": 10.25 + count, "ms_per_token_ci": [10.12, 10.99], "speedup": 0.5,
            "tokens_per_step": 2.0, "lossless": True, "sampled": False, "temperature": 0.0, "texts": 1,
            "identical_texts": 1,
        }
        for batch in (1, 2, 4) for count in (0, 1, 2, 4, 8, 16, 32)
    ]
    console = Console(width=80, file=StringIO())
    show(console, cells)
    printed = console.file.getvalue()  # type: ignore[attr-defined]
    assert "…" not in printed and max(map(len, printed.splitlines())) <= 80
    assert printed.count("10.12–10.99") == 21 and all(f"{10.25 + count:.2f}" in printed for count in (0, 16, 32))


def test_an_engine_that_may_draft_and_never_did_says_so():
    cell = {
        **CELL, "candidates": None, "fitted": True, "engine": "draftsmith", "trials": 12, "new_tokens": 100,
        "speedup": 0.97, "texts": 1, "identical_texts": 1, "temperature": 0.0,
    }
    for drafted, said in ((0, "0.97×, no drafts"), (3, "0.97× ")):
        console = Console(width=80, file=StringIO())
        show(console, [{**cell, "drafted": drafted}])
        assert said in console.file.getvalue()  # type: ignore[attr-defined]
