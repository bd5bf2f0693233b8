"""Modules that stand in for a model's linear layers and embeddings, and hold their weights packed, once.

Shapes: N outputs, K inputs, V tokens, F width.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from draftsmith.native.library import LIBRARY
from draftsmith.types import Quantization

NONE = torch.empty(0)


def _refuse(gradient: Tensor) -> None:
    raise RuntimeError("native layers have no gradient; load what is to be trained through with native=False")


def _without_gradient(product: Tensor) -> Tensor:
    """Make asking for a gradient an error and not silence."""
    if product.requires_grad:
        product.register_hook(_refuse)
    return product


class _Packed(nn.Module, ABC):
    """What packed layers share: sizes, an fp32 bias, and the original layout in `state_dict`.

    Args:
        weight_NK: the weights, of any strides; of given parts only their sizes are asked.
        transposed: whether the original layer kept them as (K, N), as GPT-2 does.
        parts: the packed weights, as `pack` returns them, where they are packed already.
    """

    PARTS: ClassVar[tuple[str, ...]] = ("packed",)
    """The names of what `pack` returns."""
    bias_N: Tensor | None

    def __init__(
        self,
        weight_NK: Tensor,
        bias_N: Tensor | None,
        transposed: bool = False,
        parts: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight_NK.shape
        self.transposed = transposed
        self.register_buffer("bias_N", None if bias_N is None else bias_N.detach().float(), persistent=False)
        given = self.pack(weight_NK.detach()) if parts is None else parts
        for name, value in zip(self.PARTS, given, strict=True):
            self.register_buffer(name, value, persistent=False)

    @staticmethod
    @abstractmethod
    def pack(weight_NK: Tensor) -> Sequence[Tensor]:
        """Return the parts of packed weights; of weights on the meta device, their sizes alone."""

    @abstractmethod
    def unpacked(self) -> Tensor:
        """Return the weights as bf16 (N, K)."""

    @abstractmethod
    def look_up(self, tokens: Tensor) -> Tensor:
        """Return the weights of outputs (…) as bf16 rows (…, K): the embedding that is tied to this layer."""

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return what native code reads: weights, scales and sums, the last two empty where the weights are all."""
        return self.get_buffer("packed"), NONE, NONE

    @property
    def weight(self) -> Tensor:
        """The weights as bf16, in the layout of the original layer; a copy, made at each call."""
        weight_NK = self.unpacked()
        return weight_NK.T.contiguous() if self.transposed else weight_NK

    def check_width(self, x: Tensor) -> None:
        """Refuse rows of another width; the operators cannot, because packed weights are padded."""
        if x.shape[-1] != self.in_features:
            raise RuntimeError(
                f"rows of {x.shape[-1]} features cannot go through a layer that reads {self.in_features}"
            )

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight
        if self.bias_N is not None:
            destination[prefix + "bias"] = self.bias_N.bfloat16()


class PackedLinear(_Packed):
    """A bf16 linear layer by the native kernels."""

    packed: Tensor

    @staticmethod
    def pack(weight_NK: Tensor) -> Sequence[Tensor]:
        """Return the packed weights."""
        return (torch.ops.draftsmith.pack(weight_NK),)

    def unpacked(self) -> Tensor:
        """Return the weights (N, K)."""
        weight_NK: Tensor = torch.ops.draftsmith.unpack(self.packed, self.out_features, self.in_features)
        return weight_NK

    def look_up(self, tokens: Tensor) -> Tensor:
        """Return rows of the weights (…, K)."""
        rows: Tensor = torch.ops.draftsmith.embedding(tokens, self.packed, self.in_features, self.out_features)
        return rows

    def forward(self, x: Tensor) -> Tensor:
        """Multiply rows (…, K) to (…, N)."""
        self.check_width(x)
        return _without_gradient(torch.ops.draftsmith.linear(x, self.packed, self.bias_N, self.out_features))


