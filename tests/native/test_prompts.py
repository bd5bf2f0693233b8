"""Texts read natively in pieces of any size: the bits of a token do not depend on how its text was cut.

B rows, T tokens, V vocabulary, F width.
"""

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from draftsmith.native import LIBRARY, why_missing
from draftsmith.targets import KVCache, Target
from draftsmith.targets.backend import NativeForward
from draftsmith.targets.encode import ENCODED_TOKENS

if not LIBRARY:
    pytest.skip(why_missing(), allow_module_level=True)

LENGTH, VOCABULARY = 330, 97
"""More than 256 tokens, whose values are packed together on tiles, and more than one block of every other kind."""
SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2, "head_dim": 16,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 400,
}


def target(windows: bool, length: int = LENGTH) -> Target:
    torch.manual_seed(0)
    sizes = SIZES | {"max_position_embeddings": length + 70}
    model = (
        MistralForCausalLM(MistralConfig(**sizes, sliding_window=50))
        if windows
        else LlamaForCausalLM(LlamaConfig(**sizes))
    )
    made = Target(model.bfloat16())
    assert isinstance(made.backend, NativeForward)
    return made


def text(rows: int = 1, length: int = LENGTH) -> Tensor:
    return torch.randint(VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(1))


def read(own: Target, tokens_BT: Tensor, piece: int, rest: int | None = None) -> tuple[Tensor, Tensor, KVCache]:
    """Read in pieces; from token `rest` on, one by one. Return logits, both taps, and the cache."""
    rows, length = tokens_BT.shape
    cache = own.new_cache(rows, length)
    single = length if rest is None else rest
    cuts = [*range(0, single, piece), *range(single, length)]
    logits, features = [], []
    for begin, end in zip(cuts, [*cuts[1:], length], strict=True):
        cached_B = torch.full((rows,), begin)
        logits_BMV, features_BMF = own.read_chain(cache, tokens_BT[:, begin:end], cached_B, (0, -1))
        logits.append(logits_BMV)
        features.append(features_BMF)
    return torch.cat(logits, 1), torch.cat(features, 1), cache


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


@pytest.mark.parametrize("windows", [False, True], ids=["all", "windows"])
@pytest.mark.parametrize(("piece", "rest"), [(1, None), (7, None), (64, None), (100, 270), (300, None)])
def test_a_text_read_in_pieces_has_the_bits_of_one_read_whole(
    instructions: str, windows: bool, piece: int, rest: int | None
):
    own, tokens_1T = target(windows), text()
    logits_1TV, features_1TF, whole = read(own, tokens_1T, LENGTH)
    other_logits_1TV, other_features_1TF, cut = read(own, tokens_1T, piece, rest)
    assert same_bits(logits_1TV, other_logits_1TV) and same_bits(features_1TF, other_features_1TF)
    for mine_NEHD, other_NEHD in zip(whole.tensors, cut.tensors, strict=True):
        assert same_bits(mine_NEHD, other_NEHD)


def test_a_model_so_wide_that_its_rows_go_in_groups_reads_alike_in_pieces(instructions: str):
    sizes = SIZES | {"hidden_size": 8192, "intermediate_size": 160, "num_hidden_layers": 1}
    own = Target(LlamaForCausalLM(LlamaConfig(**sizes)).bfloat16())
    assert isinstance(own.backend, NativeForward)
    tokens_1T = text()[:, :200]
    whole_1TV, whole_1TF = own.read_chain(own.new_cache(1, 200), tokens_1T, torch.tensor([0]))
    cache = own.new_cache(1, 200)
    for begin in range(0, 200, 50):
        logits_1MV, features_1MF = own.read_chain(cache, tokens_1T[:, begin : begin + 50], torch.tensor([begin]))
        assert same_bits(logits_1MV, whole_1TV[:, begin : begin + 50])
        assert same_bits(features_1MF, whole_1TF[:, begin : begin + 50])


def test_a_text_has_the_same_bits_beside_others(instructions: str):
    own, tokens_BT = target(False), text(5)
    logits_BTV, features_BTF, _ = read(own, tokens_BT, 128)
    for b in (0, 4):
        logits_1TV, features_1TF, _ = read(own, tokens_BT[b : b + 1], LENGTH)
        assert same_bits(logits_BTV[b], logits_1TV[0]) and same_bits(features_BTF[b], features_1TF[0])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_neither_do_threads_change_them(instructions: str, threads: int):
    own, tokens_1T = target(False), text()
    alone_1TV, _, _ = read(own, tokens_1T, 64)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        shared_1TV, _, _ = read(own, tokens_1T, 64)
    finally:
        torch.set_num_threads(before)
    assert same_bits(alone_1TV, shared_1TV)


@pytest.mark.parametrize(("rows", "length"), [(3, LENGTH), (9, LENGTH), (2, ENCODED_TOKENS + 50)])
def test_training_reads_what_decoding_reads(rows: int, length: int):
    """Texts that are read together, more of them than at a time, and longer ones than at a time."""
    own, tokens_BT = target(True, length), text(rows, length)
    assert (rows * length > ENCODED_TOKENS) == (rows != 3)
    logits_BTV, features_BTF, _ = read(own, tokens_BT, 64)
    encoded_BTF, encoded_BTV = own.encode(tokens_BT, (0, -1), logits=True)
    assert encoded_BTV is not None
    assert same_bits(encoded_BTF, features_BTF) and same_bits(encoded_BTV, logits_BTV)
    states_BTF, nothing = own.encode(tokens_BT, (0, -1))
    assert nothing is None and same_bits(states_BTF, features_BTF)


def test_the_models_own_code_reads_nearly_the_same():
    own, tokens_BT = target(True), text(2)
    native_BTF, native_BTV = own.encode(tokens_BT, logits=True)
    model_BTF, model_BTV = own.encode(tokens_BT, logits=True, by_model=True)
    assert native_BTV is not None and model_BTV is not None
    for mine, other in ((native_BTF, model_BTF), (native_BTV, model_BTV)):
        distance = ((mine.float() - other.float()).norm() / other.float().norm()).item()
        assert 0 < distance < 0.03, distance  # the roundings of bf16, in another order
