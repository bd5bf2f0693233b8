"""The experts of a mixture on the native kernels against float64, for every instruction set that this processor has.

R rows, E experts, C experts a row, F width, I inner width.
"""


import pytest
import torch
from torch import Tensor, nn

from draftsmith.native import LIBRARY, why_missing

if not LIBRARY:
    pytest.skip(why_missing(), allow_module_level=True)

from draftsmith.native.layers import PackedExperts
from draftsmith.types import Quantization

EXPERTS, WIDTH, INNER, CHOSEN = 4, 46, 22, 2
KINDS: tuple[Quantization, ...] = ("none", "int8", "int4")


def tables() -> tuple[Tensor, Tensor]:
    """Draw gate and up projections (E, 2 I, F), and down projections (E, F, I)."""
    generator = torch.Generator().manual_seed(0)
    gate_up_EIF = torch.randn((EXPERTS, 2 * INNER, WIDTH), generator=generator) * 0.3
    return gate_up_EIF.bfloat16(), (torch.randn((EXPERTS, WIDTH, INNER), generator=generator) * 0.3).bfloat16()


def questions(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Draw rows (R, F), their experts (R, C) and the weights of these."""
    generator = torch.Generator().manual_seed(rows)
    hidden_RF = torch.randn((rows, WIDTH), generator=generator).bfloat16()
    index_RC = torch.rand((rows, EXPERTS), generator=generator).argsort(1)[:, :CHOSEN]
    return hidden_RF, index_RC, torch.rand((rows, CHOSEN), generator=generator).bfloat16()


def in_whole_numbers(x: Tensor) -> Tensor:
    """Round rows to 127 steps of their largest value."""
    step = x.abs().amax(-1, keepdim=True) / 127
    return torch.where(step > 0, (x / step).round() * step, 0.0)


def in_groups(x_F: Tensor) -> Tensor:
    """Round a row to 127 steps of the largest value of every 32."""
    return torch.cat([in_whole_numbers(part) for part in x_F.split(32, -1)], -1)


def reference(experts: PackedExperts, hidden_RF: Tensor, index_RC: Tensor, weights_RC: Tensor) -> Tensor:
    """Compute in float64, with weights and rows in whole numbers where the experts have them so."""
    gate_up_EIF, down_EFI = (
        in_whole_numbers(table.float()).double() if experts.quantize == "int8" else found.double()
        for table, found in zip(tables(), experts.unpacked(), strict=True)
    )
    rounded = {"none": torch.nn.Identity(), "int8": in_whole_numbers, "int4": in_groups}[experts.quantize]
    out_RF = torch.zeros(hidden_RF.shape, dtype=torch.float64)
    for r, row_F in enumerate(hidden_RF.double()):
        for e, weight in zip(index_RC[r].tolist(), weights_RC[r].tolist(), strict=True):
            if e < EXPERTS:
                gate_I, up_I = (gate_up_EIF[e] @ rounded(row_F)).chunk(2)
                out_RF[r] += weight * (down_EFI[e] @ rounded(nn.functional.silu(gate_I) * up_I))
    return out_RF


@pytest.mark.parametrize("quantize", KINDS)
@pytest.mark.parametrize("rows", [1, 2, 7, 130])
def test_experts_say_what_float64_says(instructions: str, quantize: Quantization, rows: int):
    """Some eight roundings to bf16, each of 0.0023 in the root mean square, are 0.007.

    In whole numbers a rounding to bf16 before may move a value to the next step, 1/127 of the row's largest; that is
    another 0.003.
    """
    experts, asked = PackedExperts(*tables(), quantize), questions(rows)
    asked[1][0, 0] = EXPERTS  # no expert at all
    expected_RF = reference(experts, *asked)
    found_RF = experts(*asked)
    assert found_RF.dtype == torch.bfloat16 and found_RF.shape == expected_RF.shape
    size = expected_RF.square().mean().sqrt()
    allowed = 0.012 if quantize == "none" else 0.02
    assert ((found_RF.double() - expected_RF).square().mean().sqrt() / size).item() < allowed
    assert ((found_RF.double() - expected_RF).abs().max() / size).item() < 0.1


def test_whole_numbers_are_told_from_bf16():
    """The test above would notice if int8 experts computed in bf16, or the other way round."""
    asked = questions(130)
    plain, whole = (reference(PackedExperts(*tables(), quantize), *asked) for quantize in ("none", "int8"))
    assert ((plain - whole).square().mean().sqrt() / plain.square().mean().sqrt()).item() > 0.012


@pytest.mark.parametrize("quantize", KINDS)
def test_a_row_is_the_same_bits_in_any_company_and_on_any_threads(instructions: str, quantize: Quantization):
    experts, (hidden_RF, index_RC, weights_RC) = PackedExperts(*tables(), quantize), questions(240)
    whole_RF = experts(hidden_RF, index_RC, weights_RC)
    for first, last in ((0, 1), (5, 8), (100, 157), (0, 239)):
        part = slice(first, last)
        assert torch.equal(experts(hidden_RF[part], index_RC[part], weights_RC[part]), whole_RF[part])
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert torch.equal(experts(hidden_RF, index_RC, weights_RC), whole_RF)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("quantize", KINDS)
def test_weights_come_back(quantize: Quantization):
    experts, before = PackedExperts(*tables(), quantize), tables()
    held = experts.state_dict()
    for name, found, given in zip(("gate_up_proj", "down_proj"), experts.unpacked(), before, strict=True):
        assert torch.equal(held[name], found) and found.dtype == torch.bfloat16 and found.shape == given.shape
        # In fp32, as they are packed: half of the largest value lies between two whole numbers, and falls to either.
        if quantize == "int4":
            packed = [torch.ops.draftsmith.pack_int4(one) for one in given]
            given = torch.stack([torch.ops.draftsmith.unpack_int4(one, *given.shape[1:]) for one in packed])
        assert torch.equal(found, in_whole_numbers(given.float()).bfloat16() if quantize == "int8" else given)


def test_int8_experts_are_half_the_size():
    sizes = [sum(b.nbytes for b in PackedExperts(*tables(), quantize).buffers()) for quantize in ("none", "int8")]
    scales_and_sums = EXPERTS * 2 * 4 * 48 * 2  # 44 and 46 outputs, up to whole panels
    assert sizes[1] - scales_and_sums <= 0.55 * sizes[0]  # an input more, up to whole fours


def test_a_row_that_is_not_finite_stays_so_alone(instructions: str):
    experts, (hidden_RF, index_RC, weights_RC) = PackedExperts(*tables(), "int8"), questions(9)
    hidden_RF[4, 3] = torch.inf
    finite_R = experts(hidden_RF, index_RC, weights_RC).isfinite().all(1)
    assert finite_R.tolist() == [row != 4 for row in range(9)]


def test_parts_that_do_not_fit_are_refused_in_words():
    ops = torch.ops.draftsmith
    experts, asked = PackedExperts(*tables(), "int8"), questions(3)
    gate_up = [experts.gate_up, experts.gate_up_scales, experts.gate_up_sums]
    down = [experts.down, experts.down_scales, experts.down_sums]
    for ours, theirs in ((gate_up[:2], down), (gate_up, [part[:3] for part in down]), (down, gate_up), ([], [])):
        with pytest.raises(RuntimeError, match="^draftsmith: "):
            ops.experts(*asked, ours, theirs, INNER)
    with pytest.raises(IndexError, match="draftsmith: there is no expert 5"):
        ops.experts(asked[0], asked[1] + 5 - asked[1], asked[2], gate_up, down, INNER)


def test_the_operator_keeps_pytorch_s_rules():
    for quantize in KINDS:
        experts, asked = PackedExperts(*tables(), quantize), questions(3)
        parts = ("", "_scales", "_sums") if quantize == "int8" else ("",)
        held = [[experts.get_buffer(name + part) for part in parts] for name in ("gate_up", "down")]
        torch.library.opcheck(torch.ops.draftsmith.experts.default, (*asked, *held, INNER))
