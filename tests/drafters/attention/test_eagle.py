"""EAGLE and EAGLE-2: the formula, drafting against training, the contract, training, and the published layout."""

import json
from pathlib import Path
from typing import ClassVar

import pytest
import safetensors.torch
import torch
import torch.nn.functional as F
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from draftsmith.assets import demo_target
from draftsmith.drafters.attention.eagle import Eagle
from draftsmith.drafters.attention.eagle_config import EagleConfig
from draftsmith.drafters.base import StagewiseDrafter
from draftsmith.drafters.grow import grow
from draftsmith.drafters.models.model_drafter import DraftModel
from draftsmith.drafters.registry import family_of, load_drafter
from draftsmith.drafters.trainable.batch import TrainingBatch
from draftsmith.drafters.tree_choices import EAGLE_TREE
from draftsmith.engine import Engine
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target
from draftsmith.training.train import train as run_recipe
from draftsmith.types import ROOT, Context, DraftsmithError, SamplingParams
from tests.helpers import training_toy as toy
from tests.helpers.agreement import check_agreement_over_time
from tests.helpers.contract import check_drafter
from tests.helpers.tiny import VOCABULARY, WIDTH, tiny_model, tiny_target

VARIANTS = {
    "plain": {},
    "bias, own sizes": {"bias": True, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 6},
    "draft vocabulary": {"draft_vocab_size": 40, "depth": 3},
}


