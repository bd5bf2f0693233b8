"""Families compared: the command on a tiny target, what it leaves behind, and how it goes on after a cut."""

import json
import signal
import time
from collections.abc import Callable
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console
from typer.testing import CliRunner

from draftsmith import assets
from draftsmith.cli.app import app
from draftsmith.cli.compare import print_table
from draftsmith.evaluation.comparison.measurement_log import MeasurementLog
from draftsmith.evaluation.comparison.methods import Method
from draftsmith.evaluation.comparison.orderings import ordering_rows, orderings, summary
from draftsmith.evaluation.comparison.plots import figures
from draftsmith.evaluation.comparison.tables import cell_table, losers, short_table, too_short, verdict
from draftsmith.plan import Plan
from draftsmith.types import DraftsmithError
from draftsmith.workflows.comparison import fingerprint
from draftsmith.workflows.entries import DEFAULT_POSITIONS
from tests.helpers.oracle import OracleDrafter
from tests.helpers.tiny import save_tiny_target


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    save_tiny_target(folder / "target")
    lines = [json.dumps({"text": f"def f{i}(x):\n    return x + {i}\n" * 12, "task": "code"}) for i in range(6)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


def arguments(place: Path, *more: str) -> list[str]:
    return [
        "compare", "--target", str(place / "target"), "--prompts", str(place / "prompts.jsonl"), "--tasks",
        "code,edit", "--prompt-count", "3", "--sampled-prompt-count", "2", "--prompt-tokens", "16", "--new-tokens",
        "12", "--rounds", "3", "--texts", "16", "--text-tokens", "24", "--positions", "1000", "--out",
        str(place / "out"), *more,
    ]


def compare(place: Path, *more: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, arguments(place, *more))
    return result.exit_code, result.output


def test_two_options_of_one_family(place: Path):
    families = ("--family", "mlp:inner_dim=16", "--family", "mlp:n_predict=2,tie_weights=true")
    code, output = compare(place, *families, "--json", str(place / "result.json"))
    assert code == 0, output
    result = json.loads((place / "result.json").read_text())
    names = ["mlp:inner_dim=16", "mlp:n_predict=2,tie_weights=true"]
    assert [family["name"] for family in result["families"]] == names
    assert all(family["parameters"] > 0 and family["training_positions"] >= 1000 for family in result["families"])
    for family in result["families"]:
        trials = family["search"]["trials"]
        assert 7 <= len(trials) <= 8 and family["suggested_rate"] == 0.003 and trials[0]["rate"] == 0.003
        best = max(trials, key=lambda trial: trial["tokens_per_step"])
        assert family["rate"] == best["rate"]
        for name, values in STARTS.items():
            assert family["start"][name] == best["options"][name]
            assert {trial["options"][name] for trial in trials} == values
        assert family["search"]["positions"] == len(trials) * 16 * 48 and family["search"]["seconds"] > 0
        recipe = yaml.safe_load((next((place / "out" / "runs").glob(slug(family["name"]))) / "recipe.yaml").read_text())
        assert recipe["stage2"]["rate"] == family["rate"]
        assert recipe["drafter"]["init_from_target"] == family["start"]["init_from_target"]
    texts = result["texts"]
    assert (texts["data"], texts["prompts"]) == ("the embedded texts", "prompts.jsonl")
    assert (texts["shared_sources"], texts["shared_texts"], texts["shared_windows"]) == ([], 0, 0)
    assert result["measured"] == [
        {"task": task, "prompts": 3, "texts": 3, "sources": 0} for task in ("code", "edit")
    ]
    assert {(c["method"], c["task"], c["mode"]) for c in result["cells"]} == {
        (name, task, mode) for name in names for task in ("code", "edit") for mode in ("greedy", "T=1")
    }
    for cell in result["cells"]:
        prompts = 3 if cell["mode"] == "greedy" else 2
        assert cell["tree"]["tokens_by_prompt"] == [11] * prompts and len(cell["tree"]["steps_by_prompt"]) == prompts
        assert ("sampled_chain" in cell) == (cell["mode"] == "T=1"), "an MLP speculator has a distribution to draw from"
        assert cell["speedup_ci"][0] <= cell["speedup"] <= cell["speedup_ci"][1]
        assert len(cell["seconds_by_round"]) == 3 and min(cell["seconds_by_round"]) > 0
        assert cell["mode"] != "greedy" or cell["identical"] == cell["rounds"] == 3
    assert "Verdict" in output and len(result["verdict"]) >= 4
    report = (place / "out" / "report.md").read_text()
    assert "6 of " in report and "texts name no source, so of these only the words were compared" in report
    assert "0 shared sources, 0 shared texts, 0 times 13 words in a row" in report and "## Rates and starts" in report
    assert "## code, greedy" in report and (place / "out" / "tau-and-cost.png").read_bytes()[1:4] == b"PNG"

    measured = (place / "out" / "measurements.jsonl").read_bytes()
    code, output = compare(place, *families)
    assert code == 0 and (place / "out" / "measurements.jsonl").read_bytes() == measured, "nothing is done twice"
    (place / "out" / "measurements.jsonl").write_bytes(measured[:-25])
    code, output = compare(place, *families)
    again = (place / "out" / "measurements.jsonl").read_bytes()
    assert code == 0 and again.count(b"\n") == measured.count(b"\n"), "the record that was cut short is made again"
    code, output = compare(place, *families, "--seed", "5")
    assert code == 2 and "holds a comparison on other terms: --seed was 0 and is 5; give" in " ".join(output.split())


def test_other_terms_are_named_with_both_values(place: Path, tmp_path: Path):
    here = ("--family", "ngram", "--out", str(tmp_path / "out"))
    code, output = compare(place, *here)
    assert code == 0, output
    save_tiny_target(tmp_path / "other")
    save_tiny_target(tmp_path / "target", seed=1)
    (tmp_path / "prompts.jsonl").write_text((place / "prompts.jsonl").read_text().replace("x + 1", "x - 1"))
    for more, told in (
        (("--new-tokens", "9", "--text-tokens", "32"), "--text-tokens was 24 and is 32, --new-tokens was 12 and is 9"),
        (("--dtype", "fp64"), "--dtype was 'torch.bfloat16' and is 'torch.float64'"),
        (("--prompts", str(tmp_path / "prompts.jsonl")), "the texts are others (--data, --prompts)"),
        (("--target", str(tmp_path / "other")), "--target was 'target' and is 'other'"),
        (("--target", str(tmp_path / "target")), "the target 'target' has other weights"),
        (("--drafter", f"mine={assets.demo_drafter()}"), "--drafter 'mine' was not given"),
    ):
        code, output = compare(place, *here, *more)
        said = " ".join(output.split())
        assert code == 2 and f"holds a comparison on other terms: {told}" in said, said
        assert said.endswith("; give the same, choose another --out, or delete it.")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--family", "mpl"), "there is no drafter family 'mpl'; did you mean mlp? Known are cascade, draft-model"),
        (("--family", "mlp:n_predct=3"), "mlp:n_predct is unknown; did you mean mlp:n_predict?"),
        (("--family", "mlp", "--family", "mlp"), "named twice"),
        (("--minutes", "2"), "two budgets"),
        (("--drafter", "x="), "not of the form FOLDER or NAME=FOLDER"),
        (("--drafter", "absent/x"), "folder absent/x does not exist"),
        (("--drafter", "a/drafter", "--drafter", "b/a"), "two drafters would be called 'a'"),
        (("--family", "mlp", "--drafter", "runs/mlp/drafter"), "2 methods would be called 'mlp'; name a trained"),
        (("--family", "eagle", "--drafter", "eagle2=x"), "2 methods would be called 'eagle2'"),
        (("--family", "mlp", "--rounds", "0"), "rounds is 0; it must be at least 1"),
        (("--family", "mlp", "--tasks", "poems"), "there are no prompts of task 'poems'"),
    ],
)
def test_mistakes_are_named(place: Path, arguments: tuple[str, ...], message: str):
    code, output = compare(place, *arguments)
    assert code == 2 and message in " ".join(output.split())


