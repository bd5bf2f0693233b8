"""A target without some of its attentions and feed-forwards drafts for it, and the search for which."""

import json
from itertools import islice
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from draftsmith.drafters.family import read_spec
from draftsmith.drafters.models.layer_search import LayerSearch, Replay, tokens_per_step
from draftsmith.drafters.models.skip_layers import SkipLayers, save_skip_layers
from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Engine
from draftsmith.native import why_missing
from draftsmith.plan import Plan
from draftsmith.targets import Skipped, Target
from draftsmith.targets.sublayers import share_read, whole_layers
from draftsmith.types import DraftsmithError, SamplingParams
from tests.helpers.contract import check_drafter
from tests.helpers.tiny import ARCHITECTURES, VOCABULARY, greedy_reference, prompts, tiny_model, tiny_target

TREE = Plan((3, 2, 1))
CONFIDENCE = Plan((3, 3, 3), beam=2, nodes=7)
CHAIN = Plan((1, 1, 1), sampled=True)
SAMPLED_TREE = Plan((2, 2), sampled=True)
OUTPUTS = {
    "gpt2": ("attn.c_proj", "mlp.c_proj"), "gpt_neox": ("attention.dense", "mlp.dense_4h_to_h"),
}
native_only = pytest.mark.skipif(bool(why_missing()), reason=why_missing())


def skipped(attention: tuple[int, ...] = (), mlp: tuple[int, ...] = ()) -> Skipped:
    return Skipped(frozenset(attention), frozenset(mlp))


@pytest.mark.parametrize(
    ("architecture", "parts", "plans"),
    [
        ("llama", skipped((1,), (0,)), [None, TREE]),
        ("gpt2", skipped((0,), (0,)), [CONFIDENCE, CHAIN]),
        ("mistral", skipped((0,)), [SAMPLED_TREE]),
        pytest.param("gemma3", skipped((1,), (1, 2)), [None, CHAIN], marks=pytest.mark.slow),
        ("mixtral", skipped((), (0, 1)), [None]),
        ("gpt_neox", skipped((0, 1)), [TREE]),
    ],
)
def test_any_part_may_be_left_out(architecture: str, parts: Skipped, plans: list[Plan | None]):
    target = tiny_target(architecture)
    check_drafter(lambda: SkipLayers(target, parts, 3), target, tiny_model(architecture), plans)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_with_nothing_left_out_it_is_the_target_and_is_accepted_whole(architecture: str):
    target = tiny_target(architecture)
    drafter = SkipLayers(target, Skipped(), 3)
    tokens_BT = torch.tensor(prompts(3, shortest=12, longest=12))
    torch.testing.assert_close(drafter.model.encode(tokens_BT, (), True)[1], target.encode(tokens_BT, (), True)[1])
    engine = Engine(target, drafter, max_batch=2)
    for plan in (None, TREE):
        for completion in engine.generate(prompts(3), SamplingParams(max_tokens=13), plan):
            assert completion.accepted_lengths == [3, 3, 3]


@pytest.mark.parametrize("architecture", ["llama", "qwen3", "gemma3", "gpt2", "gpt_neox"])
@pytest.mark.parametrize(
    "parts", [skipped((0,), (1,)), skipped((0,), (0,)), skipped((1,)), skipped((), (0, 1))], ids=str
)
def test_what_is_left_says_what_a_model_says_whose_parts_put_out_nothing(architecture: str, parts: Skipped):
    silenced = silence(tiny_model(architecture), parts, *OUTPUTS.get(architecture, ()))
    view = tiny_target(architecture).without(parts)
    tokens_BT = torch.tensor(prompts(3, shortest=12, longest=12))
    torch.testing.assert_close(
        view.encode(tokens_BT, (), True)[1], silenced(tokens_BT).logits, rtol=0, atol=1e-10
    )


def silence(
    model: PreTrainedModel, parts: Skipped, attention: str = "self_attn.o_proj", mlp: str = "mlp.down_proj"
) -> PreTrainedModel:
    """Let these parts of a model put out zeros."""
    base = model.base_model
    stack = base.h if model.config.model_type == "gpt2" else base.layers
    for numbers, name in ((parts.attention, attention), (parts.mlp, mlp)):
        for number in numbers:
            for parameter in stack[number].get_submodule(name).parameters():
                parameter.zero_()
    return model


