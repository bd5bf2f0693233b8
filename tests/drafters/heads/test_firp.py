"""FIRP: future intermediate states through the target's own last layers, drafting and training alike."""

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

from draftsmith import assets
from draftsmith.drafters.heads.firp import FIRPDrafter
from draftsmith.drafters.heads.firp_config import FAMILY, FIRPConfig
from draftsmith.drafters.registry import load_drafter
from draftsmith.drafters.trainable.batch import TrainingBatch
from draftsmith.engine import Engine
from draftsmith.plan import Plan
from draftsmith.targets import Target, UpperLayers
from draftsmith.training.recipe import load_recipe
from draftsmith.types import Context, DraftsmithError, SamplingParams, TargetFacts
from tests.helpers import training_toy as toy
from tests.helpers.contract import CheckedDrafter, check_drafter, check_forward_agreement
from tests.helpers.family_training import check_training
from tests.helpers.tiny import ARCHITECTURES, VOCABULARY, WIDTH, prompts, tiny_model, tiny_target

FACTS = TargetFacts(WIDTH, VOCABULARY, None, "toy")


def make(architecture: str = "llama", seed: int = 0, **options) -> FIRPDrafter:
    """Return a drafter whose maps differ enough that depths guess different tokens."""
    torch.manual_seed(seed)
    options = {"layer": 0, "n_predict": 4, **options}
    tokens = torch.randperm(VOCABULARY)[: options["draft_vocab_size"]] if "draft_vocab_size" in options else None
    target = tiny_target(architecture)
    drafter = FAMILY.make(FAMILY.config.read(options, ""), target, tokens)
    assert isinstance(drafter, FIRPDrafter)
    with torch.no_grad():
        for parameter in drafter.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    drafter.double().bind(target)
    return drafter


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_the_upper_layers_go_on_as_the_target_does(architecture: str):
    target = tiny_target(architecture)
    tokens_BT = torch.tensor(prompts(1, shortest=12, longest=12) * 2)
    states_BTF, logits_BTV = target.encode(tokens_BT, (0, -1), logits=True)
    entry_BTF, own_BTF = states_BTF.chunk(2, dim=-1)
    upper = UpperLayers(target, 0)
    final_BTF = upper.read_text(entry_BTF, upper.new_cache(2, 12))
    torch.testing.assert_close(final_BTF, own_BTF)
    torch.testing.assert_close(upper.head(final_BTF), logits_BTV)
    after_BTF, _ = target.encode(tokens_BT, (0, -1))
    assert torch.equal(after_BTF, states_BTF), "the target reads as before"


@pytest.mark.parametrize("architecture", ["llama", "gemma3", "gpt2"])
def test_a_perfect_map_drafts_what_the_target_says(architecture: str):
    """If the guessed states were the true ones, the draft would be the target's own text."""

    class Oracle(nn.Module):
        """Returns the true outputs of the layer at the next positions, wherever the text stands."""

        def __init__(self, depth: int) -> None:
            super().__init__()
            self.depth = depth

        def forward(self, roots_BF: torch.Tensor) -> torch.Tensor:
            distances_BT = (roots_BF.unsqueeze(1) - truth_1TF).norm(dim=-1)
            here_B = distances_BT.argmin(dim=1)
            assert distances_BT.min() < 1e-9
            return truth_1TF[0, (here_B + 1 + self.depth).clamp(max=truth_1TF.shape[1] - 1)]

    target, question = tiny_target(architecture), prompts(1, seed=5)[0]
    rules = SamplingParams(max_tokens=25)
    answer = Engine(target).generate([question], rules)[0].tokens
    truth_1TF, _ = target.encode(torch.tensor([question + answer]), (0,))
    drafter = make(architecture).for_decoding(target)
    drafter.maps = nn.ModuleList(Oracle(depth) for depth in range(4))
    found = Engine(target, drafter).generate([question], rules)[0]
    assert found.tokens == answer
    assert found.accepted_lengths[:4] == [4, 4, 4, 4]


