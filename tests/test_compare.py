"""Families compared: the command on a tiny target, what it leaves behind, and how it goes on after a cut."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftsmith.cli.app import app
from draftsmith.evaluation.contest import Contender, words
from draftsmith.evaluation.contest_report import losers, orderings, verdict
from draftsmith.evaluation.ledger import Ledger
from draftsmith.types import DraftsmithError, Plan
from oracle import OracleDrafter
from tiny import save_tiny_target


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("compare")
    save_tiny_target(folder / "target")
    lines = [json.dumps({"text": f"def f{i}(x):\n    return x + {i}\n" * 12, "task": "code"}) for i in range(6)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    return folder


def compare(place: Path, *more: str) -> tuple[int, str]:
    result = CliRunner().invoke(
        app,
        [
            "compare", "--target", str(place / "target"), "--prompts", str(place / "prompts.jsonl"), "--tasks",
            "code,edit", "--prompt-count", "3", "--prompt-tokens", "16", "--new-tokens", "12", "--rounds", "3",
            "--texts", "16", "--text-tokens", "24", "--positions", "1000", "--out", str(place / "out"), *more,
        ],
    )
    return result.exit_code, result.output


def test_two_options_of_one_family(place: Path):
    families = ("--family", "mlp:inner_dim=16", "--family", "mlp:n_predict=2,tie_weights=true")
    code, output = compare(place, *families, "--json", str(place / "result.json"))
    assert code == 0, output
    result = json.loads((place / "result.json").read_text())
    names = ["mlp:inner_dim=16", "mlp:n_predict=2,tie_weights=true"]
    assert [family["name"] for family in result["families"]] == names
    assert all(family["parameters"] > 0 and family["training_positions"] >= 1000 for family in result["families"])
    assert {(c["contender"], c["task"], c["mode"]) for c in result["cells"]} == {
        (name, task, mode) for name in names for task in ("code", "edit") for mode in ("greedy", "T=1")
    }
    for cell in result["cells"]:
        assert len(cell["tree"]["tokens_per_step_by_prompt"]) == 3
        assert cell["speedup_ci"][0] <= cell["speedup"] <= cell["speedup_ci"][1]
        assert cell["mode"] != "greedy" or cell["identical"] == cell["rounds"] == 3
    assert "Verdict" in output and len(result["verdict"]) >= 4
    report = (place / "out" / "report.md").read_text()
    assert "## code, greedy" in report and (place / "out" / "tau-and-cost.png").read_bytes()[1:4] == b"PNG"

    measured = (place / "out" / "measurements.jsonl").read_bytes()
    code, output = compare(place, *families)
    assert code == 0 and (place / "out" / "measurements.jsonl").read_bytes() == measured, "nothing is done twice"
    (place / "out" / "measurements.jsonl").write_bytes(measured[:-25])
    code, output = compare(place, *families)
    again = (place / "out" / "measurements.jsonl").read_bytes()
    assert code == 0 and again.count(b"\n") == measured.count(b"\n"), "the record that was cut short is made again"
    code, output = compare(place, *families, "--seed", "5")
    assert code == 2 and "holds a comparison on other terms" in " ".join(output.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--family", "mpl"), "there is no drafter family 'mpl'; known are"),
        (("--family", "mlp:n_predct=3"), "mlp:n_predct is unknown; did you mean mlp:n_predict?"),
        (("--family", "mlp", "--family", "mlp"), "named twice"),
        (("--minutes", "2"), "two budgets"),
        (("--drafter", "x"), "not of the form NAME=FOLDER"),
        (("--family", "mlp", "--rounds", "0"), "rounds is 0; it must be at least 1"),
        (("--family", "mlp", "--tasks", "poems"), "there are no prompts of task 'poems'"),
    ],
)
def test_mistakes_are_named(place: Path, arguments: tuple[str, ...], message: str):
    code, output = compare(place, *arguments)
    assert code == 2 and message in " ".join(output.split())


def cell(name: str, speedup: float, task: str = "code", mode: str = "greedy", taus: tuple[float, ...] = (2.0, 2.2)):
    return {
        "contender": name, "task": task, "mode": mode, "speedup": speedup, "speedup_ci": [speedup - 0.1, speedup + 0.1],
        "plan": "chain 2", "identical": 12, "rounds": 12, "step_cost": 1.5, "share_drafting": 0.25,
        "tokens_per_step_timed": 1.2,
        "tree": {"tokens_per_step_by_prompt": list(taus)},
    }


def test_the_verdict_says_by_how_much_and_why_not():
    cells = [cell("mlp", 1.8), cell("ngram", 1.5), cell("slow", 0.8)]
    said = verdict(cells, ["code"])
    assert said[0].startswith("code, greedy: use mlp (chain 2), 1.80× plain decoding (1.70–1.90)")
    assert "next is ngram with 1.50×, clearly slower" in said[0]
    assert losers(cells) == [
        "slow does not beat plain decoding here: at its best (code, greedy, 0.80×) a step costs 1.50 plain ones "
        "(25% of it drafting) and brings 1.20 tokens."
    ]
    assert "decode plainly" in verdict([cell("mlp", 1.05)], ["code"])[0]
    other = cell("mlp", 1.8) | {"identical": 10}
    assert verdict([other], ["code"])[0].startswith("mlp, code: 2 of 12 greedy texts differ from plain decoding")
    close = verdict([cell("mlp", 1.8), cell("hydra", 1.75)], ["code"])
    assert "which the intervals do not tell apart" in close[0]


def test_orderings_are_paired_by_prompt():
    cells = [cell("mlp", 1.0, taus=(3.0, 2.0)), cell("medusa", 1.0, taus=(2.5, 1.5))]
    (found,) = orderings(cells, ["code"])
    assert found["difference"] == 0.5 and found["difference_ci"] == [0.5, 0.5]


def test_shapes_fit_the_drafter():
    oracle = Contender("oracle", OracleDrafter([[1, 2]], 8, plan=Plan((1,) * 6)))
    assert oracle.chain().depth == 4 and max(plan.depth for plan in oracle.shapes()) == 6
    assert words(Plan((1, 1))) == "chain 2" and words(Plan((2,) * 5, nodes=9)) == "tree 2^5 nodes 9"
    assert words(Plan(choices=((0,), (1,), (0, 0)))) == "static tree, nodes 3"
    assert words(Plan((2, 1), paths=2)) == "tree 2,1 paths 2"


def test_a_damaged_ledger_is_refused(tmp_path: Path):
    path = tmp_path / "ledger.jsonl"
    path.write_text('{"key": "a", "value": 1}\nnonsense\n')
    with pytest.raises(DraftsmithError, match="line 2 of .* is damaged"):
        Ledger(path)
