"""What tests of the native kernels share: numbers, models and contexts in bf16, and which guesses are certain.

B rows, T tokens, F width.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from draftsmith.drafters.grow import grow
from draftsmith.drafters.trainable.drafter import RowwiseDrafter
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import UNUSED, Context, Draft, Quantization
from tests.helpers.tiny import ARCHITECTURES, CONTEXT, VOCABULARY, WIDTH, tiny_model

# ---- numbers

ROWS = (0, 1, 2, 3, 5, 6, 7, 8, 13, 14, 15, 16, 28, 29, 57, 64, 300)
SHAPES = ((1, 1), (1, 16), (16, 1), (2, 3), (15, 7), (16, 16), (17, 33), (32, 64), (48, 31), (64, 130), (150, 48))
"""(N, K): odd, even and one; whole panels of 16 and not; one group of panels for a row block and several."""


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Draw bf16 numbers whose sizes spread over several powers of two."""
    generator = torch.Generator().manual_seed(sum(n * p for n, p in zip(shape, (1, 1000, 7), strict=False)) + seed)
    return (torch.randn(shape, generator=generator) * torch.randn(shape, generator=generator).exp()).bfloat16()


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def quantise_outputs(weight_NK: Tensor) -> tuple[Tensor, Tensor]:
    """Return whole numbers and a scale for every output: its largest size is 127, halves go to even."""
    wide_NK = weight_NK.float()
    scale_N = wide_NK.abs().amax(1) / 127
    return torch.where(scale_N[:, None] > 0, (wide_NK / scale_N[:, None]).round(), 0.0), scale_N


# ---- models

BOUND = 0.03
"""How far the two may be apart: the root mean square of the difference over that of the values.

A number rounds to bf16 by at most 2^-8 of itself, 0.0023 in the root mean square; two or three layers of five
roundings each, done in another order by the other, add up to some sqrt(30) of it."""

SIZES = {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "max_position_embeddings": CONTEXT, "intermediate_size": 48,
    "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": None,
}
MORE: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen2 with windows above": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=6, max_window_layers=1)
    ),
    "qwen3 with windows": lambda: Qwen3ForCausalLM(
        Qwen3Config(**SIZES, head_dim=10, use_sliding_window=True, sliding_window=5, max_window_layers=2)
    ),
    "llama with biases": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True)),
    "llama, tied": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=True)),
    "llama with one key head": lambda: LlamaForCausalLM(LlamaConfig(**{**SIZES, "num_key_value_heads": 1})),
    "llama with wide heads": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, head_dim=80)),
    "llama with nine key heads": lambda: LlamaForCausalLM(
        LlamaConfig(
            **{**SIZES, "hidden_size": 36, "num_attention_heads": 18, "num_key_value_heads": 9, "vocab_size": 700},
            head_dim=16,
        )
    ),
    "llama of 97 tokens": lambda: LlamaForCausalLM(LlamaConfig(**{**SIZES, "vocab_size": 97})),
    "llama 3's positions": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, rope_parameters={
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        })
    ),
    "yarn": lambda: LlamaForCausalLM(
        LlamaConfig(**SIZES, rope_parameters={
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32,
        })
    ),
    "mistral without a window": lambda: MistralForCausalLM(MistralConfig(**SIZES, sliding_window=None)),
}
NATIVE = ("llama", "qwen3", "mistral", *MORE)
OTHERS: dict[str, Callable[[], PreTrainedModel]] = {
    "another activation": lambda: LlamaForCausalLM(LlamaConfig(**SIZES, hidden_act="gelu")),
    "an odd width": lambda: LlamaForCausalLM(
        LlamaConfig(**{**SIZES, "hidden_size": 33, "num_attention_heads": 3, "num_key_value_heads": 3}, head_dim=8)
    ),
    "an odd inner width": lambda: LlamaForCausalLM(LlamaConfig(**{**SIZES, "intermediate_size": 47})),
}
"""What looks like a model with a native form, and has none."""
EVERYTHING = (*ARCHITECTURES, *MORE, *OTHERS)


def model(name: str) -> PreTrainedModel:
    """Build a model in bf16 by its name here or in tiny.py."""
    if name in ARCHITECTURES:
        return tiny_model(name, dtype=torch.bfloat16)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        made = {**MORE, **OTHERS}[name]()
        tied = made.config.tie_word_embeddings
        for key, parameter in made.named_parameters():
            if parameter.dim() >= 2:
                parameter.data.normal_(0.0, 0.4 if "embed" not in key else 0.06 if tied else 1.0)
            elif key.endswith("bias"):
                parameter.data.normal_(0.0, 0.3)
            else:
                parameter.data += 0.1 * torch.randn_like(parameter)
    return made.bfloat16().eval().requires_grad_(False)


@cache
def native(name: str) -> Target:
    return Target(model(name), name=name)


@cache
def plain(name: str) -> Target:
    return Target(model(name), name=name, native=False)


