"""Families compared: the command on a tiny target, what it leaves behind, and how it goes on after a cut."""

import json
import signal
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from draftsmith import assets
from draftsmith.cli.app import app
from draftsmith.evaluation.comparison.measurement_log import MeasurementLog
from draftsmith.evaluation.comparison.methods import Method
from draftsmith.plan import Plan
from draftsmith.types import DraftsmithError
from draftsmith.workflows.comparison import fingerprint
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


def test_where_it_is_no_terminal_a_line_tells_of_everything_that_is_decoded(place: Path, tmp_path: Path):
    families = ("--family", "ngram", "--family", "ngram:max_length=4")
    said = CliRunner().invoke(app, arguments(place, *families, "--out", str(tmp_path))).stderr.splitlines()
    parts = ("ngram", "ngram:max_length=4", "round 1", "round 2", "round 3")
    assert [line for line in said if line.startswith("now: ")] == [
        f"now: decoding, {part}: {task}, {mode}"
        for task in ("code", "edit") for mode in ("greedy", "T=1") for part in parts
    ]


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