def slug(name: str) -> str:
    return name.replace(":", "-").replace(",", "-")


STARTS = {"init_from_target": {"none", "embeddings", "embeddings+head"}, "init_width": {0.5, 1.0, 2.0}}
KEPT = ("chain", "tree", "sampled_chain")


def lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def trials(path: Path) -> int:
    return path.read_bytes().count(b'"trial|') if path.exists() else 0


def value(record: str) -> dict[str, Any]:
    """Return what a record says, but for the time that it took."""
    found: dict[str, Any] = json.loads(record)
    return {name: said for name, said in found["value"].items() if name != "seconds"}


def kill_when(place: Path, more: tuple[str, ...], ready: Callable[[], bool]) -> None:
    """Run the command in a process of its own, and kill it as soon as `ready`."""
    # One server imports everything and forks for each command; this process itself has threads and must not be forked.
    context = get_context("forkserver")
    context.set_forkserver_preload([__name__])
    process = context.Process(target=compare, args=(place, *more))
    process.start()
    while process.is_alive() and not ready():
        time.sleep(0.002)
    assert process.is_alive(), "it ended before it was to be killed"
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def test_a_comparison_without_search_says_so(place: Path):
    more = ("--family", "mlp:inner_dim=16", "--search-share", "0", "--tasks", "code", "--out", str(place / "plain"))
    code, output = compare(place, *more)
    assert code == 0, output
    assert "No search: every family was trained with the rate and the start that it" in " ".join(output.split())
    (family,) = json.loads((place / "plain" / "report.json").read_text())["families"]
    assert family["rate"] == family["suggested_rate"] and family["search"]["trials"] == []
    assert family["start"] == {"init_from_target": "embeddings+head", "init_width": 1.0}


