"""What a run measures and foretells: intervals, sources apart, estimates, and the sizes that follow from them."""

import io
import json
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from draftsmith import assets, train
from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.engine import Engine
from draftsmith.evaluation.measuring.intervals import ratio_interval
from draftsmith.evaluation.prompts import load_prompts
from draftsmith.targets import Target
from draftsmith.training.build import build_drafter, held_out_windows
from draftsmith.training.curves import draw_curves
from draftsmith.training.data.sources import Source
from draftsmith.training.data.survey import Survey
from draftsmith.training.data.windows import collate
from draftsmith.training.measuring import HeldOutLoss, source_lines, tau_in_words, with_loss
from draftsmith.training.progress import Work
from draftsmith.training.recipe import load_recipe
from draftsmith.training.step import TrainingStep
from draftsmith.types import DraftsmithError, SamplingParams, Statistics
from draftsmith.workflows.bridge import FIRST_PROMPTS, TOO_LOW, EngineBridge, scores
from draftsmith.workflows.estimate import Pace, foretold
from draftsmith.workflows.held_out import Evaluation, held_out_prompts
from draftsmith.workflows.recipes import final_rates
from draftsmith.workflows.sizes import by_data, by_measurements, by_time
from draftsmith.workflows.sources import gather_prompts
from tests.helpers import training_toy as toy
from tests.helpers.tiny import save_tiny_target

SMALL = ("drafter.n_predict=2", "stage1.batch=2", "stage1.length=24", "stage2.batch=2", "stage2.prompt_tokens=8",
         "stage2.new_tokens=8", "stage2.generate_batch=2", "optimizer.precision=fp32")


def write(path: Path, words: str, count: int = 40) -> Path:
    path.write_text("".join(json.dumps({"text": f"{i} {words} {i * i} " * 6}) + "\n" for i in range(count)))
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measures")
    save_tiny_target(folder / "model")
    write(folder / "code.jsonl", "draft verify accept")
    write(folder / "prose.jsonl", "a token of a tree has a root")
    return folder


def test_the_interval_is_that_of_a_draw_of_prompts():
    found = [Statistics(steps=steps, accepted=accepted) for steps, accepted in ((4, 4), (10, 1), (6, 5), (0, 0))]
    told = scores(found)
    assert told["tokens_per_step"] == 1.5 and told["prompts"] == 4
    assert told["tokens_per_step_ci"] == ratio_interval([8, 11, 11], [4, 10, 6]).ends
    assert tau_in_words(told) == "τ = 1.500 (95 % interval {:.3f} to {:.3f})".format(*told["tokens_per_step_ci"])
    alone = scores(found[:1])
    assert "tokens_per_step_ci" not in alone and tau_in_words(alone) == "τ = 2.000"


def test_every_source_is_measured_by_itself(place: Path):
    recipe = toy.recipe(place / "unused", place / "code.jsonl", "data.held_out_every=4")
    sections = [{"path": str(place / name)} for name in ("code.jsonl", "prose.jsonl")]
    recipe = type(recipe).model_validate(
        recipe.model_dump() | {"data": recipe.data.model_dump() | {"sources": sections}}
    )
    target = toy.target()
    drafter = build_drafter(recipe, target)
    learning = TrainingStep(drafter, target, recipe.optimizer, recipe.distillation)
    loss, by_source = HeldOutLoss(recipe, target)(learning)
    windows = held_out_windows(recipe, target, drafter.max_depth + 3)
    assert set(by_source) == set(windows) == {"code", "prose"} and loss is not None

    # In all it is what all windows of both have side by side: every guess counts as much as any other.
    everything = [window for own in windows.values() for window in own]
    both_N, _ = learning.measure([collate(everything, 99, drafter.max_depth - 1)], 99)
    alone = {name: learning.measure([collate(own, 99, 1)], 99) for name, own in windows.items()}
    torch.testing.assert_close(
        both_N, sum(one * count for one, count in alone.values()) / sum(count for _, count in alone.values())
    )
    assert min(by_source.values()) < loss < max(by_source.values())

    prompts = held_out_prompts(recipe.data, target, 100)
    assert {prompt.task for prompt in prompts} == {"code", "prose"}
    bridge = EngineBridge(target, prompts, 3, 12, 8, {})
    served = drafter.eval().requires_grad_(False)
    found = bridge.evaluate(served)
    ready, params = drafter.for_decoding(target), SamplingParams(max_tokens=12)
    for name, asked in bridge.prompts.items():
        texts = Engine(target, ready, max_batch=8).generate(asked, params)
        assert found["by_source"][name] == scores([text.statistics for text in texts])
    told = with_loss(dict(found), loss, by_source)
    assert told["by_source"]["code"]["held_out_loss"] == by_source["code"] and told["held_out_loss"] == loss
    lines = source_lines(told)
    assert len(lines) == 2 and lines[0].startswith("  code   τ = ") and f"{by_source['prose']:.3f}" in lines[1]


