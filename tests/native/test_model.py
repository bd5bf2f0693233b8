"""Targets on the native kernels against the same targets without them: tiny random models in bf16.

B rows, M nodes (root first), T tokens, F width, V vocabulary.
"""

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM

from draftsmith.native import LIBRARY, why_missing
from draftsmith.native.layers import PackedEmbedding, PackedLinear
from draftsmith.targets import Target, keep_path
from draftsmith.targets.backend import Eager, NativeForward, NativeLayers
from draftsmith.types import ROOT, Quantization
from tests.helpers.native_reading import read, read_trees, verify
from tests.helpers.native_toy import (
    EVERYTHING,
    NATIVE,
    SIZES,
    WHOLE,
    assert_close,
    held,
    model,
    native,
    plain,
    quantised,
)
from tests.helpers.tiny import CONTEXT, VOCABULARY, WIDTH, prompts
from tests.targets.test_target import path_to

if not LIBRARY:
    pytest.skip(why_missing(), allow_module_level=True)


@pytest.mark.parametrize("name", EVERYTHING)
def test_every_node_of_a_tree_is_read_as_pytorch_reads_it(name: str):
    taps = (-1, 0, 1)
    for ours, theirs in zip(read_trees(native(name), taps), read_trees(plain(name), taps), strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("name", EVERYTHING)
def test_only_llama_shaped_models_are_read_by_one_operator(name: str):
    assert type(native(name).backend) is (NativeForward if name in NATIVE else NativeLayers)
    assert type(plain(name).backend) is Eager


@pytest.mark.parametrize("name", NATIVE)
def test_a_node_is_the_same_bits_as_the_last_token_of_a_text(name: str):
    """Whatever tree it stands in, whatever rows are beside it, and whether its text came at once or step by step."""
    target = native(name)
    generator = torch.Generator().manual_seed(7)
    rows = prompts(3, shortest=6, longest=21, seed=2)
    tree = [ROOT, ROOT, 0, 1, 1, 4, 5, 6, 7, 2]
    guesses_BN = torch.randint(0, VOCABULARY, (3, len(tree)), generator=generator)
    cache = target.new_cache(slots=3, capacity=64)
    read(target, cache, rows)
    logits_BMV, features_BMF = verify(target, cache, rows, guesses_BN, [tree] * 3)
    for b, tokens in enumerate(rows):
        for node in range(-1, len(tree)):
            text = tokens + (path_to(node, tree, guesses_BN[b].tolist()) if node >= 0 else [])
            alone = target.new_cache(slots=1, capacity=64)
            ((all_1TV, states_1TF),) = read(target, alone, [[*text, 0]], (-1, 0))
            assert torch.equal(all_1TV[0, -1], logits_BMV[b, node + 1])
            assert torch.equal(states_1TF[0, -1], features_BMF[b, node + 1])
            if node == -1:
                for t in range(len(text)):
                    one = target.new_cache(slots=2, capacity=64)
                    if t:
                        read(target, one, [text[: t + 1]])
                    single_1MV, _ = verify(target, one, [text[: t + 1]], torch.zeros((1, 0), dtype=torch.long), [[]])
                    assert torch.equal(single_1MV[0, 0], all_1TV[0, t])


@pytest.mark.parametrize("name", ["mistral", "qwen2 with windows above", "qwen3 with windows"])
def test_what_left_the_window_is_not_looked_at(name: str):
    """Changing the first token changes the last logits only where three layers of windows still reach it."""
    target = native(name)
    reach = {"mistral": 2 * (6 - 1), "qwen2 with windows above": None, "qwen3 with windows": None}[name]
    tokens = prompts(1, shortest=30, longest=30, seed=3)[0]
    others = [(tokens[0] + 1) % VOCABULARY, *tokens[1:]]
    seen = []
    for text in (tokens, others):
        cache = target.new_cache(slots=1, capacity=40)
        seen.append(read(target, cache, [[*text, 0]])[0][0])
    changed_T = (seen[0] != seen[1]).any(-1)[0]
    if reach is None:  # a layer of full attention is in it
        assert changed_T[20:].any()
    else:
        assert changed_T[: reach + 1].any() and not changed_T[reach + 1 :].any()


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "yarn"])
def test_the_last_positions_of_the_context_are_read_alike(name: str):
    tokens = prompts(1, shortest=CONTEXT, longest=CONTEXT, seed=6)[0]
    tree = [ROOT, 0, 1, 2, ROOT]  # past the context, where positions stay at the last
    guesses_1N = torch.randint(0, VOCABULARY, (1, len(tree)), generator=torch.Generator().manual_seed(0))
    found = []
    for target in (native(name), plain(name)):
        cache = target.new_cache(slots=1, capacity=CONTEXT + 8)
        with torch.no_grad():
            read(target, cache, [tokens])
            found.append(verify(target, cache, [tokens], guesses_1N, [tree]))
    for ours, theirs in zip(*found, strict=True):
        assert_close(ours, theirs)


