"""The native int8 layers against integers, for every instruction set that this processor has.

M rows, N outputs, K inputs.
"""

import pytest
import torch
from torch import Tensor

from draftsmith.native import LIBRARY, why_missing
from tests.helpers.native_toy import ROWS, SHAPES, draw, quantise_outputs, same_bits

if not LIBRARY:
    pytest.skip(why_missing(), allow_module_level=True)

ops = torch.ops.draftsmith


def int8_reference(x_MK: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> Tensor:
    """Quantise in Python, sum whole numbers, and scale in fp32."""
    whole_NK, scale_N = quantise_outputs(weight_NK)
    wide_MK = x_MK.float()
    most_M1 = wide_MK.abs().amax(1, keepdim=True)
    # PyTorch divides a number by a tensor with two roundings; a tensor by a tensor has one.
    whole_MK = torch.where(most_M1 > 0, (wide_MK * (torch.tensor(127.0) / most_M1)).round(), 0.0)
    sums_MN = (whole_MK.long() @ whole_NK.long().T).float()
    y_MN = sums_MN * (most_M1 / 127 * scale_N)
    return (y_MN if bias_N is None else y_MN + bias_N).bfloat16()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_int8_weights_are_the_nearest_whole_numbers(
    instructions: str, outputs: int, inputs: int, dtype: torch.dtype
):
    weight_NK = draw(outputs, inputs).to(dtype)
    weight_NK[0] = 0
    for given_NK in (weight_NK, weight_NK.T.contiguous().T):
        packed, scales, sums = ops.pack_int8(given_NK)
        whole_NK, scale_N = quantise_outputs(weight_NK)
        rows_NK = packed.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
        assert torch.equal(rows_NK[:outputs, :inputs].float(), whole_NK)
        assert not rows_NK[outputs:].any() and not rows_NK[:, inputs:].any()
        assert torch.equal(scales[:outputs], scale_N) and not scales[outputs:].any()
        assert torch.equal(sums, rows_NK.int().sum(1, dtype=torch.int32))
        assert (sums.dtype, scales.dtype, packed.dtype) == (torch.int32, torch.float32, torch.int8)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_int8_products_are_exact(instructions: str, outputs: int, inputs: int, biased: bool):
    weight_NK = draw(outputs, inputs)
    int8 = ops.pack_int8(weight_NK)
    bias_N = draw(outputs, seed=1).float() if biased else None
    for rows in ROWS[1:]:
        x_MK = draw(rows, inputs, seed=2)
        x_MK[0] = 0
        assert same_bits(ops.linear_int8(x_MK, *int8, bias_N, outputs), int8_reference(x_MK, weight_NK, bias_N))
    assert ops.linear_int8(x_MK[:0], *int8, bias_N, outputs).shape == (0, outputs)


def test_the_largest_sums_do_not_saturate(instructions: str):
    signs_K = torch.tensor([1.0, -1.0]).repeat(1500)
    weight_NK = torch.stack([torch.ones(3000), -torch.ones(3000), signs_K]).bfloat16()
    x_MK = weight_NK * torch.tensor([[3.0], [-2.0], [0.5]]).bfloat16()
    y_MN = ops.linear_int8(x_MK, *ops.pack_int8(weight_NK), None, 3)
    assert same_bits(y_MN, int8_reference(x_MK, weight_NK, None))
    assert y_MN.tolist() == [[9024.0, -9024.0, 0.0], [6016.0, -6016.0, 0.0], [0.0, 0.0, 1504.0]]


def test_int8_rows_keep_their_bits_in_any_company(instructions: str):
    int8 = ops.pack_int8(draw(150, 49))
    x_MK = draw(300, 49, seed=2)
    whole_MN = ops.linear_int8(x_MK, *int8, None, 150)
    for rows in ROWS[1:]:
        for first in (0, 300 - rows):
            part = slice(first, first + rows)
            assert same_bits(ops.linear_int8(x_MK[part], *int8, None, 150), whole_MN[part])


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_an_int8_row_that_is_not_finite_is_not_made_finite(instructions: str, value: float):
    int8 = ops.pack_int8(draw(17, 9))
    x_MK = draw(3, 9, seed=2)
    x_MK[1, 4] = value
    finite_MN = ops.linear_int8(x_MK, *int8, None, 17).isfinite()
    assert not finite_MN[1].any() and finite_MN[[0, 2]].all()


def test_int8_rows_of_very_small_numbers_are_still_products(instructions: str):
    """The reciprocal of such a row's largest value overflows fp32."""
    weight_NK, x_MK = draw(17, 9), draw(2, 9, seed=2)
    y_MN = ops.linear_int8(x_MK * 2.0**-126, *ops.pack_int8(weight_NK * 2.0**60), None, 17).double() * 2.0**66
    exact_MN = ops.linear_int8(x_MK, *ops.pack_int8(weight_NK), None, 17).double()
    torch.testing.assert_close(y_MN, exact_MN, rtol=0.02, atol=0.02 * exact_MN.abs().max().item())
