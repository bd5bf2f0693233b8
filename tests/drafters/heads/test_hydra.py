"""Hydra heads: their formula, drafting against training, and the published checkpoint layout."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

from draftsmith.drafters.heads.hydra import HydraConfig, HydraDrafter, make_hydra
from draftsmith.drafters.registry import load_drafter
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError
from tests.helpers import training_toy as toy
from tests.helpers.contract import check_drafter, check_forward_agreement
from tests.helpers.heads_toy import check_packed, check_training, demo_target
from tests.helpers.tiny import VOCABULARY, WIDTH, tiny_model, tiny_target

VARIANTS = {
    "one layer": {}, "four layers": {"num_layers": 4, "num_heads": 3}, "draft vocabulary": {"draft_vocab_size": 40},
}
PLANS = [
    None, Plan((3, 2, 1)), Plan((3, 2, 2), paths=4), Plan((4, 4, 4), beam=3, nodes=9), Plan((1, 1), sampled=True),
    Plan((2, 2), sampled=True),
]


def make(architecture: str = "llama", **options) -> HydraDrafter:
    """Return random heads in float64: untrained ones would all say the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        size = options.get("draft_vocab_size")
        tokens = torch.randperm(VOCABULARY)[:size] if size else None
        drafter = make_hydra(HydraConfig(**options), tiny_target(architecture), tokens).double()
        for parameter in drafter.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    drafter.bind(tiny_target(architecture))
    return drafter.eval()


@pytest.mark.parametrize(
    ("architecture", "name"),
    [("llama", "draft vocabulary"), pytest.param("qwen3", "four layers", marks=pytest.mark.slow)],
)
def test_contract(architecture: str, name: str):
    drafter = make(architecture, default_branching=(2, 2), default_nodes=4, default_beam=2, **VARIANTS[name])
    check_drafter(lambda: drafter, tiny_target(architecture), tiny_model(architecture), PLANS)


@pytest.mark.parametrize(("architecture", "name"), [("llama", name) for name in VARIANTS] + [("mixtral", "one layer")])
def test_drafting_agrees_with_forward(architecture: str, name: str):
    check_forward_agreement(make(architecture, **VARIANTS[name]), tiny_target(architecture))


def test_heads_are_the_paper_s_formula():
    """Head d reads the state, the root and the d tokens after it, side by side; written out with the weights alone."""
    drafter = make(num_layers=2, num_heads=3)
    weights = drafter.state_dict()
    tokens_BT, features_BTF = torch.randint(0, VOCABULARY, (2, 6)), torch.randn(2, 6, WIDTH, dtype=torch.float64)
    embedded_BTF = tiny_target().embedding_weight_VF[tokens_BT]
    for depth, logits in enumerate(drafter(tokens_BT, features_BTF)):
        last = 6 - depth
        read = torch.cat([features_BTF[:, :last], *(embedded_BTF[:, d : d + last] for d in range(depth + 1))], dim=-1)

        def linear(x: torch.Tensor, name: str) -> torch.Tensor:
            return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]

        block = f"hydra_mlp.{depth}"
        state = linear(read, f"{block}.0.res_connection") + F.silu(linear(read, f"{block}.0.linear"))
        state = state + F.silu(linear(state, f"{block}.1.linear"))
        torch.testing.assert_close(logits, linear(state, f"hydra_lm_head.{depth}"))


def test_untrained_heads_say_what_the_target_s_own_head_says():
    target = tiny_target()
    drafter = make_hydra(HydraConfig(num_layers=2), target, None).double()
    drafter.bind(target)
    features_BTF, logits_BTV = target.encode(torch.randint(0, VOCABULARY, (1, 9)), logits=True)
    for depth, said in enumerate(drafter(torch.randint(0, VOCABULARY, (1, 9)), features_BTF)):
        torch.testing.assert_close(said, logits_BTV[:, : 9 - depth], rtol=1e-5, atol=1e-5)


def test_propose_compiles_without_a_break():
    from tests.drafters.heads.test_medusa import context

    drafter, seen, plan = make(), context(), Plan((2, 2, 1), paths=3)
    compiled = torch.compile(lambda c: drafter.propose(c, plan).tokens_BN, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(seen), drafter.propose(seen, plan).tokens_BN)


