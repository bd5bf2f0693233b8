"""The native 4-bit layers against their own definition, for every instruction set that this processor has.

M rows, N outputs, K inputs, P = K up to whole groups, G groups of 32 inputs.
"""

from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from draftsmith.native import LIBRARY, use_kernels, why_missing
from draftsmith.native.layers import Int4Linear
from tests.helpers.native_toy import ROWS, SHAPES, draw, same_bits

if not LIBRARY:
    pytest.skip(why_missing(), allow_module_level=True)

ops = torch.ops.draftsmith
GROUP, BLOCK = 32, 1024
ALL_SHAPES = (*SHAPES, (17, 32), (40, 95), (33, 300))


def in_groups(x_MK: Tensor) -> Tensor:
    """Return rows as (M, G, 32), zero behind the last input."""
    return pad(x_MK, (0, -x_MK.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


class Read(NamedTuple):
    """Packed weights read by what kernels.h says: whole numbers (N, G, 32), eight times the levels less zero points,
    scales (N, G) as whole numbers, and units (N)."""

    whole_NGI: Tensor
    scale_NG: Tensor
    unit_N: Tensor

    def weights(self) -> Tensor:
        """Return them as they come back (N, P), in fp32."""
        return (self.whole_NGI * (self.scale_NG * self.unit_N.unsqueeze(-1)).unsqueeze(-1)).flatten(1)


def read_back(packed: Tensor, outputs: int, inputs: int) -> Read:
    panels, groups = len(packed), -(-inputs // GROUP)
    assert packed.shape == (panels, 4 * groups + (groups + 1) // 2 + 1, 64)
    levels, details = [], []
    for g in range(groups):
        first = g // 2 * 9 + g % 2 * 4
        levels.append(packed[:, first : first + 4])
        last = packed[:, g // 2 * 9 + (8 if g // 2 * 2 + 1 < groups else 4)].view(panels, 16, 4)
        details.append(last[..., [g % 2, 2 + g % 2]])
    both = torch.stack(levels, 1).view(panels, groups, 4, 16, 4)
    halves = torch.stack([both & 15, both >> 4], dim=-2)  # (panels, groups, 4, 16, 2, 4)
    levels_NGI = halves.permute(0, 3, 1, 2, 4, 5).reshape(16 * panels, groups, GROUP).long()
    zero_NG, scale_NG = torch.stack(details, 2).reshape(16 * panels, groups, 2).long().unbind(-1)
    unit_N = packed[:, -1].contiguous().view(torch.float32).flatten()
    assert not scale_NG[outputs:].any() and not levels_NGI[outputs:].any() and not unit_N[outputs:].any()
    whole_NGI = 8 * levels_NGI - zero_NG.unsqueeze(-1)
    return Read(whole_NGI[:outputs], scale_NG[:outputs].float(), unit_N[:outputs])


def quantised_rows(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Return rows in whole numbers (M, G, 32), and a scale for every group (M, G)."""
    wide_MGI = in_groups(x_MK.float())
    most_MG1 = wide_MGI.abs().amax(-1, keepdim=True)
    whole_MGI = torch.where(most_MG1 > 0, (wide_MGI * (torch.tensor(127.0) / most_MG1)).round(), 0.0)
    return whole_MGI.long(), most_MG1.squeeze(-1) / 127


def reference(x_MK: Tensor, packed: Tensor, bias_N: Tensor | None, outputs: int) -> Tensor:
    """Sum groups in whole numbers, and add them in their order in fp32."""
    found, (rows_MGI, scale_MG) = read_back(packed, outputs, x_MK.shape[1]), quantised_rows(x_MK)
    y_MN = torch.zeros(x_MK.shape[0], outputs)
    for g in range(scale_MG.shape[1]):
        exact_MN = (rows_MGI[:, g] @ found.whole_NGI[:, g].T).float()
        y_MN = y_MN + exact_MN * (scale_MG[:, g : g + 1] * found.scale_NG[:, g])
    y_MN = y_MN * found.unit_N
    return (y_MN if bias_N is None else y_MN + bias_N).bfloat16()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("outputs", "inputs"), ALL_SHAPES)
def test_weights_are_near_what_they_were(instructions: str, outputs: int, inputs: int, dtype: torch.dtype):
    """Within two fifteenths of the range of their group, and half of the least step of their output."""
    weight_NK = draw(outputs, inputs).to(dtype)
    weight_NK[0] = 0
    packed = ops.pack_int4(weight_NK)
    assert torch.equal(ops.pack_int4(weight_NK.T.contiguous().T), packed)
    found_NK, read = ops.unpack_int4(packed, outputs, inputs), read_back(packed, outputs, inputs)
    assert same_bits(found_NK, read.weights()[:, :inputs].bfloat16()) and not found_NK[0].any()
    # Behind the last input stands its value again.
    last_NK = weight_NK.float()[:, [min(k, inputs - 1) for k in range(inputs + -inputs % GROUP)]]
    low_NG, high_NG = told(last_NK.unflatten(1, (-1, GROUP)))
    step_NG1 = ((high_NG - low_NG) / 15).unsqueeze(-1)
    apart_NGI = (in_groups(found_NK.float()) - in_groups(weight_NK.float())).abs()
    least_N11 = 8 * read.unit_N[:, None, None]
    assert torch.allclose(least_N11 * 255, step_NG1.amax(1, keepdim=True).clamp(min=255 * 2.0**-118), rtol=1e-5)
    rounding_NGI = in_groups(weight_NK.float()).abs() * 2**-8
    assert (apart_NGI <= 2 * step_NG1 + 0.5 * least_N11 + rounding_NGI).all()


def told(weight_NGI: Tensor) -> tuple[Tensor, Tensor]:
    """Return the ends (N, G) of the range of every group, as far as zero points can tell: with zero, or nearly."""
    low_NG = weight_NGI.amin(-1).clamp(max=0)
    return low_NG, weight_NGI.amax(-1).maximum(low_NG / 2)


def test_weights_in_four_bits_are_nearer_than_even_levels():
    weight_NK = torch.randn(64, 1024).bfloat16()
    groups = weight_NK.float().unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=-1, keepdim=True)
    step = (high - low) / 15
    even = ((groups - low) / step).round() * step + low
    found = ops.unpack_int4(ops.pack_int4(weight_NK), 64, 1024).float().unflatten(1, (-1, GROUP))
    ratio = (found - groups).square().mean() / (even - groups).square().mean()
    assert 0.8 < ratio.item() < 0.95


@pytest.mark.parametrize("value", [1.0, -0.75, 3e38, -3e38, 1e-37, -300.0])
def test_weights_that_are_all_alike_come_back(value: float):
    """Nearly: zero points tell no more than 32 levels, so a group far from zero has wide steps."""
    weight_NK = torch.full((17, 70), value).bfloat16()
    found_NK = ops.unpack_int4(ops.pack_int4(weight_NK), 17, 70).float()
    torch.testing.assert_close(found_NK, weight_NK.float(), rtol=0.01, atol=2**-118)


def factors(x_MK: Tensor) -> Tensor:
    """Return the lower Cholesky factors of the inverses of the products of a block's inputs, (P, inputs of a block)."""
    rows_MP = in_groups(x_MK).flatten(1).double()
    found_PW = torch.zeros(rows_MP.shape[1], min(rows_MP.shape[1], BLOCK))
    for first in range(0, len(found_PW), BLOCK):
        own_MW = rows_MP[:, first : first + BLOCK]
        size = own_MW.shape[1]
        products_WW = own_MW.T @ own_MW / len(x_MK) + 0.01 * torch.eye(size, dtype=torch.float64)
        found_PW[first : first + size, :size] = torch.linalg.cholesky(torch.linalg.inv(products_WW)).float()
    return found_PW


def fed_back(weight_NK: Tensor, factors_PW: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round one input after the other, and give the others of its block what is left, as kernels.h says, in fp32.

    Returns:
        whole numbers (N, G, 32), scales (N, G) and units (N), as `Read` has them.
    """
    inputs, padded = weight_NK.shape[1], len(factors_PW)
    left_NP = weight_NK[:, [min(k, inputs - 1) for k in range(padded)]].float()
    low_NG, high_NG = told(left_NP.unflatten(1, (-1, GROUP)))
    widest_N = (high_NG / 15 - low_NG / 15).amax(1)
    unit_N = (widest_N / (8 * 255) * torch.tensor(1.2)).clamp(min=2.0**-121)
    whole, scales = [], []
    for first in range(0, padded, GROUP):
        begins = first % BLOCK
        own_II = factors_PW[first : first + GROUP, begins : begins + GROUP]
        whole_NI, scale_N, errors_NI = group_in_turn(left_NP[:, first : first + GROUP], own_II, unit_N)
        whole.append(whole_NI)
        scales.append(scale_N)
        for later in range(first + GROUP, min(padded, first - begins + BLOCK)):
            handed_N = torch.zeros(len(weight_NK))
            for k in range(GROUP):
                handed_N = handed_N + errors_NI[:, k] * factors_PW[later, begins + k]
            left_NP[:, later] = left_NP[:, later] - handed_N
    return torch.stack(whole, 1).long(), torch.stack(scales, 1), unit_N


def group_in_turn(weight_NI: Tensor, factors_II: Tensor, unit_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Round the inputs of one group; return whole numbers (N, 32), scales (N), and what is left (N, 32)."""
    counts_N = weight_NI.any(-1)
    low, high = told(weight_NI)
    best = torch.full_like(low, torch.inf)
    whole_NI, scale_N, errors_NI = torch.zeros_like(weight_NI), torch.zeros_like(low), torch.zeros_like(weight_NI)
    for share in torch.tensor([1.0, 0.95, 0.9, 0.85]):
        for aside in (-0.25, 0.25):
            scale = ((high / 15 - low / 15) * share / (8 * unit_N)).round().clamp(1, 255)
            step = 8 * (scale * unit_N)
            inverse = 1 / step
            zero = ((aside - (low + (1 - share) / 2 * (high - low)) * inverse) * 8).round().clamp(0, 255)
            left_NI, error, levels, errors = weight_NI.clone(), torch.zeros_like(low), [], []
            for k in range(GROUP):
                levels.append((left_NI[:, k] * inverse + zero / 8).clamp(0, 15).round())
                errors.append((left_NI[:, k] - (levels[k] - zero / 8) * step) / factors_II[k, k])
                error = error + errors[k] * errors[k]
                left_NI[:, k + 1 :] -= errors[k].unsqueeze(-1) * factors_II[k + 1 :, k]
            better = error < best
            best, scale_N = torch.where(better, error, best), torch.where(better, scale, scale_N)
            whole = 8 * torch.stack(levels, -1) - zero.unsqueeze(-1)
            whole_NI = torch.where(better.unsqueeze(-1), whole, whole_NI)
            errors_NI = torch.where(better.unsqueeze(-1), torch.stack(errors, -1), errors_NI)
    return whole_NI * counts_N.unsqueeze(-1), scale_N * counts_N, errors_NI * counts_N.unsqueeze(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("outputs", "inputs"), [*ALL_SHAPES, (17, 1100)])
def test_weights_rounded_by_their_inputs_are_those_of_the_definition(
    instructions: str, outputs: int, inputs: int, dtype: torch.dtype
):
    weight_NK, of_inputs, rounded = by_definition(outputs, inputs, dtype)
    plain, packed = ops.pack_all_int4([weight_NK, weight_NK], [torch.empty(0), of_inputs])
    assert torch.equal(plain, ops.pack_int4(weight_NK))
    for found, right in zip(read_back(packed, outputs, inputs), rounded, strict=True):
        assert torch.equal(found, right)


@cache
def by_definition(outputs: int, inputs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, tuple[Tensor, ...]]:
    """Return weights, the factors of their inputs, and how they are rounded; once for all instruction sets."""
    weight_NK, of_inputs = draw(outputs, inputs).to(dtype), factors(draw(50, inputs, seed=3).float())
    weight_NK[0] = 0
    return weight_NK, of_inputs, tuple(fed_back(weight_NK, of_inputs))


def test_products_with_weights_rounded_by_their_inputs_are_nearer():
    torch.manual_seed(0)
    x_MK = torch.randn(400, 8) @ torch.randn(8, 256) + 0.3 * torch.randn(400, 256)  # inputs that go together
    weight_NK = torch.randn(64, 256)
    packed = ops.pack_all_int4([weight_NK] * 2, [torch.empty(0), factors(x_MK)])
    plain, nearer = ((x_MK @ (ops.unpack_int4(one, 64, 256) - weight_NK).T).square().mean() for one in packed)
    assert nearer < 0.5 * plain


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("by_inputs", [False, True])
def test_an_output_that_is_not_finite_spoils_no_other(instructions: str, value: float, by_inputs: bool):
    weight_NK = draw(20, 96).float()
    of_inputs = factors(draw(50, 96, seed=3).float()) if by_inputs else torch.empty(0)
    finite_NK = ops.unpack_int4(ops.pack_all_int4([weight_NK], [of_inputs])[0], 20, 96)
    weight_NK[7, 40] = value
    found_NK = ops.unpack_int4(ops.pack_all_int4([weight_NK], [of_inputs])[0], 20, 96)
    assert found_NK[7].isnan().all() and found_NK.isnan().sum() == 96
    others = [n for n in range(20) if n != 7]
    assert same_bits(found_NK[others], finite_NK[others])


@pytest.mark.parametrize(
    "wrong", [torch.ones(96, 32), torch.ones(96, 96).double(), torch.ones(96, 192)[..., ::2]]
)
def test_factors_of_other_inputs_are_refused(wrong: Tensor):
    with pytest.raises(RuntimeError, match="these factors are not those of 96 inputs"):
        ops.pack_all_int4([draw(20, 96)], [wrong])
    with pytest.raises(RuntimeError, match="there are factors of 1 matrices, not 2"):
        ops.pack_all_int4([draw(20, 96)] * 2, [torch.ones(96, 96)])


@pytest.mark.parametrize(("outputs", "inputs"), ALL_SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_products_are_those_of_the_definition_bit_by_bit(instructions: str, outputs: int, inputs: int, biased: bool):
    weight_NK = draw(outputs, inputs)
    packed = ops.pack_int4(weight_NK)
    bias_N = draw(outputs, seed=1).float() if biased else None
    for rows in ROWS[1:]:
        x_MK = draw(rows, inputs, seed=2)
        x_MK[0] = 0
        assert same_bits(ops.linear_int4(x_MK, packed, bias_N, outputs), reference(x_MK, packed, bias_N, outputs))
    assert ops.linear_int4(x_MK[:0], packed, bias_N, outputs).shape == (0, outputs)


@pytest.mark.parametrize(("outputs", "inputs"), [(33, 300), (48, 4096)])
def test_products_are_near_those_of_the_weights_that_come_back(instructions: str, outputs: int, inputs: int):
    """The bound that docs/native.md states, in float64."""
    packed, x_MK = ops.pack_int4(draw(outputs, inputs)), draw(9, inputs, seed=2)
    read = read_back(packed, outputs, inputs)
    weights_NK = read._replace(unit_N=read.unit_N.double()).weights()[:, :inputs]
    exact_MN = x_MK.double() @ weights_NK.T
    steps_MK = quantised_rows(x_MK)[1].double().repeat_interleave(GROUP, 1)[:, :inputs]
    groups = read.scale_NG.shape[1]
    allowed_MN = (0.5 * steps_MK @ weights_NK.abs().T) * 1.001
    allowed_MN += 2**-8 * exact_MN.abs() + groups * 2**-22 * (x_MK.double().abs() @ weights_NK.abs().T)
    assert ((ops.linear_int4(x_MK, packed, None, outputs).double() - exact_MN).abs() <= allowed_MN * (1 + 2**-8)).all()


def test_every_instruction_set_computes_the_same_bits(instructions: str):
    weight_NK, x_MK = draw(150, 333), draw(40, 333, seed=2)
    packed, found_MN = ops.pack_int4(weight_NK), ops.linear_int4(x_MK, ops.pack_int4(weight_NK), None, 150)
    assert use_kernels("portable")
    assert torch.equal(ops.pack_int4(weight_NK), packed)
    assert same_bits(ops.linear_int4(x_MK, packed, None, 150), found_MN)


def test_rows_keep_their_bits_in_any_company_and_on_any_threads(instructions: str, two_threads: None):
    weight_NK, x_MK = draw(700, 149), draw(300, 149, seed=2)
    packed = ops.pack_int4(weight_NK)
    whole_MN = ops.linear_int4(x_MK, packed, None, 700)
    torch.set_num_threads(1)
    assert torch.equal(ops.pack_int4(weight_NK), packed)
    for rows in ROWS[1:]:
        for first in (0, 300 - rows):
            part = slice(first, first + rows)
            assert same_bits(ops.linear_int4(x_MK[part], packed, None, 700), whole_MN[part])


def test_the_largest_sums_are_exact(instructions: str):
    """All levels and rows at their ends, of one sign: sums of 16 bits would overflow first."""
    x_MK = torch.cat([torch.full((2, 3200), 127.0), torch.full((1, 3200), -127.0)]).bfloat16()
    weight_NK = torch.cat([torch.tensor([1.0, 0.0]).repeat(3, 16), torch.ones(3, 32)], 1).repeat(1, 50).bfloat16()
    packed = ops.pack_int4(weight_NK)
    assert same_bits(ops.linear_int4(x_MK, packed, None, 3), reference(x_MK, packed, None, 3))


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_is_not_made_finite(instructions: str, value: float):
    weight_NK, x_MK = draw(17, 70), draw(3, 70, seed=2)
    broken_NK = weight_NK.clone()
    x_MK[1, 68], broken_NK[5, 40] = value, value
    finite_MN = ops.linear_int4(x_MK, ops.pack_int4(weight_NK), None, 17).isfinite()
    assert not finite_MN[1].any() and finite_MN[[0, 2]].all()
    finite_N = ops.linear_int4(x_MK[:1], ops.pack_int4(broken_NK), None, 17).isfinite()[0]
    assert finite_N.tolist() == [n != 5 for n in range(17)]
    assert ops.unpack_int4(ops.pack_int4(broken_NK), 17, 70)[5].isnan().all()


def test_rows_of_very_small_numbers_are_still_products(instructions: str):
    """The reciprocal of such a group's largest value overflows fp32."""
    packed, x_MK = ops.pack_int4(draw(17, 40) * 2.0**60), draw(2, 40, seed=2)
    y_MN = ops.linear_int4(x_MK * 2.0**-126, packed, None, 17).double() * 2.0**126
    exact_MN = ops.linear_int4(x_MK, packed, None, 17).double()
    torch.testing.assert_close(y_MN, exact_MN, rtol=0.02, atol=0.02 * exact_MN.abs().max().item())


@pytest.mark.parametrize(("entries", "width"), [(1, 1), (16, 8), (37, 40), (96, 33)])
def test_a_table_is_looked_up_as_it_is_unpacked(entries: int, width: int):
    packed = ops.pack_int4(draw(entries, width))
    expected_VF = ops.unpack_int4(packed, entries, width)
    for tokens in (torch.arange(entries), torch.tensor(entries - 1), torch.zeros((2, 0), dtype=torch.long)):
        found = ops.embedding_int4(tokens, packed, width, entries)
        assert same_bits(found, nn.functional.embedding(tokens, expected_VF))


def test_layers_are_packed_together_as_alone():
    weights = [draw(40, 33), draw(16, 64).T, draw(5, 7).float()]
    for together, weight_NK in zip(ops.pack_all_int4(weights, []), weights, strict=True):
        assert torch.equal(together, ops.pack_int4(weight_NK))


@pytest.mark.parametrize("transposed", [False, True])
def test_a_layer_saves_its_quantised_weights(transposed: bool):
    weight_NK, bias_N = draw(18, 40), draw(18)
    layer = Int4Linear(weight_NK, bias_N, transposed)
    state = layer.state_dict()
    assert same_bits(state["weight"], layer.unpacked().T if transposed else layer.unpacked())
    assert same_bits(state["bias"], bias_N) and layer.packed.nbytes == 2 * 64 * (2 * 4 + 1 + 1)


ONE = draw(1, 6)
WRONG = {
    "a vector": lambda: ops.pack_int4(torch.zeros(3)),
    "fp32 rows": lambda: ops.linear_int4(ONE.float(), ops.pack_int4(draw(20, 6)), None, 20),
    "longer rows": lambda: ops.linear_int4(draw(2, 33), ops.pack_int4(draw(20, 6)), None, 20),
    "more outputs": lambda: ops.linear_int4(ONE, ops.pack_int4(draw(20, 6)), None, 33),
    "bf16 weights": lambda: ops.linear_int4(ONE, ops.pack(draw(20, 6)), None, 20),
    "a bf16 bias": lambda: ops.linear_int4(ONE, ops.pack_int4(draw(20, 6)), draw(20), 20),
    "a table of another width": lambda: ops.embedding_int4(torch.tensor([0]), ops.pack_int4(draw(20, 6)), 40, 20),
    "weights of another layer": lambda: ops.unpack_int4(ops.pack_int4(draw(20, 6)), 40, 6),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_is_refused_in_words(name: str):
    with pytest.raises(RuntimeError, match=r"^draftsmith: "):
        WRONG[name]()


def test_a_token_that_is_not_in_the_table_is_refused():
    with pytest.raises(IndexError, match="token 20 is not in a table of 20"):
        ops.embedding_int4(torch.tensor([20]), ops.pack_int4(draw(20, 6)), 6, 20)


ARGUMENTS = {
    "pack_int4": lambda: (draw(17, 5),),
    "unpack_int4": lambda: (ops.pack_int4(draw(17, 5)), 17, 5),
    "linear_int4": lambda: (draw(2, 3, 5), ops.pack_int4(draw(17, 5)), draw(17).float(), 17),
    "embedding_int4": lambda: (torch.tensor([[1, 16], [0, 3]]), ops.pack_int4(draw(17, 5)), 5, 17),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_operators_keep_pytorch_s_rules(name: str):
    torch.library.opcheck(getattr(ops, name).default, ARGUMENTS[name]())
