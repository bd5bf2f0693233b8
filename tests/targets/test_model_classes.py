"""Every causal language model class of the installed transformers, tiny and random: exact text, or refused by name.

The reference is the model's own forward over whole texts, with its own attention and no cache, before a target is made.
"""

import re
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaForCausalLM, LlamaModel, PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention

from draftsmith.drafters.registry import load_drafter
from draftsmith.engine import Engine
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target
from draftsmith.targets.upper import UpperLayers
from draftsmith.types import DraftsmithError, SamplingParams
from tests.helpers.oracle import OracleDrafter
from tests.targets.model_classes import MODEL_TYPES, VOCABULARY, own_text, tiny_model

NEW_TOKENS = 7
PROMPTS = [[5, 9, 33, 17, 50], [3, 60, 41, 8, 22, 13, 37, 4, 29]]
TREE = Plan((2, 2, 1))

EXACT, REFUSED, UNBUILT = "exact text", "refused", "not built"

TAKEN = """
    afmoe apertus arcee aria_text axk1 beam bert bert-generation biogpt bitnet cohere cohere2 cohere2_moe
    cohere_compass_text ctrl cwm deepseek_v2 deepseek_v3 dots1 electra emu3 ernie ernie4_5 ernie4_5_moe exaone4
    exaone_moe flex_olmo flint fuyu gemma gemma2 gemma3 gemma3_text gemma4 gemma4_text gemma4_unified
    gemma4_unified_text glm glm4 glm4_moe glm4_moe_lite got_ocr2 gpt-sw3 gpt2 gpt_bigcode gpt_neox gpt_oss
    granite granite_swa granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hy_v3
    hyperclovax internlm3 iquestcoder jais2 jetmoe kolibri1 laguna lfm2 llama mellum mimo_v2_flash minicpm3
    minimax_m2 minimax_m3_vl_text ministral ministral3 mistral mixtral modernbert-decoder moshi
    moss_transcribe_diarize nanochat olmo olmo2 olmo3 olmoe opt persimmon phi phi3 phi4_multimodal phimoe qwen2
    qwen2_moe qwen3 qwen3_moe roc_bert seed_oss smollm3 solar_open starcoder2 vaultgemma youtu
"""
"""Classes that must not be refused: they work, and are to go on working."""

MOST_UNBUILT = 9
"""More classes than these may not escape the test by failing to be built."""


def outcome_of(model_type: str, changes: dict[str, Any]) -> tuple[str, str]:
    """Make a target of a model and hold its text against the model's own; return what came out, and why."""
    return outcome_with(tiny_model(model_type, **changes), model_type, changes)


def outcome_with(model: PreTrainedModel, model_type: str, changes: dict[str, Any]) -> tuple[str, str]:
    """Do the same with a model that was built already; building takes longer than most of what is done with it."""
    try:
        target = Target(model, name="it")
    except DraftsmithError as error:
        sentence = str(error)
        assert "\n" not in sentence and sentence.endswith(".")
        text = model.config.get_text_config(decoder=True)
        assert f"({model.config.model_type})" in sentence or f"({text.model_type})" in sentence
        return (UNBUILT if "its own forward does not run" in sentence else REFUSED), sentence
    own = tiny_model(model_type, **changes)
    texts = [own_text(own, prompt, NEW_TOKENS) for prompt in PROMPTS]
    known = [prompt + text for prompt, text in zip(PROMPTS, texts, strict=True)]
    drafters = [
        (None, NO_DRAFT),
        (OracleDrafter(known, VOCABULARY, error_rate=0.3), TREE),
        (load_drafter("ngram", target), None),
        (load_drafter("early-exit:layers=1", target), None),
    ]
    params = SamplingParams(max_tokens=NEW_TOKENS, ignore_eos=True)
    for drafter, plan in drafters:
        found = Engine(target, drafter, plan=plan, max_batch=2).generate(PROMPTS, params)
        assert [completion.tokens for completion in found] == texts, f"{model_type}: {drafter}"
    # Rounding alone is no reason for a refusal.
    Target(own.to(torch.bfloat16))
    Target(tiny_model(model_type, **changes).to(torch.float16))
    return EXACT, ""


