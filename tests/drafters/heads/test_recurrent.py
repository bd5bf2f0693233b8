"""The recurrent drafter: its numbers, its beam search, drafting against training, and the published checkpoint
layout.
"""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F

from draftsmith import assets
from draftsmith.drafters.heads.recurrent import RecurrentDrafter
from draftsmith.drafters.heads.recurrent_config import FAMILY, RecurrentConfig
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Engine
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.training.recipe import load_recipe
from draftsmith.types import ROOT, UNUSED, Context, Draft, DraftsmithError, SamplingParams, TargetFacts
from tests.helpers.contract import check_drafter, check_forward_agreement
from tests.helpers.family_training import check_training
from tests.helpers.tiny import VOCABULARY, WIDTH, tiny_model, tiny_target

FACTS = TargetFacts(WIDTH, VOCABULARY, None, "toy")
VARIANTS = {
    "rnn": {},
    "sum of embeddings": {"rnn": False},
    "projected": {"exit_dim": 24, "num_draft_layers": 2},
    "no blocks": {"num_draft_layers": 0},
    "own embeddings": {"own_embeddings": True},
    "draft vocabulary": {"draft_vocab_size": 40},
}


def make(seed: int = 0, architecture: str = "llama", **options) -> RecurrentDrafter:
    """Return a drafter with weights wide enough that guesses depend on everything it reads."""
    torch.manual_seed(seed)
    options = {"beam_length": 4, "beam_width": 3, **options}
    tokens = torch.randperm(VOCABULARY)[: options["draft_vocab_size"]] if "draft_vocab_size" in options else None
    target = tiny_target(architecture)
    drafter = FAMILY.make(FAMILY.config.read(options, ""), target, tokens)
    assert isinstance(drafter, RecurrentDrafter)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.mul_(2)
    drafter.double().bind(target)
    return drafter


def context(batch: int = 3, length: int = 5, seed: int = 1) -> Context:
    generator = torch.Generator().manual_seed(seed)
    counts_B = torch.randint(1, length + 1, (batch,), generator=generator)
    return Context(
        torch.randint(0, VOCABULARY, (batch, length), generator=generator),
        torch.randn(batch, length, WIDTH, generator=generator, dtype=torch.float64),
        counts_B, counts_B, torch.arange(batch), torch.zeros(batch), torch.arange(batch),
    )


@pytest.mark.parametrize("rnn", [True, False])
def test_steps_are_the_published_formula(rnn: bool):
    """s' = SiLU(W e + U s + b) from zero, head over [h, s], written out with nothing of the module but its weights."""
    drafter = make(rnn=rnn, exit_dim=24, num_draft_layers=2)
    w, table_VF = drafter.state_dict(), tiny_target().embedding_weight_VF
    tokens_BT, features_BTF = torch.tensor([[3, 5, 7]]), torch.randn(1, 3, WIDTH, dtype=torch.float64)
    state = torch.zeros_like(features_BTF)
    for depth, logits in enumerate(drafter(tokens_BT, features_BTF)):
        state, read = state[:, : 3 - depth], table_VF[tokens_BT[:, depth:]]
        if rnn:
            state = F.silu(read @ w["rnn_w.weight"].T + state @ w["rnn_u.weight"].T + w["rnn_u.bias"])
        else:
            state = state + read
        x = torch.cat([features_BTF[:, : 3 - depth], state], -1) @ w["input_proj.weight"].T + w["input_proj.bias"]
        for layer in range(2):
            x = x + F.silu(x @ w[f"lm_head.{layer}.linear.weight"].T + w[f"lm_head.{layer}.linear.bias"])
        torch.testing.assert_close(logits, x @ w["lm_head.2.weight"].T)


def beam_search(drafter: RecurrentDrafter, token: int, h_F: torch.Tensor, width: int, length: int) -> list[list[int]]:
    """Return the `width` sequences that a plain beam search over all continuations keeps, best first."""
    table_VF = tiny_target().embedding_weight_VF
    beams = [(0.0, [token], torch.zeros_like(h_F))]
    for _ in range(length):
        longer = []
        for score, tokens, state_F in beams:
            state_F = F.silu(drafter.rnn_w(table_VF[tokens[-1]]) + drafter.rnn_u(state_F))
            log_q_V = drafter.lm_head(torch.cat([h_F, state_F])).log_softmax(-1)
            longer += [(score + log_q.item(), [*tokens, v], state_F) for v, log_q in enumerate(log_q_V)]
        beams = sorted(longer, key=lambda beam: -beam[0])[:width]
    return [tokens[1:] for _, tokens, _ in beams]


def sequences(draft: Draft, row: int) -> list[list[int]]:
    """Return the tokens of every leaf's path, in order of the leaves."""
    tokens, parents = draft.tokens_BN[row].tolist(), draft.parents_BN[row].tolist()
    paths: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token] if parent != UNUSED else [])
    return [path for path in paths if len(path) == draft.depth]


