"""The target: any decoder-only causal LM of transformers, unmodified, read through draft trees.

Shapes: B rows, M nodes (root first), T tokens, F feature width, V width of the logits, S cached tokens looked at.
"""

import copy
import logging
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.dtypes import cast_parameters, resolve_dtype
from draftsmith.memory import give_back_freed_memory
from draftsmith.targets.backend import Backend, first_backend, refuse_unpackable
from draftsmith.targets.cache.cache import KVCache
from draftsmith.targets.cache.nodes import Nodes
from draftsmith.targets.calibration import Calibration
from draftsmith.targets.copies import copy_of, take_unstored
from draftsmith.targets.encode import encode_by_model, no_features
from draftsmith.targets.hooks import Hooks
from draftsmith.targets.loading.loading import load_model, precision_on_disk, resolve_device, short_name
from draftsmith.targets.loading.self_check import SelfCheck
from draftsmith.targets.loading.support import (
    SHORT_WINDOW,
    fingerprint,
    longest_text,
    refuse_unsupported,
    short_windows,
    use_tree_attention,
    weights_hash,
)
from draftsmith.targets.loading.tokens import end_tokens, load_tokenizer, tokenizer_hash
from draftsmith.targets.logit_form import LogitForm, logit_form
from draftsmith.targets.packing import without_prepacking
from draftsmith.targets.sublayers import Skipped, Sublayers, model_without, whole_layers
from draftsmith.targets.token_ids import ways
from draftsmith.types import DraftsmithError, Quantization, TargetFacts

log = logging.getLogger(__name__)


