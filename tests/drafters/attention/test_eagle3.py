"""EAGLE-3: the formula, drafting against training, the contract, training as it drafts, and the published layouts."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from draftsmith.assets import demo_target
from draftsmith.drafters.attention.eagle import Eagle
from draftsmith.drafters.attention.eagle3 import Eagle3
from draftsmith.drafters.attention.eagle_config import Eagle3Config, default_taps
from draftsmith.drafters.registry import load_drafter
from draftsmith.drafters.trainable.batch import TrainingBatch
from draftsmith.engine import Engine
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target
from draftsmith.training.train import train as run_recipe
from draftsmith.types import DraftsmithError, SamplingParams
from tests.helpers import training_toy as toy
from tests.helpers.agreement import check_agreement_over_time
from tests.helpers.contract import check_drafter
from tests.helpers.tiny import VOCABULARY, WIDTH, tiny_model, tiny_target

VARIANTS = {
    "plain": {},
    "norm before residual, one tap": {"norm_before_residual": True, "taps": (1,), "depth": 3},
    "draft vocabulary": {"draft_vocab_size": 40, "num_key_value_heads": 4, "depth": 3},
}


def make(architecture: str = "llama", seed: int = 0, **options) -> Eagle3:
    target = tiny_target(architecture)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        chosen = Eagle3Config(**{"beam": 3, "nodes": 7, **options})
        tokens = torch.randperm(VOCABULARY)[: chosen.draft_vocab_size] if chosen.draft_vocab_size else None
        drafter = Eagle3.new(chosen, target, tokens)
        for parameter in drafter.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    drafter = drafter.double()
    drafter.bind(target)
    return drafter


@pytest.mark.parametrize("early", [False, True])
def test_it_is_the_published_formula(early: bool):
    """Two depths at one position, written out with loops and nothing of the module but its weights."""
    drafter = make(norm_before_residual=early)
    w = {name: parameter.detach() for name, parameter in drafter.named_parameters()}
    w |= {name.removeprefix("midlayer.").removeprefix("self_attn."): w[name] for name in list(w)}
    tokens_T = torch.randint(0, VOCABULARY, (6,))
    features_TF = torch.randn(6, 2 * WIDTH, dtype=torch.float64)

    def norm(x, name):
        return x / (x.square().mean() + 1e-6).sqrt() * w[f"{name}.weight"]

    def turn(heads_HW, position):
        half = heads_HW.shape[1] // 2
        angles = position * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        one, two = heads_HW[:, :half], heads_HW[:, half:]
        return torch.cat([one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], 1)

    def entry(token, state, position):
        normal = norm(state, "hidden_norm")
        x = torch.cat([norm(tiny_target().embedding_weight_VF[token], "input_layernorm"), normal])
        q, k, v = ((w[f"{name}_proj.weight"] @ x).view(-1, 8) for name in "qkv")
        return turn(q, position), turn(k, position), v, normal if early else state

    def finish(q_HW, entries, residual):
        heads = []
        for head in range(4):
            scores = torch.stack([q_HW[head] @ k[head // 2] for _, k, _, _ in entries]) / 8**0.5
            heads.append(sum(p * v[head // 2] for p, (_, _, v, _) in zip(scores.softmax(0), entries, strict=True)))
        state = residual + w["o_proj.weight"] @ torch.cat(heads)
        x = norm(state, "post_attention_layernorm")
        inner = torch.nn.functional.silu(w["mlp.gate_proj.weight"] @ x) * (w["mlp.up_proj.weight"] @ x)
        return state + w["mlp.down_proj.weight"] @ inner

    root = 3
    entries = [entry(tokens_T[t], w["fc.weight"] @ features_TF[t], t) for t in range(root + 1)]
    first = finish(entries[-1][0], entries, entries[-1][3])
    entries.append(entry(tokens_T[root + 1], first, root + 1))
    second = finish(entries[-1][0], entries, entries[-1][3])
    logits = drafter(tokens_T.unsqueeze(0), features_TF.unsqueeze(0))
    for depth, state in enumerate((first, second)):
        torch.testing.assert_close(
            logits[depth][0, root], w["lm_head.weight"] @ norm(state, "norm"), rtol=1e-6, atol=1e-6
        )


@pytest.mark.parametrize("name", VARIANTS)
def test_drafting_agrees_with_forward(name: str):
    check_agreement_over_time(make(**VARIANTS[name]), tiny_target())


def test_agreement_of_a_drafter_made_ready():
    check_agreement_over_time(make(draft_vocab_size=40, depth=3).for_decoding(tiny_target()), tiny_target())


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gpt_neox"])
def test_contract(architecture: str):
    drafter = make(architecture, draft_vocab_size=60, depth=4)
    plans = {
        "llama": [None, Plan((3, 2, 1)), Plan((4, 2, 1), paths=3), Plan((1, 1, 1), sampled=True)],
        "qwen3": [None, Plan((2, 2), sampled=True)],
        "gpt_neox": [Plan((1, 1, 1, 1))],
    }
    check_drafter(lambda: drafter, tiny_target(architecture), tiny_model(architecture), plans=plans[architecture])


def test_default_taps_are_the_published_ones():
    """transformers' hidden_states 2, L / 2 and L - 3 are the outputs of the layers before."""
    assert default_taps(32) == (1, 15, 28)
    assert default_taps(8) == (1, 3, 4)
    assert (default_taps(3), default_taps(2), default_taps(1)) == ((0, 1, 2), (0, 1), (0,))
    assert make().taps == (0, 1)
    with pytest.raises(DraftsmithError, match=r"taps is \(0, 5\), but the target's layers are 0 to 1"):
        make(taps=(0, 5))


