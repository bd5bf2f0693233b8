"""The target: any decoder-only causal LM of transformers, unmodified, read through draft trees.

Shapes: B rows, M nodes (root first), T tokens, F feature width, V width of the logits, S cached tokens looked at.
"""

import copy
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.native import kernels_in_use, why_missing
from draftsmith.native.decoder import NativeDecoder, has_native_form
from draftsmith.native.layers import can_pack, pack_model
from draftsmith.target.attention import ShapeProbe, lay_out_pass
from draftsmith.target.cache import KVCache
from draftsmith.target.layers import layer_stack, shortened
from draftsmith.target.loading import load_model, precision_on_disk, resolve_device, short_name
from draftsmith.target.nodes import Nodes
from draftsmith.target.packing import can_prepack, prepack_linears
from draftsmith.target.self_check import Reading, SelfCheck
from draftsmith.target.support import (
    SHORT_WINDOW,
    fingerprint,
    longest_text,
    refuse_attention,
    refuse_unsupported,
    short_windows,
    use_tree_attention,
)
from draftsmith.target.tokens import end_tokens, load_tokenizer, tokenizer_hash
from draftsmith.types import DraftsmithError, Quantization, TargetFacts, cast_parameters, resolve_dtype

# How far the native forward may be from the model's own code, relative to its size; bf16 gives 0.01 or so, and int8,
# which rounds what goes into a layer too, two to four times that.
NATIVE_TOLERANCE: dict[Quantization, float] = {"none": 0.05, "int8": 0.1}
# Tokens of whole sequences that are read together natively: they need keys and values in all layers, and more tokens at
# a time would not be read faster.
ENCODED_TOKENS = 2048

log = logging.getLogger(__name__)


class OwnColumns:
    """Hands the head of a model only the states that logits are wanted of, where these differ from row to row."""

    def __init__(self) -> None:
        self.columns_BU: Tensor | None = None

    def pick(self, _: nn.Module, given: tuple[Tensor, ...]) -> tuple[Tensor, ...] | None:
        """Take the wanted nodes of every row out of (B, M, F); a hook before the head."""
        if self.columns_BU is None:
            return None
        states_BMF = given[0]
        index_BUF = self.columns_BU.unsqueeze(2).expand(-1, -1, states_BMF.shape[2])
        return (states_BMF.gather(1, index_BUF), *given[1:])


