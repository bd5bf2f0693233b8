"""Makes a target cost what a larger one costs while it says what it says now.

States, heads, feed-forwards and layers are padded, and what is padded meets zeros: so a small trained model becomes one
whose weights have to be read from memory, with the text, and for every drafter the acceptance, of the small one.

- A state is the small one with zeros behind it. RMS norms divide by the root of a mean over more values, so they give
  sqrt(w) times as much where states are w times as wide; their weights are divided by that, and epsilon by w. Where w
  is a power of four both are exact.
- Heads come in whole groups. The output projection does not look at those that are added, nor the down projection at
  what the feed-forward has more.
- Added layers, spread evenly, compute as any layer and add zero.

What does not matter is filled with copies of the model's own weights: they are ordinary numbers, and in int8 and int4
they are quantised as the small model's are, because rows keep their largest values and, where widths are multiples of
32, groups their members.

Shapes: N outputs, K inputs, V vocabulary, F width of a state, w times as wide.
"""

import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from draftsmith.drafters.trainable import storage
from draftsmith.targets import Target
from draftsmith.targets.loading.tokens import load_tokenizer
from draftsmith.types import DraftsmithError

TOKENIZER_FILES = ("tokenizer*", "special_tokens_map.json", "chat_template*", "vocab*", "merges*", "generation_config*")


