"""Makes a target cost as much as a larger one while its text stays the same.

States, heads, feed-forwards and layers are padded so that the padding is multiplied by zeros. A small trained model
becomes one whose weights have to be read from memory, with the small model's text and, for every drafter, acceptance.

- A state is the small one followed by zeros. RMS norms divide by the root of a mean over more values, so they give
  sqrt(w) times as much where states are w times as wide; their weights are divided by that, and epsilon by w. Where w
  is a power of four both are exact.
- Heads are added in whole groups. The output projection ignores the added heads, and the down projection ignores the
  added width of the feed-forward.
- Added layers, spread evenly, compute like any layer and add zero.

Weights that do not matter are copies of the model's own, so they are ordinary numbers. In int8 and int4 the model's own
weights are quantised as in the small model, because rows keep their largest values and, where widths are multiples of
32, groups keep their members.

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
        times: w, how many times as wide states become and as many heads there are; 1, 4, 16 … keep every bit.
        inner: width of the larger feed-forwards.
        layers: number of layers of the larger model.
    """

    times: int
    inner: int
    layers: int

    def check(self, config: Mapping[str, Any], origin: Path) -> None:
        """Raise DraftsmithError where the model of this config.json cannot be padded to this size."""
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
        """Return which of the model's own `layers` a layer is made from, and whether it acts as that one or adds zero.

        Of the layers made from the same one, the last acts as it, so that the first quarter of the larger model
        computes the same as the first quarter of the small one.
        """
        number = layer * layers // self.layers
        return number, (layer + 1) * layers // self.layers > number

    def padded_layer(self, layer: Mapping[str, Tensor], counts: bool) -> dict[str, Tensor]:
        """Return the weights of a padded layer, by their names within it; without `counts` the layer adds zero."""
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
"""Makes the embedded target one of 491 million weights, with the width and depth usual for that size."""


def repeated(weight_NK: Tensor, outputs: int, inputs: int) -> Tensor:
    """Return (outputs, inputs) filled with copies of the matrix, the first of them at the top left."""
    rows, columns = weight_NK.shape
    copies = weight_NK.repeat(-(-outputs // rows), -(-inputs // columns))
    return copies[:outputs, :inputs].contiguous()


def within_zeros(weight_NK: Tensor, outputs: int, inputs: int) -> Tensor:
    """Return (outputs, inputs) with the matrix at the top left and zeros to the right of it and below."""
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
    model.model.rotary_emb = type(model.model.rotary_emb)(larger)  # its tensors are computed, not loaded
    return Target(model, load_tokenizer(str(source), trust_remote_code=False), name)


def _pieces(source: Path, config: Mapping[str, Any], padding: Padding) -> Iterator[dict[str, Tensor]]:
    """Yield the padded weights layer by layer, then the others, so that at most one layer is held twice."""
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