@pytest.mark.parametrize(("width", "length"), [(2, 4), (5, 4), (8, 3), (40, 2)])
def test_the_default_draft_is_the_paper_s_beam_search(width: int, length: int):
    drafter, seen = make(beam_width=width, beam_length=length), context(batch=6)
    draft = drafter.propose(seen, drafter.default_plan())
    root_B, h_BF = seen.root()
    packed = 0
    for row in range(6):
        expected = beam_search(drafter, root_B[row].item(), h_BF[row], width, length)
        assert sequences(draft, row) == expected
        prefixes = {tuple(tokens[: d + 1]) for tokens in expected for d in range(length)}
        nodes = int((draft.parents_BN[row] != UNUSED).sum())
        assert nodes == len(prefixes), "each shared prefix is stored once"
        packed += nodes < width * length
    assert packed, "these weights make candidates share prefixes, so packing has something to do"


def test_candidates_without_a_common_prefix_fill_the_plan():
    drafter, seen = make(beam_width=4, beam_length=1), context()
    draft = drafter.propose(seen, drafter.default_plan())
    assert draft.tokens_BN.shape == (3, 4) and (draft.parents_BN == ROOT).all()
    assert make(beam_width=1, beam_length=3).default_plan() == Plan((1, 1, 1))


@pytest.mark.parametrize("name", VARIANTS)
def test_a_greedy_proposal_is_what_forward_predicts(name: str):
    check_forward_agreement(make(**VARIANTS[name]), tiny_target())


PLANS = (
    None, Plan((2, 2, 1)), Plan((3, 2, 1), paths=3), Plan((3, 3, 3), beam=2, nodes=7), Plan((1,) * 4, sampled=True),
    Plan((2, 2), sampled=True),
)


@pytest.mark.parametrize("architecture", [pytest.param("llama", marks=pytest.mark.slow), "gemma3"])
def test_contract(architecture: str):
    target = tiny_target(architecture)
    check_drafter(
        lambda: make(architecture=architecture).for_decoding(target), target, tiny_model(architecture), PLANS
    )


def test_propose_compiles_without_a_break():
    drafter, seen = make(draft_vocab_size=40), context()
    plan = drafter.default_plan()
    compiled = torch.compile(lambda c: drafter.propose(c, plan).tokens_BN, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(seen), drafter.propose(seen, plan).tokens_BN)


@pytest.mark.parametrize("name", VARIANTS)
def test_round_trip(tmp_path: Path, name: str):
    drafter = make(**VARIANTS[name])
    drafter.save_pretrained(tmp_path / "x", tiny_target().facts())
    back = load_drafter(tmp_path / "x", tiny_target())
    assert isinstance(back, RecurrentDrafter) and back.config.to_json() == drafter.config.to_json()
    for key, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[key]), key
    seen, plan = context(), drafter.default_plan()
    assert torch.equal(back.propose(seen, plan).tokens_BN, drafter.propose(seen, plan).tokens_BN)


@pytest.mark.parametrize("exit_dim", [2 * WIDTH, 24])
def test_published_layout_bit_for_bit(tmp_path: Path, exit_dim: int):
    """A checkpoint as transformers writes the published class, by hand."""
    hub = tmp_path / "hub"
    hub.mkdir()
    config = {
        "architectures": ["Drafter"], "exit_dim": exit_dim, "hidden_size": WIDTH,
        "model_type": "recurrent_drafting_drafter", "num_draft_layers": 2, "rnn": True, "torch_dtype": "bfloat16",
        "vocab_size": VOCABULARY, "transformers_version": "4.36.2", "num_lookback_tokens": -1,
    }
    (hub / "config.json").write_text(json.dumps(config))
    shapes = {
        "lm_head.0.linear.weight": (exit_dim, exit_dim), "lm_head.0.linear.bias": (exit_dim,),
        "lm_head.1.linear.weight": (exit_dim, exit_dim), "lm_head.1.linear.bias": (exit_dim,),
        "lm_head.2.weight": (VOCABULARY, exit_dim), "rnn_u.weight": (WIDTH, WIDTH), "rnn_u.bias": (WIDTH,),
        "rnn_w.weight": (WIDTH, WIDTH),
    }
    if exit_dim != 2 * WIDTH:
        shapes |= {"input_proj.weight": (exit_dim, 2 * WIDTH), "input_proj.bias": (exit_dim,)}
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    safetensors.torch.save_file(tensors, hub / "model.safetensors", {"format": "pt"})
    drafter = RecurrentDrafter.from_pretrained(hub, tiny_target())
    drafter.save_pretrained(tmp_path / "own", FACTS)
    written = safetensors.torch.load_file(tmp_path / "own" / "model.safetensors")
    assert written.keys() == tensors.keys()
    assert all(written[name].dtype == torch.bfloat16 and torch.equal(written[name], tensors[name]) for name in tensors)
    own = json.loads((tmp_path / "own" / "config.json").read_text())
    unused = ("transformers_version", "num_lookback_tokens")
    assert own.items() >= {key: value for key, value in config.items() if key not in unused}.items()
    assert load_drafter(hub, tiny_target()).max_depth == RecurrentConfig().beam_length