@pytest.mark.parametrize("name", VARIANTS)
def test_round_trip(tmp_path: Path, name: str):
    drafter = make(**VARIANTS[name])
    drafter.save_pretrained(tmp_path / "x", tiny_target().facts())
    assert not any("embedding" in key for key in safetensors.torch.load_file(tmp_path / "x" / drafter.weights_file))
    back = load_drafter(tmp_path / "x", tiny_target())
    assert isinstance(back, HydraDrafter) and back.sizes() == drafter.sizes()
    for key, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[key]), key
    features = torch.randn(1, 6, WIDTH, dtype=torch.float64)
    tokens = torch.randint(0, VOCABULARY, (1, 6))
    assert all(torch.equal(a, b) for a, b in zip(back(tokens, features), drafter(tokens, features), strict=True))


def published(folder: Path, **changes) -> dict[str, torch.Tensor]:
    """Write a checkpoint as the authors' code does, by hand, but for the pickle."""
    folder.mkdir(exist_ok=True)
    config = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "grounded_heads": True, "hidden_state_offset": 0,
              "hydra_head_arch": "mlp", "hydra_num_heads": 3, "hydra_num_layers": 2, "transformers_version": "4.34.1"}
    (folder / "config.json").write_text(json.dumps(config | changes))
    tensors = {}
    for head in range(3):
        shapes = {"0.linear": head + 2, "0.res_connection": head + 2, "1.linear": 1}
        for name, parts in shapes.items():
            tensors[f"hydra_mlp.{head}.{name}.weight"] = torch.randn(WIDTH, parts * WIDTH).half()
            tensors[f"hydra_mlp.{head}.{name}.bias"] = torch.randn(WIDTH).half()
        tensors[f"hydra_lm_head.{head}.weight"] = torch.randn(VOCABULARY, WIDTH).half()
        tensors[f"hydra_lm_head.{head}.bias"] = torch.randn(VOCABULARY).half()
    safetensors.torch.save_file(tensors, folder / "hydra_lm_head.safetensors", {"format": "pt"})
    return tensors


def test_published_layout_bit_for_bit(tmp_path: Path):
    tensors = published(tmp_path / "hub")
    HydraDrafter.from_pretrained(tmp_path / "hub").save_pretrained(tmp_path / "own", tiny_target().facts())
    written = safetensors.torch.load_file(tmp_path / "own" / "hydra_lm_head.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())
    before, after = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("hub", "own"))
    assert after.items() >= {key: value for key, value in before.items() if key != "transformers_version"}.items()
    assert isinstance(load_drafter(tmp_path / "hub", tiny_target()), HydraDrafter)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hydra_head_arch": "eagle-attn"}, "says hydra_head_arch 'eagle-attn', but only 'mlp' is supported"),
        ({"grounded_heads": False}, "says grounded_heads False, but only True"),
        ({"hidden_state_offset": 1}, "says hidden_state_offset 1, but only 0"),
        ({"hydra_num_heads": 4}, r"lacks the tensor hydra_mlp\.3\.0\.linear\.weight"),
        ({"hydra_num_heads": 0}, r"config\.json: hydra_num_heads is 0; use at least 1"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: dict, message: str):
    published(tmp_path, **changes)
    with pytest.raises(DraftsmithError, match=message):
        load_drafter(tmp_path, tiny_target())


def test_another_target_is_refused(tmp_path: Path):
    published(tmp_path)
    with pytest.raises(DraftsmithError, match=r"for 'lmsys/vicuna-7b-v1\.3' with a vocabulary of 96, but 'other'"):
        load_drafter(tmp_path, Target(tiny_model(vocabulary=80), name="other"))


def test_whole_heads_can_be_cut_down(tmp_path: Path):
    whole, tokens = make(), torch.arange(5, 45)
    whole.save_pretrained(tmp_path / "whole", tiny_target().facts())
    few = make_hydra(HydraConfig(draft_vocab_size=40), tiny_target(), tokens)
    few.start_from(tmp_path / "whole", tiny_target())
    read = torch.randint(0, VOCABULARY, (1, 6)), torch.randn(1, 6, WIDTH)
    for cut, full in zip(few(*read), whole.float()(*read), strict=True):
        torch.testing.assert_close(cut[..., tokens], full[..., tokens])


def test_training(tmp_path: Path):
    result = check_training(tmp_path, "{family: hydra, num_heads: 2, num_layers: 2}", "hydra_lm_head.safetensors")
    assert isinstance(load_drafter(result.drafter, toy.target()), HydraDrafter)


def test_packed_heads_decode_losslessly():
    check_packed(make_hydra(HydraConfig(draft_vocab_size=512), demo_target(), torch.arange(512)), demo_target())
