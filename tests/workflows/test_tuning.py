"""`tune-layers`: a drafter of the layers that matter, from the command line and from Python."""

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import draftsmith
from draftsmith import DraftsmithError, Target, load_drafter
from draftsmith.cli import app
from draftsmith.workflows.models import Loading
from tests.helpers.tiny import TOKENIZER_EOS, TOKENIZER_SIZE, save_tiny_target, tiny_model, tiny_tokenizer

SMALL = {"prompt_count": 4, "prompt_tokens": 12, "new_tokens": 12, "guesses": 3, "loading": Loading("fp32")}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target whose middle layer does nothing, and a file of texts."""
    folder = tmp_path_factory.mktemp("tuning")
    model = tiny_model("gemma3", dtype=torch.float32, vocabulary=TOKENIZER_SIZE, eos_token_id=TOKENIZER_EOS)
    model.model.layers[1].self_attn.o_proj.weight.zero_()
    model.model.layers[1].mlp.down_proj.weight.zero_()
    model.save_pretrained(folder / "target")
    tiny_tokenizer().save_pretrained(folder / "target")
    lines = [json.dumps({"text": f"def f{i}(x):\n    return x + {i}\n"}) for i in range(8)]
    (folder / "texts.jsonl").write_text("\n".join(lines))
    return folder


def test_the_command_saves_a_drafter_that_others_take(place: Path):
    words = [
        "tune-layers", "--target", place / "target", "--data", place / "texts.jsonl", "--out", place / "found",
        "--dtype", "fp32", "--guesses", "3", "--prompts", "4", "--prompt-tokens", "12", "--new-tokens", "12",
        "--evaluations", "40", "--json", place / "found.json",
    ]
    result = CliRunner().invoke(app, [str(word) for word in words])
    assert result.exit_code == 0, result.output
    record = json.loads((place / "found.json").read_text())
    assert record["complete"] and {1} <= set(record["best"]["skip_mlp"]) and 1 in record["best"]["skip_attention"]
    assert record["measured_on"] == "held-out prompts of texts.jsonl"
    assert record["best"]["cost"] == min(found["cost"] for found in record["evaluations"]) < 1
    assert record["best"]["measured_tau"] > 1 and record["first_layers"]["share"] < 1
    config = json.loads((place / "found" / "config.json").read_text())
    assert config["model_type"] == "skip_layers" and config["draftsmith"]["tuned"]["tau"] == record["best"]["tau"]
    wrote = [
        CliRunner().invoke(
            app, ["generate", "def f", "--target", str(place / "target"), "--dtype", "fp32", "--max-tokens", "9", *more]
        )
        for more in (["--drafter", str(place / "found")], [])
    ]
    assert wrote[0].exit_code == wrote[1].exit_code == 0 and wrote[0].stdout == wrote[1].stdout
    checked = CliRunner().invoke(app, ["check", "--target", str(place / "target"), "--drafter", str(place / "found")])
    assert checked.exit_code == 2 and "without a training forward" in " ".join(checked.stderr.split())


def test_what_was_found_is_kept_when_interrupted(place: Path):
    def stop(done: int, best: object) -> None:
        if done == 5:
            raise KeyboardInterrupt

    target = Target.from_pretrained(place / "target", dtype="fp32")
    result = draftsmith.tune_layers(
        target, place / "part", prompts=place / "texts.jsonl", on_progress=stop, **SMALL
    )
    assert not result.complete and len(result.evaluations) == 5
    assert result.best.cost == min(found.cost for found in result.evaluations)
    if result.drafter is not None:
        assert load_drafter(result.drafter, target).default_plan().depth == result.best.guesses


def test_where_nothing_gains_nothing_is_saved(tmp_path: Path):
    target = save_tiny_target(tmp_path / "target")
    result = draftsmith.tune_layers(
        target, tmp_path / "none", prompts=["some text to go on with"], evaluations=1, **SMALL
    )
    assert result.drafter is None and not (tmp_path / "none").exists()
    assert result.best.cost >= 1 and not result.best.skip_mlp
    assert "too few to hold any out" in result.sources[1]


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"guesses": 0}, "guesses is 0; give a positive number"),
        ({"prompt_tokens": 0}, "prompt_tokens is 0; give a positive number"),
        ({"minutes": 0.0}, "minutes is 0; give a positive number"),
        ({"overhead": -5.0}, "overhead is -5; give 0 or more plain steps"),
        ({"overhead": float("nan")}, "overhead is nan; give 0 or more plain steps"),
        ({"new_tokens": 4}, "4 new tokens hold no step of 3 guesses"),
        ({"new_tokens": 500}, "500 new tokens do not fit the context of 128"),
        ({"out": "target"}, "exists and holds something else"),
    ],
)
def test_settings_that_make_no_sense_are_refused(place: Path, options: dict, complaint: str):
    out = place / options.pop("out", "refused")
    with pytest.raises(DraftsmithError, match=complaint):
        draftsmith.tune_layers(place / "target", out, prompts=place / "texts.jsonl", **{**SMALL, **options})
