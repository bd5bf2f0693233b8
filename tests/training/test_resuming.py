"""Runs that were stopped, by Ctrl-C or by an error, and go on; and what is refused as another run."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.targets import Target
from draftsmith.training.checkpoint import BEST, Checkpoints
from draftsmith.training.recipe import build_recipe
from draftsmith.training.train import train
from draftsmith.training.trainer import TrainingInterrupted
from draftsmith.types import DraftsmithError
from tests.helpers import training_toy as toy


@pytest.mark.parametrize(
    "overrides",
    [
        ("optimizer.name=muon", "drafter.tie_weights=true", "optimizer.precision=bf16"),
        ("drafter.inner_dim=32", "drafter.tie_to_target=true", "drafter.scale_input=true"),
        ("drafter.condition_on_tokens=false", "stage1.accumulate=2", "stage1.positions_per_sequence=5"),
        ("drafter.inner_dim=32", "drafter.init_from_target=embeddings+head", "stage1.steps=0"),
    ],
    ids=["muon", "target's tables", "state-only", "stage 2 alone"],
)
def test_options_train_and_resume_alike(tmp_path: Path, data: Path, overrides: tuple[str, ...]):
    toy.run(tmp_path / "calm", data, *overrides)
    seen = 0

    def stop_in_the_middle(drafter: MLPSpeculator) -> dict[str, float]:
        nonlocal seen
        seen += 1
        if seen == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return toy.evaluate(drafter)

    arguments = {"target": toy.target(), "generate": toy.generate}
    recipe = toy.recipe(tmp_path / "twice", data, *overrides, "evaluation.every=3")
    with pytest.raises(TrainingInterrupted, match=r"stopped at step 3 of \d+; everything is saved .*go on with --res"):
        train(recipe, evaluate=stop_in_the_middle, **arguments)
    train(recipe, evaluate=toy.evaluate, resume=True, **arguments)
    for name in ("latest/model.safetensors", "latest/optimizer.safetensors"):
        assert (tmp_path / "calm" / name).read_bytes() == (tmp_path / "twice" / name).read_bytes()


def test_stopped_while_the_target_writes(tmp_path: Path, data: Path):
    toy.run(tmp_path / "calm", data)
    asked = 0

    def stop_while_writing(prompts: list[list[int]], max_tokens: int, seed: int) -> list[list[int]]:
        nonlocal asked
        asked += 1
        os.kill(os.getpid(), signal.SIGINT)
        return toy.generate(prompts, max_tokens, seed)

    recipe = toy.recipe(tmp_path / "run", data)
    with pytest.raises(TrainingInterrupted, match="stopped at step 6 of 10"):
        train(recipe, target=toy.target(), generate=stop_while_writing, evaluate=toy.evaluate)
    assert asked == 1 and (tmp_path / "run" / "generated.jsonl").read_text().count("\n") == 1
    toy.run(tmp_path / "run", data, resume=True)
    assert toy.outcome(tmp_path / "run") == toy.outcome(tmp_path / "calm")


READS = 2
"""How often the target reads the held-out text of `write_data` before the first step."""


def poisoned(at: int) -> Target:
    """Return a target whose states are NaN the `at`-th time they are asked for."""

    class Poisoned(Target):
        calls = 0

        def encode(self, *args, **kwargs):
            features, logits = super().encode(*args, **kwargs)
            self.calls += 1
            return (features * float("nan") if self.calls == at else features), logits

    return Poisoned(toy.target().model, toy.target().tokenizer, "toy")


def test_not_finite_loss_stops_with_the_step_and_keeps_the_checkpoint(tmp_path: Path, data: Path):
    recipe = toy.recipe(tmp_path / "run", data)
    with pytest.raises(DraftsmithError, match=r"loss became nan .* at step 4; the checkpoint of step 2 is kept; lower"):
        train(recipe, target=poisoned(READS + 4), generate=toy.generate, evaluate=toy.evaluate)
    assert Checkpoints(tmp_path / "run", 2).load().progress["step"] == 2
    toy.run(tmp_path / "run", data, resume=True)
    toy.run(tmp_path / "calm", data)
    assert toy.outcome(tmp_path / "run") == toy.outcome(tmp_path / "calm")


def test_the_seconds_of_a_run_add_up_over_its_commands(tmp_path: Path, data: Path):
    folder = tmp_path / "run"

    def commands() -> list[dict[str, Any]]:
        runs: list[dict[str, Any]] = json.loads((folder / "run.json").read_text())["runs"]
        return runs

    with pytest.raises(DraftsmithError, match="loss became nan"):
        train(toy.recipe(folder, data), target=poisoned(READS + 4), generate=toy.generate, evaluate=toy.evaluate)
    (first,) = commands()
    result = toy.run(folder, data, resume=True)
    before, after = commands()
    assert before == first and min(before["seconds"], after["seconds"]) > 0
    assert result.seconds == before["seconds"] + after["seconds"]
    del before["seconds"]  # as a run of an earlier version, which kept no count, left it
    (folder / "run.json").write_text(json.dumps({"runs": [before, after]}))
    assert toy.run(folder, data, resume=True).seconds is None


def test_curves_on_a_board_have_every_step_once_after_resuming(tmp_path: Path, data: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "run"
    recipe = toy.recipe(folder, data, "output.report_to=tensorboard")
    with pytest.raises(DraftsmithError, match="at step 4; the checkpoint of step 2"):
        train(recipe, target=poisoned(READS + 4), generate=toy.generate, evaluate=toy.evaluate)
    assert toy.records(folder, "loss")[-1]["step"] == 3, "a step behind the checkpoint, which comes again"
    toy.run(folder, data, "output.report_to=tensorboard", resume=True)
    board = accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    steps = [event.step for event in board.Scalars("loss")]
    assert steps == [record["step"] for record in toy.records(folder, "loss")] == list(range(1, 11))


def test_a_run_that_recorded_no_ways_of_making_tokens_is_refused(tmp_path: Path, data: Path):
    result = toy.run(tmp_path / "run", data)
    kept = result.folder / "run.json"
    record = json.loads(kept.read_text())
    del record["runs"][-1]["target"]["text_hash"]
    kept.write_text(json.dumps(record))
    with pytest.raises(DraftsmithError, match="earlier version, which did not record the target's text_hash; start"):
        toy.run(tmp_path / "run", data, resume=True)


def test_a_run_is_neither_overwritten_nor_resumed_as_another(tmp_path: Path, data: Path):
    folder = tmp_path / "run"
    with pytest.raises(DraftsmithError, match="no checkpoint to resume from"):
        toy.run(folder, data, resume=True)
    toy.run(folder, data)
    before = toy.outcome(folder)
    with pytest.raises(DraftsmithError, match="already holds a run, at step 10; add --resume .* or choose another"):
        toy.run(folder, data)
    with pytest.raises(DraftsmithError, match=r"stage1\.rate is 0\.5, but the run in .* has 0\.01; go on with"):
        toy.run(folder, data, "stage1.rate=0.5", resume=True)
    sources = [{"path": str(data)}, {"path": str(shutil.copy(data, tmp_path / "b.jsonl")), "weight": 2}]
    with pytest.raises(DraftsmithError, match=r"data\.sources is /.*, /.*b\.jsonl with weight 2, but") as raised:
        toy.run(folder, data, f"data.sources={json.dumps(sources)}", resume=True)
    assert "[" not in str(raised.value) and f"has {data};" in str(raised.value), "names, not Python"
    other = toy.recipe(folder, data).model_dump() | {"drafter": {"family": "eagle"}}
    with pytest.raises(DraftsmithError, match=r"drafter\.family is 'eagle', but the run in .* has 'mlp'; go on with"):
        train(build_recipe(other), target=toy.target(), generate=toy.generate, evaluate=toy.evaluate, resume=True)
    assert toy.run(folder, data, "output.keep=1", resume=True).step == 10
    after = toy.outcome(folder)
    del after["recipe.yaml"]
    assert after.items() <= before.items(), "resuming a finished run repeats nothing, but keeps as many as asked"
    checkpoints = Checkpoints(folder, 1)
    assert set(checkpoints.steps()) == {checkpoints.linked(BEST), 10}
    assert len(json.loads((folder / "run.json").read_text())["runs"]) == 2


def test_a_folder_without_a_run_keeps_its_files(tmp_path: Path):
    """One with checkpoints is a run, whatever else was removed from it."""
    run = Checkpoints(tmp_path, keep=1)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("mine")
    with pytest.raises(DraftsmithError, match=r"has no run in it, but recipe.yaml, which a run would replace"):
        run.check_begin(resume=False)
    assert recipe.read_text() == "mine"
    run.at(3).mkdir(parents=True)
    run.check_begin(resume=True)
    with pytest.raises(DraftsmithError, match="already holds a run, at step 3"):
        run.check_begin(resume=False)


def test_a_run_is_not_resumed_with_other_weights_of_the_target(tmp_path: Path, data: Path):
    toy.run(tmp_path / "run", data)
    model = toy.target().model
    changed = type(model)(model.config)
    changed.load_state_dict(model.state_dict())
    with torch.no_grad():
        changed.lm_head.weight *= 1.1
    other = Target(changed, toy.target().tokenizer, toy.target().name, native=False)
    with pytest.raises(DraftsmithError, match="has other weights than when the run in .* began; give the target that"):
        train(
            toy.recipe(tmp_path / "run", data), target=other, generate=toy.generate, evaluate=toy.evaluate,
            resume=True,
        )
