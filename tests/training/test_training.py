"""The training run on a tiny target: what it learns, leaves behind, and says when something is wrong."""

import io
import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rich.console import Console

from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.drafters.registry import load_drafter
from draftsmith.drafters.trainable.batch import IGNORED, TrainingBatch
from draftsmith.targets import Target
from draftsmith.training.build import build_drafter
from draftsmith.training.checkpoint import BEST, Checkpoints
from draftsmith.training.data.batches import choose_positions, draw, prepare
from draftsmith.training.data.generated import GeneratedText
from draftsmith.training.data.loader import noise
from draftsmith.training.data.windows import Window, collate
from draftsmith.training.recipe import build_recipe, load_recipe
from draftsmith.training.sections import DistillationSection, OnPolicySection
from draftsmith.training.step import TrainingStep
from draftsmith.training.train import train
from draftsmith.training.trainer import TrainingInterrupted
from draftsmith.types import DraftsmithError
from tests.helpers import training_toy as toy


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return toy.write_data(tmp_path)


def records(folder: Path, key: str) -> list[dict]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if key in record]


def speculator(tmp_path: Path, data: Path, *overrides: str) -> MLPSpeculator:
    return build_drafter(toy.recipe(tmp_path / "unused", data, *overrides), toy.target())


@pytest.mark.usefixtures("drawn_in_full")
def test_two_stages_learn_and_leave_a_whole_run(tmp_path: Path, data: Path):
    overrides = ("stage1.steps=40", "stage2.steps=6", "output.report_to=tensorboard", "evaluation.every=20")
    result = toy.run(tmp_path / "run", data, *overrides)
    losses = [record["loss"] for record in records(result.folder, "loss")]
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
    assert {r["stage"] for r in records(result.folder, "loss")} == {"1", "2"}
    assert load_drafter(result.folder / "latest", toy.target()) is not None, "a checkpoint is a drafter"


def examples(tokens_BL: torch.Tensor, last: int, distil: bool = False) -> TrainingBatch:
    """Return the training batch at the first positions of a text: state t predicted token t + 1, so tokens begin
    there.
    """
    features_BLF, logits_BLV = toy.target().encode(tokens_BL, logits=True)
    positions_BP = torch.arange(last).expand(len(tokens_BL), -1)
    logits_BTV = logits_BLV[:, 1:] if distil else None
    return TrainingBatch(tokens_BL[:, 1:], features_BLF[:, :-1], positions_BP, logits_BTV, float(distil))


def test_losses_are_those_of_forward(tmp_path: Path, data: Path):
    """One rule for training and decoding: the loss over all positions is that of `forward`."""
    drafter = speculator(tmp_path, data).double()
    tokens_BL = torch.randint(0, 256, (3, 12))
    work = examples(tokens_BL, 9)
    loss_N, _ = drafter.losses(work)
    logits = drafter(work.tokens_BT, work.features_BTF)
    for depth in range(2):
        expected = F.cross_entropy(logits[depth][:, :9].flatten(0, 1), tokens_BL[:, 2 + depth : 11 + depth].flatten())
        assert loss_N[depth].item() == pytest.approx(expected.item(), rel=1e-6)


def test_stage_two_trains_on_generated_tokens_only(tmp_path: Path, data: Path):
    drafter, prompt = speculator(tmp_path, data), 6
    windows = [Window([1] * prompt + [2] * count, [(prompt, prompt + count)]) for count in (10, 4)]
    task = draw(collate(windows, 16), 2, None, ())
    work = prepare(drafter, toy.target(), task, distillation=DistillationSection(), seed=())
    labels_RN, tokens_RN = work.labels_RN(2, None, 256), work.tokens_RN(2)
    assert set(labels_RN.flatten().tolist()) == {2, IGNORED}
    assert (tokens_RN[0] == torch.tensor([1, 2])).all(), "the first root is the prompt's last token"
    assert (labels_RN != IGNORED).sum(0).tolist() == [9 + 4, 9 + 3] == task.counts_N.tolist()


def test_positions_are_a_function_of_the_seed():
    learnt_BL = torch.zeros(4, 55, dtype=torch.bool)
    learnt_BL[:, 5:] = True
    one, same, other = (choose_positions(learnt_BL, 4, 7, ("a", s)) for s in (1, 1, 2))
    assert torch.equal(one, same) and not torch.equal(one, other)
    assert one.shape == (4, 7) and one.min() >= 3 and one.max() < 50
    assert all(len(row.unique()) == 7 for row in one)
    assert torch.equal(choose_positions(learnt_BL[:2, :11], 4, 7, ()), torch.tensor([[3, 4, 5]] * 2))


