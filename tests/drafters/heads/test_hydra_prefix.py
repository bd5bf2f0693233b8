"""Hydra++: the prefix attention against transformers' own layer, drafting against training, the contract, and the
published layout.
"""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaModel

from draftsmith.drafters.heads.hydra import BORROWED, HydraConfig, HydraDrafter, HydraPrefixDrafter, make_hydra
from draftsmith.drafters.registry import load_drafter
from draftsmith.drafters.trainable.batch import TrainingBatch
from draftsmith.plan import Plan
from draftsmith.types import DraftsmithError
from tests.helpers import training_toy as toy
from tests.helpers.agreement import check_agreement_over_time
from tests.helpers.contract import check_drafter, check_forward_agreement
from tests.helpers.heads_toy import check_packed, check_training, demo_target
from tests.helpers.tiny import VOCABULARY, WIDTH, tiny_model, tiny_target

VARIANTS = {
    "one layer": {}, "four layers": {"num_layers": 4, "num_heads": 3}, "draft vocabulary": {"draft_vocab_size": 40},
}
PLANS = [
    None, Plan((4, 4, 4), beam=3, nodes=9), Plan(choices=((0,), (1,), (0, 0), (0, 1), (0, 0, 1))),
    Plan((2, 2), sampled=True),
]


def make(architecture: str = "llama", **options) -> HydraPrefixDrafter:
    """Return random heads in float64, with a layer whose attention decides what they say."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        size = options.get("draft_vocab_size")
        tokens = torch.randperm(VOCABULARY)[:size] if size else None
        drafter = make_hydra(HydraConfig(prefix_attention=True, **options), tiny_target(architecture), tokens)
        for parameter in drafter.double().parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    drafter.bind(tiny_target(architecture))
    assert isinstance(drafter, HydraPrefixDrafter)
    return drafter.eval()


@pytest.mark.parametrize(
    ("architecture", "name"),
    [pytest.param("llama", "draft vocabulary", marks=pytest.mark.slow), ("qwen3", "four layers")],
)
def test_contract(architecture: str, name: str):
    drafter = make(architecture, **VARIANTS[name])
    check_drafter(lambda: drafter, tiny_target(architecture), tiny_model(architecture), PLANS)


@pytest.mark.parametrize("name", VARIANTS)
def test_drafting_agrees_with_forward(name: str):
    check_forward_agreement(make(**VARIANTS[name]), tiny_target())
    check_agreement_over_time(make(**VARIANTS[name]), tiny_target())


def test_the_layer_is_a_llama_of_one_layer_without_a_table():
    drafter = make()
    sizes = drafter.prefix.sizes
    llama = LlamaModel(LlamaConfig(
        vocab_size=4, hidden_size=WIDTH, intermediate_size=sizes.intermediate_size, num_hidden_layers=1,
        num_attention_heads=sizes.num_attention_heads, num_key_value_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim, rms_norm_eps=sizes.rms_norm_eps, rope_parameters=dict(sizes.rope_parameters),
        attn_implementation="eager",
    )).double()
    kept = llama.load_state_dict(drafter.prefix.state_dict(), strict=False)
    assert kept.missing_keys == ["embed_tokens.weight"] and not kept.unexpected_keys
    states_BTF = torch.randn(2, 9, WIDTH, dtype=torch.float64)
    expected_BTF = llama(inputs_embeds=states_BTF).last_hidden_state
    torch.testing.assert_close(drafter.prefix(states_BTF), expected_BTF, rtol=1e-6, atol=1e-6)
    positions_BP = torch.tensor([[0, 3], [8, 5]])
    some_BPF = drafter.prefix(states_BTF, positions_BP)
    torch.testing.assert_close(some_BPF, expected_BTF[torch.tensor([[0], [1]]), positions_BP], rtol=1e-6, atol=1e-6)


def test_the_loss_is_that_of_forward_at_the_positions_asked_for():
    drafter, generator = make(num_heads=2), torch.Generator().manual_seed(1)
    tokens_BL = torch.randint(0, VOCABULARY, (2, 16), generator=generator)
    features_BLF, _ = tiny_target().encode(tokens_BL)
    positions_BP = torch.tensor([[1, 6, 9], [0, 4, 12]])
    loss_N, _ = drafter.losses(TrainingBatch(tokens_BL[:, 1:], features_BLF[:, :-1], positions_BP))
    for depth, logits in enumerate(drafter(tokens_BL[:, 1:], features_BLF[:, :-1])):
        pairs = [(b, t) for b, row in enumerate(positions_BP.tolist()) for t in row]
        said = torch.stack([logits[b, t] for b, t in pairs])
        true = torch.stack([tokens_BL[b, t + depth + 2] for b, t in pairs])
        assert loss_N[depth].item() == pytest.approx(torch.nn.functional.cross_entropy(said, true).item(), rel=1e-5)


def test_untrained_heads_guess_what_the_target_s_own_head_guesses():
    target = tiny_target()
    drafter = make_hydra(HydraConfig(prefix_attention=True, num_layers=2), target, None).double()
    drafter.bind(target)
    tokens = torch.randint(0, VOCABULARY, (1, 9))
    features_BTF, logits_BTV = target.encode(tokens, logits=True)
    for depth, said in enumerate(drafter(tokens, features_BTF)):
        assert torch.equal(said.argmax(-1), logits_BTV[:, : 9 - depth].argmax(-1))


@pytest.mark.parametrize("name", VARIANTS)
def test_round_trip(tmp_path: Path, name: str):
    drafter = make(**VARIANTS[name])
    drafter.save_pretrained(tmp_path / "x", tiny_target().facts())
    back = load_drafter(tmp_path / "x", tiny_target())
    assert isinstance(back, HydraPrefixDrafter) and back.sizes() == drafter.sizes()
    assert back.prefix.sizes == drafter.prefix.sizes
    check_agreement_over_time(back, tiny_target())
    once = HydraPrefixDrafter.from_pretrained(tmp_path / "x", tiny_target())
    for key, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, once.state_dict()[key]), key
    with pytest.raises(DraftsmithError, match="says hydra_head_arch 'prefix-mlp', but only 'mlp' is supported"):
        HydraDrafter.from_pretrained(tmp_path / "x", tiny_target())


def published(folder: Path, **changes) -> dict[str, torch.Tensor]:
    """Write a checkpoint as the authors' code does, by hand, but for the pickle: dropouts are numbered, the blocks
    behind the first are one module under several names, and tables stand beside the heads."""
    folder.mkdir(exist_ok=True)
    config = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "grounded_heads": True, "hidden_state_offset": 0,
              "hydra_head_arch": "prefix-mlp", "hydra_num_heads": 2, "hydra_num_layers": 4}
    (folder / "config.json").write_text(json.dumps(config | changes))
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(BORROWED, (VOCABULARY, WIDTH))
    sizes = tiny_model().config
    layer, kv = "prefix_embeding_layer.layers.0.", WIDTH * sizes.num_key_value_heads // sizes.num_attention_heads
    inner = sizes.intermediate_size
    shapes |= {
        layer + "self_attn.q_proj.weight": (WIDTH, WIDTH), layer + "self_attn.k_proj.weight": (kv, WIDTH),
        layer + "self_attn.v_proj.weight": (kv, WIDTH), layer + "self_attn.o_proj.weight": (WIDTH, WIDTH),
        layer + "self_attn.rotary_emb.inv_freq": (4,), layer + "mlp.gate_proj.weight": (inner, WIDTH),
        layer + "mlp.up_proj.weight": (inner, WIDTH), layer + "mlp.down_proj.weight": (WIDTH, inner),
        layer + "input_layernorm.weight": (WIDTH,), layer + "post_attention_layernorm.weight": (WIDTH,),
        "prefix_embeding_layer.norm.weight": (WIDTH,),
    }
    for head in range(2):
        for part in ("linear", "res_connection"):
            shapes[f"hydra_mlp.{head}.1.{part}.weight"] = (WIDTH, (head + 2) * WIDTH)
            shapes[f"hydra_mlp.{head}.1.{part}.bias"] = (WIDTH,)
        shapes |= {f"hydra_mlp.{head}.3.linear.weight": (WIDTH, WIDTH), f"hydra_mlp.{head}.3.linear.bias": (WIDTH,)}
        shapes |= {f"hydra_lm_head.{head}.1.weight": (VOCABULARY, WIDTH), f"hydra_lm_head.{head}.1.bias": (VOCABULARY,)}
    generator = torch.Generator().manual_seed(0)
    tensors = {name: (0.3 * torch.randn(shape, generator=generator)).half() for name, shape in shapes.items()}
    for name in [name for name in tensors if ".3.linear" in name]:
        tensors |= {name.replace(".3.", f".{place}."): tensors[name].clone() for place in (5, 7)}
    safetensors.torch.save_file(tensors, folder / "hydra_lm_head.safetensors", {"format": "pt"})
    return tensors


def test_published_layout_bit_for_bit(tmp_path: Path):
    tensors = published(tmp_path / "hub")
    drafter = load_drafter(tmp_path / "hub", tiny_target())
    assert isinstance(drafter, HydraPrefixDrafter) and drafter.max_depth == 2
    check_agreement_over_time(drafter, tiny_target())
    HydraPrefixDrafter.from_pretrained(tmp_path / "hub", tiny_target()).save_pretrained(
        tmp_path / "own", tiny_target().facts()
    )
    written = safetensors.torch.load_file(tmp_path / "own" / "hydra_lm_head.safetensors")
    passed_over = {*BORROWED, "prefix_embeding_layer.layers.0.self_attn.rotary_emb.inv_freq"}
    assert written.keys() == tensors.keys() - passed_over
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in written.items())
    before, after = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("hub", "own"))
    assert after.items() >= before.items()


def test_what_does_not_fit_is_refused(tmp_path: Path):
    tensors = published(tmp_path)
    with pytest.raises(DraftsmithError, match="has a layer as large as its target's; load it with that target"):
        HydraPrefixDrafter.from_pretrained(tmp_path)
    tensors["hydra_mlp.1.5.linear.bias"] = torch.zeros(WIDTH).half()
    safetensors.torch.save_file(tensors, tmp_path / "hydra_lm_head.safetensors")
    with pytest.raises(DraftsmithError, match=r"tensor hydra_mlp\.1\.5\.linear\.bias in .* differs from that of"):
        load_drafter(tmp_path, tiny_target())
    published(tmp_path, grounded_heads=False)
    with pytest.raises(DraftsmithError, match="says grounded_heads False, but only True"):
        load_drafter(tmp_path, tiny_target())
    with pytest.raises(DraftsmithError, match=r"call attach\(cache, plan\) first"):
        make().begin(None)


def test_whole_heads_can_be_cut_down(tmp_path: Path):
    whole, tokens = make(), torch.arange(5, 45)
    whole.save_pretrained(tmp_path / "whole", tiny_target().facts())
    few = make_hydra(HydraConfig(draft_vocab_size=40, prefix_attention=True), tiny_target(), tokens)
    few.start_from(tmp_path / "whole", tiny_target())
    read = torch.randint(0, VOCABULARY, (1, 6)), torch.randn(1, 6, WIDTH)
    for cut, full in zip(few(*read), whole.float()(*read), strict=True):
        torch.testing.assert_close(cut[..., tokens], full[..., tokens])


def test_training(tmp_path: Path):
    options = "{family: hydra, num_heads: 2, num_layers: 3, prefix_attention: true}"
    result = check_training(tmp_path, options, "hydra_lm_head.safetensors")
    assert isinstance(load_drafter(result.drafter, toy.target()), HydraPrefixDrafter)


def test_packed_heads_decode_losslessly():
    options = HydraConfig(draft_vocab_size=512, prefix_attention=True, num_layers=2)
    check_packed(make_hydra(options, demo_target(), torch.arange(512)), demo_target())