def test_a_few_prompts_do_for_what_guesses_nothing():
    target = Target.from_pretrained(assets.demo_target())
    bridge = EngineBridge(target, gather_prompts(None), FIRST_PROMPTS + 1, 12, 16, {})
    assert max(len(prompts) for prompts in bridge.prompts.values()) > FIRST_PROMPTS
    drafter = MLPSpeculator.from_pretrained(assets.demo_drafter(), target)
    found = bridge.evaluate(drafter)
    assert found["tokens_per_step_ci"][1] > TOO_LOW and found["prompts"] == len(bridge.every_prompt)
    for parameter in drafter.parameters():
        parameter.data.zero_()
    found = bridge.evaluate(drafter)
    assert found["tokens_per_step_ci"][1] < TOO_LOW and found["prompts"] == FIRST_PROMPTS * len(bridge.prompts)


def test_a_run_says_and_keeps_both_measures_by_source(place: Path, tmp_path: Path):
    told = Console(file=io.StringIO(), width=400)
    result = train(
        {"stage1": {"steps": 2}, "stage2": {"steps": 1}, "target": {"dtype": "fp32"}}, *SMALL,
        target=place / "model", data=[place / "code.jsonl", place / "prose.jsonl"], out=tmp_path / "run", console=told,
        evaluation=Evaluation(prompts_a_task=3, new_tokens=8, prompt_tokens=8),
    )
    record = json.loads(json.dumps(result.as_json()))["result"]
    assert record["best_step"] in (0, 2, 3) and record["ended_early"] == []
    for evaluation in record["evaluations"]:
        found = evaluation["evaluation"]
        low, high = found["tokens_per_step_ci"]
        assert 1 <= low <= found["tokens_per_step"] <= high and set(found["by_source"]) == {"code", "prose"}
        for own in found["by_source"].values():
            assert own["prompts"] and own["held_out_loss"] > 0 and len(own["tokens_per_step_ci"]) == 2
    assert result.training.best_scores is not None
    assert result.training.best_scores["tokens_per_step"] == result.best
    said = told.file.getvalue()
    for part in ("used; left out:", "estimate:", "of stage 1", "of measuring τ 3 times", "95 % interval", "\n  code "):
        assert part in said, part
    assert result.measured_on.count == 6
    assert result.prompts == tmp_path / "run" / "held-out.jsonl"
    assert load_prompts(result.prompts) == list(result.measured_on.prompts), "and so bench measures what was held out"
    data = load_recipe(result.training.folder / "recipe.yaml").data
    sources = (Source(section, data.held_out_every, data.piece_characters) for section in data.sources)
    trained_on = {piece.content for source in sources for piece in source.pieces()}
    assert trained_on and not trained_on & {prompt.text for prompt in load_prompts(result.prompts)}


