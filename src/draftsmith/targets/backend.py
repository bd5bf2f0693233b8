"""Reads a target: transformers' code through tree attention, the same with native linear layers, or a native operator.

Every target has one backend, which is chosen while the target loads. The engine, drafters and proofs call its methods
and never ask which backend it is. Compilation belongs to the engine, see `draftsmith.engine.steps.runner`.

Shapes: B rows, M nodes (root first), T tokens, S cached tokens looked at, U nodes that logits are wanted of.
"""

import copy
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from draftsmith.dtypes import multiplies_bf16
from draftsmith.native import kernels_in_use, why_missing
from draftsmith.native.decoder import NO_BOUND, Bound, NativeDecoder, Noise, has_native_form
from draftsmith.native.layers import can_pack
from draftsmith.native.packing import pack_linears, pack_model
from draftsmith.targets.attention import ShapeProbe, lay_out_pass
from draftsmith.targets.cache.cache import KVCache
from draftsmith.targets.cache.nodes import Nodes
from draftsmith.targets.copies import refuse_left_over
from draftsmith.targets.encode import encode_by_model, encode_in_pieces, no_features
from draftsmith.targets.kept import KeptWeights
from draftsmith.targets.packing import can_prepack, prepack_linears
from draftsmith.types import DraftsmithError, Quantization

if TYPE_CHECKING:
    from draftsmith.targets.calibration import Calibration
    from draftsmith.targets.loading.self_check import SelfCheck
    from draftsmith.targets.target import Target

# How far the native forward may differ from the model's own code, relative to its size. bf16 differs by about 0.01;
# int8, which also rounds the inputs of a layer, by two to four times that.
NATIVE_TOLERANCE: dict[Quantization, float] = {"none": 0.05, "int8": 0.1, "int4": 0.1}
# Where padding is computed, the texts of a forward are padded to the longest. The padded texts may have at most this
# many times as many tokens as the texts themselves.
MOST_PADDING = 1.5

F = TypeVar("F")
log = logging.getLogger(__name__)


