"""Tiny random targets for tests: every architecture that must work, in float64 on CPU, built from configs alone.

V = 96 token ids, width 32, two or three layers. Weights are drawn wide enough that greedy text wanders instead of
repeating one token, and from a seed of their own, so that a target is the same in every test.
"""

from collections.abc import Callable
from functools import cache
from hashlib import sha256
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from draftsmith.native.packing import pack_linears
from draftsmith.targets import Target
from draftsmith.types import Quantization

VOCABULARY = 96
WIDTH = 32
CONTEXT = 128
SLIDING_WINDOW = 6
"""Shorter than the prompts of the tests, so that it is in force from the prefill on."""

_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": WIDTH,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_HEADS = {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


def _llama(vocabulary: int) -> PreTrainedModel:
    return LlamaForCausalLM(LlamaConfig(**{**_COMMON, "vocab_size": vocabulary}, **_HEADS, num_hidden_layers=2))


def _qwen3(vocabulary: int) -> PreTrainedModel:
    common = {**_COMMON, "vocab_size": vocabulary}
    return Qwen3ForCausalLM(Qwen3Config(**common, **_HEADS, num_hidden_layers=2, head_dim=12))


def _mistral(vocabulary: int) -> PreTrainedModel:
    common = {**_COMMON, "vocab_size": vocabulary}
    return MistralForCausalLM(
        MistralConfig(**common, **_HEADS, num_hidden_layers=2, sliding_window=SLIDING_WINDOW, head_dim=8)
    )


def _gemma3(vocabulary: int) -> PreTrainedModel:
    common = {**_COMMON, "vocab_size": vocabulary}
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **common,
            **_HEADS,
            num_hidden_layers=3,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=SLIDING_WINDOW,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        )
    )


def _gpt2(vocabulary: int) -> PreTrainedModel:
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=vocabulary,
            n_embd=WIDTH,
            n_layer=2,
            n_head=4,
            n_positions=CONTEXT,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def _gpt_neox(vocabulary: int) -> PreTrainedModel:
    common = {**_COMMON, "vocab_size": vocabulary}
    return GPTNeoXForCausalLM(
        GPTNeoXConfig(**common, intermediate_size=48, num_attention_heads=4, num_hidden_layers=2, rotary_pct=0.5)
    )


def _mixtral(vocabulary: int) -> PreTrainedModel:
    common = {**_COMMON, "vocab_size": vocabulary}
    return MixtralForCausalLM(
        MixtralConfig(**common, **_HEADS, num_hidden_layers=2, num_local_experts=4, num_experts_per_tok=2)
    )


def _qwen3_moe(vocabulary: int) -> PreTrainedModel:
    common = {**_COMMON, "vocab_size": vocabulary}
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **common,
            **_HEADS,
            num_hidden_layers=2,
            head_dim=8,
            moe_intermediate_size=24,
            num_experts=4,
            num_experts_per_tok=2,
            decoder_sparse_step=1,
        )
    )


_BUILDERS: dict[str, Callable[[int], PreTrainedModel]] = {
    "llama": _llama,
    "qwen3": _qwen3,
    "mistral": _mistral,
    "gemma3": _gemma3,
    "gpt2": _gpt2,
    "gpt_neox": _gpt_neox,
    "mixtral": _mixtral,
    "qwen3_moe": _qwen3_moe,
}
ARCHITECTURES = tuple(_BUILDERS)


def tiny_model(
    architecture: str = "llama",
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
    vocabulary: int = VOCABULARY,
    eos_token_id: int | list[int] | None = None,
) -> PreTrainedModel:
    """Build a Hugging Face model with wide random weights; the global random state is left as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _BUILDERS[architecture](vocabulary)
        tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
        # A tied head prefers the token just read, the more so the wider the table.
        table_scale = 0.06 if model.config.tie_word_embeddings else 1.0
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() >= 2:
                    parameter.normal_(0.0, table_scale if any(parameter is table for table in tables) else 0.4)
                elif name.endswith("bias"):
                    parameter.normal_(0.0, 0.1)
                else:
                    parameter.add_(torch.randn_like(parameter) * 0.1)
    if architecture in ("mixtral", "qwen3_moe"):
        model.set_experts_implementation("eager")  # the default one has no float64
    model.config.eos_token_id = eos_token_id
    model.generation_config.eos_token_id = eos_token_id
    return model.to(dtype).eval().requires_grad_(False)


@cache
def tiny_target(architecture: str = "llama", *, seed: int = 0) -> Target:
    """Return a float64 target without end token, shared between tests because nothing may change it."""
    return Target(tiny_model(architecture, seed=seed), name=f"tiny-{architecture}")


def prompts(
    count: int, *, shortest: int = 4, longest: int = 23, seed: int = 0, below: int = VOCABULARY
) -> list[list[int]]:
    """Draw token prompts of different lengths; prompt i does not depend on `count`."""
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    for _ in range(count):
        length = int(torch.randint(shortest, longest + 1, (), generator=generator))
        drawn.append(torch.randint(0, below, (length,), generator=generator).tolist())
    return drawn


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Build a byte-level tokenizer: 256 bytes, then `<eos>` as id 256; every string encodes and decodes to itself."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<eos>", clean_up_tokenization_spaces=False, model_max_length=CONTEXT
    )


TOKENIZER_SIZE = 257
TOKENIZER_EOS = 256


def save_tiny_target(
    folder: Path, architecture: str = "llama", *, dtype: torch.dtype = torch.float32, seed: int = 0
) -> Path:
    """Save a target that knows `tiny_tokenizer` and its end token as `from_pretrained` wants it; return the folder."""
    model = tiny_model(architecture, seed=seed, dtype=dtype, vocabulary=TOKENIZER_SIZE, eos_token_id=TOKENIZER_EOS)
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@torch.no_grad()
def greedy_reference(model: PreTrainedModel, prompt: list[int], new_tokens: int) -> list[int]:
    """Decode greedily with transformers' own `generate`, one prompt, and return the new tokens only.

    What the same weights said to the same prompt before is remembered: a shorter text is the beginning of a longer one.
    """
    known = _texts.setdefault((fingerprint(model), *prompt), [])
    if len(known) < new_tokens:
        prompt_1T = torch.tensor([prompt])
        out_1T = model.generate(
            prompt_1T, attention_mask=torch.ones_like(prompt_1T), max_new_tokens=new_tokens, do_sample=False
        )
        known[:] = out_1T[0, len(prompt) :].tolist()
    return known[:new_tokens]


def fingerprint(model: PreTrainedModel) -> str:
    """Return what differs between models that may say different things: of their settings and of every weight."""
    digest = sha256(f"{type(model)} {model.config} {model.generation_config}".encode())
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy())
    return digest.hexdigest()


_texts: dict[tuple[str | int, ...], list[int]] = {}


def packer(quantize: Quantization = "none") -> Callable[[nn.Module], bool]:
    """Return what packs the layers of a drafter for native operators, see `TrainableDrafter.pack`."""
    return lambda module: bool(pack_linears(module, lambda _: quantize))
