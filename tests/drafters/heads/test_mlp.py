"""The MLP speculator: its numbers, drafting against training, and the published checkpoint layout."""

import json
import math
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

from draftsmith.drafters.base import NoDrafter
from draftsmith.drafters.heads.mlp import MLPSpeculator, initialise_from_target
from draftsmith.drafters.heads.mlp_config import MLPConfig
from draftsmith.drafters.registry import families, load_drafter
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import Context, DraftsmithError, TargetFacts
from tests.helpers.tiny import VOCABULARY, WIDTH, tiny_model, tiny_target

FACTS = TargetFacts(WIDTH, VOCABULARY, None, "toy")
VARIANTS = {
    "untied": {},
    "tied-scaled": {"tie_weights": True, "scale_input": True},
    "narrow": {"inner_dim": 12},
    "state-only": {"condition_on_tokens": False},
    "target's tables": {"tie_to_target": True},
    "draft vocabulary": {"draft_vocab_size": 40},
    "all of it": {"draft_vocab_size": 40, "tie_to_target": True, "tie_weights": True, "condition_on_tokens": True},
}


def make(seed: int = 0, n_predict: int = 4, **options) -> MLPSpeculator:
    torch.manual_seed(seed)
    config = MLPConfig(hidden_size=WIDTH, vocab_size=VOCABULARY, n_predict=n_predict, **options)
    tokens = torch.randperm(VOCABULARY)[: config.draft_vocab_size] if config.draft_vocab_size else None
    speculator = MLPSpeculator(config, tokens).double()
    speculator.bind(tiny_target())
    return speculator


def context(batch: int = 3, length: int = 5, seed: int = 1) -> Context:
    generator = torch.Generator().manual_seed(seed)
    counts_B = torch.randint(1, length + 1, (batch,), generator=generator)
    return Context(
        torch.randint(0, VOCABULARY, (batch, length), generator=generator),
        torch.randn(batch, length, WIDTH, generator=generator, dtype=torch.float64),
        counts_B, counts_B, torch.arange(batch), torch.zeros(batch), torch.arange(batch),
    )


def test_published_weights_of_state_and_token():
    """FACTS: n = 3, D = 4096 gives w_s 0.8909, w_e 20.55 and their ratio 23.07."""
    with torch.device("meta"):
        speculator = MLPSpeculator(MLPConfig(hidden_size=4096, vocab_size=32, n_predict=3))
    assert round(speculator.state_weight, 4) == 0.8909
    assert round(speculator.token_weight, 2) == 20.55
    assert round(speculator.ratio, 2) == 23.07


def test_stages_are_the_report_s_formula():
    """state = GELU(LN(proj state + w_e / w_s emb)), written out with nothing of the module but its weights."""
    speculator = make(n_predict=2, scale_input=True)
    weights = dict(speculator.named_parameters())
    for name in ("ln.0.weight", "ln.0.bias"):
        torch.nn.init.normal_(weights[name])
    tokens_BT, features_BTF = torch.tensor([[3, 5, 7]]), torch.randn(1, 3, WIDTH, dtype=torch.float64)

    def normal(x):
        return x / torch.sqrt((x**2).mean(-1, keepdim=True) + 1e-6)

    state = normal(features_BTF) / math.sqrt(2)
    for depth, logits in enumerate(speculator(tokens_BT, features_BTF)):
        w_s = 0.5 ** (0.5 / 2)
        w_e = math.sqrt((1 - w_s**2) * WIDTH / 2)
        mixed = state[:, : 3 - depth] @ weights[f"proj.{depth}.weight"].T
        mixed = w_s * mixed + w_e * weights[f"emb.{depth}.weight"][tokens_BT[:, depth:]]
        state = F.gelu(normal(mixed / w_s) * weights[f"ln.{depth}.weight"] + weights[f"ln.{depth}.bias"])
        torch.testing.assert_close(logits, state @ weights[f"head.{depth}.weight"].T)