class Backend(ABC):
    """Reads one target, and packs the layers of its drafters.

    Args:
        target: set up as far as its hooks.
    """

    description: str
    """What reads the model, in words, for reports."""
    native: bool = False
    """Whether native kernels are used; code that loads another model beside this one may then use them too."""
    compiles: bool = True
    """Whether a compiler can improve `read`."""
    reads_apart: bool = False
    """Whether every row is read as if it were alone: its bits do not depend on other rows or on the pieces in which it
    is read, and NaN in keys and values stays with the tokens they belong to."""
    takes_parts: bool = True
    """Whether it also reads views that leave out parts of layers; views that leave out whole layers it always reads."""
    lacks: str = ""
    """Why a model of a kind that the native kernels support does not use them; empty if it does."""
    packing_s: float = 0.0
    """Seconds that native packing took."""

    def __init__(self, target: "Target") -> None:
        self.target = target

    @abstractmethod
    def read(
        self, cache: KVCache, nodes: Nodes, taps: tuple[int, ...], keep_logits: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Read nodes behind every row; see `Target.forward`."""

    def guess(
        self, cache: KVCache, roots_B: Tensor, held_B: Tensor, slots_B: Tensor | None, depth: int,
        bound: Bound = NO_BOUND,
    ) -> tuple[Tensor, Tensor] | None:
        """Draft chains greedily: read each row's root behind its `held_B` tokens, then the likeliest token, and so on.

        Returns these choices (B, depth), -1 where a chain has ended; and, with a bound, what the target may well choose
        instead of each, -1 for nothing. Returns None if no single operator does it.
        """
        return None

    def draw(
        self, cache: KVCache, roots_B: Tensor, held_B: Tensor, slots_B: Tensor | None, depth: int, noise: Noise,
        bound: Bound = NO_BOUND,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Do as `guess`, but draw the tokens; only by the target's own noise may chains end early.

        Returns the same and the distributions that the choices were drawn from, as `Draft.q_BMV`, or None if no single
        operator does it. If the target's own noise is used, the distributions are not needed.
        """
        return None

    @abstractmethod
    def encode(self, tokens_BT: Tensor, taps: tuple[int, ...], logits: bool) -> tuple[Tensor, Tensor | None]:
        """Read whole texts, without gradients; see `Target.encode`."""

    @abstractmethod
    def columns(self, span: Callable[[], int]) -> Tensor | None:
        """Return the cached entries to look at, for `Nodes`; `span` returns how many, and is called only if needed."""

    @abstractmethod
    def batches(self, sizes: Sequence[int]) -> list[list[int]]:
        """Divide texts of these lengths into groups that are read in one forward each; return their indices."""

    @abstractmethod
    def pack(self, drafter: nn.Module) -> bool:
        """Turn the linear layers of a drafter into the form that decodes fastest here, in place.

        Returns whether they are packed for native operators.
        """

    @abstractmethod
    def choose(self, plain: F, native: F) -> F:
        """Return the version that fits this backend: the one made of PyTorch's operations, or the native one."""

    @abstractmethod
    def differentiable(self) -> "Target":
        """Return the target with operations that gradients pass through; the target itself if they do already."""

    @abstractmethod
    def settled(self, probe: ShapeProbe, check: "SelfCheck") -> "Backend":
        """Return the fastest backend that reads draft trees as the model itself does; refuse it if none does."""

    def over(self, target: "Target") -> "Backend":
        """Return the backend that reads a view of the target."""
        other = copy.copy(self)
        other.target = target
        return other


class Eager(Backend):
    """The transformers model through tree attention; its bf16 products on a CPU use oneDNN, prepacked if possible.

    Args:
        lacks: why it is not native, for a model that might be.
    """

    description = "PyTorch"

    def __init__(self, target: "Target", lacks: str = "") -> None:
        super().__init__(target)
        self.lacks = lacks
        self._all_S = self._columns_S = torch.empty(0, dtype=torch.long, device=target.device)

    def read(
        self, cache: KVCache, nodes: Nodes, taps: tuple[int, ...], keep_logits: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Pass the nodes to the model, with what its attention needs of them."""
        target = self.target
        tree_pass = lay_out_pass(cache, nodes, target.max_length)
        own = keep_logits is not None and keep_logits.ndim == 2
        target.hooks.want(taps, keep_logits if own else None)
        out = target.model(
            input_ids=tree_pass.tokens_BM,
            position_ids=tree_pass.positions_BM,
            use_cache=False,
            logits_to_keep=0 if keep_logits is None or own else keep_logits,
            return_dict=True,
            tree_pass=tree_pass,
        )
        target.hooks.want(())
        if not taps:
            return out.logits, no_features(target, nodes.tokens_BM)
        features_BMF = target.hooks.take(taps)
        if nodes.counts_B is not None:
            number_M = torch.arange(features_BMF.shape[1], device=features_BMF.device)
            features_BMF = features_BMF.masked_fill((number_M >= nodes.counts_B.unsqueeze(1)).unsqueeze(2), 0)
        return out.logits, features_BMF

    def encode(self, tokens_BT: Tensor, taps: tuple[int, ...], logits: bool) -> tuple[Tensor, Tensor | None]:
        """Let the model read them."""
        return encode_by_model(self.target, tokens_BT, taps, logits)

    def columns(self, span: Callable[[], int]) -> Tensor | None:
        """Return 0 … S - 1."""
        count = span()
        if len(self._all_S) < count:
            self._all_S = torch.arange(2 * count, device=self.target.device)
        if len(self._columns_S) != count:
            self._columns_S = self._all_S[:count]
        return self._columns_S

    def batches(self, sizes: Sequence[int]) -> list[list[int]]:
        """Group texts of similar length, because they are padded to the longest."""
        batches: list[list[int]] = []
        longest = tokens = 0  # of the current batch
        for index in sorted(range(len(sizes)), key=lambda index: -sizes[index]):
            size = sizes[index]
            if batches and (len(batches[-1]) + 1) * longest <= MOST_PADDING * (tokens + size):
                batches[-1].append(index)
                tokens += size
            else:
                batches.append([index])
                longest = tokens = size
        return batches

    def pack(self, drafter: nn.Module) -> bool:
        """Prepack where that helps."""
        if can_prepack(self.target.device, self.target.dtype):
            prepack_linears(drafter)
        return False

    def choose(self, plain: F, native: F) -> F:
        """Return the version made of PyTorch's operations."""
        return plain

    def differentiable(self) -> "Target":
        """Return the target without prepacking."""
        return self.target.without_prepacking()

    def settled(self, probe: ShapeProbe, check: "SelfCheck") -> Backend:
        """Prepack, and compare with the model's own code."""
        if can_prepack(self.target.device, self.target.dtype):
            prepack_linears(self.target.model)
        check.trees()
        return self


class NativeLayers(Eager):
    """The transformers model with native linear layers; native operators around it and in drafters.

    Args:
        target: after `pack_model`.
        allowed: how far a native forward may differ from the model's own.
        packing_s: seconds that packing took.
    """

    native = True

    def __init__(self, target: "Target", allowed: float, packing_s: float) -> None:
        super().__init__(target)
        self.description = f"native {kernels_in_use()} layers"
        self._allowed, self.packing_s = allowed, packing_s

    def pack(self, drafter: nn.Module) -> bool:
        """Pack as int8: guesses need not be exact."""
        pack_linears(drafter, lambda _: "int8")
        return True

    def choose(self, plain: F, native: F) -> F:
        """Return the native version."""
        return native

    def differentiable(self) -> "Target":
        """Return a copy of the whole target, because a packed layer shares nothing with it; fp32 where bf16 is slow."""
        dtype = self.target.dtype if multiplies_bf16(self.target.device) else torch.float32
        return self.target.copied(dtype).without_prepacking()

    def settled(self, probe: ShapeProbe, check: "SelfCheck") -> Backend:
        """Use the native forward if there is one that agrees with the model itself."""
        target = self.target
        if has_native_form(target.model) and probe.softcaps == {None}:
            target.backend = NativeForward(target, self._allowed, self.packing_s)
            distance = check.tree_distance()
            if distance < self._allowed:
                return target.backend
            target.backend = self
            log.warning(
                "%s: the native forward differs from the model's own by %.3f, so it is not used.", target.name, distance
            )
        check.trees()
        return self


class NativeForward(NativeLayers):
    """One native operator for the whole forward, over the packed weights of native layers."""

    compiles = False
    reads_apart = True
    takes_parts = False

    def __init__(self, target: "Target", allowed: float, packing_s: float) -> None:
        super().__init__(target, allowed, packing_s)
        self.description = f"native {kernels_in_use()} forward"
        self._layers = [layer for layer in range(target.layers) if layer not in target.skipped.attention]
        self._decoder = NativeDecoder(target.model, self._layers, target.windows, target.max_length)

    def over(self, target: "Target") -> Backend:
        """Make the operator for this view of the target; if a layer lacks a part, transformers' code reads the view."""
        kind = NativeForward if target.skipped.whole else NativeLayers
        return kind(target, self._allowed, self.packing_s)

    def read(
        self, cache: KVCache, nodes: Nodes, taps: tuple[int, ...], keep_logits: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Call the operator."""
        keys_NEHD = [cache.keys_NEHD[layer] for layer in self._layers]
        values_NEHD = [cache.values_NEHD[layer] for layer in self._layers]
        return self._decoder.forward(
            nodes.tokens_BM, nodes.depths_BM, nodes.visible_BMM, nodes.cached_B, keys_NEHD, values_NEHD,
            cache.tables_RJ, nodes.slots_B, nodes.counts_B, taps, keep_logits,
        )

    def guess(
        self, cache: KVCache, roots_B: Tensor, held_B: Tensor, slots_B: Tensor | None, depth: int,
        bound: Bound = NO_BOUND,
    ) -> tuple[Tensor, Tensor] | None:
        """Call the operator."""
        keys_NEHD = [cache.keys_NEHD[layer] for layer in self._layers]
        values_NEHD = [cache.values_NEHD[layer] for layer in self._layers]
        return self._decoder.guess(roots_B, held_B, keys_NEHD, values_NEHD, cache.tables_RJ, slots_B, depth, bound)

    def draw(
        self, cache: KVCache, roots_B: Tensor, held_B: Tensor, slots_B: Tensor | None, depth: int, noise: Noise,
        bound: Bound = NO_BOUND,
    ) -> tuple[Tensor, Tensor, Tensor] | None:
        """Call the operator."""
        keys_NEHD = [cache.keys_NEHD[layer] for layer in self._layers]
        values_NEHD = [cache.values_NEHD[layer] for layer in self._layers]
        return self._decoder.draw(
            roots_B, held_B, keys_NEHD, values_NEHD, cache.tables_RJ, slots_B, depth, noise, bound
        )

    def encode(self, tokens_BT: Tensor, taps: tuple[int, ...], logits: bool) -> tuple[Tensor, Tensor | None]:
        """Read them with the operator that decodes."""
        return encode_in_pieces(self.target, tokens_BT, taps, logits)

    def columns(self, span: Callable[[], int]) -> Tensor | None:
        """Return None: the operator finds out what each row has."""
        return None

    def batches(self, sizes: Sequence[int]) -> list[list[int]]:
        """Read all texts together, because padding is not computed."""
        return [list(range(len(sizes)))] if sizes else []


def first_backend(
    target: "Target",
    native: bool,
    quantize: Quantization,
    origin: "Target | None" = None,
    calibration: "Calibration | None" = None,
) -> Backend:
    """Return the backend that a target starts with: native layers, packed now, where they can be used, else PyTorch.

    Args:
        origin: the target that has the weights of the layers, if the target's own model has none.
        calibration: how weights in 4 bits are rounded; None rounds each by itself.
    """
    device, dtype = target.device, target.dtype
    if native and can_pack(device, dtype):
        model, begun = target.model, time.perf_counter()
        if quantize != "none":
            refuse_left_over(model, target.name, quantize)
        pack_model(
            model, model.get_output_embeddings(), model.get_input_embeddings(), quantize,
            None if origin is None else origin.model,
            None if quantize == "none" else KeptWeights(rounding="" if calibration is None else calibration.key),
            calibration,
        )
        seconds = time.perf_counter() - begun
        log.info("%s: packed in %.2f s", target.name, seconds)
        return NativeLayers(target, NATIVE_TOLERANCE[quantize], seconds)
    if quantize != "none":
        refuse_unpackable(quantize, device, dtype)
        raise DraftsmithError(f"quantize is {quantize!r}, which needs the native kernels; leave native on.")
    wanted = native and device.type == "cpu" and dtype == torch.bfloat16
    return Eager(target, why_missing() if wanted else "")


def refuse_unpackable(quantize: Quantization, device: torch.device, dtype: torch.dtype) -> None:
    """Raise DraftsmithError where nothing can be quantised: without native kernels, or without bf16 on a CPU."""
    if not can_pack(device, dtype):
        raise DraftsmithError(
            f"quantize is {quantize!r}, which needs the native kernels and a bf16 model on a CPU; "
            f"{why_missing() or f'this is {dtype} on {device}'}."
        )
