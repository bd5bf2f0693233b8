"""What is asked of a backend: columns, batches, packing, and views without packing. See tests/native for bits."""

import pytest
import torch

from draftsmith.engine import Engine
from draftsmith.native import LIBRARY, why_missing
from draftsmith.targets import Target, UpperLayers
from draftsmith.targets.packing import can_prepack
from draftsmith.types import SamplingParams
from tests.helpers.tiny import prompts, tiny_model, tiny_target

CPU = torch.device("cpu")
native_only = pytest.mark.skipif(not LIBRARY, reason=why_missing())
prepacked_only = pytest.mark.skipif(not can_prepack(CPU, torch.bfloat16), reason="oneDNN multiplies no bf16 here")


def plain_bf16() -> Target:
    return Target(tiny_model(dtype=torch.bfloat16), native=False)


@pytest.mark.parametrize("span", [1, 7, 5, 300])
def test_columns_are_counted_from_zero(span: int):
    columns_S = tiny_target().backend.columns(lambda: span)
    assert columns_S is not None and columns_S.tolist() == list(range(span))


@native_only
def test_the_native_forward_never_asks_for_columns():
    target = Target(tiny_model(dtype=torch.bfloat16))
    assert target.backend.columns(lambda: pytest.fail("nobody needs it")) is None


def test_texts_of_similar_length_are_read_together():
    backend = tiny_target().backend
    assert backend.batches([]) == []
    assert backend.batches([3, 100, 90, 4]) == [[1, 2], [3, 0]]
    assert backend.batches([5, 5, 5]) == [[0, 1, 2]]


@native_only
def test_the_native_forward_reads_texts_of_any_lengths_together():
    backend = Target(tiny_model(dtype=torch.bfloat16)).backend
    assert backend.batches([]) == [] and backend.batches([3, 100, 90, 4]) == [[0, 1, 2, 3]]


def test_a_target_without_packed_products_is_its_own_view():
    assert tiny_target().without_prepacking() is tiny_target()


@prepacked_only
def test_a_view_without_prepacking_shares_weights_and_says_the_same():
    target, texts = plain_bf16(), torch.tensor(prompts(2, shortest=9, longest=9))
    view = target.without_prepacking()
    assert view is not target and view.without_prepacking() is view
    for ours, theirs in zip(view.model.parameters(), target.model.parameters(), strict=True):
        assert ours is theirs
    for ours, theirs in zip(view.encode(texts, (-1, 0)), target.encode(texts, (-1, 0)), strict=True):
        assert ours is theirs is None or torch.equal(ours, theirs)
    zeros_B = torch.zeros(2, dtype=torch.long)
    mine, its = (one.read_chain(one.new_cache(2, 9), texts, zeros_B) for one in (view, target))
    for ours, theirs in zip(mine, its, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("native", [False, True])
def test_gradients_pass_through_borrowed_layers(native: bool):
    """Packed products know no gradients: training runs through a view, or a copy of what is native."""
    target = Target(tiny_model(dtype=torch.bfloat16), native=native)
    upper = UpperLayers(target, 0).differentiable
    states_BTF = torch.randn(1, 5, target.hidden_size, generator=torch.Generator().manual_seed(0)).requires_grad_()
    start_B = torch.zeros(1, dtype=torch.long)
    upper.refine(states_BTF, upper.chain(upper.new_cache(1, 5), start_B, 5, 5)).float().sum().backward()
    assert states_BTF.grad is not None and states_BTF.grad.abs().sum() > 0


@pytest.mark.filterwarnings("ignore")  # what PyTorch's compiler says to itself
@pytest.mark.parametrize("native", [False, True])
def test_a_recorded_step_takes_packed_products_in(native: bool):
    target, questions = Target(tiny_model("gpt2", dtype=torch.bfloat16), native=native), prompts(1)
    params = SamplingParams(max_tokens=6)
    [expected] = Engine(target).generate(questions, params)
    engine = Engine(target, max_batch=1, compile="trace")
    assert engine.compiled == "trace"
    assert engine.generate(questions, params)[0].tokens == expected.tokens


@native_only
def test_what_native_operators_read_is_left_to_them():
    target = Target(tiny_model(dtype=torch.bfloat16))
    assert Engine(target, compile="full").compiled == "off"
    assert target.backend.pack(torch.nn.Sequential(torch.nn.Linear(4, 6)).bfloat16())
    assert not plain_bf16().backend.pack(torch.nn.Sequential(torch.nn.Linear(4, 6)).bfloat16())