def make(architecture: str = "llama", seed: int = 0, **options) -> Eagle:
    target = tiny_target(architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        chosen = EagleConfig(**options)
        tokens = torch.randperm(VOCABULARY)[: chosen.draft_vocab_size] if chosen.draft_vocab_size else None
        drafter = Eagle.new(chosen, target, tokens)
        for parameter in drafter.parameters():
            # Wide, so that what it attends to decides what it says.
            torch.nn.init.normal_(parameter, std=0.3)
    drafter = drafter.double()
    drafter.bind(target)
    return drafter


def test_it_is_the_paper_s_formula_around_the_decoder_layer_of_transformers():
    drafter = make(bias=True)
    config = LlamaConfig(
        hidden_size=WIDTH, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, rms_norm_eps=1e-6,
        attn_implementation="eager",
    )
    layer = LlamaDecoderLayer(config, 0).double()
    layer.input_layernorm = torch.nn.Identity()
    layer.load_state_dict(drafter.layer.state_dict())
    tokens_BT, features_BTF = torch.randint(0, VOCABULARY, (2, 9)), torch.randn(2, 9, WIDTH, dtype=torch.float64)
    joined = drafter.fc(torch.cat([tiny_target().embedding_weight_VF[tokens_BT], features_BTF], -1))
    positions = torch.arange(9).unsqueeze(0)
    mask = torch.full((9, 9), -torch.inf, dtype=torch.float64).triu(1)[None, None]
    angles = LlamaRotaryEmbedding(config)(joined, positions)
    state = layer(joined, attention_mask=mask, position_embeddings=angles)
    state = state if isinstance(state, torch.Tensor) else state[0]
    first = drafter(tokens_BT, features_BTF)[0]
    # transformers computes the angles in fp32.
    torch.testing.assert_close(first, state @ tiny_target().head_weight_VF.T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_drafting_agrees_with_forward(name: str):
    check_agreement_over_time(make(**VARIANTS[name]), tiny_target())


def test_agreement_of_a_drafter_made_ready():
    check_agreement_over_time(make(bias=True).for_decoding(tiny_target()), tiny_target())


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2"])
def test_contract(architecture: str):
    drafter = make(architecture, tree="dynamic", beam=3, nodes=7, depth=4)
    plans = {
        "llama": [None, Plan((3, 2, 1)), Plan((4, 2, 1), paths=3), Plan((1, 1, 1), sampled=True)],
        "gemma3": [None, Plan((2, 2), sampled=True)],
        "gpt2": [Plan((1, 1, 1, 1))],
    }
    check_drafter(lambda: drafter, tiny_target(architecture), tiny_model(architecture), plans=plans[architecture])


def test_rows_beyond_the_engine_s_cache_are_refused():
    drafter = make()
    seen = Context(
        torch.zeros(2, 1, dtype=torch.long), torch.zeros(2, 1, WIDTH, dtype=torch.float64), torch.ones(2).long(),
        torch.tensor([2, 2]), torch.arange(2), torch.zeros(2), torch.zeros(2).long(),
    )
    with pytest.raises(DraftsmithError, match=r"call attach\(cache, plan\) first"):
        drafter.propose(seen, Plan((1,)))
    drafter.attach(tiny_target().new_cache(1, 20), Plan((1,)))
    with pytest.raises(DraftsmithError, match="2 rows are drafted for at once, but there is room for 1"):
        drafter.propose(seen, Plan((1,)))


class Table(StagewiseDrafter):
    """Log-probabilities of three tokens after each path, by hand."""

    children: ClassVar = {
        (): (0.6, 0.3, 0.1),
        (0,): (0.5, 0.4, 0.1), (1,): (0.9, 0.05, 0.05), (2,): (0.4, 0.3, 0.3),
        (0, 0): (0.8, 0.1, 0.1), (0, 1): (0.4, 0.35, 0.25), (1, 0): (0.6, 0.3, 0.1),
    }
    max_depth = 3

    def begin(self, context):
        return context.root()[0], torch.full((1, 0), -1)

    def step(self, depth, state, tokens_R):
        state = state if depth == 0 else torch.cat([state, tokens_R.unsqueeze(1)], dim=1)
        paths = [tuple(row) for row in state.tolist()]
        return torch.tensor([self.children[path] for path in paths]).log(), state

    def propose(self, context, plan):
        return grow(self, context, plan)

    def default_plan(self):
        return Plan()


def test_the_dynamic_tree_is_eagle_2_s_by_hand():
    """Expansion and reranking of EAGLE-2 (arXiv:2406.16858, sections 4.1 and 4.2), worked out on paper with k = 2.

    Level 1: 0 (.6), 1 (.3), both expanded.        Level 2: 00 (.3), 01 (.24), 10 (.27), 11 (.015); 00 and 10 expanded,
    although 01 comes from the better parent.      Level 3: 000 (.24), 001 (.03), 100 (.162), 101 (.081).
    The six best of all ten: 0, 1, 00, 10, and of the two that tie at .24 both, 01 and 000.
    """
    seen = Context(
        torch.zeros(1, 1, dtype=torch.long), torch.zeros(1, 1, 1), torch.ones(1).long(), torch.ones(1).long(),
        torch.zeros(1).long(), torch.zeros(1), torch.zeros(1).long(),
    )
    plan = EagleConfig(vocab_size=3, depth=3, tree="dynamic", beam=2, nodes=6).plan()
    assert plan == Plan((2, 2, 2), beam=2, nodes=6)
    draft = Table().propose(seen, plan)
    parents, tokens = draft.parents_BN[0].tolist(), draft.tokens_BN[0].tolist()
    paths = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append((*(() if parent == ROOT else paths[parent]), token))
    assert set(paths) == {(0,), (1,), (0, 0), (1, 0), (0, 1), (0, 0, 0)}
    fewer = Table().propose(seen, Plan((2, 2, 2), beam=2, nodes=4))
    assert sorted(fewer.tokens_BN[0].tolist()) == [0, 0, 0, 1] and fewer.parents_BN[0].tolist().count(ROOT) == 2


def test_default_plans():
    assert make().default_plan() == Plan(choices=EAGLE_TREE)
    assert make(depth=3).default_plan() == Plan(choices=tuple(path for path in EAGLE_TREE if len(path) <= 3))
    assert make(depth=3, branching=(2, 1)).default_plan() == Plan((2, 1))
    assert make(depth=3, tree="chain").default_plan() == Plan((1, 1, 1))
    assert make(depth=6, tree="dynamic", beam=10, nodes=59).default_plan() == Plan((10,) * 6, beam=10, nodes=59)


def examples(seed: int = 0, positions: int = 5) -> TrainingBatch:
    generator = torch.Generator().manual_seed(seed)
    tokens_BL = torch.randint(0, VOCABULARY, (2, 16), generator=generator)
    features_BLF, _ = tiny_target().encode(tokens_BL)
    positions_BP = torch.stack([torch.randperm(10, generator=generator)[:positions].sort().values for _ in range(2)])
    return TrainingBatch(tokens_BL[:, 1:], features_BLF[:, :-1], positions_BP, seed=seed)


@pytest.mark.parametrize("name", VARIANTS)
def test_the_loss_is_the_paper_s_at_the_positions_asked_for(name: str):
    drafter, taught = make(**VARIANTS[name], noise=0.0), examples()
    loss_N, accuracy_N = drafter.losses(taught)
    states_BTF = drafter.unroll(taught.tokens_BT, taught.features_BTF, 1)[0]
    scored = torch.arange(VOCABULARY) if drafter.d2t is None else drafter.d2t
    head_WF = tiny_target().head_weight_VF[scored]
    regressions, entropies, accuracies = [], [], []
    pairs = [(b, t) for b, row in enumerate(taught.positions_BP.tolist()) for t in row]
    for b, t in pairs:
        state_F, true_F = states_BTF[b, t], taught.features_BTF[b, t + 1]
        gap_F = (state_F - true_F).abs()
        regressions.append(torch.where(gap_F < 1, gap_F**2 / 2, gap_F - 0.5).mean())
        p_W = (head_WF @ true_F).softmax(-1)
        entropies.append(-(p_W * (head_WF @ state_F).log_softmax(-1)).sum())
        accuracies.append(scored[(head_WF @ state_F).argmax()] == taught.tokens_BT[b, t + 1])
    expected = torch.stack(regressions).mean() + 0.1 * torch.stack(entropies).mean()
    torch.testing.assert_close(loss_N, expected.unsqueeze(0).to(loss_N), rtol=1e-5, atol=1e-5)
    assert accuracy_N.item() == pytest.approx(sum(bool(accuracy) for accuracy in accuracies) / 10)


def test_noise_is_a_function_of_the_training_batch():
    drafter, quiet = make(), make(noise=0.0)
    again, other = drafter.losses(examples())[0], drafter.losses(examples())[0]
    assert torch.equal(again, other) and not torch.equal(again, quiet.losses(examples())[0])


def train(folder: Path, data: Path, *overrides: str, resume: bool = False, dies_at: int | None = None):
    def evaluate(drafter: Eagle) -> dict[str, float]:
        seen.append(drafter)
        if len(seen) == dies_at:
            raise KeyboardInterrupt
        return {"tokens_per_step": 1.0}

    seen: list[Eagle] = []
    settings = (
        "drafter={family: eagle, depth: 3, draft_vocab_size: 64}",
        "stage1.positions_per_sequence=12", *overrides
    )
    return run_recipe(
        toy.recipe(folder, data, *settings), target=toy.target(), generate=toy.generate, evaluate=evaluate,
        resume=resume,
    )


def losses_of(folder: Path) -> list[float]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [record["loss"] for record in records if "loss" in record]


def test_training_lowers_the_loss_and_resumes_to_the_same_weights(tmp_path: Path):
    data = toy.write_data(tmp_path)
    steps = ("stage1.steps=30", "stage2.steps=2", "stage1.rate=0.003", "output.save_every=8", "evaluation.every=20")
    whole = train(tmp_path / "whole", data, *steps)
    losses = losses_of(whole.folder)
    assert losses[29] < 0.8 * losses[0]
    assert isinstance(load_drafter(whole.drafter, toy.target()), Eagle)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "part", data, *steps, dies_at=2)
    train(tmp_path / "part", data, *steps, resume=True)
    assert toy.outcome(tmp_path / "part") == toy.outcome(tmp_path / "whole")


def test_a_whole_drafter_starts_one_that_scores_fewer_tokens(tmp_path: Path):
    make().save_pretrained(tmp_path / "x", tiny_target().facts())
    fewer = make(seed=1, draft_vocab_size=40)
    fewer.start_from(tmp_path / "x", tiny_target())
    assert torch.equal(fewer.fc.weight.float(), make().fc.weight.float())
    with pytest.raises(DraftsmithError, match=r"drafter.head_dim is 4, but drafter.init_from .* has 8; set"):
        make(head_dim=4).start_from(tmp_path / "x", tiny_target())


@pytest.mark.parametrize("name", VARIANTS)
def test_round_trip(tmp_path: Path, name: str):
    drafter = make(**VARIANTS[name], tree="dynamic", beam=3)
    drafter.save_pretrained(tmp_path / "x", tiny_target().facts())
    back = Eagle.from_pretrained(tmp_path / "x", tiny_target())
    assert back.describe() == drafter.describe() and back.config == drafter.config
    assert back.state_dict().keys() == drafter.state_dict().keys()
    for key, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[key]), key
    check_agreement_over_time(back, tiny_target())