@pytest.mark.parametrize("name", ["llama", "qwen3", "llama with biases", "gpt2"])
def test_logits_of_a_few_columns_are_those_of_all(name: str):
    target, rows = native(name), prompts(2, shortest=17, longest=17, seed=4)
    whole = read(target, target.new_cache(2, 32), rows, (-1,))
    columns = torch.tensor([3, 15, 0])
    some = read(target, target.new_cache(2, 32), rows, (-1,), columns)
    for (logits_BMV, features_BMF), (picked_BUV, also_BMF) in zip(whole, some, strict=True):
        assert torch.equal(features_BMF, also_BMF)
        assert picked_BUV.shape == (1, 3, VOCABULARY)
        if target.backend.reads_apart:
            assert torch.equal(picked_BUV, logits_BMV[:, columns])
        else:
            assert_close(picked_BUV, logits_BMV[:, columns])


def test_a_kept_path_and_a_freed_row_leave_a_cache_as_if_read_plainly():
    target, tree = native("qwen3"), [ROOT, ROOT, 0, 1, 1, 4]
    rows = prompts(3, shortest=8, longest=19, seed=2)
    guesses_BN = torch.randint(0, VOCABULARY, (3, len(tree)), generator=torch.Generator().manual_seed(3))
    cache = target.new_cache(slots=3, capacity=48)
    read(target, cache, rows)
    verify(target, cache, rows, guesses_BN, [tree] * 3)
    keep_path(cache, torch.tensor([len(row) - 1 for row in rows]), torch.tensor([[2, 5, 6]] * 3))
    rows = [row + guesses_BN[b, [1, 4, 5]].tolist() + [b] for b, row in enumerate(rows)]
    rows = [rows[2], rows[1]]
    logits_BMV, _ = verify(target, cache, rows, guesses_BN[:2], [tree] * 2, slots_B=torch.tensor([2, 1]))
    fresh = target.new_cache(slots=2, capacity=48)
    read(target, fresh, rows)
    assert torch.equal(verify(target, fresh, rows, guesses_BN[:2], [tree] * 2)[0], logits_BMV)


@torch.no_grad()
def read_chains(target: Target, nodes: int) -> list[Tensor]:
    """Read a text, then chains of a few nodes behind it one after the other; return all logits and features."""
    (tokens,) = prompts(1, shortest=18, longest=18)
    cache = target.new_cache(slots=1, capacity=48)
    found = list(read(target, cache, [tokens], (-1, 0))[0])
    for length in range(8, 13):
        guesses_1N = torch.tensor([tokens[length : length + nodes - 1]], dtype=torch.long)
        found += verify(target, cache, [tokens[:length]], guesses_1N, [list(range(-1, nodes - 2))])
    return found


# Where there are four key heads a thread, the thread that takes one projects what it reads; elsewhere, and for three of
# nine, all threads project together first.
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize(
    "name", ["qwen3", "llama with nine key heads", "llama with wide heads", "llama with one key head"]
)
def test_threads_do_not_change_a_bit(name: str, threads: int):
    def everything() -> list[Tensor]:
        chains = [tensor for nodes in range(1, 7) for tensor in read_chains(native(name), nodes)]
        return [*read_trees(native(name), (-1, 0)), *chains]

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = everything()
        torch.set_num_threads(threads)
        found = everything()
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("quantize", ["none", "int8", "int4"])
@torch.no_grad()
def test_rows_that_are_multiplied_in_groups_have_the_bits_of_others(quantize: Quantization, threads: int):
    """So wide a model multiplies 128 rows at a time; and logits of one row may be wanted several hundred times."""
    config = LlamaConfig(**{**SIZES, "hidden_size": 4096, "num_hidden_layers": 1, "vocab_size": 300}, head_dim=16)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        target = Target(LlamaForCausalLM(config).to(torch.bfloat16), quantize=quantize)
    tokens_1T = torch.randint(0, 300, (1, 300), generator=torch.Generator().manual_seed(0))
    whole, parts = target.new_cache(1, 300), target.new_cache(1, 300)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        expected = [target.read_chain(parts, tokens_1T[:, t : t + 60], torch.tensor([t]))[0] for t in range(0, 300, 60)]
        torch.set_num_threads(threads)
        logits_1TV, _ = target.read_chain(whole, tokens_1T, torch.tensor([0]))
        many_1UV, _ = target.read_chain(
            whole, tokens_1T[:, 299:], torch.tensor([299]), keep_logits=torch.zeros(300, dtype=torch.long)
        )
    finally:
        torch.set_num_threads(before)
    assert torch.equal(logits_1TV, torch.cat(expected, 1))
    assert torch.equal(many_1UV, logits_1TV[:, -1:].expand(-1, 300, -1))


