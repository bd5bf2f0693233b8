"""Training a target together with its heads: both change, exactly as often as asked, and what comes out says so."""

import json
import math
import os
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM

from draftsmith.drafters.heads.hydra import HydraConfig, make_hydra
from draftsmith.drafters.registry import load_drafter
from draftsmith.drafters.trainable.drafter import TrainableDrafter
from draftsmith.engine import Engine
from draftsmith.plan import NO_DRAFT
from draftsmith.targets import Target
from draftsmith.training.build import build_drafter
from draftsmith.training.checkpoint import Checkpoints
from draftsmith.training.data.windows import Window, collate
from draftsmith.training.joint import JointStep
from draftsmith.training.recipe import build_recipe
from draftsmith.training.result import TrainingResult
from draftsmith.training.train import train
from draftsmith.training.trainer import TrainingInterrupted
from draftsmith.types import DraftsmithError, SamplingParams
from tests.helpers import training_toy as toy
from tests.helpers.heads_toy import evaluate
from tests.helpers.tiny import TOKENIZER_EOS, TOKENIZER_SIZE, greedy_reference, tiny_model, tiny_tokenizer

BASICS = (
    "drafter={family: medusa, num_heads: 2}", "joint={heads_rate_factor: 2, warmup_steps: 2}", "evaluation.every=3",
)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return toy.write_data(tmp_path)


def new_target(name: str = "toy", dtype: torch.dtype = torch.float32) -> Target:
    """Return a target of one's own: joint training changes it."""
    model = tiny_model(dtype=dtype, vocabulary=TOKENIZER_SIZE, eos_token_id=TOKENIZER_EOS)
    return Target(model, tiny_tokenizer(), name=name, native=False)


def run(
    folder: Path, data: Path, *overrides: str, resume: bool = False, target: Target | None = None, evaluation=evaluate,
    dry_run: bool = False,
) -> TrainingResult:
    recipe = toy.recipe(folder, data, *BASICS, *overrides)
    return train(
        recipe, target=target or new_target(), generate=toy.generate, evaluate=evaluation, resume=resume,
        dry_run=dry_run
    )


def records(folder: Path) -> list[dict]:
    return [r for r in map(json.loads, (folder / "metrics.jsonl").read_text().splitlines()) if "loss" in r]


def target_tensors(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "latest" / "target.safetensors")


OUTCOME = (
    "latest/medusa_lm_head.safetensors", "latest/target.safetensors", "latest/optimizer.safetensors",
    "drafter/medusa_lm_head.safetensors", "drafter/config.json", "target/model.safetensors", "target/config.json",
)


def outcome(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in OUTCOME}


def test_both_learn(tmp_path: Path, data: Path):
    result = run(tmp_path / "run", data, "stage1.steps=40", "stage2.steps=0", "joint.warmup_steps=5")
    found = records(result.folder)
    assert found[-1]["loss"] < 0.8 * found[0]["loss"]
    own = [record["target_loss"] for record in found]
    assert own[-1] < 0.8 * own[0] and max(own) < 1.2 * own[0]
    assert [record["heads_weight"] for record in found] == [1.0] * 5 + [0.2] * 35


def test_the_target_stands_still_in_the_warm_up_and_no_longer(tmp_path: Path, data: Path):
    before = {name: tensor.clone() for name, tensor in new_target().model.state_dict().items()}
    heads = ("stage1.steps=4", "stage2.steps=0")
    still = run(tmp_path / "still", data, *heads, "joint.warmup_steps=4")
    assert all(torch.equal(tensor, before[name]) for name, tensor in target_tensors(still.folder).items())
    changed = target_tensors(run(tmp_path / "moved", data, *heads, "joint.warmup_steps=3").folder)
    assert all(not torch.equal(tensor, before[name]) for name, tensor in changed.items())