def test_positions_lie_before_what_is_learnt_as_far_as_there_are_any():
    learnt_BL = torch.zeros(3, 40, dtype=torch.bool)
    learnt_BL[0, 4:9], learnt_BL[1, 30:36], learnt_BL[2, 20:22] = True, True, True
    for count in (None, 4, 2):
        positions_BP = choose_positions(learnt_BL, 3, count, ("x",))
        assert positions_BP.shape == (3, min(6, count or 6))
        for row, begin, end in ((0, 4, 9), (1, 30, 36), (2, 20, 22)):
            inside = [begin <= t + 2 < end for t in positions_BP[row].tolist()]
            assert sum(inside) == min(positions_BP.shape[1], end - begin)


def test_padding_and_the_words_of_others_change_no_loss(tmp_path: Path, data: Path):
    """Every window alone, without its padding and the target's distributions behind it, gives the same sums as the
    batch.
    """
    drafter = speculator(tmp_path, data, "drafter.draft_vocab_size=200").double()
    windows = [
        Window(list(range(1, 30)), [(3, 9), (20, 26)]), Window(list(range(50, 62)), [(0, 12)]),
        Window(list(range(90, 110)), [(10, 20)]),
    ]

    def judged(some: list[Window]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        task = draw(collate(some, 99, 1), 2, None, ())
        section = DistillationSection(weight=1.0)
        examples = prepare(drafter, toy.target(), task, distillation=section, seed=())
        return *drafter.losses(examples), task.counts_N

    loss_N, accuracy_N, counts_N = judged(windows)
    assert counts_N.tolist() == [6 + 6 + 10 + 10, 5 + 5 + 9 + 9]
    alone = [judged([window]) for window in windows]
    torch.testing.assert_close(loss_N * counts_N, sum(loss * count for loss, _, count in alone))
    torch.testing.assert_close(accuracy_N * counts_N, sum(hits * count for _, hits, count in alone))


def test_draft_vocabulary_labels(tmp_path: Path, data: Path):
    drafter = speculator(tmp_path, data, "drafter.draft_vocab_size=20")
    assert drafter.d2t is not None and (drafter.d2t.diff() > 0).all()
    known, unknown = int(drafter.d2t[4]), next(t for t in range(256) if t not in drafter.d2t.tolist())
    work = examples(torch.tensor([[1, known, known, unknown]]), 1, distil=True)
    assert work.labels_RN(2, drafter.d2t, drafter.vocab_size).tolist() == [[4, IGNORED]]
    soft = work.soft_labels(2, drafter.d2t)
    assert soft is not None and soft.index_RN.tolist() == [[0, 1]]
    assert soft.log_p_SW.shape == (2, 20), "no guess wants the target's word behind the last token"
    result = toy.run(tmp_path / "run", data, "drafter.draft_vocab_size=20", "distillation.weight=0.5")
    assert load_drafter(result.drafter, toy.target()).d2t.tolist() == drafter.d2t.tolist()


def test_distillation_is_least_when_the_drafter_says_what_the_target_says(tmp_path: Path, data: Path):
    drafter = speculator(tmp_path, data)
    tokens_BL = torch.randint(0, 256, (2, 9))
    work = examples(tokens_BL, 6, distil=True)
    soft, labels_RN = work.soft_labels(2, None), work.labels_RN(2, None, 257)
    assert soft is not None
    # The logits behind token t + 1 + d are the target's word on token t + 2 + d.
    _, logits_BLV = toy.target().encode(tokens_BL, logits=True)
    torch.testing.assert_close(soft.log_p_SW[soft.index_RN[0, 1]], logits_BLV[0, 2].log_softmax(-1))
    for depth in range(2):
        own_RV = soft.log_p_SW[soft.index_RN[:, depth]]
        assert work.loss_and_accuracy(depth, own_RV, labels_RN, soft)[0].abs() < 1e-5
    assert (drafter.losses(work)[0] > 0.01).all()


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


def test_accumulation_is_one_larger_batch(tmp_path: Path, data: Path):
    """Every guess counts as much as any other, however unlike the micro-batches are."""
    recipe = toy.recipe(tmp_path / "unused", data)
    lengths = [(30, 30), (9, 4), (25, 20), (7, 3)]
    windows = [
        Window(list(range(i, i + whole)), [(whole - learnt, whole)]) for i, (whole, learnt) in enumerate(lengths)
    ]
    moved = []
    for sizes in ((4,), (2, 2), (1, 1, 2)):
        drafter, rest = build_drafter(recipe, toy.target()), iter(windows)
        step = TrainingStep(drafter, toy.target(), recipe.optimizer, DistillationSection(weight=0.5))
        batches = [collate([next(rest) for _ in range(size)], 99, 1) for size in sizes]
        found = step(batches, rate=0.01, positions=None, seed=())
        weights = (p.grad if p.grad is not None else p for p in drafter.parameters())
        moved.append([found.loss_N, found.accuracy_N, *weights])
    for other in moved[1:]:
        for one, two in zip(moved[0], other, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-3, atol=1e-4)


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


def test_a_run_that_recorded_no_ways_of_making_tokens_is_refused(tmp_path: Path, data: Path):
    result = toy.run(tmp_path / "run", data)
    kept = result.folder / "run.json"
    record = json.loads(kept.read_text())
    del record["runs"][-1]["target"]["text_hash"]
    kept.write_text(json.dumps(record))
    with pytest.raises(DraftsmithError, match="earlier version, which did not record the target's text_hash; start"):
        toy.run(tmp_path / "run", data, resume=True)


def test_a_target_without_a_tokenizer_learns_from_sequences_of_another_run(tmp_path: Path, data: Path):
    written = toy.run(tmp_path / "one", data).folder / "generated.jsonl"
    bare = Target(toy.target().model, None, name="bare")
    recipe = toy.recipe(tmp_path / "two", data, "stage1.steps=0", f"stage2.texts={written}")
    assert train(recipe, target=bare, generate=toy.generate, evaluate=toy.evaluate).step == 4


@pytest.mark.parametrize(
    ("vocabulary", "context", "words"),
    [(99, 16, "has token 99, but the target's tokens end at 98; give"), (100, 15, "has a text of 16 tokens, but the")],
)
def test_texts_of_another_targets_run_are_refused(tmp_path: Path, vocabulary: int, context: int, words: str):
    path, section = tmp_path / "generated.jsonl", OnPolicySection(steps=1, batch=1, prompt_tokens=6, new_tokens=10)
    path.write_text(json.dumps({"sequences": [[99, *range(15)]], "prompts": [6]}) + "\n")
    assert not GeneratedText.of(path, section, 1, vocabulary=100, context=16).missing
    with pytest.raises(DraftsmithError, match=words):
        GeneratedText.of(path, section, 1, vocabulary=vocabulary, context=context)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ('{"text": "one"}\n', r"line 1, has the fields text instead of token ids as a run writes them; give the gener"),
        ("[1]\n", r"line 1, has a list instead of token ids .*, or name a file of texts in data\.sources"),
        ("plain words\n", "is not what a run writes; give the generated.jsonl of a run, or name a file of"),
        ('{"sequences": [[1, 2]], "prompts": [1]}\n{"sequences": ["a"], "prompts": [1]}\n', "line 2, has the fields s"),
        ('{"sequences": [[1, 2]]}\n', "was written by an earlier version; give that of a new run"),
        ("", "is not what a run writes"),
    ],
)  # fmt: skip
def test_texts_that_no_run_wrote_are_refused_for_what_they_are(tmp_path: Path, data: Path, content: str, words: str):
    path = tmp_path / "texts.jsonl"
    path.write_text(content)
    with pytest.raises(DraftsmithError, match=words) as raised:
        toy.run(tmp_path / "run", data, f"stage2.texts={path}")
    assert ("earlier" in str(raised.value)) == ("earlier" in words)