class Target:
    """Wraps a causal LM: returns logits and tapped hidden states at every node of a draft tree, in one forward.

    Args:
        model: the loaded transformers model; used as it is, in evaluation mode.
        tokenizer: its tokenizer, or None when prompts are token ids.
        name: its name in messages and checkpoints.
        native: use the native kernels where possible (bf16 on a CPU): linear layers then hold packed weights instead of
            their own, and Llama-shaped models are read by one native operator. False uses PyTorch alone.
        quantize: "int8" or "int4" quantises the linear layers; the text is then that of the quantised model.
        origin: a target of the same kind that holds the weights of the layers if `model` does not, see `copy_of`.
        calibration: how weights in 4 bits are rounded; None rounds each by itself.

    Raises:
        DraftsmithError: with the reason, for encoder-decoders, recurrent or hybrid state, and attention outside
            transformers' attention interface.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "in-memory",
        native: bool = True,
        quantize: Quantization = "none",
        origin: "Target | None" = None,
        calibration: Calibration | None = None,
    ) -> None:
        refuse_unsupported(model.config, name)
        own_attention = use_tree_attention(model, name)
        self.model = model.eval().requires_grad_(False)
        self.tokenizer = tokenizer
        self.name = name
        self.config = model.config.get_text_config(decoder=True)
        self.device: torch.device = model.device if origin is None else origin.device
        self.dtype: torch.dtype = model.dtype
        self.hidden_size: int = self.config.hidden_size
        self.vocab_size: int = _head(model, name).weight.shape[0]
        self.layers: int = self.config.num_hidden_layers
        self.skipped = Skipped()
        """The parts of layers that this view leaves out."""
        self.max_length = longest_text(self.config, name)
        self.eos_token_ids: frozenset[int] = end_tokens(model, tokenizer)
        self.weights = sum(parameter.numel() for parameter in model.parameters())
        """Number of parameters; counted before packing, which turns parameters into buffers."""
        self.weights_hash: str = weights_hash(model) if origin is None else origin.weights_hash
        """Hash of the weights as they were loaded, before packing and quantisation."""
        self.precision_on_disk = ""
        """The stored dtype, such as "fp32", if the dtype "auto" made the weights coarser; empty if it did not."""
        self.hooks = Hooks(model, self.layers, self.hidden_size, f"{name} ({self.config.model_type})")
        self.backend: Backend = first_backend(self, native, quantize, origin, calibration)
        """What reads the model."""
        self.hooks.limit(model.get_output_embeddings())
        # Packing came first: so weights that are mapped from files are read once, and not also by these forwards.
        with short_windows(model, self.config) as window:
            check = SelfCheck(self, own_attention)
            probe = check.whole_texts()
            self.kv_shapes = [probe.shapes[layer] for layer in range(self.layers)]
            self.windows: list[int | None] = [probe.windows[layer] for layer in range(self.layers)]
            """The sliding window of every layer, None for full attention."""
            self.backend = self.backend.settled(probe, check)
        if window is not None:
            self.windows = [window if short == SHORT_WINDOW else short for short in self.windows]
            self.backend = self.backend.over(self)
        log.info("%s: %s", name, self.backend.description)

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

        What loading freed is given back to the system once, also in a program that keeps what it frees
        (`draftsmith.memory`): decoding and training do not need so much again.

        Raises:
            DraftsmithError: when the model is missing, damaged or of an unsupported kind.
        """
        name = str(name_or_path)
        where = resolve_device(device)
        kind = resolve_dtype(dtype, where, native)
        model = load_model(name, kind, where, trust_remote_code)
        tokenizer, folder = load_tokenizer(name, trust_remote_code), Path(name)
        target = cls(model, tokenizer, folder.resolve().name if folder.is_dir() else name, native, quantize)
        give_back_freed_memory()
        if dtype == "auto":
            target.precision_on_disk = precision_on_disk(name, kind, trust_remote_code)
            if target.precision_on_disk:
                log.info(
                    "%s: weights are %s on disk; using %s here", target.name, target.precision_on_disk, short_name(kind)
                )
        return target

    @cached_property
    def sublayers(self) -> Sublayers:
        """The parts of its layers; DraftsmithError if they have no parts that can be left out."""
        return Sublayers(self)

    @property
    def embedding_weight_VF(self) -> Tensor:
        """The input embedding (V, hidden)."""
        weight: Tensor = self.model.get_input_embeddings().weight
        return weight

    @property
    def head_weight_VF(self) -> Tensor:
        """The output projection (V, hidden)."""
        weight: Tensor = self.model.get_output_embeddings().weight
        return weight

    @cached_property
    def logit_form(self) -> LogitForm:
        """The operation that turns products of the output projection into logits."""
        return logit_form(self)

    def facts(self) -> TargetFacts:
        """Return what a drafter trained for this target is checked against."""
        vocabulary, changed = tokenizer_hash(self.tokenizer), fingerprint(self.model.config)
        weights = self.weights_hash if changed is None else None
        return TargetFacts(
            self.hidden_size, self.vocab_size, vocabulary, self.name, changed, *ways(self.tokenizer), weights
        )

    def feature_size(self, taps: tuple[int, ...]) -> int:
        """Width (F) of the concatenated tapped states."""
        return len(taps) * self.hidden_size

    def widened(self) -> "Target":
        """Return an fp32 copy, which tells ties caused by rounding from faults."""
        return self.copied(torch.float32)

    def copied(self, dtype: torch.dtype, native: bool = False, quantize: Quantization = "none") -> "Target":
        """Return a copy with weights of its own, in another precision."""
        # The model is built anew, because a copy of the modules would keep hooks and packed weights of this target.
        model = type(self.model)(copy.deepcopy(self.model.config))
        cast_parameters(model, dtype)
        model.load_state_dict(self.model.state_dict())
        take_unstored(model, self.model)
        return Target(model.to(device=self.device), self.tokenizer, self.name, native, quantize)

    def quantised(self, quantize: Quantization, name: str = "a quantised copy", calibrate: int = 0) -> "Target":
        """Return a copy that computes in bf16 with quantised layers, by the native kernels.

        It shares with a bf16 target what is not packed, such as norms and an untied embedding.

        Args:
            name: what to call the copy in the message about its memory.
            calibrate: tokens of its own text by which weights in 4 bits are rounded; 0 uses none, see `Calibration`.

        Raises:
            DraftsmithError: there is not enough memory, or the native kernels do not run here.
        """
        refuse_unpackable(quantize, self.device, torch.bfloat16)
        model = copy_of(self, quantize, name)
        calibration = Calibration(self, calibrate, name) if calibrate else None
        return Target(model, self.tokenizer, self.name, quantize=quantize, origin=self, calibration=calibration)

    def truncated(self, layers: int) -> "Target":
        """Return a view of the first `layers` layers under the same norm and head; see `without`."""
        if not 1 <= layers <= self.layers:
            raise DraftsmithError(f"{self.name} has {self.layers} layers, so {layers} of them cannot be taken.")
        return self.without(whole_layers(range(layers, self.layers)))

    def without(self, skipped: Skipped) -> "Target":
        """Return a view that leaves out parts of layers, and has no taps.

        It shares the weights. Where its layers attend, it reads and writes caches of this target.
        """
        view = copy.copy(self)
        view.model, view.skipped = model_without(self, skipped), skipped
        view.layers = 1 + max(layer for layer in range(self.layers) if layer not in skipped.attention & skipped.mlp)
        view.kv_shapes = [
            (0, 0, 0, 0) if layer in skipped.attention else self.kv_shapes[layer] for layer in range(view.layers)
        ]
        view.windows = self.windows[: view.layers]
        view.backend = self.backend.over(view)
        return view

    def without_prepacking(self) -> "Target":
        """Return a view that uses the model's own products, for gradients and for generated code."""
        model = without_prepacking(self.model)
        if model is self.model:
            return self
        view = copy.copy(self)
        view.model = model
        view.backend = self.backend.over(view)
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
            by_model: let the model's own code read even where a native operator could, as a second opinion.

        Returns:
            features_BTF, where entry t is the state after reading token t (so it predicts token t + 1), and
            logits_BTV if asked for.
        """
        if not taps and not logits:
            return no_features(self, tokens_BT), None
        if gradients or by_model:
            return encode_by_model(self, tokens_BT, taps, logits, gradients)
        return self.backend.encode(tokens_BT, taps, logits)

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
        """Read tokens of a text behind every row; each token sees those before it. See `Nodes` and `forward`.

        Args:
            longest: the largest of `cached_B`; without it the device has to be waited for.
        """
        columns_S = None if longest is None else self.backend.columns(lambda: longest + tokens_BM.shape[1])
        nodes = Nodes(tokens_BM, cached_B, slots_B, counts_B=counts_B, columns_S=columns_S)
        return self.forward(cache, nodes, taps, keep_logits)

    def forward(
        self, cache: KVCache, nodes: Nodes, taps: tuple[int, ...] = (-1,), keep_logits: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Read nodes behind every row and store their keys and values; the caller decides what stays.

        Args:
            nodes: what to read, and where.
            taps: hidden states to return, see `Drafter.taps`.
            keep_logits: nodes to compute logits at: the same for all rows (U), or each row's own (B, U); None computes
                all.

        Returns:
            logits (B, M or U, V) and features_BMF. For nodes that a row does not have, logits are undefined, and
            features are zero.
        """
        return self.backend.read(cache, nodes, taps, keep_logits)


def _head(model: PreTrainedModel, name: str) -> nn.Linear:
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise DraftsmithError(f"{name} has no output projection; give a causal language model.")
    return head