@pytest.mark.parametrize(
    ("architecture", "options"),
    [("llama", {}), ("llama", {"draft_vocab_size": 40}), ("gemma3", {"layer": 1}), ("mistral", {}), ("gpt2", {})],
    ids=["llama", "draft vocabulary", "gemma3", "mistral", "gpt2"],
)
def test_a_greedy_proposal_is_what_forward_predicts(architecture: str, options: dict):
    check_forward_agreement(make(architecture, **options), tiny_target(architecture))


PLANS = (
    None, Plan((2, 2, 1)), Plan((3, 2, 1), paths=3), Plan((3, 3, 3), beam=2, nodes=7), Plan((1,) * 4, sampled=True),
    Plan((2, 2), sampled=True),
)


@pytest.mark.parametrize("architecture", ["llama", pytest.param("gemma3", marks=pytest.mark.slow)])
def test_contract(architecture: str):
    target = tiny_target(architecture)
    check_drafter(
        lambda: make(architecture).for_decoding(target), target, tiny_model(architecture), PLANS
    )


def test_a_tree_is_the_product_of_the_depths():
    target = tiny_target()
    drafter = make(branching=(2, 3), n_predict=3, n_candidates=6).for_decoding(target)
    plan = drafter.default_plan()
    assert plan == Plan((2, 3, 1), paths=6) and make().default_plan() == Plan((1, 1, 1, 1))
    checked = CheckedDrafter(drafter, target)
    Engine(target, checked).generate([[1, 2, 3]], SamplingParams(max_tokens=6))
    assert checked.drafts
    for draft in checked.drafts:
        tokens, parents = draft.tokens_BN[0].tolist(), draft.parents_BN[0].tolist()
        families: dict[int, set[int]] = {}
        for token, parent in zip(tokens, parents, strict=True):
            families.setdefault(parent, set()).add(token)
        second = [families[node] for node, parent in enumerate(parents) if parent == -1]
        assert len(second) == 2 and second[0] == second[1] and len(second[0]) == 3


@pytest.mark.parametrize("vocabulary", [0, 40])
def test_losses_are_those_of_forward(vocabulary: int):
    drafter = make(n_predict=2, state_weight=0.5, **({"draft_vocab_size": vocabulary} if vocabulary else {}))
    target = tiny_target()
    tokens_BL = torch.randint(0, VOCABULARY, (3, 14))
    features_BLF, logits_BLV = target.encode(tokens_BL, drafter.taps, logits=True)
    positions_BP = torch.tensor([[0, 2, 7], [1, 5, 10], [3, 4, 9]])
    work = TrainingBatch(tokens_BL[:, 1:], features_BLF[:, :-1], positions_BP, logits_BLV[:, 1:], weight=0.3)
    loss_N, accuracy_N = drafter.losses(work)
    logits = drafter(work.tokens_BT, work.features_BTF)
    soft, labels_RN = work.soft_labels(2, drafter.d2t), work.labels_RN(2, drafter.d2t, VOCABULARY)
    batch_B1 = torch.arange(3).unsqueeze(1)
    for depth in range(2):
        said_RV = logits[depth][batch_B1, positions_BP].flatten(0, 1)
        if vocabulary:
            said_RV = said_RV[:, drafter.d2t]
        loss, accuracy = work.loss_and_accuracy(depth, said_RV, labels_RN, soft)
        roots_RF = features_BLF[batch_B1, positions_BP].flatten(0, 1)
        true_RF = features_BLF[batch_B1, positions_BP + 1 + depth].flatten(0, 1)
        error_R = (drafter.maps[depth](roots_RF) - true_RF).square().sum(-1) / true_RF.square().sum(-1)
        torch.testing.assert_close(loss_N[depth], loss + 0.5 * error_R.mean(), check_dtype=False)
        torch.testing.assert_close(accuracy_N[depth], accuracy)