def test_bad_checkpoints_and_options_are_refused(tmp_path: Path):
    make().save_pretrained(tmp_path / "x", FACTS)
    with pytest.raises(DraftsmithError, match="borrows its target's embedding; load it with that target"):
        RecurrentDrafter.from_pretrained(tmp_path / "x")

    def rewritten(**changes) -> Path:
        values = json.loads((tmp_path / "x/config.json").read_text()) | changes
        (tmp_path / "x/config.json").write_text(json.dumps({k: v for k, v in values.items() if v is not None}))
        (tmp_path / "x/manifest.json").unlink(missing_ok=True)
        return tmp_path / "x"

    for changes, message in (
        ({"exit_dim": None}, r"lacks exit_dim; use a whole config"),
        ({"exit_dim": 64, "num_draft_layers": 2}, r"has a tensor 'lm_head\.1\.weight' that is not in its config\.json"),
        ({"num_draft_layers": 1, "rnn": False}, r"has a tensor 'rnn_u\.bias' that is not in its config\.json"),
        ({"rnn": True, "exit_dim": 24}, r"lacks the tensor input_proj\.weight"),
        ({"exit_dim": 64, "hidden_size": 16}, "with hidden size 16, but 'tiny-llama' has 32"),
    ):
        with pytest.raises(DraftsmithError, match=message):
            load_drafter(rewritten(**changes), tiny_target())
    with pytest.raises(DraftsmithError, match="beam_width is 97; it must be between 1 and the 96 tokens"):
        make(beam_width=97)
    with pytest.raises(DraftsmithError, match=r"beam_widht is unknown; did you mean beam_width\?"):
        make(beam_widht=2)


def test_a_whole_drafter_may_become_limited(tmp_path: Path):
    whole = make(own_embeddings=True).float()
    whole.save_pretrained(tmp_path / "x", tiny_target().facts())
    torch.manual_seed(3)
    tokens_W = torch.randperm(VOCABULARY)[:40].sort().values
    options = FAMILY.config.read({"draft_vocab_size": 40, "own_embeddings": True, "beam_length": 4}, "")
    fewer = FAMILY.make(options, tiny_target(), tokens_W)
    assert isinstance(fewer, RecurrentDrafter)
    fewer.start_from(tmp_path / "x", tiny_target())
    tokens_BT, features_BTF = torch.randint(0, VOCABULARY, (2, 5)), torch.randn(2, 5, WIDTH)
    for small, large in zip(fewer(tokens_BT, features_BTF), whole(tokens_BT, features_BTF), strict=True):
        torch.testing.assert_close(small[..., tokens_W], large[..., tokens_W])
        assert small.isneginf().sum() == small.numel() // VOCABULARY * (VOCABULARY - 40)


@pytest.mark.parametrize(
    ("options", "overrides"),
    [
        ({"beam_length": 2}, ("distillation.weight=0.7", "optimizer.name=muon")),
        pytest.param(
            {"beam_length": 2, "rnn": False, "exit_dim": 24, "draft_vocab_size": 60}, (), marks=pytest.mark.slow
        ),
    ],
    ids=["distilled", "limited"],
)
def test_training(tmp_path: Path, options: dict, overrides: tuple[str, ...]):
    drafter = check_training(tmp_path, {"family": "recurrent", **options}, "stage1.rate=0.02", *overrides)
    assert drafter.max_depth == 2


def test_the_recipe_is_of_this_family():
    drafter = load_recipe(Path(__file__).parents[3] / "recipes" / "recurrent.yaml").drafter
    assert drafter.family == "recurrent" and drafter.config.beam_width == 3


def test_embeddings_of_the_target_are_not_saved(tmp_path: Path):
    make().save_pretrained(tmp_path / "x", FACTS)
    assert "embeddings.weight" not in safetensors.torch.load_file(tmp_path / "x/model.safetensors")
    assert make().embeddings.weight.data_ptr() == tiny_target("llama").embedding_weight_VF.data_ptr()
    own = make(own_embeddings=True)
    torch.testing.assert_close(own.embeddings.weight.detach(), 2 * tiny_target().embedding_weight_VF)


def test_packed_for_the_demo_target():
    """Int8 products guess; the text stays the target's."""
    target = Target.from_pretrained(assets.demo_target())
    torch.manual_seed(0)
    drafter = FAMILY.make(FAMILY.config.read({"draft_vocab_size": 512}, ""), target, torch.arange(512))
    assert isinstance(drafter, RecurrentDrafter)
    drafter.bind(target)
    engine = Engine(target, drafter.for_decoding(target), max_batch=2)
    rules = SamplingParams(max_tokens=12)
    texts = [c.tokens for c in engine.generate([[5, 6, 7], [8, 9]], rules)]
    assert texts == [c.tokens for c in engine.generate([[5, 6, 7], [8, 9]], rules, plan=Plan())]
    assert engine.drafter.default_plan().max_nodes == 20