def test_initial_weights():
    torch.manual_seed(0)
    speculator = MLPSpeculator(MLPConfig(hidden_size=256, vocab_size=512, inner_dim=1024, n_predict=2))
    for name, weight in speculator.named_parameters():
        if weight.ndim == 2:
            assert weight.std().item() == pytest.approx(1024**-0.5, rel=0.02), name
        else:
            assert (weight == (1 if name.endswith("weight") else 0)).all()
    assert not any("bias" in name for name, _ in speculator.named_parameters() if not name.startswith("ln"))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_greedy_proposal_is_what_forward_predicts(name: str):
    speculator, seen = make(**VARIANTS[name]), context()
    draft = speculator.propose(seen, Plan((1,) * 4))
    root_B, feature_BF = seen.root()
    tokens_BT = torch.cat([root_B.unsqueeze(1), draft.tokens_BN], dim=1)
    logits = speculator(tokens_BT, feature_BF.unsqueeze(1).expand(-1, 5, -1))
    for depth in range(4):
        assert logits[depth].shape == (3, 5 - depth, VOCABULARY)
        assert torch.equal(logits[depth][:, 0].argmax(-1), draft.tokens_BN[:, depth])


@pytest.mark.parametrize("name", VARIANTS)
def test_top_k_agrees_with_step(name: str):
    speculator = make(**VARIANTS[name])
    state = speculator.start(torch.randn(5, WIDTH, dtype=torch.float64))
    tokens_R = torch.randint(0, VOCABULARY, (5,))
    log_q_RV, after = speculator.step(0, state, tokens_R)
    torch.testing.assert_close(log_q_RV.exp().sum(-1), torch.ones(5))
    for k in (1, 3):
        scores_Rk, tokens_Rk, also_after = speculator.top_k(0, state, tokens_R, k, scores=True)
        expected = log_q_RV.topk(k)
        assert torch.equal(tokens_Rk, expected.indices)
        torch.testing.assert_close(scores_Rk, expected.values)
        assert torch.equal(after, also_after)
        assert speculator.top_k(0, state, tokens_R, k, scores=False)[0] is None