@cache
def outcome(model_type: str) -> tuple[str, str]:
    """Say what becomes of this model type, if it can be built tiny and runs by itself."""
    try:
        model = tiny_model(model_type)
    except Exception as error:  # the code of two hundred kinds of models raises as many kinds
        return UNBUILT, f"{type(error).__name__}: {str(error).strip().splitlines()[0][:100]}"
    return outcome_with(model, model_type, {})


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_class_gives_its_own_text_or_is_refused_by_name(model_type: str):
    kind, reason = outcome(model_type)
    if model_type in TAKEN.split():
        assert kind == EXACT, reason
    if kind == UNBUILT:
        pytest.skip(f"{model_type} was not built: {reason}")


def test_few_classes_escape():
    unbuilt = [model_type for model_type in MODEL_TYPES if outcome(model_type)[0] == UNBUILT]
    assert len(unbuilt) <= MOST_UNBUILT, unbuilt


EXACT_VARIANTS = {
    **{
        f"{name}, positions called dynamic that are not": (
            name, {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 1.0, "alpha": 1000.0}},
        )
        for name in ("hunyuan_v1_dense", "hunyuan_v1_moe")
    },
    "windows in some layers": ("qwen2", {"layer_types": ["full_attention", "sliding_attention"]}),
    "windows in all layers": ("mixtral", {"sliding_window": 6}),
    "positions that scale queries": (
        "ministral3",
        {"rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 4,
            "llama_4_scaling_beta": 0.5,
        }},
    ),
    "keys that layers share": (
        "gemma4_text",
        {"num_hidden_layers": 4, "num_kv_shared_layers": 2,
         "layer_types": ["sliding_attention", "full_attention"] * 2},
    ),
    "experts in gemma4": (
        "gemma4_text",
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 24},
    ),
    "keys that are values": ("gemma4_text", {"attention_k_eq_v": True}),
    "no grouped heads": ("llama", {"num_key_value_heads": 4}),
    "one key head": ("gpt_bigcode", {"multi_query": True}),
}


@pytest.mark.parametrize("name", EXACT_VARIANTS)
def test_a_variant_gives_its_own_text(name: str):
    assert outcome_of(*EXACT_VARIANTS[name]) == (EXACT, "")


REFUSED_VARIANTS = {
    "reads both ways": ("bert", {"is_decoder": False}),
    "gemma reads both ways": ("gemma3_text", {"use_bidirectional_attention": True}),
    "a window that attention is not handed": ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 6}),
    "a long window that attention is not handed": (
        "qwen2_moe", {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1},
    ),
    "another long window": ("phimoe", {"sliding_window": 4096}),
    "convolutions": ("lfm2", {"full_attn_idxs": [1]}),
    "attention in blocks": (
        "minimax_m3_vl_text", {"layer_types": ["full_attention", "minimax_m3_sparse"], "index_block_size": 4}
    ),
}


@pytest.mark.parametrize("name", REFUSED_VARIANTS)
def test_a_variant_is_refused(name: str):
    assert outcome_of(*REFUSED_VARIANTS[name])[0] == REFUSED


def test_windows_are_as_before():
    model = tiny_model("mistral", sliding_window=4096)
    target = Target(model)
    assert target.windows == [4096, 4096]
    assert model.config.sliding_window == 4096
    assert [layer.self_attn.config.sliding_window for layer in model.model.layers] == [4096, 4096]


class Shifted(LlamaAttention):
    """Attention that hands on a share of the state before, which no cache keeps."""

    share = 0.1

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        before = torch.cat([torch.zeros_like(hidden_states[:, :1]), hidden_states[:, :-1]], dim=1)
        out, weights = super().forward(hidden_states, *args, **kwargs)
        return out + self.share * before, weights


