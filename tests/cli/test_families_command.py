"""`draftsmith families`, and what a mistyped family is answered with."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from draftsmith.cli import app
from draftsmith.drafters.family import Family
from draftsmith.drafters.registry import families
from draftsmith.training.recipe import build_recipe
from draftsmith.types import DraftsmithError


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def test_families_are_listed_with_options_and_whether_they_are_trained(tmp_path: Path):
    result = run("families", "--json", tmp_path / "f.json")
    assert result.exit_code == 0
    listed = {facts["name"]: facts for facts in json.loads((tmp_path / "f.json").read_text())["families"]}
    assert set(listed) == set(families()) and all(name in result.stdout for name in listed)
    assert "max_length=4" in " ".join(result.stdout.split())
    assert listed["mlp"]["trained"] and not listed["ngram"]["trained"] and listed["eagle"]["tree"]
    options = {option["name"]: option for option in listed["ngram"]["options"]}
    assert options["max_length"] == {
        "name": "max_length", "default": 4, "required": False,
        "what": "the most that are looked up; the longest match is tried first",
    }
    (path, *_) = listed["draft-model"]["options"]
    assert path["name"] == "path" and path["required"] and path["default"] is None


@pytest.mark.parametrize("family", families().values(), ids=lambda family: family.name)
def test_every_option_says_in_a_line_what_it_means(family: Family):
    for name, field in family.config.options().items():
        assert field.description and len(field.description) < 120, name
        assert "\n" not in field.description and not field.description.endswith("."), name


def test_what_the_target_decides_is_no_option():
    assert not {"hidden_size", "vocab_size", "rope_parameters"} & families()["eagle"].config.options().keys()
    for key in ("hidden_size", "rope_parameters"):
        with pytest.raises(DraftsmithError, match=f"drafter.{key} is the target's own; leave it out"):
            build_recipe({"drafter": {"family": "eagle", key: 64}})


def test_one_family_is_told_in_full():
    result = run("families", "eagle")
    told = " ".join(result.stdout.replace("│", " ").split())
    assert result.exit_code == 0 and "--plan eagle takes its published tree" in told
    assert "weight, in the loss, of the cross-entropy against the target's own distribution" in told
    assert "feature_weight 1.0" in told


@pytest.mark.parametrize(
    ("words", "near"),
    [
        (["families", "medsa"], "medusa"),
        (["train", "drafter.family=eagel"], "eagle"),
        (["generate", "x", "--drafter", "ngrm:max_length=3", "--dtype", "fp32"], "ngram"),
        (["generate", "x", "--drafter", "sufix", "--dtype", "fp32"], "suffix"),
    ],
)
def test_a_mistyped_family_is_answered_with_the_nearest_and_the_list(words: list[str], near: str):
    result = run(*words)
    sentence = " ".join(result.stderr.split())
    assert result.exit_code == 2 and result.stdout == ""
    assert f"did you mean {near}? Known are cascade, draft-model" in sentence
    assert "`draftsmith families` says more" in sentence