def test_what_does_not_fit_the_cache_is_refused():
    target = native("llama")
    cache = target.new_cache(slots=1, capacity=16)
    guesses_1N = torch.zeros((1, 3), dtype=torch.long)
    chain = [[ROOT, 0, 1]]
    with pytest.raises(IndexError, match="draftsmith: 13 cached tokens and 4 nodes do not fit a slot of 16"):
        verify(target, cache, [[1] * 14], guesses_1N, chain)
    with pytest.raises(IndexError, match="draftsmith: the cache has 1 slots"):
        verify(target, cache, [[1] * 4] * 2, guesses_1N.expand(2, -1), chain * 2)
    with pytest.raises(IndexError, match=f"draftsmith: there is no token {VOCABULARY}"):
        verify(target, cache, [[VOCABULARY]], guesses_1N, chain)
    with pytest.raises(IndexError, match="draftsmith: there is no tap 2"):
        verify(target, cache, [[1]], guesses_1N, chain, (2,))
    with pytest.raises(IndexError, match="draftsmith: there is no node 3"):
        read(target, cache, [[1, 2, 3]], (), torch.tensor([3]))


# ---- what is held


@pytest.mark.parametrize("name", EVERYTHING)
def test_the_state_keeps_names_shapes_and_exact_values(name: str):
    before, after = model(name).state_dict(), native(name).model.state_dict()
    assert after.keys() == before.keys()
    for key, tensor in before.items():
        assert after[key].dtype == tensor.dtype and torch.equal(after[key], tensor), key


@pytest.mark.parametrize("name", EVERYTHING)
def test_tables_are_those_of_the_model(name: str):
    fresh = model(name)
    assert torch.equal(native(name).embedding_weight_VF, fresh.get_input_embeddings().weight)
    assert torch.equal(native(name).head_weight_VF, fresh.get_output_embeddings().weight)
    assert native(name).vocab_size == fresh.config.vocab_size


@pytest.mark.parametrize("name", ["llama", "llama, tied", "gpt2", "gemma3", "mixtral", "qwen2"])
def test_a_widened_copy_is_the_same_model_in_fp32(name: str):
    wide, tokens_BT = native(name).widened(), torch.tensor(prompts(2, shortest=12, longest=12))
    expected_BTV = plain(name).widened().encode(tokens_BT, logits=True)[1]
    _, logits_BTV = wide.encode(tokens_BT, logits=True)
    assert wide.dtype == torch.float32 and not wide.backend.native
    assert logits_BTV is not None and expected_BTV is not None and torch.equal(logits_BTV, expected_BTV)


def padding(module: nn.Module) -> int:
    """Count what packing may add: outputs up to whole panels of 16, inputs up to pairs, and biases in fp32."""
    added = 0
    for part in module.modules():
        if isinstance(part, PackedLinear):
            bias = 0 if part.bias_N is None else 2 * part.out_features
            added += 2 * (part.packed.numel() - part.out_features * part.in_features) + bias
            assert part.packed.numel() == -(-part.out_features // 16) * 16 * -(-part.in_features // 2) * 2
    return added


@pytest.mark.parametrize("name", EVERYTHING)
def test_weights_are_held_once(name: str):
    fresh = model(name)
    before, target = held(fresh), Target(fresh, name=name)
    packed = [part for part in target.model.modules() if isinstance(part, PackedLinear)]
    assert packed
    allowed = before + padding(target.model)
    if name == "gemma3":  # its embedding scales what it looks up, and keeps a table of its own
        allowed += 2 * VOCABULARY * WIDTH
    if name in ("mixtral", "qwen3_moe"):  # experts of 24 and 48, whose outputs are padded too
        allowed += 2 * 16 * WIDTH * 4 * 2 * 3
    assert held(target.model) <= allowed


@pytest.mark.parametrize("name", ["llama, tied", "gpt2"])
def test_a_tied_table_is_held_once(name: str):
    for target in (native(name), *(quantised(name, kind) for kind in WHOLE)):
        embedding = target.model.get_input_embeddings()
        assert isinstance(embedding, PackedEmbedding) and not embedding._buffers and not embedding._parameters
        tokens = torch.tensor([[0, 5, VOCABULARY - 1]])
        assert torch.equal(embedding(tokens)[0], target.embedding_weight_VF[tokens[0]])
        assert torch.equal(target.embedding_weight_VF, target.head_weight_VF)
