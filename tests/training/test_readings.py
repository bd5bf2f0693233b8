"""Texts that are learnt from several times are read once, and learnt from as if they were read every time."""

import random

import pytest
import torch
from torch import Tensor

from draftsmith.drafters.registry import family_named
from draftsmith.drafters.trainable.model import TrainableModel
from draftsmith.native import why_missing
from draftsmith.targets import Target
from draftsmith.training.data.batches import draw, prepare
from draftsmith.training.data.readings import Readings
from draftsmith.training.data.windows import Batch, Window, collate
from draftsmith.training.sections import DistillationSection, OptimizerSection
from draftsmith.training.step import TrainingStep
from tests.helpers.native_toy import VOCABULARY, native, plain

native_only = pytest.mark.skipif(bool(why_missing()), reason=why_missing())

FAMILIES: dict[str, dict[str, int]] = {
    "mlp": {"n_predict": 3, "inner_dim": 24},
    "mlp of fewer tokens": {"n_predict": 2, "inner_dim": 24, "draft_vocab_size": 40},
    "eagle3": {"depth": 3},
    "medusa": {},
    "firp": {"n_predict": 2},
    "hydra": {"prefix_attention": True},
    "recurrent": {},
    "eagle": {"depth": 2},
}


def windows(count: int, seed: int) -> list[Window]:
    rng = random.Random(seed)
    lengths = [rng.randrange(10, 24) for _ in range(count)]
    return [Window([rng.randrange(VOCABULARY) for _ in range(length)], [(4, length)]) for length in lengths]


def drafter_of(name: str, target: Target) -> TrainableModel:
    options = dict(FAMILIES[name])
    tokens = torch.arange(0, 2 * options["draft_vocab_size"], 2) if "draft_vocab_size" in options else None
    torch.manual_seed(0)
    family = family_named(name.split()[0])
    drafter = family.make(family.config.read(options, "options"), target, tokens)
    assert isinstance(drafter, TrainableModel)
    drafter.bind(target)
    return drafter.train()


def step_of(drafter: TrainableModel, target: Target, weight: float = 0.5) -> TrainingStep:
    section = OptimizerSection(precision="fp32")
    return TrainingStep(drafter, target, section, DistillationSection(weight=weight))


def gradients(step: TrainingStep, batch: Batch) -> list[Tensor]:
    step.gradients([batch], rate=0.0, positions=3, seed=("positions",))
    found = [p.grad.clone() for p in step.drafter.parameters() if p.grad is not None]
    assert all(gradient.isfinite().all() for gradient in found), "padding is no number that a gradient could break on"
    step.forget()
    return found


@native_only
@pytest.mark.parametrize("weight", [0.0, 0.5])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_kept_teaches_the_same_bits_whatever_was_read_before(family: str, weight: float) -> None:
    target, texts = native("llama"), windows(8, seed=1)
    wanted = collate(texts[2:6], 99, 2, again=True)
    drafter = drafter_of(family, target)
    alone = gradients(step_of(drafter, target, weight), wanted)
    step = step_of(drafter, target, weight)
    for some in (texts[:4], texts[4:]):
        gradients(step, collate(some, 99, 2, again=True))
    left = step.readings.left
    for found in (gradients(step, wanted), gradients(step, wanted)):
        assert alone and all(map(torch.equal, found, alone))
    assert step.readings.left == left, "all of them were there"
    once = gradients(step, collate(texts[2:6], 99, 2))
    for found, expected in zip(once, alone, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.05, atol=0.02 * float(expected.abs().max()))


@native_only
def test_what_has_no_room_is_read_again_with_the_same_bits() -> None:
    target = native("llama")
    drafter, batch = drafter_of("mlp", target), collate(windows(6, seed=2), 99, 2, again=True)
    roomy, narrow = (Readings(target, drafter.taps, True, room) for room in (2**20, 700))
    expected, found = roomy.states(batch), [narrow.states(batch) for _ in range(2)]
    assert 0 <= narrow.left < 700 and roomy.left < 2**20 - 700
    for states in found:
        assert all(map(torch.equal, states, expected))


@native_only
def test_logits_are_those_of_the_tokens_that_are_guessed() -> None:
    target = native("llama")
    drafter, section = drafter_of("mlp", target), DistillationSection(weight=1.0)
    said = []
    for again in (False, True):
        task = draw(collate(windows(5, seed=3), 99, 2, again), drafter.max_depth, 4, ("x",))
        readings = Readings(target, drafter.taps, True)
        examples = prepare(drafter, target, task, distillation=section, seed=(), readings=readings)
        soft = examples.soft_labels(drafter.max_depth, None)
        assert soft is not None
        counts_RN = examples.counts_RN(drafter.max_depth)
        assert counts_RN is not None
        said.append(soft.log_p_SW[soft.index_RN].where(counts_RN.unsqueeze(2), 0))
    torch.testing.assert_close(said[1], said[0], atol=0.1, rtol=0.02)


@native_only
def test_nothing_is_kept_of_what_comes_once_or_where_there_is_no_room() -> None:
    target, texts = native("llama"), windows(3, seed=4)
    for room, again, keeps in ((2**20, True, True), (2**20, False, False), (0, True, False)):
        assert Readings(target, (-1,), True, room).keeps(collate(texts, 99, 2, again)) is keeps


def test_nothing_is_kept_where_bits_depend_on_what_is_read_beside() -> None:
    assert not Readings(plain("llama"), (-1,), True).keeps(collate(windows(3, seed=4), 99, 2, again=True))
