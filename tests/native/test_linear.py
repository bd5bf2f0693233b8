"""The native linear layers against float64 and against integers, for every instruction set that this processor has.

M rows, N outputs, K inputs, V entries of a table.
"""


import pytest
import torch
from torch import Tensor, nn

from draftsmith.native import LIBRARY, kernels_in_use, use_kernels, why_missing
from tests.helpers.native_toy import ROWS, SHAPES, draw, quantise_outputs, same_bits

if not LIBRARY:
    pytest.skip(why_missing(), allow_module_level=True)

from draftsmith.native.layers import Int8Linear, PackedLinear

ops = torch.ops.draftsmith

def assert_within_rounding(y: Tensor, x: Tensor, weight_NK: Tensor, bias_N: Tensor | None) -> None:
    """Compare with float64.

    Products of two bf16 are exact in fp32, so the only errors are those of K sums (and of the bias), each at most 2^-24
    of a partial sum, which is at most Σ|x||w| + |b|; and the last rounding to bf16, at most 2^-8 of the result. The
    factor 2^-23 leaves room for both to meet.
    """
    wide, weights_NK = x.double(), weight_NK.double()
    add_N = torch.zeros(weight_NK.shape[0], dtype=torch.float64) if bias_N is None else bias_N.double()
    expected = wide @ weights_NK.T + add_N
    size = wide.abs() @ weights_NK.abs().T + add_N.abs()
    bound = 2**-8 * expected.abs() + (weight_NK.shape[1] + 1) * 2**-23 * size
    assert y.dtype == torch.bfloat16 and y.shape == expected.shape
    assert bool(((y.double() - expected).abs() <= bound).all())


# ---- packing


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_packed_weights_unpack_to_the_same_bits(instructions: str, outputs: int, inputs: int):
    weight_NK = draw(outputs, inputs)
    packed = ops.pack(weight_NK)
    assert packed.shape == ((outputs + 15) // 16, (inputs + 1) // 2, 16, 2)
    assert same_bits(ops.unpack(packed, outputs, inputs), weight_NK)
    rows_NK = packed.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)
    assert same_bits(rows_NK[:outputs, :inputs], weight_NK)
    assert not rows_NK[outputs:].any() and not rows_NK[:, inputs:].any()


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_weights_of_any_strides_pack_the_same(instructions: str, outputs: int, inputs: int):
    weight_NK = draw(outputs, inputs)
    frame = torch.full((2 * outputs + 1, 3 * inputs + 1), torch.nan, dtype=torch.bfloat16)
    inside_NK = frame[1::2, 1::3]
    inside_NK.copy_(weight_NK)
    rows_NK = torch.full_like(frame, torch.nan)[:outputs, 1 : 1 + inputs]
    rows_NK.copy_(weight_NK)
    packed = ops.pack(weight_NK)
    for other_NK in (weight_NK.T.contiguous().T, inside_NK, rows_NK):
        assert same_bits(ops.pack(other_NK), packed)
    repeated_NK = weight_NK[:1].expand(outputs, inputs)
    assert same_bits(ops.pack(repeated_NK), ops.pack(repeated_NK.contiguous()))


def test_matrices_packed_together_are_packed_as_they_are_alone(instructions: str, two_threads: None):
    stack_ENK = draw(5, 33, 40)
    given = [draw(150, 48), draw(1, 1), stack_ENK, draw(64, 131), stack_ENK.transpose(1, 2), draw(0, 4), draw(31, 66).T]
    together = ops.pack_all(given)
    assert len(together) == len(given)
    for weights, packed in zip(given, together, strict=True):
        alone = [ops.pack(one_NK) for one_NK in (weights if weights.dim() == 3 else [weights])]
        assert same_bits(packed, torch.stack(alone) if weights.dim() == 3 else alone[0])


def test_special_values_survive_packing():
    bits_NK = torch.arange(-32768, 32768, dtype=torch.int32).to(torch.int16).view(256, 256)
    weight_NK = bits_NK.view(torch.bfloat16)
    assert torch.equal(ops.unpack(ops.pack(weight_NK), 256, 256).view(torch.int16), bits_NK)