def test_gradients_reach_every_map_through_the_layers_above():
    """The first map also through the keys and values that later guesses attend to; the target gets none."""
    drafter, target = make(n_predict=2, state_weight=0.0), tiny_target()
    tokens_BL = torch.randint(0, VOCABULARY, (2, 10))
    features_BLF, _ = target.encode(tokens_BL, drafter.taps)
    work = TrainingBatch(tokens_BL[:, 1:], features_BLF[:, :-1], torch.tensor([[1, 4], [2, 6]]))
    weight = drafter.maps[0].weight
    (through_keys,) = torch.autograd.grad(drafter.losses(work)[0][1], weight)
    assert through_keys.norm() > 1e-6
    direction = through_keys / through_keys.norm()
    with torch.no_grad():
        slope = []
        for sign in (1, -1):
            weight.add_(sign * 1e-3 * direction)
            slope.append(drafter.losses(work)[0][1])
            weight.sub_(sign * 1e-3 * direction)
    assert ((slope[0] - slope[1]) / 2e-3).item() == pytest.approx(through_keys.norm().item(), rel=1e-2)
    assert not any(p.requires_grad for p in target.model.parameters())


@pytest.mark.parametrize("options", [{}, {"draft_vocab_size": 40, "branching": (2,)}], ids=["whole", "limited"])
def test_round_trip(tmp_path: Path, options: dict):
    drafter = make(**options)
    drafter.save_pretrained(tmp_path / "x", tiny_target("llama").facts())
    names = safetensors.torch.load_file(tmp_path / "x/model.safetensors").keys()
    assert names == {*(f"maps.{d}.weight" for d in range(4)), *(["d2t"] if options else [])}
    back = load_drafter(tmp_path / "x", tiny_target("llama"))
    assert isinstance(back, FIRPDrafter) and back.config == drafter.config and back.taps == (0,)
    state = back.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in drafter.state_dict().items())


def test_a_whole_drafter_may_become_limited(tmp_path: Path):
    whole = make().float()
    whole.save_pretrained(tmp_path / "x", tiny_target("llama").facts())
    fewer = make(draft_vocab_size=40).float()
    fewer.start_from(tmp_path / "x", tiny_target("llama"))
    assert all(torch.equal(a.weight, b.weight) for a, b in zip(fewer.maps, whole.maps, strict=True))
    assert len(fewer.d2t) == 40


def test_compiled_engines_write_the_same():
    """Recorded operations of the target, and rows padded to a bucket, beside a drafter that is not recorded."""
    target, questions = tiny_target(), prompts(3, seed=2)
    rules = [SamplingParams(max_tokens=n) for n in (6, 9, 14)]
    texts = []
    for level in ("off", "trace"):
        engine = Engine(target, make().for_decoding(target), plan=Plan((2, 1)), max_batch=3, compile=level)
        texts.append([c.tokens for c in engine.generate(questions, rules)])
    assert texts[0] == texts[1]


def test_bad_checkpoints_and_options_are_refused(tmp_path: Path):
    make().save_pretrained(tmp_path / "x", FACTS)
    with pytest.raises(DraftsmithError, match="borrows its target's last layers; load it with that target"):
        FIRPDrafter.from_pretrained(tmp_path / "x")
    values = json.loads((tmp_path / "x/config.json").read_text())
    (tmp_path / "x/manifest.json").unlink()
    for changes, message in (
        ({"layer": 1}, "layer is 1, but tiny-llama has 2 layers, of which at least one has to follow; use 0 to 0"),
        ({"layer": None}, r"config\.json lacks layer; use a whole config"),
        ({"n_predict": 5}, r"lacks the tensor maps\.4\.weight"),
        ({"n_predict": 3}, r"has a tensor 'maps\.3\.weight' that is not in its config\.json"),
        ({"branching": [2] * 5}, "branching is .* at most n_predict = 4 numbers"),
        ({"hidden_size": 16}, "with hidden size 16, but 'tiny-llama' has 32"),
    ):
        changed = {key: value for key, value in (values | changes).items() if value is not None}
        (tmp_path / "x/config.json").write_text(json.dumps(changed))
        with pytest.raises(DraftsmithError, match=message):
            load_drafter(tmp_path / "x", tiny_target())
    with pytest.raises(DraftsmithError, match="n_predict is 33"):
        make(n_predict=33)
    unbound = FIRPDrafter(FIRPConfig().for_target(tiny_target()))
    with pytest.raises(DraftsmithError, match="bind it to that target"):
        unbound(torch.zeros((1, 2), dtype=torch.long), torch.zeros(1, 2, WIDTH))