def test_state_only_heads_do_not_read_tokens():
    speculator = make(condition_on_tokens=False)
    features = torch.randn(1, 6, WIDTH, dtype=torch.float64)
    one, other = (speculator(torch.full((1, 6), token), features) for token in (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_what_is_drawn_begins_as_wide_as_asked_for():
    one, wide = make().state_dict(), make(init_width=2.0).state_dict()
    for name, drawn in one.items():
        factor = 2.0 if drawn.ndim == 2 else 1.0
        torch.testing.assert_close(wide[name], factor * drawn)
    assert one["head.0.weight"].std().item() == pytest.approx(WIDTH**-0.5, rel=0.1)


def test_default_plan_is_the_config_s():
    assert make(top_k_tokens_per_head=(3, 2), n_candidates=4).default_plan() == Plan((3, 2, 1, 1), paths=4)
    assert make().default_plan() == Plan((1, 1, 1, 1))


@pytest.mark.parametrize("name", ["untied", "draft vocabulary"])
def test_propose_compiles_without_a_break(name: str):
    speculator, seen = make(**VARIANTS[name]), context()
    plan = Plan((2, 2, 1), paths=3)
    compiled = torch.compile(lambda c: speculator.propose(c, plan).tokens_BN, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(seen), speculator.propose(seen, plan).tokens_BN)


@pytest.mark.parametrize("name", VARIANTS)
def test_round_trip(tmp_path: Path, name: str):
    speculator = make(**VARIANTS[name])
    speculator.save_pretrained(tmp_path / "x", tiny_target().facts(), {"note": 1})
    back = load_drafter(tmp_path / "x", tiny_target())
    assert isinstance(back, MLPSpeculator) and back.config.to_json() == speculator.config.to_json()
    for key, tensor in speculator.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[key]), key
    seen = context()
    assert torch.equal(back.propose(seen, Plan((2, 1))).tokens_BN, speculator.propose(seen, Plan((2, 1))).tokens_BN)


def published(folder: Path, tied: bool, dtype: torch.dtype, *, names: str = "all", shards: int = 1) -> dict:
    """Write a checkpoint as the published ones are, by hand; return its tensors."""
    folder.mkdir()
    n, width = 3, 12
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "emb_dim": WIDTH, "inner_dim": width,
        "model_type": "mlp_speculator", "n_candidates": 5, "n_predict": n, "scale_input": tied, "tie_weights": tied,
        "top_k_tokens_per_head": [4, 3, 2], "torch_dtype": str(dtype)[6:], "transformers_version": "4.38.2",
        "vocab_size": VOCABULARY,
    }
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {"emb": (VOCABULARY, width), "head": (VOCABULARY, width), "ln_w": (width,), "ln_b": (width,)}
    shared = {key: torch.randn(shape).to(dtype) for key, shape in shapes.items()} | {
        "proj": torch.randn(width, width).to(dtype)
    }
    tensors = {}
    for i in range(n):
        def draw(key: str, shape: tuple[int, ...]) -> torch.Tensor:
            return shared[key].clone() if tied else torch.randn(shape).to(dtype)

        tensors[f"speculator.emb.{i}.weight"] = draw("emb", shapes["emb"])
        tensors[f"speculator.head.{i}.weight"] = draw("head", shapes["head"])
        tensors[f"speculator.ln.{i}.weight"] = draw("ln_w", shapes["ln_w"])
        tensors[f"speculator.ln.{i}.bias"] = draw("ln_b", shapes["ln_b"])
        tensors[f"speculator.proj.{i}.weight"] = (
            torch.randn(width, WIDTH).to(dtype) if i == 0 else draw("proj", (width, width))
        )
    kept = {
        key: tensor for key, tensor in tensors.items()
        if names == "all" or ".0." in key or key == "speculator.proj.1.weight"
    }
    if shards == 1:
        safetensors.torch.save_file(kept, folder / "model.safetensors", {"format": "pt"})
        return tensors
    weight_map = {}
    for shard in range(shards):
        part = {key: tensor for j, (key, tensor) in enumerate(kept.items()) if j % shards == shard}
        name = f"model-{shard + 1:05}-of-{shards:05}.safetensors"
        safetensors.torch.save_file(part, folder / name)
        weight_map |= dict.fromkeys(part, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tensors


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("tied", "layout"),
    [(False, "whole"), (False, "shards"), (True, "whole"), (True, "shards"), (True, "first names")],
)
def test_published_layout_bit_for_bit(tmp_path: Path, tied: bool, dtype: torch.dtype, layout: str):
    names, shards = ("first" if layout == "first names" else "all"), (3 if layout == "shards" else 1)
    tensors = published(tmp_path / "hub", tied, dtype, names=names, shards=shards)
    MLPSpeculator.from_pretrained(tmp_path / "hub").save_pretrained(tmp_path / "own", FACTS)
    written = safetensors.torch.load_file(tmp_path / "own" / "model.safetensors")
    assert written.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert written[name].dtype == dtype and torch.equal(written[name], tensor), name
    before, after = (json.loads((tmp_path / f / "config.json").read_text()) for f in ("hub", "own"))
    assert after.pop("draftsmith")["target"]["hidden_size"] == WIDTH
    assert after == {key: value for key, value in before.items() if key != "transformers_version"}


def test_tied_tensors_can_be_written_once(tmp_path: Path):
    speculator = make(tie_weights=True)
    speculator.save_pretrained(tmp_path / "x", FACTS, repeat_tied=False)
    names = safetensors.torch.load_file(tmp_path / "x/model.safetensors").keys()
    assert {name.removeprefix("speculator.") for name in names} == {
        "emb.0.weight", "head.0.weight", "ln.0.weight", "ln.0.bias", "proj.0.weight", "proj.1.weight"
    }
    back = MLPSpeculator.from_pretrained(tmp_path / "x").state_dict()
    assert all(torch.equal(tensor, back[name]) for name, tensor in speculator.state_dict().items())


