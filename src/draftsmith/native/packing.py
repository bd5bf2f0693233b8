"""Replaces the linear layers of a model by packed ones, of its own weights or of those of the model it is a copy of.

Shapes: N outputs, K inputs, E experts.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.pytorch_utils import Conv1D

from draftsmith.native.layers import LAYERS, NONE, PackedEmbedding, PackedExperts, PackedLayer
from draftsmith.types import Quantization

KINDS = (nn.Linear, Conv1D)
PIECE = 64 << 20
"""Bytes of weights that are packed together. Layers alone are too small for huge pages, and packing all at once would
hold the model twice."""

Choice = Callable[[nn.Module], Quantization]
"""How to quantise the weights of a layer, or of a module of experts."""


class Packable(ABC):
    """A linear layer, or the experts of a layer, that a packed one can replace.

    Args:
        module: what is replaced; its weights may be on the meta device where the origin has them.
        origin: what has the weights, packed or not: the module itself, or its twin in another model.
        quantize: how to quantise them.
    """

    def __init__(self, module: Any, origin: Any, quantize: Quantization) -> None:
        self.module, self.origin, self.quantize = module, origin, quantize
        self.factors = NONE
        """Of the inputs, where weights in 4 bits are rounded by them; see `Rounding`."""

    @property
    def is_transposed(self) -> bool:
        """Whether the weights are kept as (K, N), as GPT-2's are."""
        return isinstance(self.module, Conv1D)

    @abstractmethod
    def weights(self) -> list[Tensor]:
        """Return the weights in bf16, as they are packed; freshly made where the origin has them packed."""

    @abstractmethod
    def sources(self) -> list[Tensor]:
        """Return all that the packed weights depend on, as the origin has it."""

    @abstractmethod
    def shared(self) -> Sequence[Tensor] | None:
        """Return the packed parts where another model has packed the same in the same way, else None."""

    @abstractmethod
    def sizes(self) -> list[Tensor]:
        """Return what `weights` returns, on the meta device."""

    @abstractmethod
    def pack(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """Pack what `weights` or `sizes` returns into parts."""

    @abstractmethod
    def packed(self, parts: Sequence[Tensor]) -> nn.Module:
        """Return the packed module of these parts."""

    def new_bytes(self) -> int:
        """Return the bytes that the packed module takes beside its origin."""
        return 0 if self.shared() is not None else sum(part.nbytes for part in self.pack(self.sizes()))

    @abstractmethod
    def free(self, shared: Mapping[int, int]) -> None:
        """Let go of the weights, unless other modules hold them too by `shared`."""


class PackableLinear(Packable):
    """A linear layer."""

    @property
    def _is_copy(self) -> bool:
        return isinstance(self.origin, PackedLayer)

    def weights(self) -> list[Tensor]:
        """Return the weights (N, K)."""
        if self._is_copy:
            return [self.origin.unpacked()]
        weight = self.origin.weight.detach().bfloat16()
        return [weight.T if self.is_transposed else weight]

    def sources(self) -> list[Tensor]:
        """Return the weights, packed or not."""
        return [part for part in self.origin.parts() if len(part)] if self._is_copy else [self.origin.weight.detach()]

    def shared(self) -> Sequence[Tensor] | None:
        """Return the parts of a packed origin of this kind."""
        if not isinstance(self.origin, LAYERS[self.quantize]):
            return None
        return [self.origin.get_buffer(name) for name in self.origin.PARTS]

    def sizes(self) -> list[Tensor]:
        """Return a matrix (N, K) on the meta device."""
        weight = self.module.weight
        sizes = weight.T.shape if self.is_transposed else weight.shape
        return [torch.empty(sizes, dtype=torch.bfloat16, device="meta")]

    def pack(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """Pack the matrix."""
        return LAYERS[self.quantize].pack(weights[0])

    def packed(self, parts: Sequence[Tensor]) -> nn.Module:
        """Return the packed layer."""
        bias_N = self.origin.bias_N if self._is_copy else self.origin.bias
        return LAYERS[self.quantize](self.sizes()[0], bias_N, self.is_transposed, parts)

    def new_bytes(self) -> int:
        """Count the bias too, which is fp32 in a packed layer."""
        bias = None if self._is_copy else self.origin.bias
        return super().new_bytes() + (0 if bias is None or bias.dtype == torch.float32 else 4 * bias.numel())

    def free(self, shared: Mapping[int, int]) -> None:
        """Let go of the matrix."""
        if shared[id(self.module.weight)] == 1:
            self.module.weight = None


class PackableExperts(Packable):
    """The experts of one of transformers' mixtures, in the form that `PackedExperts` knows."""

    @property
    def _is_copy(self) -> bool:
        return isinstance(self.origin, PackedExperts)

    def weights(self) -> list[Tensor]:
        """Return gate and up projections, and down projections."""
        if self._is_copy:
            return [*self.origin.unpacked()]
        return [table.detach().bfloat16() for table in (self.origin.gate_up_proj, self.origin.down_proj)]

    def sources(self) -> list[Tensor]:
        """Return both tables, packed or not."""
        return self.origin.parts() if self._is_copy else [self.origin.gate_up_proj, self.origin.down_proj]

    def shared(self) -> Sequence[Tensor] | None:
        """Return the parts of packed experts of this kind."""
        return self.origin.parts() if self._is_copy and self.origin.quantize == self.quantize else None

    def sizes(self) -> list[Tensor]:
        """Return two tables on the meta device."""
        tables = (self.module.gate_up_proj, self.module.down_proj)
        return [torch.empty(table.shape, dtype=torch.bfloat16, device="meta") for table in tables]

    def pack(self, weights: Sequence[Tensor]) -> Sequence[Tensor]:
        """Pack both tables."""
        gate_up_EIF, down_EFI = weights
        return PackedExperts.pack(gate_up_EIF, down_EFI, self.quantize)

    def packed(self, parts: Sequence[Tensor]) -> nn.Module:
        """Return the packed experts."""
        gate_up_EIF, down_EFI = self.sizes()
        return PackedExperts(gate_up_EIF, down_EFI, self.quantize, parts)

    def free(self, shared: Mapping[int, int]) -> None:
        """Let go of both tables."""
        self.module.gate_up_proj = self.module.down_proj = None


class Keeper(Protocol):
    """Keeps the packed weights of a model from one start to the next."""

    def find(self, work: Mapping[str, Packable]) -> Mapping[str, Sequence[Tensor]]:
        """Return the parts of all these, by their names in the model, or nothing."""

    def keep(self, parts: Mapping[str, Sequence[Tensor]]) -> None:
        """Keep the parts of all that was not found."""


class Rounding(Protocol):
    """Says how the weights of linear layers are rounded to 4 bits, where not by the weights alone."""

    def factors(self, names: Sequence[str]) -> Mapping[str, Tensor]:
        """Return lower Cholesky factors of the inverses of these layers' inputs' products, by name.

        They are (inputs up to whole groups, inputs of a block), and row k has those of input k. A layer without any is
        rounded by its weights alone.
        """


def pack_model(
    model: nn.Module,
    head: nn.Module,
    embedding: nn.Module,
    quantize: Quantization = "none",
    origin: nn.Module | None = None,
    keeper: Keeper | None = None,
    rounding: Rounding | None = None,
) -> None:
    """Replace the linear layers of a model by packed ones, in place.

    A head that shares its weights with a plain embedding is packed once, and the embedding reads from it. Tensors are
    freed as they are packed, so the model is never held twice.

    Args:
        quantize: how to quantise the weights of every layer, see `choice_for`.
        origin: the model that has the weights, if they are not this one's own; see `packables`.
        keeper: asked for quantised weights first, and given all of them where it had none.
        rounding: asked where weights are to be rounded, and not found.
    """
    choice = choice_for(head, embedding, quantize)
    shares = _is_tied(head, embedding) and type(embedding) is nn.Embedding
    new_head = pack_linears(model, choice, origin, keeper, rounding).get(head, head)
    if shares and isinstance(new_head, PackedLayer):
        _replace(list(model.modules()), {embedding: PackedEmbedding(new_head)})
        embedding.weight = None  # type: ignore[assignment]


def choice_for(head: nn.Module, embedding: nn.Module, quantize: Quantization) -> Choice:
    """Say how the layers of a model are quantised.

    Tied to a plain embedding, the head takes the embedding with it: both are then the same table. Embeddings of other
    kinds do more than look up (Gemma's scales); they keep their table, and a head that is tied to one stays bf16.
    """
    keeps = _is_tied(head, embedding) and type(embedding) is not nn.Embedding
    return lambda layer: "none" if keeps and layer is head else quantize


def pack_linears(
    model: nn.Module,
    quantize: Choice = lambda layer: "none",
    origin: nn.Module | None = None,
    keeper: Keeper | None = None,
    rounding: Rounding | None = None,
) -> dict[nn.Module, nn.Module]:
    """Replace the linear layers and the experts of a module by packed ones, in place; return what replaced which layer.

    Args:
        quantize: how to quantise the weights of a layer, or of a module of experts.
        origin: the model that has the weights, if they are not this one's own; see `packables`.
        keeper: asked for quantised weights first, and given all of them where it had none.
        rounding: asked where weights are to be rounded, and not found.
    """
    modules = list(model.modules())
    work = packables(model, quantize, origin)
    shared = Counter(id(module.weight) for module in modules if isinstance(module, (*KINDS, nn.Embedding)))
    ready = {name: parts for name, one in work.items() if (parts := one.shared()) is not None}
    rounded = {name: one for name, one in work.items() if one.quantize != "none" and name not in ready}
    found = keeper.find(rounded) if keeper is not None and rounded else {}
    ready |= found
    if rounding is not None and rounded and not found:
        linear = [name for name, one in rounded.items() if isinstance(one, PackableLinear)]
        for name, factors in rounding.factors(linear).items():
            rounded[name].factors = factors
    replaced: dict[nn.Module, nn.Module] = {}
    made: dict[str, Sequence[Tensor]] = {}
    for some in _pieces(work):
        for name, parts in _pack_together({name: one for name, one in some.items() if name not in ready}).items():
            ready[name] = made[name] = parts
        for name, one in some.items():
            replaced[one.module] = one.packed(ready[name])
        for one in some.values():
            one.free(shared)
            one.factors = NONE
    if keeper is not None and rounded and not found:
        keeper.keep({name: made[name] for name in rounded})
    _replace(modules, replaced)
    return replaced


def packables(model: nn.Module, quantize: Choice, origin: nn.Module | None = None) -> dict[str, Packable]:
    """Return what of a model is packed, by name.

    Args:
        quantize: how to quantise the weights of a layer, or of a module of experts.
        origin: a model with modules of the same names, in any dtype and maybe packed itself, that has the weights; the
            model's own may then be on the meta device.
    """
    work: dict[str, Packable] = {}
    for name, module in model.named_modules():
        kind: type[Packable]
        if type(module) in KINDS and _is_packable(module.weight):
            kind = PackableLinear
        elif _has_plain_experts(module):
            kind = PackableExperts
        else:
            continue
        work[name] = kind(module, module if origin is None else origin.get_submodule(name), quantize(module))
    return work


def left_over(model: nn.Module) -> tuple[Counter[str], int]:
    """Count the weights of matrices that are multiplied and not packed, by the kind of module that has them.

    Args:
        model: what is not packed yet, in bf16, or on the meta device.

    Returns:
        These counts, and how many weights are packed.
    """
    work = packables(model, lambda _: "none")
    counts: Counter[str] = Counter()
    for name, module in model.named_modules():
        if name not in work and not isinstance(module, nn.Embedding):  # embeddings are looked up
            matrices = (one for one in module.parameters(recurse=False) if one.ndim > 1)
            counts[type(module).__name__] += sum(one.numel() for one in matrices)
    return +counts, sum(weight.numel() for one in work.values() for weight in one.sizes())


def _is_tied(head: nn.Module, embedding: nn.Module) -> bool:
    return isinstance(embedding, nn.Embedding) and embedding.weight is getattr(head, "weight", None)


def _is_packable(weight: Any) -> bool:
    return bool(weight.dtype == torch.bfloat16 and weight.device.type in ("cpu", "meta"))


def _has_plain_experts(module: nn.Module) -> bool:
    """Whether these are experts of the form `PackedExperts` knows."""
    tables: Any = dict(module.named_parameters(recurse=False))
    if tables.keys() != {"gate_up_proj", "down_proj"} or tables["down_proj"].ndim != 3:
        return False
    # transformers says in attributes how its experts are laid out; modules without them are of another make.
    form = vars(module)
    plain = form.get("has_gate") and form.get("is_concatenated")
    special = form.get("has_bias") or form.get("is_transposed") or form.get("has_post_expert_norm")
    odd = any(size % 2 for size in tables["down_proj"].shape[1:])
    gated = isinstance(module._modules.get("act_fn"), (nn.SiLU, SiLUActivation))
    return bool(plain and gated and not special and not odd and all(_is_packable(table) for table in tables.values()))


PACK_TOGETHER: dict[Quantization, Callable[[list[Tensor], list[Tensor]], list[Tensor]]] = {
    "none": lambda weights, _: torch.ops.draftsmith.pack_all(weights),
    "int4": lambda weights, factors: torch.ops.draftsmith.pack_all_int4(weights, factors),
}
"""What packs several layers into one piece of memory, given their weights and the factors of their inputs."""


def _pack_together(work: Mapping[str, Packable]) -> dict[str, Sequence[Tensor]]:
    """Pack what there is of each kind in as few pieces of memory as can be; return the parts by name."""
    made: dict[str, Sequence[Tensor]] = {}
    for kind, pack in PACK_TOGETHER.items():
        together = [name for name, one in work.items() if one.quantize == kind and isinstance(one, PackableLinear)]
        if together:
            packed = pack([work[name].weights()[0] for name in together], [work[name].factors for name in together])
            made |= {name: [part] for name, part in zip(together, packed, strict=True)}
    return made | {name: one.pack(one.weights()) for name, one in work.items() if name not in made}


def _pieces(work: Mapping[str, Packable]) -> Iterator[dict[str, Packable]]:
    """Group layers, in order, up to a piece each."""
    piece: dict[str, Packable] = {}
    taken = 0
    for name, one in work.items():
        size = sum(weight.nbytes for weight in one.sizes())
        if piece and taken + size > PIECE:
            yield piece
            piece, taken = {}, 0
        piece[name] = one
        taken += size
    if piece:
        yield piece


def _replace(parents: Iterable[nn.Module], replacements: Mapping[nn.Module, nn.Module]) -> None:
    for parent in parents:
        for name, child in list(parent._modules.items()):
            if child is not None and child in replacements:
                setattr(parent, name, replacements[child])
