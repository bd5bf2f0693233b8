"""The target against transformers itself, in float64: what it reads, in trees and plainly, and what it refuses.

B rows, M nodes (root first), T tokens, V vocabulary.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    JambaConfig,
    JambaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)

from draftsmith.native import why_missing
from draftsmith.targets import Nodes, Target, keep_path
from draftsmith.types import ROOT, UNUSED, DraftsmithError
from draftsmith.verify.tree import tree_tables
from tests.helpers.tiny import (
    ARCHITECTURES,
    CONTEXT,
    VOCABULARY,
    WIDTH,
    prompts,
    save_tiny_target,
    tiny_model,
    tiny_target,
)

TOLERANCE = {"rtol": 0.0, "atol": 1e-9}


def reference(model: PreTrainedModel, tokens: list[int]) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return transformers' logits (T, V) and hidden states (T, F), embedding first and final norm last."""
    with torch.no_grad():
        out = model(input_ids=torch.tensor([tokens]), output_hidden_states=True, use_cache=False)
    return out.logits[0], tuple(state[0] for state in out.hidden_states)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_encode_equals_the_plain_forward(architecture: str):
    target, model = tiny_target(architecture), tiny_model(architecture)
    tokens = prompts(1, shortest=20, longest=20)[0]
    logits_TV, states = reference(model, tokens)
    features_BTF, logits_BTV = target.encode(torch.tensor([tokens]), taps=(-1, 0), logits=True)
    torch.testing.assert_close(logits_BTV[0], logits_TV, **TOLERANCE)
    torch.testing.assert_close(features_BTF[0, :, :WIDTH], states[-1], **TOLERANCE)
    torch.testing.assert_close(features_BTF[0, :, WIDTH:], states[1], **TOLERANCE)
    assert features_BTF.shape[2] == target.feature_size((-1, 0))


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_encode_without_logits_gives_the_same_features(architecture: str):
    target = tiny_target(architecture)
    tokens_BT = torch.tensor(prompts(3, shortest=9, longest=9))
    features_BTF, logits = target.encode(tokens_BT)
    assert logits is None
    torch.testing.assert_close(features_BTF, target.encode(tokens_BT, logits=True)[0], **TOLERANCE)


def random_tree(nodes: int, unused: int, generator: torch.Generator) -> list[int]:
    """Draw parents of `nodes` nodes, the last `unused` of them padding."""
    parents = [int(torch.randint(ROOT, max(node, 1), (), generator=generator)) for node in range(nodes)]
    parents[0] = ROOT
    return parents[: nodes - unused] + [UNUSED] * unused