def test_the_middle_layer_is_the_default():
    assert FAMILY.make(FAMILY.config.read({}, ""), tiny_target("gemma3"), None).taps == (1,)
    drafter = load_recipe(Path(__file__).parents[3] / "recipes" / "firp.yaml").drafter
    assert drafter.family == "firp" and drafter.config.n_predict >= 2


@pytest.mark.parametrize(
    ("options", "overrides"),
    [
        pytest.param(
            {"n_predict": 2}, ("distillation.weight=0.7", "optimizer.precision=bf16"), marks=pytest.mark.slow
        ),
        ({"n_predict": 2, "draft_vocab_size": 60, "layer": 0}, ("stage1.positions_per_sequence=8",)),
    ],
    ids=["distilled", "limited"],
)
def test_training(tmp_path: Path, options: dict, overrides: tuple[str, ...]):
    drafter = check_training(tmp_path, {"family": "firp", **options}, *overrides)
    before = FAMILY.make(FAMILY.config.read(options, ""), toy.target(), drafter.d2t)
    assert not torch.equal(before.maps[0].weight, drafter.maps[0].weight)


@pytest.mark.parametrize("limit", [0, 512])
def test_packed_for_the_demo_target(limit: int):
    """Native layers and int8 maps guess as plain ones do, over a cache that native code filled; and gradients pass."""
    target = Target.from_pretrained(assets.demo_target())
    options = FAMILY.config.read({"draft_vocab_size": limit, "branching": (2,)}, "")
    drafter = FAMILY.make(options, target, torch.arange(limit) if limit else None)
    assert isinstance(drafter, FIRPDrafter)
    drafter.bind(target)
    decoding = drafter.for_decoding(target)
    engine = Engine(target, decoding, max_batch=2)
    rules, questions = SamplingParams(max_tokens=12), [[5, 6, 7], [8, 9]]
    texts = [c.tokens for c in engine.generate(questions, rules)]
    assert texts == [c.tokens for c in engine.generate(questions, rules, plan=Plan())]

    text_1L = torch.tensor([questions[0] + texts[0]])
    length = text_1L.shape[1]
    cache = target.new_cache(1, 64)
    _, features_1LF = target.read_chain(cache, text_1L, torch.zeros(1, dtype=torch.long), drafter.taps)
    decoding.attach(cache, decoding.default_plan())
    one_1 = torch.ones(1, dtype=torch.long)
    root = Context(
        one_1.unsqueeze(0), features_1LF[:, -1:], one_1, length * one_1 + 1, 0 * one_1, torch.zeros(1), 0 * one_1
    )
    _, state = decoding.begin(root)
    features_1LF = torch.nn.functional.pad(features_1LF, (0, 0, 0, 2))
    logits = drafter(torch.ones(1, length + 2, dtype=torch.long), features_1LF)
    for depth in range(3):
        log_q_1V, _ = decoding.step(depth, state, one_1)
        q_V, expected_V = log_q_1V[0].exp(), logits[depth][0, length - 1].softmax(-1)
        assert (q_V - expected_V).abs().sum() < 0.1, "total variation, doubled"

    work = TrainingBatch(text_1L[:, 1:], target.encode(text_1L, drafter.taps)[0][:, :-1], torch.tensor([[1, 3, 6]]))
    drafter.losses(work)[0].sum().backward()
    assert all(one.weight.grad.norm() > 0 for one in drafter.maps)
    assert [c.tokens for c in engine.generate(questions, rules)] == texts
