"""Targets on the native kernels against the same targets without them: tiny random models in bf16.

B rows, M nodes (root first), T tokens, F width, V vocabulary.
"""

import copy
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from draftsmith.drafters.heads.mlp import MLPSpeculator
from draftsmith.drafters.heads.mlp_config import MLPConfig
from draftsmith.engine import Engine
from draftsmith.native import LIBRARY, why_missing
from draftsmith.native.layers import LAYERS, PackedEmbedding, PackedExperts, PackedLinear
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import KVCache, Nodes, Target, keep_path
from draftsmith.targets.backend import Eager, NativeForward, NativeLayers
from draftsmith.types import ROOT, UNUSED, Quantization, SamplingParams
from draftsmith.verify import tree_tables
from tests.helpers.native_toy import EVERYTHING, NATIVE, assert_close, model, native, plain
from tests.helpers.oracle import OracleDrafter
from tests.helpers.tiny import CONTEXT, VOCABULARY, WIDTH, packer, prompts
from tests.targets.test_target import path_to, random_tree

if not LIBRARY:
    pytest.skip(why_missing(), allow_module_level=True)

# ---- reading


def read(
    target: Target, cache: KVCache, rows: list[list[int]], taps: tuple[int, ...] = (), columns: Tensor | None = None
) -> list[tuple[Tensor, Tensor]]:
    """Prefill every row but for its last token, which is the root."""
    found = []
    for slot, tokens in enumerate(rows):
        count = len(tokens) - 1
        nodes = Nodes(
            torch.tensor([tokens[:-1]]), torch.zeros(1, dtype=torch.long), torch.tensor([slot]),
            torch.arange(count).unsqueeze(0), torch.ones((1, count, count), dtype=torch.bool).tril(),
            columns_S=torch.arange(cache.capacity),
        )
        found.append(target.forward(cache, nodes, taps, columns))
    return found


