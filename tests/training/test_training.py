"""The training run on a tiny target: what it learns, leaves behind, and says when something is wrong."""

import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.drafters.registry import load_drafter
from draftsmith.training.checkpoint import Checkpoints
from draftsmith.training.recipe import load_recipe
from draftsmith.training.train import train
from draftsmith.types import DraftsmithError
from tests.helpers import training_toy as toy


@pytest.mark.usefixtures("drawn_in_full")
def test_two_stages_learn_and_leave_a_whole_run(tmp_path: Path, data: Path):
    overrides = ("stage1.steps=40", "stage2.steps=6", "output.report_to=tensorboard", "evaluation.every=20")
    result = toy.run(tmp_path / "run", data, *overrides)
    losses = [record["loss"] for record in toy.records(result.folder, "loss")]
    assert losses[39] < 0.8 * losses[0]
    assert result.step == 46 and [r["step"] for r in result.evaluations] == [0, 20, 40, 46]
    assert result.best == max(r["evaluation"]["tokens_per_step"] for r in result.evaluations)
    drafter = load_drafter(result.drafter, toy.target())
    assert isinstance(drafter, MLPSpeculator) and drafter.max_depth == 2
    assert load_recipe(result.folder / "recipe.yaml") == toy.recipe(tmp_path / "run", data, *overrides)
    run = json.loads((result.folder / "run.json").read_text())["runs"][0]
    assert run["versions"]["torch"] == torch.__version__ and run["target"]["name"] == "toy"
    assert (result.folder / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert list((result.folder / "tensorboard").iterdir())
    assert {r["stage"] for r in toy.records(result.folder, "loss")} == {"1", "2"}
    assert load_drafter(result.folder / "latest", toy.target()) is not None, "a checkpoint is a drafter"


def test_warm_start_takes_weights_and_nothing_else(tmp_path: Path, data: Path):
    first = toy.run(tmp_path / "a", data)
    second = toy.run(tmp_path / "b", data, f"drafter.init_from={first.drafter}", "stage1.steps=0", "stage2.steps=1")
    assert second.step == 1
    start = load_drafter(Checkpoints(second.folder, 2).at(0), toy.target()).state_dict()
    given = load_drafter(first.drafter, toy.target()).state_dict()
    assert all(torch.equal(tensor, start[name]) for name, tensor in given.items())
    with pytest.raises(DraftsmithError, match=r"drafter\.n_predict is 3, but drafter\.init_from .* has 2; set"):
        toy.run(tmp_path / "c", data, f"drafter.init_from={first.drafter}", "drafter.n_predict=3")


def test_dry_run_prints_the_plan_and_writes_a_loadable_drafter(tmp_path: Path, data: Path):
    console = Console(file=io.StringIO(), width=200)
    recipe = toy.recipe(tmp_path / "run", data)
    result = train(
        recipe, target=toy.target(), generate=toy.generate, evaluate=toy.evaluate, dry_run=True, console=console
    )
    text = console.file.getvalue()
    assert "stage 1: 6 steps × 2 sequences, at most 384 tokens, rate 0.01 → 0.001" in text
    assert "initialised drafter" in text
    assert load_drafter(result.drafter, toy.target()).max_depth == 2
    toy.run(tmp_path / "run", data)


def test_the_speculator_so_far_is_handed_to_generation(tmp_path: Path, data: Path):
    given: list[MLPSpeculator] = []
    train(
        toy.recipe(tmp_path / "run", data), target=toy.target(), generate=toy.generate, evaluate=toy.evaluate,
        on_drafter=given.append,
    )
    assert len(given) == 1 and not given[0].training
    assert (given[0].ln[0].bias != 0).any()


def mistakes(folder: Path, data: Path) -> list[tuple[tuple[str, ...], str]]:
    (folder / "file").write_text("")
    return [
        (("stage1.steps=0", "stage2.steps=0"), "both 0"),
        (("stage1.length=4096",), r"stage1\.length is 4096; this target and drafter need 5 to 128 tokens"),
        (("stage2.new_tokens=500",), r"prompt_tokens \+ stage2\.new_tokens is 506"),
        ((f"output.folder={folder}/file/x",), r"cannot write the run's folder .*file/x .*another output\.folder"),
        (("drafter.tie_to_target=true",), r"inner_dim is 16, but the target's tables are 32 wide"),
        ((f"data.sources=[{{path: {data}x}}]",), r"text\.jsonlx does not exist; did you mean .*text\.jsonl"),
        (("drafter.init_from=/nowhere/else",), "/nowhere/else does not exist"),
        (("data.sources=[]",), r"data\.sources is empty"),
    ]


def test_mistakes_are_one_clear_sentence(tmp_path: Path, data: Path):
    for i, (overrides, message) in enumerate(mistakes(tmp_path, data)):
        with pytest.raises(DraftsmithError, match=message):
            toy.run(tmp_path / str(i), data, *overrides)


def test_evaluation_without_tau_is_refused(tmp_path: Path, data: Path):
    with pytest.raises(DraftsmithError, match="returned loss; it must have tokens_per_step"):
        train(
            toy.recipe(tmp_path / "run", data), target=toy.target(), generate=toy.generate,
            evaluate=lambda _: {"loss": 1.0},
        )


@pytest.mark.parametrize("count", [3, 40])
def test_that_every_document_is_held_out_is_refused(tmp_path: Path, count: int):
    data = toy.write_data(tmp_path, count)
    with pytest.raises(DraftsmithError, match=r"recipe key data\.held_out_every cannot be used: 1 would .*; use 0 to"):
        toy.run(tmp_path / "run", data, "data.held_out_every=1")


def test_more_drafted_tokens_than_the_target_has_are_refused_by_their_key(tmp_path: Path, data: Path):
    size = toy.target().vocab_size
    words = rf"recipe key drafter\.draft_vocab_size is 2048, more than the target's {size} tokens \(toy\); use 0 to"
    with pytest.raises(DraftsmithError, match=words):
        toy.run(tmp_path / "run", data, "drafter.draft_vocab_size=2048")