def examples(positions_BP: torch.Tensor, weight: float = 0.0) -> TrainingBatch:
    tokens_BL = torch.randint(0, VOCABULARY, (2, 16), generator=torch.Generator().manual_seed(0))
    features_BLF, logits_BLV = tiny_target().encode(tokens_BL, (0, 1), logits=True)
    return TrainingBatch(tokens_BL[:, 1:], features_BLF[:, :-1], positions_BP, logits_BLV[:, 1:], weight)


@pytest.mark.parametrize("weight", [0.0, 0.6])
def test_training_sees_what_drafting_sees(weight: float):
    """The loss at the positions asked for is that of `forward`, which its agreement ties to decoding."""
    drafter = make(draft_vocab_size=40, depth=3)
    positions_BP = torch.tensor([[0, 3, 9], [2, 5, 8]])
    taught = examples(positions_BP, weight)
    loss_N, _ = drafter.losses(taught)
    logits = drafter(taught.tokens_BT, taught.features_BTF)
    labels_RN = taught.labels_RN(3, drafter.d2t, VOCABULARY)
    batch_B1 = torch.arange(2).unsqueeze(1)
    for depth in range(3):
        scores_RW = logits[depth][batch_B1, positions_BP].flatten(0, 1)[:, drafter.d2t]
        expected, _ = taught.loss_and_accuracy(depth, scores_RW, labels_RN, taught.soft_labels(3, drafter.d2t))
        torch.testing.assert_close(loss_N[depth], expected, rtol=1e-5, atol=1e-6)
    # The states that predict later tokens are never looked at.
    blind = TrainingBatch(taught.tokens_BT, taught.features_BTF.clone(), positions_BP[:1, :2].expand(2, -1))
    blind.features_BTF[:, 4:] = 1e6
    clear = TrainingBatch(taught.tokens_BT, taught.features_BTF, blind.positions_BP)
    assert torch.equal(drafter.losses(blind)[0], drafter.losses(clear)[0])


def test_gradients_flow_through_the_depths():
    drafter = make(depth=3)
    loss_N, _ = drafter.losses(examples(torch.tensor([[1, 4], [2, 6]])))
    (gradient,) = torch.autograd.grad(loss_N[2], drafter.fc.weight)
    assert bool(gradient.abs().sum() > 0)


def train(folder: Path, data: Path, *overrides: str, resume: bool = False, dies_at: int | None = None):
    def evaluate(drafter: Eagle3) -> dict[str, float]:
        seen.append(drafter)
        if len(seen) == dies_at:
            raise KeyboardInterrupt
        return {"tokens_per_step": 1.0}

    seen: list[Eagle3] = []
    settings = (
        "drafter={family: eagle3, depth: 3, draft_vocab_size: 64}", "stage1.positions_per_sequence=12", *overrides,
    )
    return run_recipe(
        toy.recipe(folder, data, *settings), target=toy.target(), generate=toy.generate, evaluate=evaluate,
        resume=resume,
    )