def test_a_part_of_the_data_is_measured_on_where_no_prompts_are_given(place: Path):
    # The prompts of this file, as data: six documents, of which no two share 13 words.
    command = arguments(place, "--family", "mlp:inner_dim=16", "--out", str(place / "own"))
    for option in ("--prompts", "--tasks"):
        at = command.index(option)
        del command[at : at + 2]
    result = CliRunner().invoke(app, [*command, "--data", str(place / "prompts.jsonl"), "--search-share", "0"])
    assert result.exit_code == 0, result.output
    found = json.loads((place / "own" / "report.json").read_text())
    assert (found["texts"]["data"], found["texts"]["prompts"]) == ("prompts.jsonl", None)
    assert [(part["part"], part["texts"]) for part in found["texts"]["parts"]] == [
        ("training", 3), ("tuning", 1), ("measured", 2)
    ]
    assert found["tasks"] == ["code", "edit"] and all(item["texts"] == 2 for item in found["measured"])
    parts = [lines(place / "own" / "parts" / f"{name}.jsonl") for name in ("training", "tuning", "measured")]
    assert parts == [3, 1, 2]


def test_texts_that_are_too_short_are_counted_once_and_no_recipe_is_named(place: Path):
    (place / "short.jsonl").write_text("".join(json.dumps({"text": f"one {i}"}) + "\n" for i in range(9)))
    more = ("--family", "mlp:inner_dim=16", "--data", str(place / "short.jsonl"), "--out", str(place / "short"))
    code, output = compare(place, *more)
    told = " ".join(output.split())
    parts = [json.loads(line) for line in (place / "short" / "parts" / "training.jsonl").read_text().splitlines()]
    assert code == 2 and f"({len(parts)}: shorter than 64 tokens)" in told and 4 < len(parts) < 9
    assert "give texts of at least 64 tokens with --data" in told and "stage2" not in told


def test_a_comparison_of_another_format_is_refused(place: Path):
    folder = place / "old"
    folder.mkdir()
    (folder / "measurements.jsonl").write_text('{"key": "terms", "value": {"format": 2}}\n')
    code, output = compare(place, "--family", "ngram", "--out", str(folder))
    assert code == 2 and "of another version of Draftsmith, which measured otherwise" in " ".join(output.split())