class Counting(LlamaModel):
    """Counts positions by itself, whatever it is told."""

    def forward(self, input_ids: Tensor | None = None, position_ids: Tensor | None = None, **kwargs: Any) -> Any:
        assert input_ids is not None
        return super().forward(input_ids, position_ids=torch.arange(input_ids.shape[1]).unsqueeze(0), **kwargs)


class Both(LlamaAttention):
    """Attends twice a layer, as differential attention does: a cache has place for one set of values only."""

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        first, weights = super().forward(hidden_states, *args, **kwargs)
        second, _ = super().forward(hidden_states.flip(-1), *args, **kwargs)
        return first - 0.5 * second, weights


def planted(kind: type[nn.Module] | None, dtype: torch.dtype) -> LlamaForCausalLM:
    """Build a Llama whose attention, or whose decoder, is of another class."""
    model = tiny_model("llama")
    assert isinstance(model, LlamaForCausalLM)
    if kind is not None and issubclass(kind, LlamaAttention):
        for layer in model.model.layers:
            layer.self_attn.__class__ = kind
    elif kind is not None:
        model.model.__class__ = kind
    return model.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", [Shifted, Counting, Both])
def test_what_the_interface_does_not_show_is_refused(kind: type[nn.Module], dtype: torch.dtype):
    Target(planted(None, dtype), native=False)
    with pytest.raises(DraftsmithError, match=r"it \(llama\) .*a draft tree behind its cache"):
        Target(planted(kind, dtype), name="it", native=False)


@pytest.mark.parametrize("kind", [None, Shifted])
def test_a_token_that_cannot_be_read_is_no_excuse(kind: type[nn.Module] | None, caplog: pytest.LogCaptureFixture):
    """Other tokens are read then; where all weights are damaged nothing can be compared, and the target loads."""
    model = planted(kind, torch.float64)
    model.get_input_embeddings().weight.data[VOCABULARY // 9] = torch.nan
    if kind is None:
        Target(model)
        model.get_input_embeddings().weight.data.fill_(torch.nan)
        Target(model, name="it")
        assert "it: its own logits are not finite" in caplog.text
        return
    with pytest.raises(DraftsmithError, match="does not say what its own code says"):
        Target(model)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_check_is_cheap(dtype: torch.dtype):
    model = planted(None, dtype)
    read: list[int] = []
    model.get_input_embeddings().register_forward_hook(lambda module, tokens, out: read.append(tokens[0].numel()))
    Target(model, native=False)
    assert len(read) == 4 and sum(read) <= 40


@pytest.mark.parametrize("model_type", ["opt", "bert", "gemma3", "gpt_oss"])
def test_the_last_layers_of_a_deeper_stack_go_on_by_themselves(model_type: str):
    target = Target(tiny_model(model_type))
    assert UpperLayers(target, 0).layer == 0


@pytest.mark.parametrize("model_type", ["ctrl", "gemma4", "gemma4_text"])
def test_last_layers_that_look_back_are_refused(model_type: str):
    with pytest.raises(DraftsmithError, match="do not go on from that layer's output alone"):
        UpperLayers(Target(tiny_model(model_type)), 0)


if __name__ == "__main__":  # the table of docs/targets.md
    reasons: dict[str, list[str]] = {}
    for name in MODEL_TYPES:
        kind, reason = outcome(name)
        text = re.sub(r"[0-9.]+(e[-+]\d+)?|it \(\S+\)|its kind \(\S+\)|layers of kind [^,]*(, \w+)*,", "…", reason)
        reasons.setdefault(f"{kind}: {text}" if kind != UNBUILT else kind, []).append(name)
    for reason, names in sorted(reasons.items(), key=lambda item: -len(item[1])):
        print(f"\n{len(names)} {reason}\n    {' '.join(names)}")
