"""Medusa heads: their formula, drafting against training, what they share, and the published checkpoint layout."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

from draftsmith.drafters.heads.medusa import MedusaConfig, MedusaDrafter
from draftsmith.drafters.registry import load_drafter
from draftsmith.drafters.tree_choices import MEDUSA_TREE
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import Context, DraftsmithError
from tests.helpers import training_toy as toy
from tests.helpers.contract import check_drafter, check_forward_agreement
from tests.helpers.heads_toy import check_packed, check_training, demo_target
from tests.helpers.tiny import VOCABULARY, WIDTH, tiny_model, tiny_target

VARIANTS = {
    "own heads": {},
    "two layers": {"num_layers": 2, "num_heads": 3},
    "tied": {"tie_to_target": True},
    "draft vocabulary": {"draft_vocab_size": 40},
    "tied draft vocabulary": {"draft_vocab_size": 40, "tie_to_target": True},
}
PLANS = [
    None, Plan((3, 2, 1)), Plan((3, 2, 2), paths=4), Plan((4, 4, 4), beam=3, nodes=9), Plan((1, 1), sampled=True),
    Plan((2, 2), sampled=True),
]


def make(architecture: str = "llama", **options) -> MedusaDrafter:
    """Return random heads in float64: untrained ones would all say the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        size = options.get("draft_vocab_size")
        tokens = torch.randperm(VOCABULARY)[:size] if size else None
        drafter = MedusaDrafter.new(MedusaConfig(**options), tiny_target(architecture), tokens).double()
        for parameter in drafter.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    drafter.bind(tiny_target(architecture))
    return drafter.eval()


def context(batch: int = 3) -> Context:
    generator = torch.Generator().manual_seed(1)
    ones = torch.ones(batch, dtype=torch.long)
    return Context(
        torch.randint(0, VOCABULARY, (batch, 1), generator=generator),
        torch.randn(batch, 1, WIDTH, generator=generator, dtype=torch.float64), ones, ones, torch.arange(batch),
        torch.zeros(batch), torch.arange(batch),
    )


@pytest.mark.parametrize(
    ("architecture", "name"),
    [pytest.param("llama", "own heads", marks=pytest.mark.slow), ("gemma3", "tied draft vocabulary")],
)
def test_contract(architecture: str, name: str):
    drafter = make(architecture, default_branching=(2, 2), default_nodes=4, default_beam=2, **VARIANTS[name])
    check_drafter(lambda: drafter, tiny_target(architecture), tiny_model(architecture), PLANS)


@pytest.mark.parametrize(("architecture", "name"), [("llama", name) for name in VARIANTS] + [("gpt2", "own heads")])
def test_drafting_agrees_with_forward(architecture: str, name: str):
    check_forward_agreement(make(architecture, **VARIANTS[name]), tiny_target(architecture))


@pytest.mark.parametrize("name", ["two layers", "tied"])
def test_heads_are_the_paper_s_formula(name: str):
    drafter = make(**VARIANTS[name])
    weights = {drafter.published_name(key): tensor for key, tensor in drafter.state_dict().items()}
    features_BTF, layers = torch.randn(2, 5, WIDTH, dtype=torch.float64), drafter.config.num_layers
    tokens_BT = torch.randint(0, VOCABULARY, (2, 5))
    for depth, logits in enumerate(drafter(tokens_BT, features_BTF)):
        state = features_BTF[:, : 5 - depth]
        for layer in range(layers):
            block = f"{depth}.{layer}.linear"
            state = state + F.silu(state @ weights[f"{block}.weight"].T + weights[f"{block}.bias"])
        head_VF = weights.get(f"{depth}.{layers}.weight", tiny_target().head_weight_VF)
        torch.testing.assert_close(logits, state @ head_VF.T)
    other = drafter((tokens_BT + 1) % VOCABULARY, features_BTF)
    assert all(torch.equal(one, two) for one, two in zip(drafter(tokens_BT, features_BTF), other, strict=True))


@pytest.mark.parametrize("options", [{}, {"tie_to_target": True}, {"draft_vocab_size": 40}], ids=str)
def test_untrained_heads_say_what_the_target_s_own_head_says(options: dict):
    target, tokens = tiny_target(), torch.arange(3, 43) if options.get("draft_vocab_size") else None
    drafter = MedusaDrafter.new(MedusaConfig(**options), target, tokens).double()
    drafter.bind(target)
    features_BTF, logits_BTV = target.encode(torch.randint(0, VOCABULARY, (1, 9)), logits=True)
    said = drafter(torch.zeros(1, 9, dtype=torch.long), features_BTF)[0]
    kept = slice(None) if tokens is None else tokens
    torch.testing.assert_close(said[..., kept], logits_BTV[..., kept], rtol=1e-5, atol=1e-5)
    if tokens is not None:
        assert (said[..., :3] == -torch.inf).all()
    if not options:
        drawn = MedusaDrafter.new(MedusaConfig(init_from_target=False), target, None)
        assert not torch.equal(drawn.projections()[0].weight, drafter.projections()[0].weight.float())