def test_training_lowers_the_loss_and_resumes_to_the_same_weights(tmp_path: Path):
    data = toy.write_data(tmp_path)
    steps = ("stage1.steps=24", "stage2.steps=2", "stage1.rate=0.003", "evaluation.every=16", "distillation.weight=0.5")
    whole = train(tmp_path / "whole", data, *steps)
    records = map(json.loads, (whole.folder / "metrics.jsonl").read_text().splitlines())
    losses = [record["loss"] for record in records if "loss" in record]
    assert losses[23] < 0.8 * losses[0]
    assert isinstance(load_drafter(whole.drafter, toy.target()), Eagle3)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "part", data, *steps, dies_at=2)
    train(tmp_path / "part", data, *steps, resume=True)
    assert toy.outcome(tmp_path / "part") == toy.outcome(tmp_path / "whole")


def test_a_whole_drafter_starts_one_that_scores_fewer_tokens(tmp_path: Path):
    whole, fewer = make(), make(seed=1, draft_vocab_size=40)
    whole.save_pretrained(tmp_path / "x", tiny_target().facts())
    fewer.start_from(tmp_path / "x", tiny_target())
    assert torch.equal(fewer.lm_head.weight.float(), whole.lm_head.weight[fewer.d2t].float())
    with pytest.raises(DraftsmithError, match=r"drafter.norm_before_residual is True, but drafter.init_from"):
        make(norm_before_residual=True).start_from(tmp_path / "x", tiny_target())


@pytest.mark.parametrize("name", VARIANTS)
def test_round_trip(tmp_path: Path, name: str):
    drafter = make(**VARIANTS[name])
    drafter.save_pretrained(tmp_path / "x", tiny_target().facts())
    back = Eagle3.from_pretrained(tmp_path / "x", tiny_target())
    assert back.describe() == drafter.describe() and back.config == drafter.config and back.taps == drafter.taps
    assert back.state_dict().keys() == drafter.state_dict().keys()
    for key, tensor in drafter.state_dict().items():
        assert torch.equal(tensor, back.state_dict()[key]), key
    assert isinstance(load_drafter(tmp_path / "x", tiny_target()), Eagle3)


def published(folder: Path, tensors_changes: dict | None = None, **changes) -> Path:
    """Write a checkpoint as the published ones are: token 3 i is scored as i, so d2t[i] is 2 i."""
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLMEagle3"], "bos_token_id": 1, "draft_vocab_size": 32, "eos_token_id": 2,
        "hidden_act": "silu", "hidden_size": WIDTH, "intermediate_size": 48, "max_position_embeddings": 128,
        "model_type": "llama", "num_attention_heads": 4, "num_hidden_layers": 1, "num_key_value_heads": 2,
        "rms_norm_eps": 1e-05, "tie_word_embeddings": False, "torch_dtype": "float16", "vocab_size": VOCABULARY,
    } | changes
    (folder / "config.json").write_text(json.dumps(config))
    shapes = {
        "fc.weight": (WIDTH, 2 * WIDTH), "norm.weight": (WIDTH,), "lm_head.weight": (32, WIDTH),
        "midlayer.hidden_norm.weight": (WIDTH,), "midlayer.input_layernorm.weight": (WIDTH,),
        "midlayer.post_attention_layernorm.weight": (WIDTH,), "midlayer.self_attn.q_proj.weight": (32, 2 * WIDTH),
        "midlayer.self_attn.k_proj.weight": (16, 2 * WIDTH), "midlayer.self_attn.v_proj.weight": (16, 2 * WIDTH),
        "midlayer.self_attn.o_proj.weight": (WIDTH, 32), "midlayer.mlp.gate_proj.weight": (48, WIDTH),
        "midlayer.mlp.up_proj.weight": (48, WIDTH), "midlayer.mlp.down_proj.weight": (WIDTH, 48),
    }
    tensors = {name: torch.randn(shape).half() for name, shape in shapes.items()}
    tensors |= {"d2t": 2 * torch.arange(32), "t2d": torch.arange(VOCABULARY) % 3 == 0} | (tensors_changes or {})
    safetensors.torch.save_file(tensors, folder / "model.safetensors")
    return folder


