"""What a step learns from: positions, labels and losses, and how micro-batches add up."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.drafters.registry import load_drafter
from draftsmith.drafters.trainable.batch import IGNORED, TrainingBatch
from draftsmith.training.build import build_drafter
from draftsmith.training.data.batches import choose_positions, draw, prepare
from draftsmith.training.data.loader import noise
from draftsmith.training.data.windows import Window, collate
from draftsmith.training.sections import DistillationSection
from draftsmith.training.step import TrainingStep
from tests.helpers import training_toy as toy


def speculator(tmp_path: Path, data: Path, *overrides: str) -> MLPSpeculator:
    return build_drafter(toy.recipe(tmp_path / "unused", data, *overrides), toy.target())


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


def test_noise_is_stable():
    """The order of the data rests on these bits: they may never change between versions."""
    assert noise(0, "piece", 1) == noise(0, "piece", 1) != noise(0, "piece", 2)
    assert noise(1, "a") == 2461651067226055738