def test_that_a_run_cannot_go_on_is_said_before_its_target_is_loaded(place: Path, tmp_path: Path):
    model, data = tmp_path / "model", tmp_path / "a.jsonl"
    shutil.copytree(place / "model", model)
    shutil.copy(place / "code.jsonl", data)
    recipe = {"stage1": {"steps": 1}, "stage2": {"steps": 0}, "target": {"dtype": "fp32"}}
    words = {"target": model, "evaluation": Evaluation(prompts_a_task=2, new_tokens=8, prompt_tokens=8)}
    train(recipe, *SMALL, data=data, out=tmp_path / "run", **words)
    (model / "model.safetensors").write_bytes(b"")  # no load can succeed
    with pytest.raises(DraftsmithError, match=rf"data\.sources is {place}/prose\.jsonl, but .* has {data}; go on with"):
        train(recipe, *SMALL, data=place / "prose.jsonl", out=tmp_path / "run", resume=True, **words)
    with data.open("a") as lines:
        lines.write('{"text": "more"}\n')
    with pytest.raises(DraftsmithError, match=r"a\.jsonl has changed since the run in"):
        train(recipe, *SMALL, data=data, out=tmp_path / "run", resume=True, **words)
    with pytest.raises(DraftsmithError, match=r"recipe key drafter\.draft_vocab_size is 2048, more than .*/model\)"):
        train(recipe, *SMALL, "drafter.draft_vocab_size=2048", data=data, out=tmp_path / "new", **words)


def test_a_family_is_named_again_to_go_on_without_the_options_chosen_at_the_start(place: Path, tmp_path: Path):
    """Such as the drafted vocabulary, which is chosen for a large one."""
    words = {"target": place / "model", "data": place / "code.jsonl", "out": tmp_path / "run", "family": "mlp"}
    recipe = {"stage1": {"steps": 1}, "stage2": {"steps": 0}, "target": {"dtype": "fp32"}}
    asked = Evaluation(prompts_a_task=2, new_tokens=8, prompt_tokens=8)
    train(recipe, *SMALL, "drafter.draft_vocab_size=64", evaluation=asked, **words)
    assert train(None, *SMALL, evaluation=asked, resume=True, **words).training.step == 1
    with pytest.raises(DraftsmithError, match="draft_vocab_size is 32, but"):
        train(None, *SMALL, evaluation=asked, resume=True, **{**words, "family": "mlp:draft_vocab_size=32"})
    with pytest.raises(DraftsmithError, match="drafter.family is 'medusa', but the run in .* has 'mlp'"):
        train(None, *SMALL[1:], evaluation=asked, resume=True, **{**words, "family": "medusa"})


@pytest.mark.parametrize("named", [True, False], ids=["named again", "not named"])
def test_a_run_goes_on_though_what_it_started_from_is_gone(place: Path, tmp_path: Path, named: bool):
    words: dict[str, Any] = {"data": place / "code.jsonl", "target": place / "model"}
    recipe = {"stage1": {"steps": 2}, "target": {"dtype": "fp32"}, "output": {"save_every": 1}}
    asked = Evaluation(prompts_a_task=2, new_tokens=8, prompt_tokens=8)
    first = train(recipe, *SMALL, evaluation=asked, out=tmp_path / "first", **words)
    warm = {"init_from": first.drafter, "out": tmp_path / "second", **words}
    train(recipe, *SMALL, evaluation=asked, **warm)
    last = tmp_path / "second" / "checkpoints" / "step-00000002"
    weights = (last / "model.safetensors").read_bytes()
    (last / "model.safetensors").write_bytes(b"")
    shutil.move(tmp_path / "first", tmp_path / "moved")
    if not named:
        del warm["init_from"]
    for dry_run in (True, False):
        with pytest.warns(RuntimeWarning, match="the run goes on from its checkpoint of step 1 instead"):
            train(None, evaluation=asked, resume=True, dry_run=dry_run, **warm)
    assert (last / "model.safetensors").read_bytes() == weights


def test_a_family_beside_a_recipe_of_another_one_is_named_again_to_go_on(place: Path, tmp_path: Path):
    words = {"target": place / "model", "data": place / "code.jsonl", "out": tmp_path / "run", "family": "medusa"}
    recipe = {
        "drafter": {"family": "mlp", "n_predict": 2}, "stage1": {"steps": 1}, "stage2": {"steps": 0},
        "target": {"dtype": "fp32"},
    }
    asked = Evaluation(prompts_a_task=2, new_tokens=8, prompt_tokens=8)
    train(recipe, *SMALL[1:], evaluation=asked, **words)
    assert train(recipe, *SMALL[1:], evaluation=asked, resume=True, **words).training.step == 1