class Target:
    """Wraps a causal LM: logits and tapped hidden states at every node of a draft tree, in one forward.

    Args:
        model: the loaded transformers model; used as it is, in evaluation mode.
        tokenizer: its tokenizer, or None when prompts are token ids.
        name: what to call it in messages and checkpoints.
        native: use the native kernels where they serve (bf16 on a CPU): linear layers then hold packed weights in the
            place of their own, and Llama-shaped models are read by one native operator. It is False for PyTorch alone.
        quantize: "int8" quantises the linear layers; text is then that of the quantised model.

    Raises:
        DraftsmithError: for encoder-decoders, recurrent or hybrid state, and attention outside transformers'
            attention interface, with the reason.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "in-memory",
        native: bool = True,
        quantize: Quantization = "none",
    ) -> None:
        refuse_unsupported(model.config, name)
        own_attention = use_tree_attention(model, name)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.config = model.config.get_text_config(decoder=True)
        self.device: torch.device = model.device
        self.dtype: torch.dtype = model.dtype
        self.hidden_size: int = self.config.hidden_size
        self._head: nn.Module = _head(model, name)
        self.vocab_size: int = self._head.weight.shape[0]
        self.layers: int = self.config.num_hidden_layers
        self.max_length = longest_text(self.config, name)
        self.eos_token_ids: frozenset[int] = end_tokens(model, tokenizer)
        self.weights = sum(parameter.numel() for parameter in model.parameters())
        """How many there are; packing turns parameters into buffers, so it is counted before."""
        self._captured: dict[int, Tensor] = {}
        self._wanted: set[int] = {-1}
        self._own_columns = OwnColumns()
        self._install_taps()
        self.packing_s = 0.0
        self.native = native and can_pack(self.device, self.dtype)
        """Whether linear layers, of a drafter too, run on the native kernels."""
        if self.native:
            self._pack(quantize)
        elif quantize != "none":
            raise DraftsmithError(
                f"quantize is {quantize!r}, which needs the native kernels and a bf16 model on a CPU; "
                f"{why_missing() or f'this is {self.dtype} on {self.device}'}."
            )
        self.model.get_output_embeddings().register_forward_pre_hook(self._own_columns.pick)
        self._decoder: NativeDecoder | None = None
        self.packed = True
        """Whether linear layers use what `prepack_linears` gave them; generated code wants the plain weights."""
        self.implementation = "PyTorch"
        """What reads the model, in words."""
        self.precision_on_disk = ""
        """What the weights were before the dtype "auto" made them coarser, such as "fp32"; empty where it did not."""
        self.why_not_native = ""
        """Why a model that the native kernels are made for goes without them; empty when it does not."""
        # Packing came first: weights that are mapped from files are then read once, and not by these forwards as well.
        with short_windows(model, self.config) as window:
            check = SelfCheck(self, own_attention, self._read_by_model)
            probe = self._probe(check)
            self.kv_shapes = [probe.shapes[layer] for layer in range(self.layers)]
            self.windows = [probe.windows[layer] for layer in range(self.layers)]
            """The sliding window of every layer, None for full attention."""
            if self.native:
                self._go_native(probe, check, NATIVE_TOLERANCE[quantize])
            elif self.device.type == "cpu" and self.dtype == torch.bfloat16:
                self.why_not_native = why_missing()
                if can_prepack(self.device, self.dtype):
                    prepack_linears(model, lambda: self.packed)
            if self._decoder is None:
                check.trees()
        if window is not None:
            self.windows = [window if short == SHORT_WINDOW else short for short in self.windows]
            if self._decoder is not None:
                self._decoder = NativeDecoder(model, self.windows, self.max_length)

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *,
        dtype: str | torch.dtype = "auto",
        device: str = "auto",
        trust_remote_code: bool = False,
        native: bool = True,
        quantize: Quantization = "none",
    ) -> "Target":
        """Load a target by hub name or folder; weights from safetensors only.

        Raises:
            DraftsmithError: when it is missing, damaged or of an unsupported kind.
        """
        name = str(name_or_path)
        where = resolve_device(device)
        kind = resolve_dtype(dtype, where)
        model = load_model(name, kind, where, trust_remote_code)
        tokenizer, folder = load_tokenizer(name, trust_remote_code), Path(name)
        target = cls(model, tokenizer, folder.resolve().name if folder.is_dir() else name, native, quantize)
        if dtype == "auto":
            target.precision_on_disk = precision_on_disk(name, kind, trust_remote_code)
            if target.precision_on_disk:
                log.info(
                    "%s: weights are %s on disk; using %s here", target.name, target.precision_on_disk, short_name(kind)
                )
        return target

    @property
    def embedding_weight_VF(self) -> Tensor:
        """The input embedding (V, hidden)."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def head_weight_VF(self) -> Tensor:
        """The output projection (V, hidden)."""
        weight: Tensor = self._head.weight  # type: ignore[assignment]
        return weight

    @property
    def is_native(self) -> bool:
        """Whether one native operator reads the whole model, so that there is nothing to compile."""
        return self._decoder is not None

    def facts(self) -> TargetFacts:
        """Return what a drafter trained for this target has to match."""
        vocabulary, changed = tokenizer_hash(self.tokenizer), fingerprint(self.model.config)
        return TargetFacts(self.hidden_size, self.vocab_size, vocabulary, self.name, changed)

    def feature_size(self, taps: tuple[int, ...]) -> int:
        """Width (F) of the concatenated tapped states."""
        return len(taps) * self.hidden_size

    def widened(self) -> "Target":
        """Return an fp32 copy, to tell ties of the rounding from faults."""
        return self.copied(torch.float32)

    def copied(self, dtype: torch.dtype, native: bool = False, quantize: Quantization = "none") -> "Target":
        """Return a copy with weights of its own, in another precision."""
        # Built anew: a copy of the modules would keep hooks and packed weights that belong to this target.
        model = type(self.model)(copy.deepcopy(self.model.config))
        cast_parameters(model, dtype)
        model.load_state_dict(self.model.state_dict())
        return Target(model.to(device=self.device), self.tokenizer, self.name, native, quantize)

    def truncated(self, layers: int) -> "Target":
        """Return a view of the first `layers` layers under the same norm and head, without taps.

        It shares the weights, and reads and writes the first layers of a cache that this target reads and writes.
        """
        if not 1 <= layers <= self.layers:
            raise DraftsmithError(f"{self.name} has {self.layers} layers, so {layers} of them cannot be taken.")
        view = copy.copy(self)
        view.model = shortened(self.model, self.layers, layers)
        view.layers, view.kv_shapes, view.windows = layers, self.kv_shapes[:layers], self.windows[:layers]
        view._captured, view._wanted = {}, set()
        if self._decoder is not None:
            view._decoder = NativeDecoder(view.model, view.windows, self.max_length)
        return view

    def new_cache(self, slots: int, capacity: int, blocks: int | None = None, features: int = 0) -> KVCache:
        """Allocate keys and values for `slots` rows of `capacity` tokens; see `KVCache` for blocks and features."""
        return KVCache(self.kv_shapes, slots, capacity, self.dtype, self.device, blocks, features)

    def encode(
        self,
        tokens_BT: Tensor,
        taps: tuple[int, ...] = (-1,),
        logits: bool = False,
        gradients: bool = False,
        by_model: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Read whole sequences, for training; with `gradients`, for training the target too.

        Args:
            by_model: let the model's own code read, where a native operator would: a second opinion.

        Returns:
            features_BTF, where entry t is the state after reading token t (so it predicts token t + 1), and
            logits_BTV if asked for.
        """
        nothing_BT0 = torch.empty((*tokens_BT.shape, 0), dtype=self.dtype, device=self.device)
        if not taps and not logits:
            return nothing_BT0, None
        if self._decoder is not None and not gradients and not by_model:
            features_BTF, logits_BTV = self._encode_natively(tokens_BT, taps, logits)
            return features_BTF, logits_BTV if logits else None
        self._wanted = set(taps)
        with torch.set_grad_enabled(gradients):
            out = self.model(
                input_ids=tokens_BT, use_cache=False, logits_to_keep=0 if logits else 1, return_dict=True
            )
        return self._features(taps) if taps else nothing_BT0, out.logits if logits else None

    def _encode_natively(self, tokens_BT: Tensor, taps: tuple[int, ...], logits: bool) -> tuple[Tensor, Tensor]:
        batch, length = tokens_BT.shape
        some = max(1, ENCODED_TOKENS // max(1, length))
        keep = None if logits else torch.empty(0, dtype=torch.long)
        cache = self.new_cache(min(some, batch), length)
        if batch <= some and length <= ENCODED_TOKENS:
            scores_BTV, features_BTF = self.read_chain(cache, tokens_BT, torch.zeros(batch, dtype=torch.long), taps,
                                                       keep_logits=keep)
            return features_BTF, scores_BTV
        features_BTF = torch.empty((batch, length, self.feature_size(taps)), dtype=self.dtype)
        scores_BTV = torch.empty((batch, length if logits else 0, self.vocab_size), dtype=self.dtype)
        for row in range(0, batch, some):
            for begin in range(0, length, ENCODED_TOKENS):
                piece = slice(row, row + some), slice(begin, begin + ENCODED_TOKENS)
                cached_B = torch.full((len(tokens_BT[piece]),), begin)
                logits_BMV, features_BTF[piece] = self.read_chain(
                    cache, tokens_BT[piece], cached_B, taps, keep_logits=keep
                )
                if logits:
                    scores_BTV[piece] = logits_BMV
        return features_BTF, scores_BTV

    def read_chain(
        self,
        cache: KVCache,
        tokens_BM: Tensor,
        cached_B: Tensor,
        taps: tuple[int, ...] = (-1,),
        slots_B: Tensor | None = None,
        keep_logits: Tensor | None = None,
        longest: int | None = None,
        counts_B: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Read tokens of a text behind every row, each seeing those before it; see `Nodes` and `forward`.

        Args:
            longest: the largest of `cached_B`; without it the device is asked.
        """
        columns_S = None
        if self._decoder is None and longest is not None:
            columns_S = torch.arange(longest + tokens_BM.shape[1], device=self.device)
        nodes = Nodes(tokens_BM, cached_B, slots_B, counts_B=counts_B, columns_S=columns_S)
        return self.forward(cache, nodes, taps, keep_logits)

    def forward(
        self, cache: KVCache, nodes: Nodes, taps: tuple[int, ...] = (-1,), keep_logits: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Read nodes behind every row and store their keys and values; the caller decides what stays.

        Args:
            nodes: what to read, and where.
            taps: hidden states to return, see `Drafter.taps`.
            keep_logits: nodes to compute logits at: the same of all rows (U), or of every row its own (B, U); None
                computes all.

        Returns:
            logits (B, M or U, V) and features_BMF. Of nodes that a row does not have, the logits are anything, and the
            features zero.
        """
        if self._decoder is not None:
            return self._decoder.forward(
                nodes.tokens_BM, nodes.depths_BM, nodes.visible_BMM, nodes.cached_B, cache.keys_NEHD[: self.layers],
                cache.values_NEHD[: self.layers], cache.tables_RJ, nodes.slots_B, nodes.counts_B, taps, keep_logits,
            )
        tree_pass = lay_out_pass(cache, nodes, self.max_length)
        self._wanted = set(taps)
        own = keep_logits is not None and keep_logits.ndim == 2
        self._own_columns.columns_BU = keep_logits if own else None
        out = self.model(
            input_ids=tree_pass.tokens_BM,
            position_ids=tree_pass.positions_BM,
            use_cache=False,
            logits_to_keep=0 if keep_logits is None or own else keep_logits,
            return_dict=True,
            tree_pass=tree_pass,
        )
        self._own_columns.columns_BU = None
        if not taps:
            return out.logits, out.logits.new_empty((*nodes.tokens_BM.shape, 0))
        features_BMF = self._features(taps)
        if nodes.counts_B is not None:
            number_M = torch.arange(features_BMF.shape[1], device=self.device)
            features_BMF = features_BMF.masked_fill((number_M >= nodes.counts_B.unsqueeze(1)).unsqueeze(2), 0)
        return out.logits, features_BMF

    def _features(self, taps: tuple[int, ...]) -> Tensor:
        states = [self._captured[tap] for tap in taps]
        self._captured.clear()
        return states[0] if len(states) == 1 else torch.cat(states, dim=-1)

    def _install_taps(self) -> None:
        def catch(tap: int) -> Callable[[nn.Module, Any, Any], None]:
            def hook(_: nn.Module, __: Any, output: Any) -> None:
                if tap in self._wanted:
                    state = output if isinstance(output, Tensor) else output[0]
                    if state.dim() != 3 or state.shape[2] != self.hidden_size:
                        raise DraftsmithError(
                            f"{self.name} ({self.config.model_type}) hands states of shape {tuple(state.shape)} from "
                            f"layer to layer, where one of {self.hidden_size} a token is needed; it is not supported "
                            "yet."
                        )
                    self._captured[tap] = state

            return hook

        base = self.model.base_model
        path, stack = layer_stack(self.model, self.layers, self.name)
        # Some heads call the decoder inside the base model and pass that by; where both come, the outer one comes last.
        for module in {base.get_submodule(path.rpartition(".")[0]), base}:
            module.register_forward_hook(catch(-1))
        for index, layer in enumerate(stack):
            layer.register_forward_hook(catch(index))

    @torch.no_grad()
    def _read_by_model(self, tokens_RT: Tensor, taps: tuple[int, ...], probe: ShapeProbe | None = None) -> Reading:
        """Read whole texts by the model's own code, through whichever attention it has now."""
        self._wanted = set(taps)
        more = {} if probe is None else {"shape_probe": probe}
        out = self.model(input_ids=tokens_RT, use_cache=False, return_dict=True, **more)
        return Reading(out.logits, self._features(taps))

    def _probe(self, check: SelfCheck) -> ShapeProbe:
        """Read whole texts through our attention; return what its layers asked for."""
        probe = ShapeProbe()
        reading = self._read_by_model(check.sample.tokens_RT, check.taps, probe)
        refuse_attention(probe, self.layers, f"{self.name} ({self.config.model_type})")
        check.whole_texts(reading)
        return probe

    def _pack(self, quantize: Quantization) -> None:
        """Pack the linear layers, in place."""
        begun = time.perf_counter()
        self._head = pack_model(self.model, self._head, self.model.get_input_embeddings(), quantize == "int8")
        self.packing_s = time.perf_counter() - begun
        log.info("%s: packed in %.2f s", self.name, self.packing_s)

    def _go_native(self, probe: ShapeProbe, check: SelfCheck, allowed: float) -> None:
        """Take the native forward if it says what the model said."""
        self.implementation = f"native {kernels_in_use()} layers"
        if has_native_form(self.model) and probe.softcaps == {None}:
            self._decoder = NativeDecoder(self.model, self.windows, self.max_length)
            distance = check.tree_distance()
            if distance < allowed:
                self.implementation = f"native {kernels_in_use()} forward"
            else:
                self._decoder = None
                log.warning(
                    "%s: the native forward differs from the model's own by %.3f, so it is not used.",
                    self.name, distance,
                )
        log.info("%s: %s", self.name, self.implementation)


def _head(model: PreTrainedModel, name: str) -> nn.Linear:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise DraftsmithError(f"{name} has no output projection; give a causal language model.")
    return head
