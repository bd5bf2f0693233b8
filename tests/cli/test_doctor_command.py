"""`draftsmith doctor`, and the number of threads that every command takes."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner, Result

from draftsmith import __version__
from draftsmith.cli import app
from draftsmith.cli.statistics import ratio_in_words, show_statistics
from draftsmith.processor import usable_cores
from draftsmith.types import Completion, Statistics
from draftsmith.workflows import doctor
from tests.helpers.tiny import save_tiny_target

ROOT = Path(__file__).parents[2]


def run(*words: str | Path) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "MATRIX_BYTES", 2**20)
    monkeypatch.setattr(doctor, "MEASURE_S", 0.01)


@pytest.mark.usefixtures("quick")
def test_doctor_says_what_runs_here_what_it_means_and_what_to_do(tmp_path: Path):
    result = run("doctor", "--json", tmp_path / "d.json")
    assert result.exit_code == 0
    record = json.loads((tmp_path / "d.json").read_text())
    shown = " ".join(result.stdout.split())
    assert "cannot write more than" in shown and "What would make it faster" in shown
    assert f"draftsmith {__version__}" in shown or "draftsmith source tree" in shown
    assert record["threads"] == torch.get_num_threads() == record["provenance"]["threads"]
    assert record["measured"]["gb_per_s"] > 0 and record["available"]["cores"] >= 1
    assert record["measured"]["plain_tokens_per_second_at_most"]["2 GB"] == record["measured"]["gb_per_s"] / 2
    assert "packed weights" in shown and record["packed"]["folder"].endswith("packed")
    assert record["packed"]["most_bytes"] == 8e9 and 0 <= record["packed"]["bytes"] <= 8e9
    assert (record["kernels"] is None) == bool(record["kernels_missing"])
    assert all(sentence.endswith(".") and sentence.split()[0] in shown for sentence in record["advice"])


@pytest.mark.usefixtures("quick")
def test_doctor_measures_with_the_threads_it_is_given(threads: Callable[[int], None]):
    result = run("doctor", "--threads", "3")
    assert result.exit_code == 0 and torch.get_num_threads() == 3
    words = [word for word in result.stdout.replace("│", " ").split("\n") if word.split()[:1] == ["threads"]]
    assert words[0].split() == ["threads", "3"]


def test_help_needs_no_pytorch():
    code = "import sys; from draftsmith.cli import app; app(['doctor', '--help'], standalone_mode=False); "
    code += "print([name for name in ('torch', 'transformers', 'matplotlib') if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT / "src")
    assert "--json" in done.stdout and done.stdout.strip().endswith("[]")


THREADED = ("generate", "bench", "compare", "prove", "check", "demo", "train", "tune-layers", "doctor")


@pytest.mark.parametrize("command", THREADED)
@pytest.mark.parametrize("number", ["0", "-2"])
def test_no_threads_are_refused_in_a_sentence(command: str, number: str):
    result = run(command, "--threads", number)
    assert result.exit_code == 2 and result.stdout == ""
    assert result.stderr == f"Error: --threads is {number}; use at least 1, or leave it out.\n"


def test_threads_that_would_never_meet_are_refused():
    cores = len(usable_cores())
    result = run("generate", "abc", "--threads", str(64 * cores))
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: --threads is {64 * cores}, on {cores} core") and "use " in result.stderr


def test_threads_change_no_text_and_too_many_are_said_to_be(tmp_path: Path, threads: Callable[[int], None]):
    target = save_tiny_target(tmp_path / "tiny-target")
    words = ("generate", "abc def", "--target", target, "--max-tokens", "12", "--dtype", "fp32", "--threads")
    too_many = len(usable_cores()) + 1
    one, many = run(*words, "1"), run(*words, str(too_many))
    assert one.exit_code == many.exit_code == 0 and one.stdout == many.stdout
    assert torch.get_num_threads() == too_many
    assert "threads on" not in one.stderr and f"{too_many} threads on" in many.stderr


def test_a_ratio_is_told_only_where_it_can_be_true():
    assert ratio_in_words(300.0, 200.0, 2.0, 0.0, 2) == ratio_in_words(300.0, 200.0, 2.0, None, 2) == "so this is 1.50×"
    assert ratio_in_words(300.0, 200.0, 2.0, 1.26, 2) == "no ratio, because other programs took 1.3 of 2 cores"
    assert ratio_in_words(210.0, 100.0, 2.0, 0.0, 2) == "so this is 2.10×"
    assert ratio_in_words(300.0, 100.0, 2.0, 0.0, 2).startswith("no ratio: 3.00 were more than 2.00 tokens a step can")


@pytest.mark.parametrize(("short", "expected"), [(0.0, False), (0.25, True)])
def test_statistics_say_for_how_long_there_were_fewer_threads(short: float, expected: bool):
    console = Console(width=200)
    done = Completion([1], [2], "b", "length", Statistics(steps=1, new_tokens=2, target_s=0.5), [0])
    with console.capture() as said:
        show_statistics(console, [done], "none", 100.0, short)
    text = said.get()
    assert ("0.250 of 0.500" in text) == expected
    assert ("because other programs wanted the processor" in text) == expected
    with console.capture() as said:
        show_statistics(console, [done], "none", 100.0, quantize="int4")
    assert "lossless, for int4 weights" in said.get() and "weights" not in text