def path_to(node: int, parents: list[int], tokens: list[int]) -> list[int]:
    """Return the tokens of the path from below the root to a node."""
    path: list[int] = []
    while node != ROOT:
        path.insert(0, tokens[node])
        node = parents[node]
    return path


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_node_of_a_ragged_batch_of_trees_equals_its_own_path(architecture: str, uninitialised_is_nan: None):
    target, model = tiny_target(architecture), tiny_model(architecture)
    generator = torch.Generator().manual_seed(1)
    rows = prompts(4, shortest=5, longest=21)
    # Deeper than the sliding window, with siblings, so that a node's place in memory is not its position.
    comb = [ROOT, ROOT, *(2 * (node // 2) for node in range(14))]
    nodes = len(comb)
    trees = [comb, *(random_tree(nodes, unused, generator) for unused in (0, 5, nodes))]
    guesses_BN = torch.randint(0, VOCABULARY, (4, nodes), generator=generator)
    cache = target.new_cache(slots=4, capacity=48)
    read(target, cache, rows)
    logits_BMV, features_BMF = verify(target, cache, rows, guesses_BN, trees)
    for row, tokens in enumerate(rows):
        for node, parent in enumerate([ROOT, *trees[row]]):
            if parent == UNUSED:
                continue
            path = path_to(node - 1, trees[row], guesses_BN[row].tolist()) if node else []
            logits_TV, states = reference(model, tokens + path)
            torch.testing.assert_close(logits_BMV[row, node], logits_TV[-1], **TOLERANCE)
            torch.testing.assert_close(features_BMF[row, node, :WIDTH], states[-1][-1], **TOLERANCE)
            torch.testing.assert_close(features_BMF[row, node, WIDTH:], states[1][-1], **TOLERANCE)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_kept_path_and_a_freed_row_leave_a_cache_as_if_read_plainly(architecture: str, uninitialised_is_nan: None):
    target, model = tiny_target(architecture), tiny_model(architecture)
    rows = prompts(3, shortest=8, longest=19, seed=2)
    tree = [ROOT, ROOT, 0, 1, 1, 4]
    guesses_BN = torch.randint(0, VOCABULARY, (3, len(tree)), generator=torch.Generator().manual_seed(3))
    cache = target.new_cache(slots=3, capacity=48)
    read(target, cache, rows)
    verify(target, cache, rows, guesses_BN, [tree] * 3)
    path_BP = torch.tensor([[2, 5, 6]] * 3)
    keep_path(cache, torch.tensor([len(row) - 1 for row in rows]), path_BP)
    rows = [row + guesses_BN[b, [1, 4, 5]].tolist() + [b] for b, row in enumerate(rows)]
    rows = [rows[2], rows[1]]
    logits_BMV, _ = verify(target, cache, rows, guesses_BN[:2], [tree] * 2, torch.tensor([2, 1]))
    for row, tokens in enumerate(rows):
        torch.testing.assert_close(logits_BMV[row, 0], reference(model, tokens)[0][-1], **TOLERANCE)
        leaf = tokens + path_to(5, tree, guesses_BN[row].tolist())
        torch.testing.assert_close(logits_BMV[row, 6], reference(model, leaf)[0][-1], **TOLERANCE)


def read(target: Target, cache, rows: list[list[int]]) -> None:
    """Prefill every row but for its last token, which is the root."""
    for slot, tokens in enumerate(rows):
        with torch.no_grad():
            target.read_chain(
                cache, torch.tensor([tokens[:-1]]), torch.zeros(1, dtype=torch.long), (), torch.tensor([slot])
            )


def verify(
    target: Target, cache, rows: list[list[int]], guesses_BN: Tensor, trees: list[list[int]],
    slots_B: Tensor | None = None,
):
    """Read the root and the tree of every row, one step."""
    visible_BMM, depths_BM = tree_tables(torch.tensor(trees), guesses_BN.shape[1])
    roots_B1 = torch.tensor([[tokens[-1]] for tokens in rows])
    cached_B = torch.tensor([len(tokens) - 1 for tokens in rows])
    with torch.no_grad():
        nodes = Nodes(
            torch.cat([roots_B1, guesses_BN], dim=1), cached_B, slots_B, depths_BM, visible_BMM,
            columns_S=torch.arange(cache.capacity),
        )
        return target.forward(cache, nodes, taps=(-1, 0))


def test_facts_name_what_a_drafter_must_match():
    target = tiny_target("llama")
    facts = target.facts()
    assert (facts.hidden_size, facts.vocab_size, facts.tokenizer_hash, facts.name) == (32, 96, None, "tiny-llama")
    assert target.max_length == CONTEXT
    assert target.embedding_weight_VF.shape == target.head_weight_VF.shape == (VOCABULARY, WIDTH)
    assert target.eos_token_ids == frozenset()
    assert Target(tiny_model(eos_token_id=[3, 5])).eos_token_ids == {3, 5}


def test_a_saved_target_loads_with_its_tokenizer_and_end_token(tmp_path: Path):
    target = Target.from_pretrained(save_tiny_target(tmp_path / "tiny"), dtype="fp32", device="cpu")
    assert target.dtype == torch.float32
    assert target.eos_token_ids == {256}
    assert target.tokenizer is not None and target.tokenizer.decode(target.tokenizer("é x").input_ids) == "é x"
    assert target.facts().tokenizer_hash is not None


def test_encoder_decoders_are_refused():
    config = T5Config(vocab_size=96, d_model=32, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(DraftsmithError, match=r"t5.*encoder-decoder"):
        Target(T5ForConditionalGeneration(config))


def test_recurrent_models_are_refused():
    config = MambaConfig(vocab_size=96, hidden_size=32, state_size=4, num_hidden_layers=2, use_cache=False)
    with pytest.raises(DraftsmithError, match=r"mamba.*rolled back"):
        Target(MambaForCausalLM(config))


def test_hybrid_models_are_refused():
    config = JambaConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        attn_layer_period=2,
        attn_layer_offset=1,
        expert_layer_period=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        num_experts=2,
        mamba_d_state=4,
        use_mamba_kernels=False,
    )
    with pytest.raises(DraftsmithError, match=r"jamba.*rolled back"):
        Target(JambaForCausalLM(config))


def test_attention_outside_the_interface_is_refused():
    config = BloomConfig(vocab_size=96, hidden_size=32, n_layer=1, n_head=2)
    with pytest.raises(DraftsmithError, match=r"bloom.*attention interface"):
        Target(BloomForCausalLM(config))


def test_a_missing_target_is_one_sentence(tmp_path: Path):
    with pytest.raises(DraftsmithError, match="nowhere does not exist; check the path"):
        Target.from_pretrained(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DraftsmithError, match=r"empty.*config\.json"):
        Target.from_pretrained(tmp_path / "empty")


def test_damaged_weights_are_one_sentence(tmp_path: Path):
    folder = save_tiny_target(tmp_path / "tiny")
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(DraftsmithError, match="weights"):
        Target.from_pretrained(folder, device="cpu")


def test_an_unknown_dtype_is_named(tmp_path: Path):
    with pytest.raises(DraftsmithError, match="int3"):
        Target.from_pretrained(save_tiny_target(tmp_path / "tiny"), dtype="int3", device="cpu")


def test_a_widened_copy_is_the_same_model_in_fp32():
    narrow = Target(tiny_model().to(torch.bfloat16))
    wide = narrow.widened()
    assert wide.dtype == torch.float32 and narrow.dtype == torch.bfloat16
    tokens_BT = torch.tensor([[5, 9, 2, 7, 11, 3]])
    features_BTF, logits_BTV = wide.encode(tokens_BT, logits=True)
    narrow_BTF, narrow_BTV = narrow.encode(tokens_BT, logits=True)
    assert logits_BTV is not None and narrow_BTV is not None and features_BTF.shape == narrow_BTF.shape
    torch.testing.assert_close(narrow_BTV.float(), logits_BTV, rtol=0.1, atol=0.25)


def test_copies_of_a_model_that_was_cast_as_a_whole_turn_positions_as_it_does():
    """Otherwise a copy that drafts would read the target's keys by other positions than they were written with."""
    target = Target(tiny_model("llama").to(torch.bfloat16))
    rounded = target.model.model.rotary_emb.inv_freq
    assert rounded.dtype == torch.bfloat16
    copies = [target.widened(), target.copied(torch.bfloat16)]
    if not why_missing():
        copies.append(target.quantised("int4"))
    for one in copies:
        frequencies = one.model.model.rotary_emb.inv_freq
        assert frequencies.dtype == torch.float32 and torch.equal(frequencies, rounded.float())


def test_copies_in_fewer_bits_keep_the_rotary_frequencies():
    """Rounded to bf16 they would turn positions by up to a radian within a few hundred tokens."""
    copied = tiny_target("llama").copied(torch.bfloat16)
    assert copied.dtype == torch.bfloat16
    frequencies = copied.model.model.rotary_emb.inv_freq
    torch.testing.assert_close(frequencies.double(), tiny_target("llama").model.model.rotary_emb.inv_freq.double())