def test_two_micro_batches_of_unlike_size_are_one_batch(tmp_path: Path, data: Path):
    """Every learnt token counts as much as any other in the target's own loss, whatever batch it stands in."""
    windows = [
        Window(list(range(40, 70)), [(1, 30)]), Window(list(range(90, 102)), [(8, 12)]),
        Window(list(range(50, 64)), [(1, 4)]),
    ]
    recipe = toy.recipe(tmp_path, data, *BASICS, "joint.warmup_steps=0", "joint.weight=1e-9")
    assert recipe.joint is not None

    def own_loss(*groups: list[Window]) -> float:
        target = new_target()
        drafter = build_drafter(recipe, target)
        step = JointStep(recipe.joint, drafter, target, recipe.optimizer, recipe.distillation)
        batches = [collate(group, 99, drafter.max_depth - 1) for group in groups]
        return step(batches, rate=0.001, positions=2, seed=(1,)).noted["target_loss"]

    assert own_loss(windows[:1], windows[1:]) == pytest.approx(own_loss(windows), rel=1e-4)


def test_heads_alone_are_an_ordinary_run(tmp_path: Path, data: Path):
    """While the target stands still, joint training is Medusa-1: only the weights of the depths differ."""
    still = run(tmp_path / "a", data, "stage1.steps=3", "joint.warmup_steps=9", "joint.decay=1.0", "stage2.steps=0")
    recipe = toy.recipe(tmp_path / "b", data, BASICS[0], "drafter.decay=1.0", "stage1.steps=3", "stage2.steps=0")
    plain = train(recipe, target=new_target(), generate=toy.generate, evaluate=evaluate)
    one, other = (safetensors.torch.load_file(r.folder / "latest/medusa_lm_head.safetensors") for r in (still, plain))
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], rtol=1e-4, atol=1e-6)


def test_heads_pull_at_the_target_as_much_as_asked(tmp_path: Path, data: Path):
    moved = {}
    for name, weight in (("light", 1e-6), ("heavy", 5.0)):
        result = run(tmp_path / name, data, "stage1.steps=3", "stage2.steps=0", f"joint.weight={weight}")
        moved[name] = target_tensors(result.folder)
    assert any(not torch.equal(tensor, moved["heavy"][name]) for name, tensor in moved["light"].items())


def test_the_weight_rises_as_a_sine(tmp_path: Path, data: Path):
    result = run(tmp_path / "run", data, "stage2.steps=0", "joint.ramp_steps=3", "joint.weight=0.4")
    weights = [record["heads_weight"] for record in records(result.folder)]
    assert weights == pytest.approx([1, 1, 0.2, 0.4 * math.sin(math.pi / 3), 0.4, 0.4])


@pytest.mark.parametrize(
    "overrides",
    [
        (), ("stage1.accumulate=2", "distillation.weight=0.5", "optimizer.precision=bf16"),
        ("drafter={family: medusa, num_heads: 2, tie_to_target: true, draft_vocab_size: 64}", "stage1.steps=0"),
    ],
    ids=["plain", "accumulated", "tied"],
)
def test_interrupted_and_resumed_ends_alike(tmp_path: Path, data: Path, overrides: tuple[str, ...]):
    run(tmp_path / "calm", data, *overrides)
    seen = 0

    def stop_in_the_middle(drafter: TrainableDrafter) -> dict[str, float]:
        nonlocal seen
        seen += 1
        if seen == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return evaluate(drafter)

    with pytest.raises(TrainingInterrupted, match="stopped at step 3"):
        run(tmp_path / "twice", data, *overrides, evaluation=stop_in_the_middle)
    run(tmp_path / "twice", data, *overrides, resume=True)
    assert outcome(tmp_path / "twice") == outcome(tmp_path / "calm")


def test_killed_at_any_file_call_and_resumed_ends_alike(tmp_path: Path, data: Path):
    run(tmp_path / "calm", data)
    expected = outcome(tmp_path / "calm")
    for call in (70, 150, 230):
        folder = tmp_path / str(call)
        assert toy.dies(lambda folder=folder: run(folder, data), at_call=call)
        started = bool(Checkpoints(folder, 2).steps())
        run(folder, data, resume=started)
        assert outcome(folder) == expected