def test_a_killed_comparison_ends_as_one_that_was_not(place: Path):
    more = ("--family", "mlp:inner_dim=16", "--family", "ngram", "--positions", "6000", "--tasks", "code")
    whole, cut = place / "whole", place / "cut"
    assert compare(place, *more, "--out", str(whole))[0] == 0

    measurement_log, run = cut / "measurements.jsonl", cut / "runs" / "mlp-inner_dim=16"
    more += ("--out", str(cut))
    kill_when(place, more, lambda: lines(measurement_log) > 4)
    assert 2 <= trials(measurement_log) < trials(whole / "measurements.jsonl"), "killed as it searched"
    kill_when(place, more, lambda: (run / "latest").exists())
    (run / "latest").unlink()  # as if the kill had come between a checkpoint and the link to it
    searched = trials(measurement_log)
    assert lines(measurement_log) == 3 + searched, (
        "terms, beginning, what is scored, and search: it was killed as it trained"
    )
    assert searched == trials(whole / "measurements.jsonl")
    kill_when(place, more, lambda: lines(measurement_log) > 4 + searched)
    kept = measurement_log.read_bytes()
    assert lines(measurement_log) < lines(whole / "measurements.jsonl"), "killed as it measured"
    code, output = compare(place, *more)
    assert code == 0, output

    assert measurement_log.read_bytes().startswith(kept[: kept.rfind(b"\n") + 1]), "what was measured stays as it was"
    records = [(folder / measurement_log.name).read_text().splitlines() for folder in (whole, cut)]
    keys = [[json.loads(record)["key"] for record in several] for several in records]
    assert keys[0] == keys[1] and len(set(keys[1])) == len(keys[1]), "everything once, in the same order"
    found = [[value(record) for record in several if '"trial|' in record] for several in records]
    assert found[0] == found[1], "the search found the same"
    weights = [folder / "runs" / run.name / "drafter" / "model.safetensors" for folder in (whole, cut)]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    one, other = (json.loads((folder / "report.json").read_text()) for folder in (whole, cut))
    spent = [command["seconds"] for command in json.loads((run / "run.json").read_text())["runs"]]
    assert len(spent) == 2 and min(spent) > 0 and other["families"][0]["training_s"] == sum(spent), "both parts count"
    assert other["begun"]["date"] < other["provenance"]["date"], "the command that was killed began it"
    assert one["orderings"] == other["orderings"]
    for left, right in zip(one["cells"], other["cells"], strict=True):
        assert {name: left.get(name) for name in KEPT} == {name: right.get(name) for name in KEPT}


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


def test_an_unknown_family_leaves_no_folder(place: Path):
    code, _ = compare(place, "--family", "mpl", "--out", str(place / "nothing"))
    assert code == 2 and not (place / "nothing").exists()


def test_short_prompts_are_compared_on(place: Path):
    texts = [json.dumps({"text": f"a{i} = ", "task": "code"}) for i in range(4)]
    (place / "short.jsonl").write_text("\n".join(texts))
    more = ("--family", "ngram", "--prompts", str(place / "short.jsonl"), "--out", str(place / "brief"))
    code, output = compare(place, *more)
    assert code == 0, output
    cells = json.loads((place / "brief" / "report.json").read_text())["cells"]
    assert {cell["task"] for cell in cells} == {"code", "edit"} and all(cell["identical"] == 3 for cell in cells)


def test_shapes_fit_the_drafter():
    oracle = Method("oracle", OracleDrafter([[1, 2]], 8, plan=Plan((1,) * 6)))
    assert oracle.chain().depth == 4 and max(plan.depth for plan in oracle.shapes(0.0)) == 6


def test_a_damaged_measurement_log_is_refused(tmp_path: Path):
    path = tmp_path / "measurements.jsonl"
    path.write_text('{"key": "a", "value": 1}\nnonsense\n')
    with pytest.raises(DraftsmithError, match="line 2 of .* is damaged"):
        MeasurementLog(path)


def test_a_drafter_of_another_program_is_told_apart_by_its_weights(tmp_path: Path):
    """Published drafters have no manifest with a digest of theirs."""
    (tmp_path / "config.json").write_text("{}")
    found = []
    for weights in (b"", b"longer"):
        (tmp_path / "model.safetensors").write_bytes(weights)
        found.append(fingerprint(tmp_path))
    assert found[0] != found[1] == fingerprint(tmp_path)