@dataclass(frozen=True)
class Padding:
    """How much larger a Llama becomes.

    Args:
        times: w, of states and heads; 1, 4, 16 … keep every bit.
        inner: width of the feed-forwards.
        layers: how many there are.
    """

    times: int
    inner: int
    layers: int

    def check(self, config: Mapping[str, Any], origin: Path) -> None:
        """Raise DraftsmithError where the model of this config.json cannot be padded so."""
        if config.get("model_type") != "llama" or config.get("attention_bias") or config.get("mlp_bias"):
            raise DraftsmithError(f"{origin} is no Llama without biases; give the folder of one to pad.")
        if self.times < 1 or math.isqrt(self.times) ** 2 != self.times:
            raise DraftsmithError(f"states cannot become {self.times} times as wide exactly; choose 1, 4, 16, ….")
        for name, most in (("intermediate_size", self.inner), ("num_hidden_layers", self.layers)):
            if config[name] > most:
                raise DraftsmithError(f"{origin} has {name} {config[name]}, more than {most}; choose a larger size.")

    def padded_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config.json of the larger model."""
        head_width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        key_heads = config.get("num_key_value_heads") or config["num_attention_heads"]
        return {
            **config,
            "hidden_size": config["hidden_size"] * self.times,
            "num_attention_heads": config["num_attention_heads"] * self.times,
            "num_key_value_heads": key_heads * self.times,
            "head_dim": head_width,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "rms_norm_eps": config["rms_norm_eps"] / self.times,
        }

    def source_of(self, layer: int, layers: int) -> tuple[int, bool]:
        """Return which of the model's own `layers` a layer is made of, and whether it is that one or adds zero.

        The i-th comes last of its share, so that the first quarter of one model says what that of the other does.
        """
        number = layer * layers // self.layers
        return number, (layer + 1) * layers // self.layers > number

    def padded_layer(self, layer: Mapping[str, Tensor], counts: bool) -> dict[str, Tensor]:
        """Return the weights of a layer, by their names in it; one that does not count adds zero."""
        times, wide = self.times, self.times * len(layer["input_layernorm.weight"])
        padded = {}
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up"):
            weight_NK = layer[f"{name}_proj.weight"]
            outputs = self.inner if name.startswith("mlp.") else times * len(weight_NK)
            padded[f"{name}_proj.weight"] = repeated(weight_NK, outputs, wide)
        for name in ("self_attn.o", "mlp.down"):
            weight_NK = layer[f"{name}_proj.weight"]
            inputs = self.inner if name.startswith("mlp.") else times * weight_NK.shape[1]
            padded[f"{name}_proj.weight"] = within_zeros(weight_NK * counts, wide, inputs)
        for name in ("input_layernorm", "post_attention_layernorm"):
            padded[f"{name}.weight"] = self.padded_norm(layer[f"{name}.weight"])
        return padded

    def padded_norm(self, weight_F: Tensor) -> Tensor:
        """Return the weights of a norm over the wider state."""
        return (weight_F / math.isqrt(self.times)).repeat(self.times)


HALF_BILLION = Padding(4, 4096, 19)
"""Makes the embedded target one of 491 million weights, as wide and deep as models of that size are."""


def repeated(weight_NK: Tensor, outputs: int, inputs: int) -> Tensor:
    """Return (outputs, inputs) of the same weights over and over, the matrix itself first."""
    rows, columns = weight_NK.shape
    copies = weight_NK.repeat(-(-outputs // rows), -(-inputs // columns))
    return copies[:outputs, :inputs].contiguous()


def within_zeros(weight_NK: Tensor, outputs: int, inputs: int) -> Tensor:
    """Return (outputs, inputs) with the matrix first and zeros behind and below it."""
    rows, columns = weight_NK.shape
    return torch.nn.functional.pad(weight_NK, (0, inputs - columns, 0, outputs - rows))


def pad_target(source: Path, folder: Path, padding: Padding) -> int:
    """Write the target in `source`, made larger, as a folder of transformers; return how many weights it has.

    Raises:
        DraftsmithError: the source is no Llama of a smaller size, or the folder is not empty.
    """
    config = storage.read_json(source / "config.json")
    padding.check(config, source)
    storage.refuse_full(folder)
    count = 0

    def fill(aside: Path) -> None:
        nonlocal count
        files: dict[str, str] = {}
        for number, tensors in enumerate(_pieces(source, config, padding), 1):
            name = f"model-{number:05d}-of-{padding.layers + 1:05d}.safetensors"
            save_file(tensors, aside / name, {"format": "pt"})
            files |= dict.fromkeys(tensors, name)
            count += sum(tensor.numel() for tensor in tensors.values())
        index = {"metadata": {"total_size": 2 * count}, "weight_map": files}
        storage.write_json(aside / "model.safetensors.index.json", index)
        storage.write_json(aside / "config.json", padding.padded_config(config))
        for pattern in TOKENIZER_FILES:
            for path in source.glob(pattern):
                shutil.copy(path, aside)

    storage.write_folder(folder, fill)
    return count


def padded_target(source: Path, padding: Padding, name: str) -> Target:
    """Return the target in `source`, made larger, in bf16 on the CPU, without writing it anywhere.

    Raises:
        DraftsmithError: the source is no Llama of a smaller size.
    """
    config = storage.read_json(source / "config.json")
    padding.check(config, source)
    larger = AutoConfig.for_model(**padding.padded_config(config))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(larger, dtype=torch.bfloat16)
    weights = {key: weight for piece in _pieces(source, config, padding) for key, weight in piece.items()}
    model.load_state_dict(weights, strict=False, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(larger)  # what is computed rather than loaded
    return Target(model, load_tokenizer(str(source), trust_remote_code=False), name)


def _pieces(source: Path, config: Mapping[str, Any], padding: Padding) -> Iterator[dict[str, Tensor]]:
    """Give the weights of every layer, then the others, so that no more than a layer is held twice."""
    state = {name: weight.bfloat16() for name, weight in storage.read_tensors(source).items()}
    layers = config["num_hidden_layers"]
    for number in range(padding.layers):
        own, counts = padding.source_of(number, layers)
        begin = f"model.layers.{own}."
        layer = {name.removeprefix(begin): weight for name, weight in state.items() if name.startswith(begin)}
        made = padding.padded_layer(layer, counts)
        yield {f"model.layers.{number}.{name}": weight for name, weight in made.items()}
    embedding_VF = state["model.embed_tokens.weight"]
    wide = embedding_VF.shape[1] * padding.times
    rest = {
        "model.embed_tokens.weight": within_zeros(embedding_VF, len(embedding_VF), wide),
        "model.norm.weight": padding.padded_norm(state["model.norm.weight"]),
    }
    if not config.get("tie_word_embeddings"):
        rest["lm_head.weight"] = repeated(state["lm_head.weight"], len(embedding_VF), wide)
    yield rest