def test_rates_fall_where_only_their_beginning_is_set(tmp_path: Path):
    assert final_rates(["stage1.rate=1e-4", "stage2.rate=2e-4", "stage2.final_rate=1e-4", "stage1.steps=3"]) == [
        "stage1.final_rate=5e-06"
    ]
    assert final_rates(["stage1.rate=fast"]) == []
    with pytest.raises(DraftsmithError, match="stage2 cannot be used: final_rate is 1e-05 and rate 1e-06, so that it"):
        toy.recipe(tmp_path, tmp_path, "stage2.rate=1e-6", "stage2.final_rate=1e-5")


def test_an_estimate_comes_with_a_dry_run_and_is_of_the_rest_when_resumed(place: Path, tmp_path: Path):
    words = {"target": place / "model", "data": place / "code.jsonl", "out": tmp_path / "run"}
    recipe = {"stage1": {"steps": 4}, "target": {"dtype": "fp32"}, "output": {"save_every": 1}}
    asked = Evaluation(prompts_a_task=2, new_tokens=8, prompt_tokens=8)

    def said(**more: bool) -> str:
        told = Console(file=io.StringIO(), width=400)
        train(recipe, *SMALL, evaluation=asked, console=told, **words, **more)
        return told.file.getvalue()

    assert "of saving 5 times; " in said(dry_run=True)
    assert "of measuring τ 2 times" in said()
    run = tmp_path / "run"
    (run / "checkpoints" / "step-00000004" / "model.safetensors").write_bytes(b"")
    rest = said(resume=True)
    skipped = run / "checkpoints" / "step-00000004" / "model.safetensors"
    why = "(its SHA-256 is not in manifest.json)"
    assert f"{skipped} is damaged {why}; the run goes on from its checkpoint of step 3 instead.\n" in rest
    assert "resuming at step 3 of 4" in rest and "of measuring τ 1 time, " in rest and "of saving 1 time; " in rest
    assert "estimate" not in said(resume=True), "nothing is left to be done"


def test_a_run_is_not_resumed_with_other_prompts_to_measure_on(place: Path, tmp_path: Path):
    words = {"target": place / "model", "data": place / "code.jsonl", "out": tmp_path / "run"}
    recipe = {"stage1": {"steps": 1}, "stage2": {"steps": 0}, "target": {"dtype": "fp32"}}
    asked = Evaluation(prompts_a_task=2, new_tokens=8, prompt_tokens=8)
    train(recipe, *SMALL, evaluation=asked, **words)
    changes: tuple[dict[str, Any], ...] = (
        {"prompts": place / "prose.jsonl"}, {"prompts_a_task": 1}, {"new_tokens": 9}, {"prompt_tokens": 7},
    )
    for change in changes:
        with pytest.raises(DraftsmithError, match="has measured τ on other prompts or lengths .* give the same data"):
            train(recipe, *SMALL, evaluation=replace(asked, **change), resume=True, **words)
    assert train(recipe, *SMALL, evaluation=asked, resume=True, **words).training.step == 1
    kept = tmp_path / "run" / "run.json"
    record = json.loads(kept.read_text())
    for earlier in record["runs"]:  # as an earlier version wrote it
        del earlier["measured_on"]
    kept.write_text(json.dumps(record))
    other = replace(asked, new_tokens=9)
    assert train(recipe, *SMALL, evaluation=other, resume=True, **words).training.step == 1
    with pytest.raises(DraftsmithError, match="has measured τ on other prompts"):
        train(recipe, *SMALL, evaluation=asked, resume=True, **words)


PACE = Pace(first=0.5, second=1.0, text=0.25, measurement=6.0, save=0.0, parameters=10**6, depth=3)


def test_an_estimate_adds_up(tmp_path: Path):
    recipe = toy.recipe(tmp_path, tmp_path)
    sentence = foretold(recipe, toy.target(), PACE, Work(120, 60, 240, 10, 4))
    assert sentence.startswith(
        "estimate: 4.0 minutes: 60 s of stage 1 (0.500 s a step), 2.0 minutes of stage 2 (1.000 s a step, 240 texts of "
        "the target's to write), 60 s of measuring τ 10 times, 0 s of saving 4 times; "
    )
    rest = foretold(recipe, toy.target(), PACE, Work(0, 60, 0, 0, 0))
    assert rest.startswith("estimate: 60 s: 60 s of stage 2 (1.000 s a step); ")


