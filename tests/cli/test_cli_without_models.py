"""What the commands say before any model is loaded: help, the version, and mistakes in one sentence each."""

import re
from pathlib import Path

import pytest

from draftsmith import __version__
from tests.cli.test_cli import refused, run

COMMANDS = ("demo", "train", "generate", "bench", "compare", "check", "prove", "families", "doctor")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches_with_an_example_and_says_where_more_stands(command: str):
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"draftsmith {command} " in result.output and "Example" in result.output
    (page,) = set(re.findall(r"More: (\S+?\.md)", result.output))
    assert (Path(__file__).parents[2] / page).is_file()


def test_no_command_shows_the_commands():
    result = run()
    assert all(command in result.output for command in COMMANDS)


def test_the_version_is_that_of_the_package():
    result = run("--version")
    assert (result.exit_code, result.stdout) == (0, f"draftsmith {__version__}\n")


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        (["generate", ""], ["prompt is empty"]),
        (["generate", "x", "--top-p", "3"], ["top_p is 3.0"]),
        (["generate", "x", "--max-tokens", "0"], ["max_tokens is 0"]),
        (["generate", "x", "--n", "0"], ["n is 0"]),
        (["generate", "x", "--logit-bias", "a=b"], ["'a=b'"]),
        (["generate", "x", "--prompt-file", "absent.txt"], ["give one"]),
        (["generate", "--prompt-file", "absent.txt"], ["absent.txt"]),
        (["generate", "x", "--json", "/proc/absent/r.json"], ["/proc/absent"]),
        (["generate", "x", "--epsilon", "0.1"], ["--epsilon is 0.1", "--acceptance typical"]),
        (["generate", "x", "--delta", "0.1", "--acceptance", "block"], ["--delta is 0.1", "--acceptance typical"]),
        (["generate", "x", "--acceptance", "block", "--temperature", "1"], ["block", "add --sampled"]),
        (["generate", "x", "--acceptance", "typical"], ["typical changes nothing at temperature 0"]),
        (["generate", "x", "--acceptance", "block", "--sampled"], ["block changes nothing at temperature 0"]),
        (["generate", "x", "--acceptance", "typical", "--temperature", "1", "--epsilon", "2"], ["epsilon is 2.0"]),
        (["generate", "x", "--sampled", "--nodes", "4"], ["cannot be pruned"]),
        (["generate", "x", "--beam", "0"], ["beam is 0"]),
        (["bench", "--acceptance", "typical"], ["typical changes nothing at temperature 0"]),
        (["bench", "--temperature", "1", "--peer", "transformers"], ["--peer", "1.0"]),
        (["bench", "--temperature", "-1"], ["temperature is -1.0"]),
        (["bench", "--batch", "1,x"], ["--batch", "'1,x'"]),
        (["bench", "--candidates", "-1"], ["candidates"]),
        (["bench", "--peer", "other"], ["'other'"]),
        (["bench", "--data", "absent.jsonl"], ["absent.jsonl"]),
        (["bench", "--json", "/proc/absent/r.json"], ["/proc/absent"]),
        (["demo", "--out", "/proc/absent/report"], ["/proc/absent"]),
        (["demo", "--minutes", "0"], ["--minutes"]),
        (["train", "absent.yaml"], ["absent.yaml"]),
        (["train", "a.yaml", "b.yaml"], ["b.yaml"]),
        (["train", "--json", "/proc/absent/r.json"], ["/proc/absent"]),
    ],
)
def test_mistakes_are_one_sentence_before_anything_is_loaded(words: list[str], parts: list[str]):
    refused(run(*words), *parts)


def test_an_unknown_recipe_key_gets_the_nearest_right_one(tmp_path: Path):
    (tmp_path / "recipe.yaml").write_text("stage1: {step: 5}\n")
    refused(run("train", tmp_path / "recipe.yaml"), "stage1.step", "stage1.steps")