@pytest.mark.parametrize("name", VARIANTS)
def test_nodes_of_a_row_get_its_scores(name: str):
    """Heads are asked once a row; what every node of the tree gets is what it would have been told alone."""
    drafter, seen, plan = make(**VARIANTS[name]), context(), Plan((3, 2, 2))
    draft = drafter.propose(seen, plan)
    root_B, feature_BF = seen.root()
    for b in range(3):
        best = [drafter.score(d, feature_BF[b]).topk(k).indices for d, k in enumerate(plan.branching)]
        told = [set((found if drafter.d2t is None else drafter.d2t[found]).tolist()) for found in best]
        parents, tokens = draft.parents_BN[b].tolist(), draft.tokens_BN[b].tolist()
        depths: list[int] = []
        for parent in parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        for node, depth in enumerate(depths):
            assert tokens[node] in told[depth]
        assert sorted(depths) == [0] * 3 + [1] * 6 + [2] * 12
    rows_R = torch.tensor([0, 0, 1, 1, 2, 2])
    _, (said, rows_B) = drafter.begin(seen)
    wide_RV, _ = drafter.step(1, (said, rows_R), root_B[rows_R])
    narrow_BV, _ = drafter.step(1, (said, rows_B), root_B)
    torch.testing.assert_close(wide_RV.exp().sum(-1), torch.ones(6))
    assert torch.equal(wide_RV, narrow_BV[rows_R])
    scores_Rk, tokens_Rk, _ = drafter.top_k(1, (said, rows_R), root_B[rows_R], 3, scores=True)
    assert torch.equal(tokens_Rk, wide_RV.topk(3).indices) and scores_Rk is not None
    torch.testing.assert_close(scores_Rk, wide_RV.topk(3).values)


@pytest.mark.parametrize("name", [pytest.param("own heads", marks=pytest.mark.slow), "tied draft vocabulary"])
def test_propose_compiles_without_a_break(name: str):
    drafter, seen, plan = make(**VARIANTS[name]), context(), Plan((2, 2, 1), paths=3)
    compiled = torch.compile(lambda c: drafter.propose(c, plan).tokens_BN, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(seen), drafter.propose(seen, plan).tokens_BN)


def test_default_plan_is_the_options():
    assert make().default_plan() == Plan(choices=MEDUSA_TREE)
    assert make(num_heads=2).default_plan() == Plan(choices=tuple(path for path in MEDUSA_TREE if len(path) <= 2))
    assert make(default_branching=(1, 1, 1, 1)).default_plan() == Plan((1, 1, 1, 1))
    chosen = make(default_branching=(4, 2), default_nodes=5, default_beam=3)
    assert chosen.default_plan() == Plan((4, 2), nodes=5, beam=3)
    with pytest.raises(DraftsmithError, match=r"default_branching is \(1, 1, 1\); .* num_heads = 2 numbers"):
        MedusaConfig(num_heads=2, default_branching=(1, 1, 1))


@pytest.mark.parametrize("name", VARIANTS)
def test_round_trip(tmp_path: Path, name: str):
    drafter = make(default_branching=(3, 2), default_nodes=5, **VARIANTS[name])
    drafter.save_pretrained(tmp_path / "x", tiny_target().facts())
    back = MedusaDrafter.from_pretrained(tmp_path / "x", tiny_target())
    assert back.sizes() == drafter.sizes() and back.default_plan() == drafter.default_plan()
    assert back.state_dict().keys() == drafter.state_dict().keys()
    for key, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[key]), key
    loaded, seen = load_drafter(tmp_path / "x", tiny_target()), context()
    assert torch.equal(loaded.propose(seen, Plan((2, 1))).tokens_BN, drafter.propose(seen, Plan((2, 1))).tokens_BN)