@native_only
def test_native_code_takes_whole_layers_and_parts():
    """Whole layers by the operator, parts by transformers' code; both say what PyTorch says, and keep the text."""
    model = six_layers(Skipped()).bfloat16()
    plain, native = Target(model, native=False), Target(six_layers(Skipped()).bfloat16())
    tokens_BT = torch.tensor(prompts(3, shortest=12, longest=12))
    greedy = SamplingParams(max_tokens=16)
    expected = [c.tokens for c in Engine(native).generate(prompts(4), greedy)]
    for parts, forward in ((whole_layers([1, 2, 4]), True), (skipped((1, 5), (1, 2, 3)), False)):
        view = native.without(parts)
        assert ("forward" in view.backend.description) == forward
        found_BTV, own_BTV = view.encode(tokens_BT, (), True)[1], plain.without(parts).encode(tokens_BT, (), True)[1]
        assert found_BTV is not None and own_BTV is not None
        assert (found_BTV - own_BTV).float().norm() < 0.03 * own_BTV.float().norm()
        for plan in (None, TREE):
            done = Engine(native, SkipLayers(native, parts, 3), max_batch=3).generate(prompts(4), greedy, plan)
            assert [c.tokens for c in done] == expected


def test_the_share_counts_each_part_once():
    target = tiny_target("llama")
    parts = [share_read(target, part) for part in (skipped((0,)), skipped((), (0,)), skipped((0,), (0,)))]
    saved = [1 - share for share in parts]
    norms = 2 * 32 * 8 / sum(p.nbytes for p in [*target.model.model.layers.parameters(), target.head_weight_VF])
    assert saved[2] == pytest.approx(saved[0] + saved[1] + norms, abs=1e-12)
    assert share_read(target, Skipped()) == 1 and share_read(target, skipped((0,), (0, 1))) < parts[2]


NO_OPS = skipped((1, 2, 4), (2, 3, 4))