def unpacked_int8(packed: Tensor, scales: Tensor, outputs: int, inputs: int) -> Tensor:
    """Return int8 weights times their scales, as bf16 (N, K)."""
    whole_NK = packed.permute(0, 2, 1, 3).flatten(2).flatten(0, 1)[:outputs, :inputs]
    return (whole_NK * scales[:outputs, None]).bfloat16()


class Int8Linear(_Packed):
    """A linear layer with int8 weights, a scale for each output, and rows quantised as they come, a scale for each."""

    PARTS = ("packed", "scales", "sums")
    packed: Tensor
    scales: Tensor
    sums: Tensor

    @staticmethod
    def pack(weight_NK: Tensor) -> Sequence[Tensor]:
        """Return whole numbers, the scale of every output, and the sums of the numbers."""
        parts: tuple[Tensor, ...] = torch.ops.draftsmith.pack_int8(weight_NK)
        return parts

    def unpacked(self) -> Tensor:
        """Return the quantised weights as bf16 (N, K)."""
        return unpacked_int8(self.packed, self.scales, self.out_features, self.in_features)

    def look_up(self, tokens: Tensor) -> Tensor:
        """Return whole numbers times their scales (…, K)."""
        rows: Tensor = torch.ops.draftsmith.embedding_int8(
            tokens, self.packed, self.scales, self.in_features, self.out_features
        )
        return rows

    def parts(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return weights, scales and sums."""
        return self.packed, self.scales, self.sums

    def forward(self, x: Tensor) -> Tensor:
        """Multiply rows (…, K) to (…, N)."""
        self.check_width(x)
        return _without_gradient(
            torch.ops.draftsmith.linear_int8(x, self.packed, self.scales, self.sums, self.bias_N, self.out_features)
        )


class Int4Linear(_Packed):
    """A linear layer with weights in 4 bits, every 32 inputs of an output with a scale and a zero point of their own.

    Rows are quantised to int8 as they come, with a scale for every 32 inputs.
    """

    packed: Tensor

    @staticmethod
    def pack(weight_NK: Tensor) -> Sequence[Tensor]:
        """Return the packed weights."""
        return (torch.ops.draftsmith.pack_int4(weight_NK),)

    def unpacked(self) -> Tensor:
        """Return the quantised weights as bf16 (N, K)."""
        weight_NK: Tensor = torch.ops.draftsmith.unpack_int4(self.packed, self.out_features, self.in_features)
        return weight_NK

    def look_up(self, tokens: Tensor) -> Tensor:
        """Return rows of the quantised weights (…, K)."""
        rows: Tensor = torch.ops.draftsmith.embedding_int4(tokens, self.packed, self.in_features, self.out_features)
        return rows

    def forward(self, x: Tensor) -> Tensor:
        """Multiply rows (…, K) to (…, N)."""
        self.check_width(x)
        return _without_gradient(torch.ops.draftsmith.linear_int4(x, self.packed, self.bias_N, self.out_features))


PackedLayer = PackedLinear | Int8Linear | Int4Linear
LAYERS: dict[Quantization, type[PackedLayer]] = {"none": PackedLinear, "int8": Int8Linear, "int4": Int4Linear}


class PackedEmbedding(nn.Module):
    """The embedding of a model whose head is tied to it: reads the head's packed weights, as the head has them."""

    def __init__(self, head: PackedLayer) -> None:
        super().__init__()
        self._head = (head,)  # in a tuple, so that it is not a submodule twice

    @property
    def weight(self) -> Tensor:
        """The table (V, F); a copy, made at each call."""
        return self._head[0].weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Look tokens (…) up as rows (…, F)."""
        return self._head[0].look_up(tokens)

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "weight"] = self.weight


class PackedExperts(nn.Module):
    """The experts of a mixture (gated SiLU, no biases) by the native kernels, in the place of transformers' module.

    Args:
        gate_up_EIF: gate and up projections of every expert, gates first, (E, 2 I, F).
        down_EFI: down projections.
        quantize: how to quantise the weights of each expert, and then rows as they come.
        parts: what `pack` returns, where the weights are packed already; of the tables only sizes are asked.
    """

    def __init__(
        self,
        gate_up_EIF: Tensor,
        down_EFI: Tensor,
        quantize: Quantization = "none",
        parts: Sequence[Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.width, self.inner = down_EFI.shape[1:]
        self.quantize = quantize
        given = self.pack(gate_up_EIF, down_EFI, quantize) if parts is None else parts
        names = [name + part for name in ("gate_up", "down") for part in self._parts()]
        for name, value in zip(names, given, strict=True):
            self.register_buffer(name, value, persistent=False)

    @staticmethod
    def pack(gate_up_EIF: Tensor, down_EFI: Tensor, quantize: Quantization) -> Sequence[Tensor]:
        """Return the parts of packed experts; of tables on the meta device, their sizes alone."""
        return [*_pack_experts(gate_up_EIF.detach(), quantize), *_pack_experts(down_EFI.detach(), quantize)]

    def parts(self) -> list[Tensor]:
        """Return what is packed, in the order of `pack`."""
        return [*self._held("gate_up"), *self._held("down")]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Send rows (R, F) through their experts (R, C) and add up what comes, weighted."""
        rows = hidden_states.reshape(-1, self.width).contiguous()
        summed: Tensor = torch.ops.draftsmith.experts(
            rows, top_k_index, top_k_weights, self._held("gate_up"), self._held("down"), self.inner
        )
        return _without_gradient(summed).view(hidden_states.shape)

    def unpacked(self) -> tuple[Tensor, Tensor]:
        """Return the weights as bf16: gate and up projections (E, 2 I, F), and down projections (E, F, I)."""
        return self._unpacked("gate_up", 2 * self.inner, self.width), self._unpacked("down", self.width, self.inner)

    def _parts(self) -> tuple[str, ...]:
        return ("", "_scales", "_sums") if self.quantize == "int8" else ("",)

    def _held(self, name: str) -> list[Tensor]:
        return [self.get_buffer(name + part) for part in self._parts()]

    def _unpacked(self, name: str, outputs: int, inputs: int) -> Tensor:
        if self.quantize == "int8":
            packed, scales, _ = self._held(name)
            pairs = zip(packed, scales, strict=True)
            return torch.stack([unpacked_int8(weights, steps, outputs, inputs) for weights, steps in pairs])
        operators = torch.ops.draftsmith
        unpack = operators.unpack_int4 if self.quantize == "int4" else operators.unpack
        return torch.stack([unpack(one, outputs, inputs) for one in self._held(name)[0]])

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[prefix + "gate_up_proj"], destination[prefix + "down_proj"] = self.unpacked()


def _pack_experts(weights_ENK: Tensor, quantize: Quantization) -> list[Tensor]:
    """Pack every expert; return the weights, and in int8 their scales and sums, each of all experts."""
    if quantize == "none":
        return list(torch.ops.draftsmith.pack_all([weights_ENK]))
    if quantize == "int4":
        return [torch.stack([torch.ops.draftsmith.pack_int4(one) for one in weights_ENK])]
    packed = [torch.ops.draftsmith.pack_int8(one) for one in weights_ENK]
    return [torch.stack(parts) for parts in zip(*packed, strict=True)]


def packed_parts(layers: Iterable[nn.Module]) -> tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]]:
    """Return what native code reads of packed layers: weights, scales, sums and biases, empty where there are none."""
    held: tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]] = ([], [], [], [])
    for layer in layers:
        assert isinstance(layer, PackedLayer)
        for parts, part in zip(held, (*layer.parts(), NONE if layer.bias_N is None else layer.bias_N), strict=True):
            parts.append(part)
    return held


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether packed layers work here: bf16 on a CPU, with the native kernels built."""
    return LIBRARY and device.type == "cpu" and dtype == torch.bfloat16