def test_a_folder_named_for_texts_is_refused_with_the_file_in_it(tmp_path: Path, data: Path):
    folder = toy.run(tmp_path / "one", data).folder
    with pytest.raises(DraftsmithError, match=rf"{folder} is a folder; give {folder}/generated\.jsonl"):
        toy.run(tmp_path / "two", data, f"stage2.texts={folder}")


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


def test_a_run_refuses_texts_that_its_target_cannot_read(tmp_path: Path, data: Path):
    written = tmp_path / "generated.jsonl"
    record = {"sequences": [[toy.target().vocab_size, *range(15)]] * 4, "prompts": [6] * 4}
    written.write_text(json.dumps(record) + "\n")
    with pytest.raises(DraftsmithError, match="generated.jsonl has token .* give the generated.jsonl of a run of this"):
        toy.run(tmp_path / "run", data, "stage1.steps=0", f"stage2.texts={written}")


def test_curves_on_a_board_have_every_step_once_after_resuming(tmp_path: Path, data: Path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    folder = tmp_path / "run"
    recipe = toy.recipe(folder, data, "output.report_to=tensorboard")
    with pytest.raises(DraftsmithError, match="at step 4; the checkpoint of step 2"):
        train(recipe, target=poisoned(READS + 4), generate=toy.generate, evaluate=toy.evaluate)
    assert records(folder, "loss")[-1]["step"] == 3, "a step behind the checkpoint, which comes again"
    toy.run(folder, data, "output.report_to=tensorboard", resume=True)
    board = accumulator.EventAccumulator(str(folder / "tensorboard")).Reload()
    steps = [event.step for event in board.Scalars("loss")]
    assert steps == [record["step"] for record in records(folder, "loss")] == list(range(1, 11))


def test_generated_text_is_made_once(tmp_path: Path):
    section = OnPolicySection(steps=5, batch=2, epochs=2, prompt_tokens=3, new_tokens=8, generate_batch=2)
    asked: list[int] = []

    class Prompts:
        def __init__(self) -> None:
            self.given = 0

        def next_window(self) -> Window:
            self.given += 1
            return Window([self.given] * 3, [])

    def generate(prompts: list[list[int]], max_tokens: int, seed: int) -> list[list[int]]:
        asked.append(seed)
        return [[prompt[0]] * max_tokens for prompt in prompts]

    path = tmp_path / "generated.jsonl"
    whole = GeneratedText(path, section, 1)
    list(whole.make(Prompts(), generate))
    assert len(whole.sequences) == 5 and len(set(asked)) == 3
    content = path.read_bytes()
    for cut in (len(content) - 3, content.index(b"\n") + 4, 0):
        path.write_bytes(content[:cut])
        again = GeneratedText(path, section, 1)
        list(again.make(Prompts(), generate))
        assert path.read_bytes() == content and again.sequences == whole.sequences
    asked.clear()
    again = GeneratedText(path, section, 1)
    assert not list(again.make(Prompts(), generate)) and not asked
    read = [again.batch(i).tokens_BL[:, 0].tolist() for i in range(5)]
    assert sorted(number for batch in read for number in batch) == sorted([1, 2, 3, 4, 5] * 2)
    with pytest.raises(DraftsmithError, match="did not write 8 tokens, or up to its end token, after each of 2"):
        list(GeneratedText(tmp_path / "x", section, 1).make(Prompts(), lambda p, n, s: [[1]] * len(p)))


def test_fresh_texts_are_read_twice_before_more_are_written(tmp_path: Path):
    section = OnPolicySection(steps=49, batch=2, epochs=4, prompt_tokens=3, new_tokens=8, generate_batch=8)
    texts = GeneratedText(tmp_path / "x", section, 1)
    numbers = iter(range(99))

    class Prompts:
        def next_window(self) -> Window:
            return Window([next(numbers)] * 3, [])

    makes = texts.make(Prompts(), lambda prompts, n, s: [[1] * n for _ in prompts])
    read: list[list[int]] = []
    for step in range(49):
        assert texts.needed(step) == (16 if step < 16 else 25)
        while len(texts.sequences) < texts.needed(step):
            next(makes)
        read.append(texts.batch(step).tokens_BL[:, 0].tolist())
    assert not texts.missing and texts.count == 25
    flat = [number for batch in read for number in batch]
    first, second = list(range(16)), list(range(16, 25))
    for begin, expected in ((0, first), (16, first), (32, second), (41, second), (50, first + second)):
        assert sorted(flat[begin : begin + len(expected)]) == expected
    assert flat[:16] != flat[16:32], "another order every time"
    assert sorted(flat[75:] + [n for n in range(25) if n not in flat[75:]]) == list(range(25))


def test_a_text_ends_at_its_end_token(tmp_path: Path):
    section = OnPolicySection(steps=1, batch=2, prompt_tokens=3, new_tokens=8, generate_batch=2)
    prompts = iter([Window([1, 2, 3], []), Window([4, 5, 6, 7, 8], [])])

    class Prompts:
        def next_window(self) -> Window:
            return next(prompts)

    texts = GeneratedText(tmp_path / "x", section, 1)
    list(texts.make(Prompts(), lambda p, n, s: [[9, 9, 99], [9] * 8], {99}))
    again = GeneratedText(tmp_path / "x", section, 1)
    assert again.sequences == texts.sequences == [[1, 2, 3, 9, 9, 99], [4, 5, 6, 7, 8] + [9] * 8]
    batch = again.batch(0)
    rows = sorted(zip(batch.tokens_BL.tolist(), batch.learnt_BL.tolist(), strict=True))
    assert rows[0] == ([1, 2, 3, 9, 9, 99] + [0] * 7, [False] * 3 + [True] * 3 + [False] * 7)
    assert rows[1] == (again.sequences[1], [False] * 5 + [True] * 8)


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


def test_evaluation_without_tau_is_refused(tmp_path: Path, data: Path):
    with pytest.raises(DraftsmithError, match="returned loss; it must have tokens_per_step"):
        train(
            toy.recipe(tmp_path / "run", data), target=toy.target(), generate=toy.generate,
            evaluate=lambda _: {"loss": 1.0},
        )


def test_noise_is_stable():
    """The order of the data rests on these bits: they may never change between versions."""
    assert noise(0, "piece", 1) == noise(0, "piece", 1) != noise(0, "piece", 2)
    assert noise(1, "a") == 2461651067226055738