def test_what_comes_out_is_another_target_with_its_heads(tmp_path: Path, data: Path):
    result = run(tmp_path / "run", data, "stage1.rate=0.003")
    assert result.target == tmp_path / "run" / "target"
    config = json.loads((result.target / "config.json").read_text())
    label = config["draftsmith"]
    assert label["changed_from"] == "toy" and label["note"].startswith("not lossless with respect to toy")
    assert config["dtype"] == "float32"
    card = (result.target / "README.md").read_text()
    assert "not lossless with respect to `toy`" in card and label["fingerprint"] in card
    changed = Target.from_pretrained(result.target, dtype="fp64", native=False)
    kept = target_tensors(result.folder)
    for name, tensor in changed.model.state_dict().items():
        assert torch.equal(tensor.float(), kept[name]), name
    drafter = load_drafter(result.drafter, changed)
    reference = AutoModelForCausalLM.from_pretrained(result.target, dtype=torch.float64)
    questions = [list(b"draft verify"), list(b"token 1 root"), list(b"1")]
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    engine = Engine(changed, drafter, max_batch=3)
    found = engine.generate(questions, params)
    plain = engine.generate(questions, params, plan=NO_DRAFT)
    assert [c.tokens for c in found] == [c.tokens for c in plain]
    reference.generation_config.eos_token_id = None
    assert found[0].tokens == greedy_reference(reference, questions[0], 12)
    assert sum(c.statistics.accepted for c in found) > 0
    old = new_target()
    with pytest.raises(DraftsmithError, match=r"changed with its heads' with weights changed in training \(.*\), but "
                                              r"'toy' has unchanged weights; load the target it was trained with"):
        load_drafter(result.drafter, old)
    with pytest.raises(DraftsmithError, match=r"weights changed in training \(step 10\), but 'toy' has unchanged"):
        load_drafter(result.folder / "latest", old)
    make_hydra(HydraConfig(num_heads=1), old, None).save_pretrained(tmp_path / "for-old", old.facts())
    with pytest.raises(DraftsmithError, match="drafts for 'toy' with unchanged weights, but 'target' has weights chan"):
        load_drafter(tmp_path / "for-old", changed)


def test_bf16_export(tmp_path: Path, data: Path):
    result = run(tmp_path / "run", data, "stage2.steps=0", "stage1.steps=3", "output.dtype=bf16")
    config = json.loads((result.target / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    changed = Target.from_pretrained(result.target)
    assert changed.facts().fingerprint == config["draftsmith"]["fingerprint"]
    assert load_drafter(result.drafter, changed).max_depth == 2
    written = safetensors.torch.load_file(result.target / "model.safetensors")
    for name, tensor in target_tensors(result.folder).items():
        assert torch.equal(written[name], tensor.bfloat16()), name


def test_a_loss_that_is_not_finite_stops_and_the_run_goes_on_alike(tmp_path: Path, data: Path):
    run(tmp_path / "calm", data)

    class Poisoned(Target):
        calls = 0

        def encode(self, *args, **kwargs):
            features, logits = super().encode(*args, **kwargs)
            self.calls += 1
            return features, logits * float("nan") if self.calls == 4 else logits

    poisoned = Poisoned(new_target().model, tiny_tokenizer(), "toy", native=False)
    with pytest.raises(DraftsmithError, match=r"gradient norm nan\) at step 4; the checkpoint of step 3 is kept"):
        run(tmp_path / "run", data, target=poisoned)
    run(tmp_path / "run", data, resume=True)
    assert outcome(tmp_path / "run") == outcome(tmp_path / "calm")


def test_dry_run_leaves_the_target_alone(tmp_path: Path, data: Path):
    result = run(tmp_path / "run", data, dry_run=True)
    assert load_drafter(result.drafter, new_target()).max_depth == 2
    assert not (tmp_path / "run" / "target").exists()


def test_mistakes_are_one_clear_sentence(tmp_path: Path, data: Path):
    with pytest.raises(DraftsmithError, match=r"held in torch\.bfloat16; load it in fp32 .target.dtype=fp32."):
        run(tmp_path / "run", data, target=new_target(dtype=torch.bfloat16))
    with pytest.raises(DraftsmithError, match=r"recipe key joint\.wait is unknown; did you mean joint\.weight\?"):
        build_recipe({"joint": {"wait": 1}})
    with pytest.raises(DraftsmithError, match=r"recipe key joint\.decay is 2; use at most 1"):
        build_recipe({"joint": {"decay": 2}})
    run(tmp_path / "run", data, "stage1.steps=2", "stage2.steps=0")
    recipe = toy.recipe(tmp_path / "run", data, BASICS[0], "stage1.steps=2", "stage2.steps=0")
    with pytest.raises(DraftsmithError, match=r"joint is None, but the run in .* has \{"):
        train(recipe, target=new_target(), generate=toy.generate, evaluate=evaluate, resume=True)