@pytest.mark.parametrize(("entries", "width"), [(1, 1), (16, 8), (37, 12), (96, 33)])
def test_a_packed_table_is_looked_up_like_an_embedding(entries: int, width: int):
    table_VF = draw(entries, width)
    packed = ops.pack(table_VF)
    for tokens in (torch.arange(entries), torch.tensor(entries - 1), torch.zeros((2, 0), dtype=torch.long)):
        assert same_bits(ops.embedding(tokens, packed, width, entries), nn.functional.embedding(tokens, table_VF))
    grid = torch.randint(0, entries, (5, 4), generator=torch.Generator().manual_seed(0)).T[::2]
    assert not grid.is_contiguous()
    assert same_bits(ops.embedding(grid, packed, width, entries), nn.functional.embedding(grid, table_VF))


@pytest.mark.parametrize(("entries", "width"), [(1, 1), (16, 8), (37, 12), (96, 33)])
def test_an_int8_table_is_looked_up_as_whole_numbers_times_their_scale(entries: int, width: int):
    table_VF = draw(entries, width)
    table_VF[0] = 0
    packed, scales, _ = ops.pack_int8(table_VF)
    whole_VF, scale_V = quantise_outputs(table_VF)
    expected_VF = (whole_VF * scale_V[:, None]).bfloat16()
    for tokens in (torch.arange(entries), torch.tensor(entries - 1), torch.zeros((2, 0), dtype=torch.long)):
        found = ops.embedding_int8(tokens, packed, scales, width, entries)
        assert torch.equal(found, nn.functional.embedding(tokens, expected_VF)) and found.dtype == torch.bfloat16


# ---- products in bf16


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("biased", [False, True])
def test_products_of_any_number_of_rows_are_right_to_rounding(
    instructions: str, outputs: int, inputs: int, biased: bool
):
    weight_NK = draw(outputs, inputs)
    packed = ops.pack(weight_NK)
    bias_N = draw(outputs, seed=1).float() if biased else None
    for rows in ROWS:
        x_MK = draw(rows, inputs, seed=2)
        assert_within_rounding(ops.linear(x_MK, packed, bias_N, outputs), x_MK, weight_NK, bias_N)