def test_time_is_shared_out_with_what_measuring_takes(tmp_path: Path):
    survey = Survey([10], Counter(), whole=False)
    recipe = toy.recipe(tmp_path, tmp_path, "stage1.steps=1", "stage2.steps=1")
    steps = {choice.key: choice.value for choice in by_time(survey, recipe, PACE, 20.0)}
    # Eight measurements within the stages and three at their ends leave 1,134 of 1,200 seconds; a step of stage 2 needs
    # one text.
    assert steps == {"stage1.steps": int(0.4 * 1134 / 0.5), "stage2.steps": int(0.6 * 1134 / 1.25)}
    whole = Survey([10] * 400, Counter(), whole=True)
    twice = toy.recipe(tmp_path, tmp_path, "stage1.steps=1", "stage1.batch=16", "stage1.accumulate=4")
    passes = by_time(whole, twice, PACE, 2000.0)[0]
    assert passes.value == 20 * 400 // (16 * 4) and passes.why.startswith("20 passes over the data's 400 windows")
    # What a stage with steps of its own takes is not the other's: 300 of the 1,134 seconds, 500 of them, or all.
    for stage, count, other, left in ((1, 600, 2, 834 / 1.25), (2, 400, 1, 634 / 0.5), (1, 9000, 2, 10)):
        given = toy.recipe(tmp_path, tmp_path, f"stage{stage}.steps={count}", f"stage{other}.steps=1")
        found = {choice.key: choice for choice in by_time(survey, given, PACE, 20.0, [f"stage{stage}.steps"])}
        assert found.keys() == {f"stage{other}.steps"} and found[f"stage{other}.steps"].value == int(left)
        assert found[f"stage{other}.steps"].why.startswith(f"what stage{stage}.steps={count} leaves of 20 minutes (")
    long = toy.recipe(tmp_path, tmp_path, "stage1.steps=900", "stage2.steps=500")
    assert {c.key: c.value for c in by_measurements(long, PACE, 20.0)} == {
        "evaluation.every": 175, "evaluation.patience": 3
    }
    assert [c.key for c in by_measurements(long, PACE, 5.0)] == ["evaluation.every"], "too few to end a stage early"
    assert by_measurements(long, PACE, 3.0) == []
    longer = toy.recipe(tmp_path, tmp_path, "stage1.steps=900", "stage2.steps=503")
    assert by_measurements(longer, PACE, 20.0)[0].value == 176, "not three steps before the end, which is measured too"


@pytest.mark.usefixtures("drawn_in_full")
def test_prompts_fit_into_texts_that_are_all_short(tmp_path: Path):
    recipe, target = toy.recipe(tmp_path, tmp_path), Target.from_pretrained(assets.demo_target())
    for tokens, prompt in ((11, 10), (12, 11), (3, 2), (400, 64)):
        choices = by_data(Survey([tokens] * 9, Counter(), whole=True), recipe, target)
        assert {choice.key: choice.value for choice in choices}["stage2.prompt_tokens"] == prompt


def test_curves_are_drawn_of_every_kind_of_record(tmp_path: Path):
    def evaluation(step: int, **more: object) -> dict:
        return {"step": step, "evaluation": {"tokens_per_step": 1.5 + step / 10, **more}}

    losses = [
        {"step": step, "stage": "1" if step < 3 else "2", "loss": 3.0, "loss_by_head": [1.0, 2.0],
         "training_accuracy_by_head": [0.5, 0.1], "rate": 0.1} for step in range(1, 5)
    ]
    own = {"tokens_per_step": 2.0, "held_out_loss": 1.0}
    full = evaluation(2, tokens_per_step_ci=[1.0, 2.0], held_out_loss=3.0, by_source={"a": own, "b": own})
    ended = {"step": 2, "ended_early": {"stage": "1"}}
    for number, records in enumerate(([], [evaluation(0)], [evaluation(0), *losses, full, ended])):
        draw_curves(records, tmp_path / f"{number}.png")
        assert (tmp_path / f"{number}.png").read_bytes().startswith(b"\x89PNG")