def test_bits_are_the_published_file_s(tmp_path: Path):
    published(tmp_path / "hub", False, torch.bfloat16)
    MLPSpeculator.from_pretrained(tmp_path / "hub").save_pretrained(tmp_path / "own", FACTS)
    assert (tmp_path / "hub/model.safetensors").read_bytes() == (tmp_path / "own/model.safetensors").read_bytes()


def other_target(width: int = WIDTH, vocabulary: int = VOCABULARY) -> Target:
    if width == WIDTH:
        return Target(tiny_model(vocabulary=vocabulary), name="other")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=vocabulary, hidden_size=width, intermediate_size=8, num_hidden_layers=1,
                         num_attention_heads=2, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    return Target(LlamaForCausalLM(config), name="other")


def test_another_target_is_refused(tmp_path: Path):
    make().save_pretrained(tmp_path / "x", tiny_target().facts())
    with pytest.raises(DraftsmithError, match=r"drafts for 'tiny-llama' with hidden size 32, but 'other' has 16; load"):
        load_drafter(tmp_path / "x", other_target(width=16))
    with pytest.raises(DraftsmithError, match=r"with a vocabulary of 96, but 'other' has 80"):
        load_drafter(tmp_path / "x", other_target(vocabulary=80))
    make().save_pretrained(tmp_path / "y", TargetFacts(WIDTH, VOCABULARY, "abc", "theirs"))
    from tests.helpers.tiny import tiny_tokenizer

    with pytest.raises(DraftsmithError, match="drafts for 'theirs' with tokenizer hash abc, but 'other' has "):
        load_drafter(tmp_path / "y", Target(tiny_model(), tiny_tokenizer(), name="other"))


def test_damaged_and_foreign_folders_are_refused(tmp_path: Path):
    def saved(name: str) -> Path:
        make().save_pretrained(tmp_path / name, FACTS)
        return tmp_path / name

    def refused(folder: Path, message: str) -> None:
        with pytest.raises(DraftsmithError, match=message):
            load_drafter(folder, tiny_target())

    folder = saved("drafter")
    refused(tmp_path / "draftr", r"draftr does not exist; did you mean .*drafter\?")
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-10])
    refused(folder, r"model\.safetensors is damaged \(its SHA-256")
    (folder / "manifest.json").unlink()
    refused(folder, r"model\.safetensors is cut short or broken")
    weights.write_bytes(content)
    load_drafter(folder, tiny_target())
    weights.unlink()
    refused(folder, r"model\.safetensors is missing")
    (folder / "pytorch_model.bin").write_bytes(b"")
    refused(folder, r"pytorch_model\.bin is a pickle")
    flipped = saved("flipped")
    content = bytearray((flipped / "model.safetensors").read_bytes())
    content[-3] ^= 1
    (flipped / "model.safetensors").write_bytes(content)
    refused(flipped, "is damaged")

    def rewritten(name: str, **changes) -> Path:
        folder = saved(name)
        values = json.loads((folder / "config.json").read_text()) | changes
        (folder / "config.json").write_text(json.dumps(values))
        (folder / "manifest.json").unlink()
        return folder

    refused(rewritten("a", auto_map={"AutoModel": "x.Y"}), r"its own code \(auto_map\)")
    refused(rewritten("b", model_type="foreign"), "drafter family 'foreign', which is unknown; known are .*mlp")
    refused(rewritten("c", inner_dim=7), r"tensor speculator\..* has shape .* but its config\.json says")
    refused(rewritten("d", n_predict=5, top_k_tokens_per_head=[1]), r"lacks the tensor speculator\..*\.4\.")
    refused(rewritten("e", n_predict=2, top_k_tokens_per_head=[1]), "that is not in its config.json")
    refused(rewritten("f", top_k_tokens_per_head=[1] * 9), "top_k_tokens_per_head is .* at most n_predict = 4")
    (tmp_path / "g").mkdir()
    refused(tmp_path / "g", r"config\.json is missing")