@pytest.mark.parametrize("int8", [False, True])
@pytest.mark.parametrize("rows", [9, 15, 64, 65, 128, 200])
def test_rows_so_wide_that_they_go_in_groups_are_those_of_a_row_alone(instructions: str, rows: int, int8: bool):
    x, weight_NK = draw(rows, 8192), draw(40, 8192)
    layer = Int8Linear(weight_NK, None) if int8 else PackedLinear(weight_NK, None)
    together = layer(x)
    if not int8:
        assert_within_rounding(together, x, weight_NK, None)
    for row in {0, min(63, rows - 1), rows - 1, rows // 2}:
        assert same_bits(together[row], layer(x[row : row + 1])[0])


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_a_row_is_the_same_bits_however_many_are_computed_with_it(instructions: str, outputs: int, inputs: int):
    packed, bias_N = ops.pack(draw(outputs, inputs)), draw(outputs, seed=1).float()
    x_MK = draw(300, inputs, seed=2)
    whole_MN = ops.linear(x_MK, packed, bias_N, outputs)
    for rows in ROWS[1:]:
        for first in (0, 300 - rows):
            part = slice(first, first + rows)
            assert same_bits(ops.linear(x_MK[part], packed, bias_N, outputs), whole_MN[part])
    single = [ops.linear(x_K, packed, bias_N, outputs) for x_K in x_MK[:60]]
    assert same_bits(torch.stack(single), whole_MN[:60])


@pytest.mark.parametrize("size", [1e-17, 1e-19, 1e-21, 1e-38])
def test_a_row_of_tiny_numbers_is_the_same_bits_however_many_are_computed_with_it(instructions: str, size: float):
    """Products and sums are on both sides of the smallest normal number, below which instructions may know only 0."""
    packed = ops.pack((draw(37, 70).float() * size).bfloat16())
    x_MK = (draw(20, 70, seed=2).float() * (size if size > 1e-30 else 1)).bfloat16()
    every_MN = ops.linear(x_MK, packed, None, 37)
    for rows in (1, 2, 3, 5, 16, 17):
        assert same_bits(ops.linear(x_MK[:rows], packed, None, 37), every_MN[:rows])


def test_a_row_is_the_same_bits_whatever_the_others_hold(instructions: str):
    packed = ops.pack(draw(50, 21))
    x_MK = draw(29, 21, seed=2)
    expected_N = ops.linear(x_MK[7:8], packed, None, 50)[0]
    for value in (0.0, 1e30, torch.inf, torch.nan):
        others_MK = torch.full_like(x_MK, value)
        others_MK[7] = x_MK[7]
        assert same_bits(ops.linear(others_MK, packed, None, 50)[7], expected_N)


def test_threads_do_not_change_a_bit(instructions: str, two_threads: None):
    weight_NK, x_MK = draw(700, 130), draw(61, 130, seed=2)
    bias_N = draw(700, seed=1).float()
    packed, int8 = ops.pack(weight_NK), ops.pack_int8(weight_NK)
    together = [ops.linear(x_MK, packed, bias_N, 700), ops.linear_int8(x_MK, *int8, bias_N, 700)]
    torch.set_num_threads(1)
    assert same_bits(ops.pack(weight_NK), packed)
    assert all(torch.equal(a, b) for a, b in zip(ops.pack_int8(weight_NK), int8, strict=True))
    alone = [ops.linear(x_MK, packed, bias_N, 700), ops.linear_int8(x_MK, *int8, bias_N, 700)]
    assert all(same_bits(a, b) for a, b in zip(alone, together, strict=True))


def views(x_MK: Tensor) -> dict[str, Tensor]:
    """Show the same rows through other strides, with NaN wherever a product has no business."""
    rows, inputs = x_MK.shape

    def frame(*shape: int) -> Tensor:
        return torch.full(shape, torch.nan, dtype=x_MK.dtype)

    shown = {
        "inside": frame(rows + 2, inputs + 3)[1:-1, 2 : 2 + inputs],
        "transposed": frame(inputs + 2, rows + 1)[1:-1, :rows].T,
        "every other": frame(rows, 2 * inputs)[:, ::2],
        "between others": frame(rows * inputs + 9)[5:-4].view(rows, inputs),
    }
    for view_MK in shown.values():
        view_MK.copy_(x_MK)
    return shown


@pytest.mark.parametrize("inputs", [1, 6, 7, 33, 64])
def test_rows_of_any_strides_give_the_same_bits(instructions: str, inputs: int):
    weight_NK, x_MK = draw(21, inputs), draw(9, inputs, seed=2)
    packed, int8 = ops.pack(weight_NK), ops.pack_int8(weight_NK)
    expected_MN, exact_MN = ops.linear(x_MK, packed, None, 21), ops.linear_int8(x_MK, *int8, None, 21)
    for name, view_MK in views(x_MK).items():
        assert same_bits(ops.linear(view_MK, packed, None, 21), expected_MN), name
        assert same_bits(ops.linear_int8(view_MK, *int8, None, 21), exact_MN), name
    repeated_MK = x_MK[:1].expand(9, inputs)
    assert same_bits(ops.linear(repeated_MK, packed, None, 21), expected_MN[:1].expand(9, -1))
    assert same_bits(ops.linear_int8(repeated_MK, *int8, None, 21), exact_MN[:1].expand(9, -1))


@pytest.mark.parametrize("inputs", [12, 13])
def test_leading_dimensions_stay(instructions: str, inputs: int):
    weight_NK, bias_N = draw(18, inputs), draw(18, seed=1).float()
    packed, int8 = ops.pack(weight_NK), ops.pack_int8(weight_NK)
    x = draw(2, 3, inputs, seed=2)
    for leading in (x, x.transpose(0, 1), x[:, :0], x[0, 0], x.unsqueeze(2)):
        flat = leading.reshape(-1, inputs)
        for operator, weights in ((ops.linear, (packed,)), (ops.linear_int8, int8)):
            y = operator(leading, *weights, bias_N, 18)
            assert y.shape == (*leading.shape[:-1], 18) and y.is_contiguous()
            assert same_bits(y.reshape(-1, 18), operator(flat, *weights, bias_N, 18))
        assert_within_rounding(ops.linear(leading, packed, bias_N, 18), leading, weight_NK, bias_N)


def test_what_is_not_finite_stays_so(instructions: str):
    """Also beside the padding of odd sizes, where 0 · ∞ would spread it to numbers that have none."""
    weight_NK = draw(17, 7)
    weight_NK[3, 2] = torch.inf
    weight_NK[5, 1] = torch.nan
    x_MK = draw(4, 7, seed=2).abs() + 1
    x_MK[1, 6] = torch.nan
    expected_MN = (x_MK.double() @ weight_NK.double().T).isfinite()
    assert torch.equal(ops.linear(x_MK, ops.pack(weight_NK), None, 17).isfinite(), expected_MN)
    assert expected_MN[0].sum() == 15 and not expected_MN[1].any()


# ---- what is refused

ONE = torch.ones((2, 6), dtype=torch.bfloat16)
REFUSED = {
    "fp32 rows": lambda: ops.linear(ONE.float(), ops.pack(draw(20, 6)), None, 20),
    "longer rows": lambda: ops.linear(draw(2, 7), ops.pack(draw(20, 6)), None, 20),
    "shorter rows": lambda: ops.linear(ONE[:, :4], ops.pack(draw(20, 6)), None, 20),
    "rows without an end": lambda: ops.linear(torch.tensor(1.0).bfloat16(), ops.pack(draw(20, 6)), None, 20),
    "more outputs": lambda: ops.linear(ONE, ops.pack(draw(20, 6)), None, 33),
    "fewer outputs": lambda: ops.linear(ONE, ops.pack(draw(20, 6)), None, 16),
    "no outputs": lambda: ops.linear(ONE, ops.pack(draw(20, 6)), None, -1),
    "weights that are not packed": lambda: ops.linear(ONE, draw(20, 6), None, 20),
    "packed fp32": lambda: ops.linear(ONE, ops.pack(draw(20, 6)).float(), None, 20),
    "strided packing": lambda: ops.linear(ONE, ops.pack(draw(20, 6)).repeat(1, 1, 2, 1)[:, :, ::2], None, 20),
    "a bf16 bias": lambda: ops.linear(ONE, ops.pack(draw(20, 6)), draw(20), 20),
    "a short bias": lambda: ops.linear(ONE, ops.pack(draw(20, 6)), torch.zeros(19), 20),
    "a strided bias": lambda: ops.linear(ONE, ops.pack(draw(20, 6)), torch.zeros(40)[::2], 20),
    "an fp32 matrix": lambda: ops.pack(torch.zeros(3, 3)),
    "a vector": lambda: ops.pack(torch.zeros(3).bfloat16()),
    "a stack alone": lambda: ops.pack(torch.zeros(2, 3, 3).bfloat16()),
    "a vector among matrices": lambda: ops.pack_all([draw(3, 3), draw(3)]),
    "fp32 among matrices": lambda: ops.pack_all([draw(3, 3), draw(3, 3).float()]),
    "unpacking another shape": lambda: ops.unpack(ops.pack(draw(20, 6)), 20, 8),
    "a table of another width": lambda: ops.embedding(torch.tensor([0]), ops.pack(draw(20, 6)), 8, 20),
    "tokens in int32": lambda: ops.embedding(torch.tensor([0]).int(), ops.pack(draw(20, 6)), 6, 20),
    "a token too large": lambda: ops.embedding(torch.tensor([0, 20]), ops.pack(draw(20, 6)), 6, 20),
    "a negative token": lambda: ops.embedding(torch.tensor([-1]), ops.pack(draw(20, 6)), 6, 20),
    "an int8 table of another width": lambda: ops.embedding_int8(
        torch.tensor([0]), *ops.pack_int8(draw(20, 6))[:2], 11, 20
    ),
    "a token too large for int8": lambda: ops.embedding_int8(
        torch.tensor([20]), *ops.pack_int8(draw(20, 6))[:2], 6, 20
    ),
    "bf16 weights for an int8 table": lambda: ops.embedding_int8(
        torch.tensor([0]), ops.pack(draw(20, 6)), torch.ones(32), 6, 20
    ),
    "an int8 vector": lambda: ops.pack_int8(torch.zeros(3)),
    "fp32 rows for int8": lambda: ops.linear_int8(ONE.float(), *ops.pack_int8(draw(20, 6)), None, 20),
    "longer rows for int8": lambda: ops.linear_int8(draw(2, 9), *ops.pack_int8(draw(20, 6)), None, 20),
    "more int8 outputs": lambda: ops.linear_int8(ONE, *ops.pack_int8(draw(20, 6)), None, 33),
    "bf16 weights for int8": lambda: ops.linear_int8(ONE, ops.pack(draw(20, 6)), *ops.pack_int8(draw(20, 6))[1:], None,
                                                     20),
    "a bf16 bias for int8": lambda: ops.linear_int8(ONE, *ops.pack_int8(draw(20, 6)), draw(20), 20),
    "a short bias for int8": lambda: ops.linear_int8(ONE, *ops.pack_int8(draw(20, 6)), torch.zeros(19), 20),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_does_not_fit_is_refused_in_words(what: str):
    with pytest.raises((RuntimeError, IndexError), match="^draftsmith: "):
        REFUSED[what]()


@pytest.mark.parametrize("part", ["scales", "bias", "sums"])
def test_parts_of_an_int8_layer_are_refused_or_read_by_their_strides(part: str):
    """A bias expanded from one number must not be read as if there were a number for every output."""
    packed, scales, sums = ops.pack_int8(draw(32, 6))
    bias_N = torch.arange(32.0)
    given = {"scales": scales, "sums": sums, "bias": bias_N}
    expected_MN = ops.linear_int8(ONE, packed, scales, sums, bias_N, 32)
    given[part] = torch.stack([given[part], given[part] + 1], dim=1)[:, 0]
    try:
        found_MN = ops.linear_int8(ONE, packed, given["scales"], given["sums"], given["bias"], 32)
    except RuntimeError as error:
        assert str(error).startswith("draftsmith: ")
    else:
        assert same_bits(found_MN, expected_MN)


@pytest.mark.parametrize("place", [0, 3, 7])
def test_a_weight_that_is_nan_stays_nan_in_int8(place: int):
    weight_NK = draw(20, 8)
    weight_NK[5, place] = float("nan")
    found_MN = Int8Linear(weight_NK, None)(draw(2, 8))
    broken_N = torch.arange(20) == 5
    assert found_MN[:, broken_N].isnan().all() and found_MN[:, ~broken_N].isfinite().all()


@pytest.mark.parametrize("kind", [PackedLinear, Int8Linear])
def test_a_layer_refuses_rows_one_feature_short(kind: type[nn.Module]):
    with pytest.raises(RuntimeError, match="rows of 7 features cannot go through a layer that reads 8"):
        kind(draw(20, 8), None)(draw(2, 7))


def test_an_unknown_instruction_set_changes_nothing():
    before = kernels_in_use()
    assert not use_kernels("avx1024") and kernels_in_use() == before


# ---- as PyTorch operators

ARGUMENTS = {
    "pack": lambda: (draw(17, 5),),
    "unpack": lambda: (ops.pack(draw(17, 5)), 17, 5),
    "linear": lambda: (draw(2, 3, 5), ops.pack(draw(17, 5)), draw(17).float(), 17),
    "embedding": lambda: (torch.tensor([[1, 16], [0, 3]]), ops.pack(draw(17, 5)), 5, 17),
    "embedding_int8": lambda: (torch.tensor([[1, 16], [0, 3]]), *ops.pack_int8(draw(17, 5))[:2], 5, 17),
    "pack_int8": lambda: (draw(17, 5),),
    "linear_int8": lambda: (draw(2, 3, 5), *ops.pack_int8(draw(17, 5)), None, 17),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_operators_keep_pytorch_s_rules(name: str):
    torch.library.opcheck(getattr(ops, name).default, ARGUMENTS[name]())


def test_a_layer_with_bias_and_one_without_compile_to_the_same_bits():
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = PackedLinear(draw(48, 21), draw(48)), PackedLinear(draw(21, 48), None)
            self.int8 = Int8Linear(draw(21, 21), draw(21))

        def forward(self, x: Tensor) -> Tensor:
            return self.int8(x + self.down(nn.functional.silu(self.up(x))))

    module = Two()
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    for rows in (1, 5, 8):
        x = draw(2, rows, 21, seed=2)
        assert same_bits(compiled(x), module(x))


def test_a_packed_layer_is_exported():
    module = nn.Sequential(PackedLinear(draw(48, 21), draw(48)), nn.GELU(), PackedLinear(draw(5, 48), None))
    rows = torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(module, (draw(3, 21),), dynamic_shapes=({0: rows},))
    for count in (3, 29):
        x_MK = draw(count, 21, seed=2)
        assert same_bits(exported.module()(x_MK), module(x_MK))


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_layer_saves_what_it_was_made_of(biased: bool, transposed: bool):
    weight_NK, bias_N = draw(18, 7), draw(18) if biased else None
    state = PackedLinear(weight_NK, bias_N, transposed).state_dict()
    assert state.keys() == {"weight", "bias"} if biased else {"weight"}
    assert same_bits(state["weight"], weight_NK.T if transposed else weight_NK)
    assert bias_N is None or same_bits(state["bias"], bias_N)