def published(folder: Path, **changes) -> Path:
    """Write a checkpoint as the authors' are: a Llama config, and the target's embedding among the tensors."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"], "bias": True, "hidden_act": "silu", "hidden_size": WIDTH,
        "intermediate_size": 48, "max_position_embeddings": 128, "model_type": "llama", "num_attention_heads": 4,
        "num_hidden_layers": 1, "num_key_value_heads": 2, "pretraining_tp": 1, "rms_norm_eps": 1e-05,
        "rope_scaling": None, "rope_theta": 500000.0, "tie_word_embeddings": False, "vocab_size": VOCABULARY,
    } | changes
    (folder / "config.json").write_text(json.dumps(config))
    part = "layers.0."
    shapes = {
        "embed_tokens.weight": (VOCABULARY, WIDTH), "fc.weight": (WIDTH, 2 * WIDTH), "fc.bias": (WIDTH,),
        part + "self_attn.q_proj.weight": (32, WIDTH), part + "self_attn.k_proj.weight": (16, WIDTH),
        part + "self_attn.v_proj.weight": (16, WIDTH), part + "self_attn.o_proj.weight": (WIDTH, 32),
        part + "mlp.gate_proj.weight": (48, WIDTH), part + "mlp.up_proj.weight": (48, WIDTH),
        part + "mlp.down_proj.weight": (WIDTH, 48), part + "post_attention_layernorm.weight": (WIDTH,),
    }
    tensors = {name: torch.randn(shape).half() for name, shape in shapes.items()}
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder


def test_published_layout(tmp_path: Path):
    folder = published(tmp_path / "hub")
    drafter = load_drafter(folder, tiny_target())
    assert isinstance(drafter, Eagle) and drafter.config.rope_parameters["rope_theta"] == 500000.0
    check_agreement_over_time(drafter, tiny_target())
    Eagle.from_pretrained(folder, tiny_target()).save_pretrained(tmp_path / "own", tiny_target().facts())
    before, after = (safetensors.torch.load_file(tmp_path / f / "model.safetensors") for f in ("hub", "own"))
    assert after.keys() == before.keys() - {"embed_tokens.weight"}
    assert all(torch.equal(tensor, before[name]) and tensor.dtype == torch.half for name, tensor in after.items())


@pytest.mark.parametrize("biased", [True, False])
def test_a_folder_whose_config_lacks_bias_is_told_by_its_tensors(tmp_path: Path, biased: bool):
    folder = published(tmp_path / "hub")
    config = json.loads((folder / "config.json").read_text())
    del config["bias"]
    (folder / "config.json").write_text(json.dumps(config))
    if not biased:
        tensors = safetensors.torch.load_file(folder / "model.safetensors")
        del tensors["fc.bias"]
        safetensors.torch.save_file(tensors, folder / "model.safetensors")
    drafter = load_drafter(folder, tiny_target())
    assert isinstance(drafter, Eagle) and (drafter.fc.bias is not None) == biased
    (folder / "model.safetensors").unlink()
    assert family_of(folder).name == "draft-model", "without its tensors it is a Llama like any other"


def test_a_llama_of_one_layer_is_no_eagle(tmp_path: Path):
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
    ))
    model.save_pretrained(tmp_path / "small")
    assert isinstance(load_drafter(tmp_path / "small", tiny_target()), DraftModel)


def test_refusals(tmp_path: Path):
    def refused(message: str, target: Target | None = None, **changes) -> None:
        folder = published(tmp_path / str(len(list(tmp_path.iterdir()))), **changes)
        with pytest.raises(DraftsmithError, match=message):
            Eagle.from_pretrained(folder, target or tiny_target())

    refused("drafts for a target with hidden size 16, but 'tiny-llama' has 32", hidden_size=16)
    refused("with a vocabulary of 80, but", vocab_size=80)
    refused("has the activation 'gelu'; silu is supported", hidden_act="gelu")
    refused("it must be of a rope_type among default", rope_scaling={"type": "dynamic", "factor": 2.0})
    refused("num_attention_heads is 4; it must be a multiple of num_key_value_heads, which is 3", num_key_value_heads=3)
    refused("lacks the tensor fc.bias|has a tensor 'fc.bias'", bias=False)
    refused("tree is 'bush'; give 'chain', 'static' or 'dynamic'", tree="bush")
    refused(r"branching is \(2, 2\); it must be at most depth = 1 numbers", depth=1, branching=[2, 2])
    with pytest.raises(DraftsmithError, match="borrows its target's embedding and head"):
        Eagle.from_pretrained(tmp_path / "0")


def test_tables_of_the_target_are_not_saved_or_trained():
    drafter = make()
    assert drafter.head.weight.data_ptr() == tiny_target("llama").head_weight_VF.data_ptr()
    assert not any(name.startswith(("embedding", "head")) for name in drafter.state_dict())
    assert F.embedding(torch.tensor([3]), drafter.embedding.weight).equal(tiny_target().embedding_weight_VF[3:4])


def test_a_packed_drafter_decodes_on_a_native_target():
    target = Target.from_pretrained(demo_target(), dtype="bf16")
    torch.manual_seed(0)
    drafter = Eagle.new(EagleConfig(draft_vocab_size=512), target, torch.arange(512)).for_decoding(target)
    questions = [list(range(40, 40 + n)) for n in (5, 30, 12)]
    engine = Engine(target, drafter, max_batch=2)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    plain = [completion.tokens for completion in engine.generate(questions, params, plan=NO_DRAFT)]
    for plan in (None, Plan((1,) * 5)):
        assert [completion.tokens for completion in engine.generate(questions, params, plan=plan)] == plain
    with pytest.raises(DraftsmithError, match="packed for decoding; save the one it was made from"):
        drafter.save_pretrained(Path("nowhere"), target.facts())