def published(folder: Path, heads: int = 5, prefix: str = "", tied: bool = False) -> dict[str, torch.Tensor]:
    """Write a checkpoint as the published ones are, by hand: a config that says little, and counts two heads."""
    folder.mkdir()
    config = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_heads": 2, "medusa_num_layers": 1,
              "transformers_version": "4.31.0"} | ({"version": "2"} if tied else {})
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {}
    for head in range(heads):
        tensors[f"{head}.0.linear.weight"] = torch.randn(WIDTH, WIDTH).half()
        tensors[f"{head}.0.linear.bias"] = torch.randn(WIDTH).half()
        if not tied:
            tensors[f"{head}.1.weight"] = torch.randn(VOCABULARY, WIDTH).half()
    file = {prefix + name: tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(file, folder / "medusa_lm_head.safetensors", {"format": "pt"})
    return tensors


@pytest.mark.parametrize(("prefix", "tied"), [("", False), ("medusa_head.", False), ("", True)])
def test_published_layout_bit_for_bit(tmp_path: Path, prefix: str, tied: bool):
    tensors = published(tmp_path / "hub", prefix=prefix, tied=tied)
    drafter = MedusaDrafter.from_pretrained(tmp_path / "hub", tiny_target())
    assert drafter.max_depth == 5 and drafter.config.tie_to_target == tied
    drafter.save_pretrained(tmp_path / "own", tiny_target().facts())
    written = safetensors.torch.load_file(tmp_path / "own" / "medusa_lm_head.safetensors")
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensor) for name, tensor in tensors.items())
    config = json.loads((tmp_path / "own" / "config.json").read_text())
    wanted = {"base_model_name_or_path": "lmsys/vicuna-7b-v1.3", "medusa_num_heads": 5, "medusa_num_layers": 1}
    assert config.items() >= wanted.items() and config.get("version") == ("2" if tied else None)
    assert isinstance(load_drafter(tmp_path / "hub", tiny_target()), MedusaDrafter)


def test_what_does_not_fit_is_refused(tmp_path: Path):
    published(tmp_path / "hub")
    other = Target(tiny_model(vocabulary=80), name="other")
    with pytest.raises(DraftsmithError, match=r"for 'lmsys/vicuna-7b-v1\.3' with a vocabulary of 96, but 'other' has"):
        load_drafter(tmp_path / "hub", other)
    published(tmp_path / "tied", tied=True)
    with pytest.raises(DraftsmithError, match="does not say how large its target is; load it with that target"):
        MedusaDrafter.from_pretrained(tmp_path / "tied")
    config = json.loads((tmp_path / "hub" / "config.json").read_text())
    for changes, message in (
        ({"medusa_num_layers": 2}, r"has a tensor '0\.1\.weight' that is not in its config"),
        ({"medusa_num_layers": "x"}, r"config\.json: medusa_num_layers is 'x'; give a whole number"),
        ({"model_type": "foreign"}, "drafter family 'foreign', which is unknown; known are .*medusa"),
    ):
        (tmp_path / "hub" / "config.json").write_text(json.dumps(config | changes))
        with pytest.raises(DraftsmithError, match=message):
            load_drafter(tmp_path / "hub", tiny_target())
    (tmp_path / "hub" / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file({"x": torch.zeros(1)}, tmp_path / "hub" / "medusa_lm_head.safetensors")
    with pytest.raises(DraftsmithError, match="holds no Medusa heads"):
        load_drafter(tmp_path / "hub", tiny_target())
    (tmp_path / "hub" / "medusa_lm_head.safetensors").unlink()
    (tmp_path / "hub" / "medusa_lm_head.pt").write_bytes(b"")
    with pytest.raises(DraftsmithError, match=r"medusa_lm_head\.pt is a pickle, which can run code"):
        load_drafter(tmp_path / "hub", tiny_target())


def test_whole_heads_can_be_cut_down(tmp_path: Path):
    whole, tokens = make(), torch.arange(5, 45)
    whole.save_pretrained(tmp_path / "whole", tiny_target().facts())
    few = MedusaDrafter.new(MedusaConfig(draft_vocab_size=40), tiny_target(), tokens)
    few.start_from(tmp_path / "whole", tiny_target())
    features_BTF = torch.randn(1, 6, WIDTH)
    tokens_BT = torch.zeros(1, 6, dtype=torch.long)
    for cut, full in zip(few(tokens_BT, features_BTF), whole.float()(tokens_BT, features_BTF), strict=True):
        torch.testing.assert_close(cut[..., tokens], full[..., tokens])
    with pytest.raises(DraftsmithError, match=r"drafter\.num_heads is 3, but drafter\.init_from .* has 4; set"):
        MedusaDrafter.new(MedusaConfig(num_heads=3), tiny_target(), None).start_from(tmp_path / "whole", tiny_target())


@pytest.mark.parametrize("options", ["", ", tie_to_target: true, draft_vocab_size: 64"])
def test_training(tmp_path: Path, options: str):
    result = check_training(tmp_path, f"{{family: medusa, num_heads: 2{options}}}", "medusa_lm_head.safetensors")
    assert isinstance(load_drafter(result.drafter, toy.target()), MedusaDrafter)


@pytest.mark.parametrize("options", [{}, {"tie_to_target": True, "draft_vocab_size": 512}], ids=["own", "tied"])
def test_packed_heads_decode_losslessly(options: dict):
    target = demo_target()
    tokens = torch.arange(512) if options.get("draft_vocab_size") else None
    check_packed(MedusaDrafter.new(MedusaConfig(**options), target, tokens), target)
