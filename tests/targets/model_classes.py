"""Tiny random models of every causal language model class that the installed transformers knows, from configs alone."""

import copy
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)

VOCABULARY = 64
CONTEXT = 64
WINDOW = 6
"""Shorter than the texts of the tests, so that it is in force."""
LARGEST = 7_000_000
"""A model of more weights is not tiny: its config has a size by a name that is not among those below."""

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_positions": CONTEXT, "max_position_embeddings": CONTEXT, "n_ctx": CONTEXT,
    "max_seq_len": CONTEXT, "seq_length": CONTEXT, "max_sequence_length": CONTEXT,
    "hidden_size": 32, "n_embd": 32, "d_model": 32, "embedding_size": 32, "word_embed_proj_dim": 32, "dim_model": 32,
    "num_hidden_layers": 2, "n_layer": 2, "n_layers": 2, "num_layers": 2, "decoder_layers": 2, "encoder_layers": 2,
    "num_decoder_layers": 2, "num_encoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4,
    "encoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "dim_head": 8, "kv_channels": 8,
    "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4,
    "intermediate_size": 48, "n_inner": 48, "ffn_dim": 48, "ffn_hidden_size": 48, "dff": 48, "dim_ff": 48,
    "d_inner": 48, "decoder_ffn_dim": 48, "encoder_ffn_dim": 48, "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 24,
    "shared_intermediate_size": 24, "moe_shared_expert_intermediate_size": 24, "expert_ffn_hidden_size": 24,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "moe_topk": 2, "moe_k": 2, "n_shared_experts": 1, "num_shared_experts": 1, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "num_dense_layers": 1,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "qk_head_dim": 16, "sliding_window": WINDOW, "use_sliding_window": True, "max_window_layers": 1,
    "sliding_window_pattern": 2, "_sliding_window_pattern": 2, "local_attention": WINDOW, "window_size": WINDOW,
    "keep_window_size": WINDOW, "global_attn_every_n_layers": 2, "index_topk": WINDOW,
    "rotary_dim": 4, "query_pre_attn_scalar": 8, "d_kv": 8,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "decoder_start_token_id": 1, "attention_dropout": 0.0,
    "is_decoder": True,
}
_PLAIN_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# What single kinds need besides, in their own words.
_BESIDES: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _PLAIN_ROPE, "sliding_attention": _PLAIN_ROPE}},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0}, "ffn_config": {"ffn_hidden_size": 48}},
    "deepseek_v2": {"topk_group": 1, "n_group": 1, "num_experts_per_tok": 2},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "dots3_note_text": {"per_layer_config": None},
    "gemma3n_text": {
        "vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"], "intermediate_size": [48, 48],
        "activation_sparsity_pattern": [0.0, 0.0],
    },
    "gemma4_text": {"vocab_size_per_layer_input": VOCABULARY, "hidden_size_per_layer_input": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "granitemoehybrid": {"mamba_n_heads": 8, "mamba_d_head": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8, "num_experts": 4, "moe_topk": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "mamba2": {"num_heads": 8, "head_dim": 8},
    "ministral": {"head_dim": 8},
    "nemotron": {"num_key_value_heads": 2},
    "phimoe": {"sliding_window": None},
    "qwen2_moe": {"use_sliding_window": False},
    "reformer": {"is_decoder": True, "axial_pos_embds_dim": [8, 24], "axial_pos_shape": [8, 8]},
    "roc_bert": {"pronunciation_vocab_size": VOCABULARY, "shape_vocab_size": VOCABULARY},
    "xlm": {"n_words": VOCABULARY, "emb_dim": 32},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {"layer_types": ["mamba", "hybrid"]},
}
_NARROW = {"xglm", "inkling2_text"}
"""Their own code does not run in float64; they are held in float32."""


def _shrunk(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the arguments that make a config of this class tiny."""
    given = config.to_dict()
    sizes = {key: value for key, value in _SIZES.items() if key in given and given[key] is not None}
    if "kv_lora_rank" in sizes:  # each head has its own keys in these
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    for key in type(config).sub_configs:
        part = getattr(config, key, None)
        if isinstance(part, PreTrainedConfig):
            sizes[key] = {**_shrunk(part), "model_type": part.model_type}
    return sizes | _BESIDES.get(config.model_type, {})


def tiny_config(model_type: str, **changes: Any) -> PreTrainedConfig:
    """Make a tiny config of a model type, with changes of its text part."""
    kind = CONFIG_MAPPING[model_type]
    return kind(**_shrunk(kind()) | changes)


def tiny_model(model_type: str, **changes: Any) -> PreTrainedModel:
    """Build a model with random weights, every one of them, the same each time; raise whatever its code raises."""
    config = tiny_config(model_type, **changes)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if (model_type, repr(changes)) not in _tiny:
            with torch.device("meta"):
                size = sum(p.numel() for p in AutoModelForCausalLM.from_config(copy.deepcopy(config)).parameters())
            if size > LARGEST:
                raise ValueError(f"{size} weights are not tiny")
            _tiny.add((model_type, repr(changes)))
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0.0, 0.3)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    if model._can_set_experts_implementation():
        model.set_experts_implementation("eager")  # the default one has no float64
    return model.to(torch.float32 if model_type in _NARROW else torch.float64).eval()


_tiny: set[tuple[str, str]] = set()
"""Model types, and changes of them, that were weighed without memory and found to be tiny."""


@torch.no_grad()
def own_text(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[int]:
    """Continue a prompt greedily by the model's own forward over the whole text, once a token, without any cache."""
    text = list(prompt)
    for _ in range(new_tokens):
        text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
    return text[len(prompt) :]