def test_other_packages_add_families(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A package that is installed beside this one brings its own family by the entry-point group."""
    package = tmp_path / "site"
    (package / "theirs-1.0.dist-info").mkdir(parents=True)
    (package / "theirs-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (package / "theirs-1.0.dist-info" / "entry_points.txt").write_text("[draftsmith.drafters]\nghost = theirs:FAMILY\n")
    (package / "theirs.py").write_text(
        "from draftsmith.drafters.base import NoDrafter\n"
        "from pydantic import Field\n"
        "from draftsmith.drafters.config import Config\n"
        "from draftsmith.drafters.family import Family\n\n"
        "class GhostConfig(Config):\n    mood: str = Field('pale', description='its mood')\n\n"
        "FAMILY = Family('ghost', 'drafts nothing', GhostConfig, lambda options, target, tokens: NoDrafter(),\n"
        "    lambda folder, target: NoDrafter(), lambda config: config.get('model_type') == 'ghost')\n"
    )
    monkeypatch.syspath_prepend(str(package))
    families.cache_clear()
    (tmp_path / "ghost").mkdir()
    (tmp_path / "ghost" / "config.json").write_text('{"model_type": "ghost"}')
    try:
        assert isinstance(load_drafter(tmp_path / "ghost", tiny_target()), NoDrafter)
        assert isinstance(load_drafter("ghost:mood=blue", tiny_target()), NoDrafter)
        with pytest.raises(DraftsmithError, match=r"ghost:mod is unknown; did you mean ghost:mood\?"):
            load_drafter("ghost:mod=blue", tiny_target())
        with pytest.raises(DraftsmithError, match="has 'mood' where key=value is needed"):
            load_drafter("ghost:mood", tiny_target())
        with pytest.raises(DraftsmithError, match="'mlp' has to be trained"):
            load_drafter("mlp", tiny_target())
    finally:
        families.cache_clear()


def test_hub_names_fail_clearly_without_a_network():
    with pytest.raises(DraftsmithError, match="'nobody/nothing' is neither a local folder nor could it be fetched"):
        load_drafter("nobody/nothing", tiny_target())


def test_start_from_the_target_s_tables():
    target, speculator = tiny_target(), make()
    initialise_from_target(speculator, target, "embeddings+head")
    for depth in range(4):
        assert torch.equal(speculator.head[depth].weight, target.head_weight_VF)
        table = speculator.emb[depth].weight
        assert table.square().mean().sqrt().item() == pytest.approx(WIDTH**-0.5)
        torch.testing.assert_close(
            F.cosine_similarity(table.detach(), target.embedding_weight_VF), torch.ones(VOCABULARY, dtype=torch.float64)
        )
    before = make(inner_dim=48)
    initialise_from_target(before, target, "embeddings+head")
    own_VD, theirs_VF = before.emb[0].weight.float(), target.embedding_weight_VF.float()
    torch.testing.assert_close(
        F.normalize(own_VD) @ F.normalize(own_VD).T, F.normalize(theirs_VF) @ F.normalize(theirs_VF).T
    )
    with pytest.raises(DraftsmithError, match="init_from_target is 'all'"):
        MLPConfig(init_from_target="all")


def test_tables_of_the_target_are_shared_frozen_and_not_saved(tmp_path: Path):
    speculator = make(tie_to_target=True)
    assert speculator.emb[0].weight.data_ptr() == tiny_target().embedding_weight_VF.data_ptr()
    assert not any(name.startswith(("emb", "head")) for name, _ in speculator.named_parameters())
    speculator.save_pretrained(tmp_path / "x", FACTS)
    names = safetensors.torch.load_file(tmp_path / "x/model.safetensors").keys()
    assert not any(".emb." in name or ".head." in name for name in names)
    with pytest.raises(DraftsmithError, match="borrows its target's embedding and head; load it with that target"):
        MLPSpeculator.from_pretrained(tmp_path / "x")