def verify(
    target: Target,
    cache: KVCache,
    rows: list[list[int]],
    guesses_BN: Tensor,
    trees: list[list[int]],
    taps: tuple[int, ...] = (-1, 0),
    slots_B: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Read the root and the tree of every row, one step."""
    visible_BMM, depths_BM = tree_tables(torch.tensor(trees).view(len(rows), -1).long(), guesses_BN.shape[1])
    roots_B1 = torch.tensor([[tokens[-1]] for tokens in rows])
    cached_B = torch.tensor([len(tokens) - 1 for tokens in rows])
    nodes = Nodes(
        torch.cat([roots_B1, guesses_BN], dim=1), cached_B, slots_B, depths_BM, visible_BMM,
        columns_S=torch.arange(cache.capacity),
    )
    return target.forward(cache, nodes, taps)


@torch.no_grad()
def read_trees(target: Target, taps: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Read four ragged rows and their trees, deeper than any window; return logits and features of used nodes."""
    generator = torch.Generator().manual_seed(1)
    rows = prompts(4, shortest=5, longest=21)
    comb = [ROOT, ROOT, *(2 * (node // 2) for node in range(14))]
    trees = [comb, *(random_tree(len(comb), unused, generator) for unused in (0, 5, len(comb)))]
    guesses_BN = torch.randint(0, VOCABULARY, (4, len(comb)), generator=generator)
    cache = target.new_cache(slots=5, capacity=48)
    read(target, cache, rows)
    logits_BMV, features_BMF = verify(target, cache, rows, guesses_BN, trees, taps)
    used_BM = torch.tensor([[ROOT, *tree] for tree in trees]) != UNUSED
    return logits_BMV[used_BM], features_BMF[used_BM]


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


# With two key heads of 80, two threads never wait between projections and attention; with the others they do.
@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("name", ["qwen3", "llama with wide heads", "llama with one key head"])
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


def held(module: nn.Module) -> int:
    """Count the bytes of all different memory behind parameters and buffers."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


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


# ---- text


NEW_TOKENS = 20
CHAIN = Plan((1, 1, 1, 1))
TREE = Plan((3, 2, 1))


def decode(target: Target, drafter: object, plan: Plan, questions: list[list[int]], **options: object):
    engine = Engine(target, drafter, max_batch=8)  # type: ignore[arg-type]
    return engine.generate(questions, SamplingParams(max_tokens=NEW_TOKENS, **options), plan=plan)  # type: ignore[arg-type]


def tokens_of(completions) -> list[list[int]]:
    return [completion.tokens for completion in completions]


def random_speculator() -> MLPSpeculator:
    torch.manual_seed(3)
    config = MLPConfig(hidden_size=WIDTH, vocab_size=VOCABULARY, n_predict=4)
    made = MLPSpeculator(config).bfloat16().requires_grad_(False)
    made.pack(packer())
    return made


def assert_text_keeps(target: Target, temperature: float = 0.0) -> None:
    """Decode alone and plainly, then in batches of 1, 3 and 8 with chains, ranked trees and sampled drafts."""
    questions = prompts(8, seed=11)
    rules = {"temperature": temperature, "seed": 5}
    alone = [decode(target, None, NO_DRAFT, [question], **rules)[0].tokens for question in questions]
    assert len({tuple(text) for text in alone}) == 8 and max(len(set(text)) for text in alone) > NEW_TOKENS // 3
    texts = [question + answer for question, answer in zip(questions, alone, strict=True)]
    lengths = set()
    for size in (1, 3, 8):
        assert tokens_of(decode(target, None, NO_DRAFT, questions[:size], **rules)) == alone[:size]
        for plan in (CHAIN, TREE, Plan((2, 2), sampled=True)):
            if plan.sampled and temperature:
                continue  # keeps the distribution, not the tokens
            oracle = OracleDrafter(texts, VOCABULARY, error_rate=0.35, ragged=not plan.sampled)
            completions = decode(target, oracle, plan, questions[:size], **rules)
            assert tokens_of(completions) == alone[:size]
            lengths |= {length for completion in completions for length in completion.accepted_lengths}
    assert lengths == set(range(CHAIN.depth + 1))


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral", "qwen2 with windows above", "llama with biases"])
def test_greedy_text_is_that_of_plain_decoding_whatever_the_batch_and_draft(name: str):
    assert isinstance(native(name).backend, NativeForward)
    assert_text_keeps(native(name))


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_sampled_text_of_a_seed_is_that_of_plain_decoding(name: str):
    assert_text_keeps(native(name), temperature=0.9)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])
def test_a_native_speculator_changes_nothing(name: str):
    target, questions, speculator = native(name), prompts(8, seed=11), random_speculator()
    alone = [decode(target, None, NO_DRAFT, [question])[0].tokens for question in questions]
    for size in (1, 3, 8):
        for plan in (CHAIN, Plan((4, 2, 1), paths=4), Plan((3, 2)), Plan((3, 3, 2), paths=6, beam=2),
                     Plan((2, 2), sampled=True)):
            assert tokens_of(decode(target, speculator, plan, questions[:size])) == alone[:size]


def test_rows_join_and_leave_without_touching_each_other():
    target, questions = native("mistral"), prompts(9, seed=5)
    params = [SamplingParams(max_tokens=1 + (7 * i) % NEW_TOKENS) for i in range(9)]
    alone = [
        Engine(target).generate([question], rules)[0].tokens for question, rules in zip(questions, params, strict=True)
    ]
    speculator = random_speculator()
    for max_batch in (2, 5):
        engine = Engine(target, speculator, plan=Plan((4, 2, 1), paths=4), max_batch=max_batch)
        assert tokens_of(engine.generate(questions, params)) == alone


# ---- int8 and int4

WHOLE: tuple[Quantization, ...] = ("int8", "int4")


@cache
def quantised(name: str, quantize: Quantization) -> Target:
    return Target(model(name), name=name, quantize=quantize)


@pytest.mark.parametrize("quantize", WHOLE)
@pytest.mark.parametrize("name", EVERYTHING)
def test_a_quantised_model_says_nearly_what_the_model_says(name: str, quantize: Quantization):
    """Rows and int8 weights are rounded by 1/254 of their largest, 0.01 in the root mean square for one of thrice it.

    Two or three layers of seven products add up to some 0.06, and sharp attention enlarges that. Weights in 4 bits are
    off by 0.074; what the model then says is held against the model with these weights, below.
    """
    target = quantised(name, quantize)
    assert any(isinstance(part, LAYERS[quantize]) for part in target.model.modules())
    for ours, theirs in zip(read_trees(target, (-1, 0)), read_trees(plain(name), (-1, 0)), strict=True):
        assert_close(ours, theirs, bound=0.2 if quantize == "int8" else 0.8)


@pytest.mark.parametrize("quantize", WHOLE)
@pytest.mark.parametrize("name", EVERYTHING)
def test_a_quantised_model_keeps_names_and_shapes(name: str, quantize: Quantization):
    before, after = model(name).state_dict(), quantised(name, quantize).model.state_dict()
    assert {key: (t.shape, t.dtype) for key, t in after.items()} == {
        key: (t.shape, t.dtype) for key, t in before.items()
    }
    for key, tensor in before.items():
        # Half a step of the output's own scale, and the rounding of the step to bf16; in 4 bits a step is 2/15, and
        # ends may be off by more than one.
        steps = 0.5 / 127 if quantize == "int8" else 2 * 2 / 15
        assert ((after[key] - tensor).float().abs() <= tensor.float().abs().max() * (steps + 2**-8)).all(), key


@pytest.mark.parametrize("quantize", WHOLE)
@pytest.mark.parametrize("name", ["llama", "llama, tied", "gpt2", "qwen2"])
def test_a_quantised_model_is_widened_to_what_it_says(name: str, quantize: Quantization):
    wide, tokens_BT = quantised(name, quantize).widened(), torch.tensor(prompts(2, shortest=12, longest=12))
    _, expected_BTV = wide.encode(tokens_BT, logits=True)
    _, logits_BTV = quantised(name, quantize).encode(tokens_BT, logits=True)
    assert expected_BTV is not None and logits_BTV is not None
    assert_close(logits_BTV, expected_BTV.bfloat16(), bound=0.1)


@pytest.mark.parametrize("quantize", WHOLE)
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_most_rows_of_a_quantised_mixture_are_what_it_is_widened_to(name: str, quantize: Quantization):
    """Whole numbers may send a row to another expert, so a few may be far off; the median is not."""
    wide, tokens_BT = quantised(name, quantize).widened(), torch.tensor(prompts(2, shortest=12, longest=12))
    _, expected_BTV = wide.encode(tokens_BT, logits=True)
    _, logits_BTV = quantised(name, quantize).encode(tokens_BT, logits=True)
    assert expected_BTV is not None and logits_BTV is not None
    error_BT = (logits_BTV - expected_BTV).float().square().mean(-1).sqrt()
    assert (error_BT.median() / expected_BTV.float().square().mean().sqrt()).item() < 0.06


@pytest.mark.parametrize("quantize", WHOLE)
@pytest.mark.parametrize("name", EVERYTHING)
def test_all_products_of_a_quantised_model_are_in_whole_numbers(name: str, quantize: Quantization):
    """All but a head that is one with an embedding which keeps its table."""
    parts = list(quantised(name, quantize).model.modules())
    in_bf16 = [part for part in parts if isinstance(part, PackedLinear)]
    assert len(in_bf16) == (name == "gemma3")
    assert all(part.quantize == quantize for part in parts if isinstance(part, PackedExperts))
    assert any(isinstance(part, PackedExperts) for part in parts) == (name in ("mixtral", "qwen3_moe"))


@pytest.mark.parametrize("quantize", WHOLE)
@pytest.mark.parametrize("name", ["llama", "llama, tied", "qwen3", "mistral"])
def test_greedy_text_of_a_quantised_model_is_that_of_its_plain_decoding(name: str, quantize: Quantization):
    assert_text_keeps(quantised(name, quantize))


@pytest.mark.parametrize("quantize", WHOLE)
@pytest.mark.parametrize("name", ["llama", "llama, tied", "gpt2", "qwen2", "mixtral"])
def test_a_quantised_model_is_smaller(name: str, quantize: Quantization):
    fresh = model(name)
    before = held(fresh)
    assert held(quantised(name, quantize).model) < before
    assert held(copy.deepcopy(native(name).model)) > held(quantised(name, quantize).model)