def test_published_layout_with_offsets(tmp_path: Path):
    folder = published(tmp_path / "hub", {"embed_tokens.weight": torch.zeros(VOCABULARY, WIDTH).half()})
    drafter = load_drafter(folder, tiny_target())
    assert isinstance(drafter, Eagle3) and torch.equal(drafter.d2t, 3 * torch.arange(32))
    check_agreement_over_time(drafter, tiny_target())
    Eagle3.from_pretrained(folder, tiny_target()).save_pretrained(tmp_path / "own", tiny_target().facts())
    before, after = (safetensors.torch.load_file(tmp_path / f / "model.safetensors") for f in ("hub", "own"))
    assert after.keys() == before.keys() - {"embed_tokens.weight"}
    assert all(torch.equal(tensor, before[name]) and tensor.dtype == before[name].dtype
               for name, tensor in after.items())
    written = json.loads((tmp_path / "own/config.json").read_text())
    assert written["eagle_aux_hidden_state_layer_ids"] == [1, 2]
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1]


def test_the_authors_training_config_is_told_from_eagle_1(tmp_path: Path):
    folder = published(tmp_path / "hub", architectures=["LlamaForCausalLM"], bias=False)
    assert isinstance(load_drafter(folder, tiny_target()), Eagle3)
    config = json.loads((folder / "config.json").read_text())
    assert not Eagle.recognises(config)


def test_speculators_layout(tmp_path: Path):
    plain = Eagle3.from_pretrained(published(tmp_path / "hub"), tiny_target())
    folder = published(tmp_path / "speculators")
    config = json.loads((folder / "config.json").read_text())
    own = {"architectures", "draft_vocab_size"}
    config = {name: config[name] for name in own} | {
        "speculators_model_type": "eagle3", "norm_before_residual": True, "eagle_aux_hidden_state_layer_ids": [1, 2],
        "transformer_layer_config": {name: value for name, value in config.items() if name not in own},
    }
    (folder / "config.json").write_text(json.dumps(config))
    tensors = safetensors.torch.load_file(tmp_path / "hub/model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(renamed, folder / "model.safetensors")
    drafter = Eagle3.from_pretrained(folder, tiny_target())
    assert drafter.config.norm_before_residual and not plain.config.norm_before_residual and drafter.taps == (0, 1)
    assert all(torch.equal(tensor, plain.state_dict()[name]) for name, tensor in drafter.state_dict().items())


def test_refusals(tmp_path: Path):
    def refused(message: str, tensors: dict | None = None, **changes) -> None:
        folder = published(tmp_path / str(len(list(tmp_path.iterdir()))), tensors, **changes)
        with pytest.raises(DraftsmithError, match=message):
            Eagle3.from_pretrained(folder, tiny_target())

    refused("d2t and t2d in .* name different tokens", {"d2t": torch.arange(32)})
    refused("names a token outside the 96", {"d2t": 4 * torch.arange(32), "t2d": torch.arange(160) % 5 == 0})
    refused("states 32 wide for a target of 64; use a drafter as wide as its target", target_hidden_size=64)
    refused("with a vocabulary of 80, but 'tiny-llama' has 96", vocab_size=80)
    refused("fuses states in another way", eagle_config={"use_aux_hidden_state": False})
    refused(r"taps is \(0, 7\), but the target's layers are 0 to 1", eagle_aux_hidden_state_layer_ids=[1, 8])
    refused("has a tensor 'other' that is not in its config.json", {"other": torch.zeros(1)})
    with pytest.raises(DraftsmithError, match="borrows its target's embedding; load it with that target"):
        Eagle3.from_pretrained(published(tmp_path / "whole"))


def test_a_packed_drafter_decodes_on_a_native_target():
    target = Target.from_pretrained(demo_target(), dtype="bf16")
    torch.manual_seed(0)
    drafter = Eagle3.new(Eagle3Config(draft_vocab_size=512), target, torch.arange(512)).for_decoding(target)
    assert drafter.taps == (1, 3, 4)
    questions = [list(range(40, 40 + n)) for n in (5, 30, 12)]
    engine = Engine(target, drafter, max_batch=2)
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    plain = [completion.tokens for completion in engine.generate(questions, params, plan=NO_DRAFT)]
    for plan in (None, Plan((1,) * 5)):
        assert [completion.tokens for completion in engine.generate(questions, params, plan=plan)] == plain