def six_layers(silent: Skipped) -> PreTrainedModel:
    """Make a Llama of six layers, float64, some of whose parts do nothing."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=6, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=128, bos_token_id=None, eos_token_id=None,
                pad_token_id=None, tie_word_embeddings=False,
            )
        )
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, 0.0, 0.4)
    model.generation_config.eos_token_id = None
    return silence(model.double().eval().requires_grad_(False), silent)


def texts_of(model: PreTrainedModel, count: int = 4, new_tokens: int = 24) -> list[tuple[int, list[int]]]:
    questions = prompts(count)
    return [(len(question), question + greedy_reference(model, question, new_tokens)) for question in questions]


@pytest.mark.parametrize(("whole", "found"), [(False, NO_OPS), (True, whole_layers([2, 4]))])
def test_the_search_finds_exactly_the_parts_that_do_nothing(whole: bool, found: Skipped):
    texts = texts_of(six_layers(NO_OPS), 3, 13)
    search = LayerSearch(Replay(Target(six_layers(NO_OPS)), texts, 4), whole)
    looked_at = list(islice(search.candidates(), 60))
    assert search.best.skipped == found and search.best.tau == 5 and search.best.guesses == 4
    assert len({candidate.skipped for candidate in looked_at}) == len(looked_at) == len(search.seen)
    assert search.best.cost == pytest.approx((4 * search.best.share + 1) / 5)
    first = search.best_of_first_layers
    assert first is not None and first.cost > search.best.cost and first.skipped.whole
    again = LayerSearch(search.replay, whole)
    assert list(islice(again.candidates(), 20)) == looked_at[:20], "the same seed looks at the same"


def test_a_search_ends_when_there_is_nothing_left_to_try():
    texts = texts_of(tiny_model("llama"), 2, 12)
    search = LayerSearch(Replay(tiny_target("llama"), texts, 2), whole=False)
    assert len(list(search.candidates())) == 2**4 - 1, "every choice but the empty one"


@pytest.mark.parametrize("architecture", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize("guesses", [1, 3])
def test_a_replay_accepts_what_decoding_accepts(architecture: str, guesses: int):
    target, parts = tiny_target(architecture), skipped((), (1,))
    texts = texts_of(tiny_model(architecture), 5, 30)
    runs = Replay(target, texts, guesses).runs(target.without(parts))
    engine = Engine(target, SkipLayers(target, parts, guesses), max_batch=2)
    done = engine.generate([tokens[:prompt] for prompt, tokens in texts], SamplingParams(max_tokens=30))
    steps = tokens = 0
    for run, completion in zip(runs, done, strict=True):
        at, accepted = 0, []
        while at < len(run):
            accepted.append(run[at])
            at += run[at] + 1
        # Where as many tokens are to come as are guessed, decoding guesses one less: the last one is the target's own.
        last = guesses - 1 if at - accepted[-1] == len(run) else guesses
        assert completion.accepted_lengths[: len(accepted)] == [*accepted[:-1], min(accepted[-1], last)]
        steps, tokens = steps + len(accepted), tokens + sum(accepted) + len(accepted)
    assert tokens_per_step(runs, guesses) == tokens / steps and any(map(any, runs))


def test_a_saved_drafter_loads_for_its_target_and_for_no_other(tmp_path: Path):
    target, folder = tiny_target("llama"), tmp_path / "layers"
    save_skip_layers(folder, skipped((1,), (0,)), 5, target)
    drafter = load_drafter(folder, target)
    assert drafter.default_plan() == Plan((1,) * 5) and drafter.memory_bytes() == drafter.parameter_count() == 0
    [question] = prompts(1)
    [found] = Engine(target, drafter).generate([question], SamplingParams(max_tokens=9))
    assert found.tokens == greedy_reference(tiny_model("llama"), question, 9) and found.statistics.drafted > 0
    with pytest.raises(DraftsmithError, match="drafts for a target of 2 layers, but 'in-memory' has 6"):
        load_drafter(folder, Target(six_layers(Skipped())))
    with pytest.raises(DraftsmithError, match="a vocabulary of 96, but 'in-memory' has 40"):
        load_drafter(folder, Target(tiny_model("llama", vocabulary=40)))
    save_skip_layers(folder, skipped((0,)), 2, target)
    assert load_drafter(folder, target).default_plan() == Plan((1, 1)), "an older drafter may be replaced"
    folder.rename(tmp_path / ".layers.old")
    assert load_drafter(folder, target).default_plan() == Plan((1, 1)), "while that is done, or when it was killed"
    (tmp_path / ".layers.old").rename(folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace('"guesses": 2', '"guesses": 3'))
    with pytest.raises(DraftsmithError, match="is damaged"):
        load_drafter(folder, target)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(DraftsmithError, match="exists and holds something else"):
        save_skip_layers(tmp_path / "mine", Skipped(), 2, target)


def test_lists_are_read_in_a_word():
    assert read_spec("x:a=[1,2],b=3,c=[]") == ("x", {"a": [1, 2], "b": 3, "c": []})
    assert read_spec('x:a="/one, two #3: four",b=ngram') == ("x", {"a": "/one, two #3: four", "b": "ngram"})
    drafter = load_drafter("skip-layers:skip_attention=[0,1],skip_mlp=[1],guesses=2", tiny_target())
    assert isinstance(drafter, SkipLayers) and drafter.model.skipped == skipped((0, 1), (1,))


@pytest.mark.parametrize(
    ("word", "complaint"),
    [
        ("skip-layers", "skip-layers:skip_attention is missing"),
        ("skip-layers:skip_attention=[2],skip_mlp=[]", "has the layers 0 to 1, so layer 2 cannot be left out"),
        ("skip-layers:skip_attention=[0,1],skip_mlp=[0,1]", "no part of tiny-llama is left to draft with"),
        ("skip-layers:skip_attention=1,skip_mlp=[]", "skip-layers:skip_attention is 1; give a list, in brackets"),
        ("skip-layers:skip_attention=[-1],skip_mlp=[]", "use at least 0"),
    ],
)
def test_wrong_words_are_refused(word: str, complaint: str):
    with pytest.raises(DraftsmithError, match=complaint):
        load_drafter(word, tiny_target())


def test_texts_that_are_too_short_are_refused():
    target = tiny_target()
    with pytest.raises(DraftsmithError, match="longer than the 6 guesses of a step"):
        Replay(target, [(3, [1, 2, 3, 4, 5, 6])], 6)