def assert_close(ours: Tensor, theirs: Tensor, bound: float = BOUND) -> None:
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype == torch.bfloat16
    difference, size = (ours.float() - theirs.float()), theirs.float().square().mean().sqrt()
    assert (difference.square().mean().sqrt() / size).item() < bound
    # No single number may be far off either: eight times the root mean square is beyond any rounding.
    assert (difference.abs().max() / size).item() < 8 * bound


# ---- guesses

PLANS = [
    Plan((1,)), Plan((1, 1, 1, 1)), Plan((4, 2, 1), paths=4), Plan((3, 2)), Plan((2, 2, 2), paths=1),
    Plan((3, 3, 2), paths=5, beam=4), Plan((4, 4, 3), paths=6, beam=2), Plan((20, 1), paths=3),
    Plan((1, 1, 1), confidence=0.02), Plan((4, 2, 1), paths=4, confidence=0.03),
]
PRUNED = [
    Plan((3, 2), nodes=4), Plan((3, 3, 3), beam=2), Plan((4, 4, 3), beam=2, nodes=7), Plan((2, 2, 2), nodes=2),
    Plan((2, 2, 2, 2), beam=2, nodes=5), Plan((3, 2, 2), nodes=6, confidence=0.01),
    Plan((3, 3, 2), paths=3, nodes=6, beam=3),
]
"""Trees that keep nodes of any depth."""


def paths_of(draft: Draft, row: int) -> set[tuple[int, ...]]:
    """Return the guesses of a row, each with those before it."""
    paths: list[tuple[int, ...]] = []
    nodes = zip(draft.tokens_BN[row].tolist(), draft.parents_BN[row].tolist(), strict=True)
    for token, parent in nodes:
        if parent != UNUSED:
            paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return set(paths)


def context_for(batch: int, width: int, features: int, seed: int, vocabulary: int = VOCABULARY) -> Context:
    """Draw a context of ragged rows, as an engine hands it over."""
    generator = torch.Generator().manual_seed(seed)
    counts_B = torch.randint(1, width + 1, (batch,), generator=generator)
    return Context(
        torch.randint(0, vocabulary, (batch, width), generator=generator),
        torch.randn((batch, width, features), generator=generator).bfloat16(),
        counts_B,
        counts_B + torch.randint(0, 30, (batch,), generator=generator),
        torch.arange(batch), torch.zeros(batch), torch.arange(batch),
    )


def contexts_for(batches: Sequence[int], width: int, features: int) -> tuple[Context, list[tuple[int, int]]]:
    """Draw contexts of so many rows, each by its own seed, and put them behind each other; say where each lies."""
    drawn = [context_for(batch, width, features, seed) for seed, batch in enumerate(batches)]
    names = ("tokens_BT", "features_BTF", "counts_B", "lengths_B", "rows_B", "temperature_B", "seeds_B")
    ends = list(accumulate(batches))
    joined = Context(*(torch.cat([getattr(context, name) for context in drawn]) for name in names))
    return joined, list(zip([0, *ends], ends, strict=False))


def sampled(context: Context, temperature: float = 0.8) -> Context:
    """Return it with a temperature for two rows of three."""
    temperature_B = torch.full((len(context.counts_B),), temperature, dtype=torch.float64)
    temperature_B[::3] = 0
    return replace(context, temperature_B=temperature_B)


def guesses(draft: Draft, plan: Plan) -> tuple[Tensor, Tensor]:
    """Return tokens and parents in all slots of the plan: where rows become unsure, a draft may have fewer."""
    missing = plan.max_nodes - draft.tokens_BN.shape[1]
    return pad(draft.tokens_BN, (0, missing)), pad(draft.parents_BN, (0, missing), value=UNUSED)


def certain_rows(
    made: RowwiseDrafter, context: Context, plan: Plan, moves: int = 8
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the draft in float64 and which rows of it rounding cannot change.

    A row counts as certain when the same tree comes out in PyTorch's bf16, and with every weight moved by some 2^-7 of
    itself, twice the most that a rounding to bf16 does, as often as `moves` says.
    """
    wide = replace(context, features_BTF=context.features_BTF.double())
    tokens_BN, parents_BN = guesses(grow(copy.deepcopy(made).double(), wide, plan), plan)
    others = [grow(made, context, plan)]
    generator = torch.Generator().manual_seed(0)
    for _ in range(moves):
        moved = copy.deepcopy(made).double()
        for tensor in {id(t): t for t in (*moved.parameters(), *moved.buffers()) if t.is_floating_point()}.values():
            tensor *= 1 + 2**-7 * torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        others.append(grow(moved, wide, plan))
    certain_B = torch.ones(len(tokens_BN), dtype=torch.bool)
    for ours_BN, theirs_BN in (guesses(other, plan) for other in others):
        certain_B &= (ours_BN == tokens_BN).all(1) & (theirs_BN == parents_BN).all(1)
    return tokens_BN, parents_BN, certain_B


WHOLE: tuple[Quantization, ...] = ("int8", "int4")


@cache
def quantised(name: str, quantize: Quantization) -> Target:
    return Target(model(name), name=name, quantize=quantize)


def held(module: nn.Module) -> int:
    """Count the bytes of all different memory behind parameters and buffers."""
    tensors = [*module.parameters(), *module.buffers()]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())
