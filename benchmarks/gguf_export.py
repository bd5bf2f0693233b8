"""Writes a Llama of transformers as GGUF, bf16, so that llama.cpp runs the very same weights; and feeds it token ids.

    python benchmarks/gguf_export.py demo.gguf --check
    python benchmarks/gguf_export.py 134m.gguf --geometry 134m

Matrices stay bf16, norms become fp32, which is exact. Queries and keys change the order of their rows: transformers
rotates the two halves of a head against each other, llama.cpp neighbours. The vocabulary is left out, since only token
ids go in and out; for a server it is written too (`gguf_vocabulary.py`). `--check` reads a text with both sides and
compares their logits.

It needs the packages gguf and, for `--check`, llama-cpp-python; `--peer-site` names a folder of packages to find them
in when they are not installed here. Shapes: M tokens of a step, T tokens, V vocabulary, N outputs, K inputs.
"""

import argparse
import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch
from common import GEOMETRIES, main, model_folder, say
from gguf_vocabulary import add_vocabulary
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from draftsmith.evaluation.prompts import embedded_prompts
from draftsmith.evaluation.reporting.result_files import ensure_writable
from draftsmith.targets import Target
from draftsmith.types import DraftsmithError

PACKAGES = {"gguf": "gguf", "llama_cpp": "llama-cpp-python"}
# How far apart the logits of two bf16 implementations may be, relative to their size.
TOLERANCE = 0.05

_logging: list[Any] = []  # llama.cpp keeps a pointer to its callback, so Python must not free it


def add_peer_site(parser: argparse.ArgumentParser) -> None:
    """Add the option that says where the other decoders' packages are."""
    parser.add_argument(
        "--peer-site", type=Path, help="folder of packages (site-packages) to search for gguf and llama_cpp, after ours"
    )


def find_packages(site: Path | None) -> str | None:
    """Make gguf and llama_cpp importable; return None, or why they are not, in one sentence."""
    if site is not None and str(site) not in sys.path:
        if not site.is_dir():
            return f"the folder {site} of --peer-site does not exist."
        sys.path.append(str(site))  # last, so that our own packages win
    for module, package in PACKAGES.items():
        try:
            importlib.import_module(module)
        except (ImportError, OSError, RuntimeError) as error:
            return f"{package} cannot be imported ({error}); install it, or name its folder with --peer-site."
    return None


# Writing


def write_gguf(model: PreTrainedModel, path: Path, name: str, vocabulary: Path | None = None) -> None:
    """Write a plain Llama; DraftsmithError for one that is not.

    Args:
        model: as transformers loads it, in bf16, with its own linear layers (not yet wrapped in a native Target).
        vocabulary: folder of a target whose vocabulary is written too.
    """
    gguf = importlib.import_module("gguf")
    _refuse_unplain(model, name)
    config: Any = model.config
    width = config.head_dim
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(width)
    writer.add_value_length(width)
    writer.add_rope_dimension_count(width)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    if vocabulary is None:
        writer.add_tokenizer_model("no_vocab")
    else:
        add_vocabulary(writer, vocabulary, config.vocab_size)
    for tensor_name, tensor in _tensors(model):
        if tensor.dim() == 1:
            writer.add_tensor(tensor_name, tensor.float().numpy())
        else:
            raw = tensor.contiguous().view(torch.uint8).numpy()
            writer.add_tensor(tensor_name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _refuse_unplain(model: PreTrainedModel, name: str) -> None:
    config: Any = model.config
    rope = config.rope_parameters.get("rope_type", "default") if config.model_type == "llama" else ""
    plain = config.model_type == "llama" and rope == "default" and config.hidden_act == "silu"
    if not plain or config.attention_bias or config.mlp_bias or model.dtype != torch.bfloat16:
        raise DraftsmithError(
            f"{name} ({config.model_type}, {model.dtype}) is not a plain bf16 Llama (no biases, unscaled rotary "
            "positions, silu), and nothing else is exported."
        )


def _tensors(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield names and tensors of llama.cpp's layout; a tied head is left out, llama.cpp then reads the embedding."""
    config: Any = model.config
    base: Any = model.base_model
    yield "token_embd.weight", base.embed_tokens.weight.detach()
    yield "output_norm.weight", base.norm.weight.detach()
    if not config.tie_word_embeddings:
        yield "output.weight", model.get_output_embeddings().weight.detach()  # type: ignore[union-attr, operator]
    for index, layer in enumerate(base.layers):
        attention, feed_forward = layer.self_attn, layer.mlp
        parts = {
            "attn_norm": layer.input_layernorm.weight,
            "attn_q": rotated_rows(attention.q_proj.weight, config.num_attention_heads),
            "attn_k": rotated_rows(attention.k_proj.weight, config.num_key_value_heads),
            "attn_v": attention.v_proj.weight,
            "attn_output": attention.o_proj.weight,
            "ffn_norm": layer.post_attention_layernorm.weight,
            "ffn_gate": feed_forward.gate_proj.weight,
            "ffn_up": feed_forward.up_proj.weight,
            "ffn_down": feed_forward.down_proj.weight,
        }
        for part, weight in parts.items():
            yield f"blk.{index}.{part}.weight", weight.detach()


def rotated_rows(weight_NK: Tensor, heads: int) -> Tensor:
    """Put rows that are rotated together next to each other: within a head 0, half, 1, half + 1, …"""
    outputs, inputs = weight_NK.shape
    return weight_NK.reshape(heads, 2, outputs // heads // 2, inputs).transpose(1, 2).reshape(outputs, inputs)


# Reading with llama.cpp


class LlamaCpp:
    """One sequence in llama.cpp, by its C interface: logits behind M tokens at any place of the sequence.

    Args:
        room: most tokens of the sequence, and of a step.
        flash: attention by llama.cpp's fused kernel, which its own programs choose where they can.
        piece: most tokens that it computes at a time; all of a step by default.
    """

    def __init__(self, path: Path, threads: int, room: int, flash: bool = True, piece: int | None = None) -> None:
        self._api: ModuleType = importlib.import_module("llama_cpp")
        api = self._api
        quiet_llama_cpp()
        api.llama_backend_init()
        self._model = api.llama_model_load_from_file(str(path).encode(), api.llama_model_default_params())
        if not self._model:
            raise DraftsmithError(f"llama.cpp could not load {path.name}.")
        params = api.llama_context_default_params()
        params.n_ctx = params.n_batch = room
        params.n_ubatch = piece or room
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = (
            api.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash else api.LLAMA_FLASH_ATTN_TYPE_DISABLED
        )
        self._context = api.llama_init_from_model(self._model, params)
        if not self._context:
            raise DraftsmithError(f"llama.cpp could not make a context for {path.name}.")
        self._memory = api.llama_get_memory(self._context)
        self._vocabulary = api.llama_vocab_n_tokens(api.llama_model_get_vocab(self._model))
        self._batch = api.llama_batch_init(room, 0, 1)
        for i in range(room):
            self._batch.n_seq_id[i], self._batch.seq_id[i][0], self._batch.logits[i] = 1, 0, 1
        self.held = 0
        """Tokens whose keys and values are kept."""

    def cut(self, length: int) -> None:
        """Forget what is behind the first `length` tokens."""
        self._api.llama_memory_seq_rm(self._memory, 0, length, -1)
        self.held = min(self.held, length)

    def stage(self, tokens: Sequence[int], which: Literal["all", "last", "none"] = "all") -> None:
        """Write the tokens of the next step, to be read behind those held; logits behind all, the last or none."""
        self._batch.n_tokens = len(tokens)
        for i, token in enumerate(tokens):
            self._batch.token[i], self._batch.pos[i] = token, self.held + i
            self._batch.logits[i] = which == "all" or (which == "last" and i + 1 == len(tokens))

    def read_staged(self) -> None:
        """Read the staged tokens, and wait for the logits behind all of them."""
        status = self._api.llama_decode(self._context, self._batch)
        if status:
            raise RuntimeError(f"llama_decode returned {status}")
        self.held += self._batch.n_tokens
        self._api.llama_get_logits(self._context)

    def staged_logits(self) -> np.ndarray:
        """Return the logits (M, V) of the last step, copied."""
        shape = (self._batch.n_tokens, self._vocabulary)
        return np.ctypeslib.as_array(self._api.llama_get_logits(self._context), shape=shape).copy()

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """Read tokens behind those held, and return the logits (M, V), copied."""
        self.stage(tokens)
        self.read_staged()
        return self.staged_logits()

    def close(self) -> None:
        """Free everything."""
        self._api.llama_batch_free(self._batch)
        self._api.llama_free(self._context)
        self._api.llama_model_free(self._model)


def quiet_llama_cpp() -> None:
    """Keep llama.cpp from reporting on stderr, errors excepted."""
    if not _logging:
        api = importlib.import_module("llama_cpp")
        errors = 4  # a level of ggml

        def report(level: int, text: bytes, _: Any) -> None:
            if level == errors:
                sys.stderr.write(text.decode(errors="replace"))

        _logging.append(api.llama_log_callback(report))
        api.llama_log_set(_logging[0], None)


def about_llama_cpp() -> dict[str, str]:
    """Return version and build of llama.cpp for a result's provenance."""
    api = importlib.import_module("llama_cpp")
    return {
        "llama-cpp-python": api.__version__,
        "llama.cpp": " ".join(api.llama_print_system_info().decode().split()),
    }


@contextmanager
def llama_cpp_of(
    model: PreTrainedModel, folder: Path, threads: int, room: int, flash: bool, piece: int | None = None
) -> Iterator[LlamaCpp]:
    """Export a model into a folder, and give it opened in llama.cpp."""
    path = folder / "model.gguf"
    write_gguf(model, path, "model")
    opened = LlamaCpp(path, threads, room, flash, piece)
    try:
        yield opened
    finally:
        opened.close()
        path.unlink()


# Checking


@torch.no_grad()
def compare_logits(model: PreTrainedModel, opened: LlamaCpp, tokens: list[int], step: int = 8) -> dict[str, float]:
    """Read tokens with both sides, llama.cpp in steps with a guess taken back before each.

    Returns:
        the relative distance of the logits, the share of positions whose most likely token is the same, and the largest
        gap, in transformers' logits, between the two tokens where it is not.
    """
    expected_TV = model(torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()
    opened.cut(0)
    pieces = []
    for start in range(0, len(tokens), step):
        opened.logits([tokens[0]] * step)  # a wrong guess, to see that it leaves nothing behind
        opened.cut(start)
        pieces.append(opened.logits(tokens[start : start + step]))
    got_TV = np.concatenate(pieces)
    centred_TV = expected_TV - expected_TV.mean(-1, keepdims=True)
    best_T, got_T = expected_TV.argmax(-1), got_TV.argmax(-1)
    rows = np.arange(len(tokens))
    return {
        "distance": float(np.linalg.norm(got_TV - expected_TV) / np.linalg.norm(centred_TV)),
        "same_argmax": float((best_T == got_T).mean()),
        "largest_gap": float((expected_TV[rows, best_T] - expected_TV[rows, got_T]).max()),
    }


def check_tokens(folder: str, vocabulary: int, count: int = 256) -> list[int]:
    """Return a held-out text of the target's tokenizer, or random ids where it has none."""
    tokenizer = Target.from_pretrained(folder, dtype="bf16", device="cpu").tokenizer
    if tokenizer is None:
        return np.random.default_rng(0).integers(0, vocabulary, count).tolist()
    text = "\n\n".join(prompt.text for prompt in embedded_prompts("code"))
    return list(tokenizer(text)["input_ids"])[:count]


def run() -> None:
    """Write, and check if that is asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("out", type=Path, help="the GGUF file to write")
    parser.add_argument("--target", help="folder or hub name; the embedded demo target by default")
    parser.add_argument("--geometry", default="demo", choices=["demo", *GEOMETRIES], help="or random weights")
    parser.add_argument("--check", action="store_true", help="compare the logits of both sides over a text")
    parser.add_argument("--threads", type=int, default=2, help="of llama.cpp in the check")
    add_peer_site(parser)
    args = parser.parse_args()
    transformers_logging.disable_progress_bar()
    ensure_writable(args.out)
    missing = find_packages(args.peer_site)
    if missing is not None:
        raise DraftsmithError(missing)
    with model_folder(args.geometry, args.target, torch.bfloat16) as folder:
        model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, use_safetensors=True).eval()
        write_gguf(model, args.out, Path(folder).name)
        say(f"written: {args.out.name}, {args.out.stat().st_size / 2**20:.1f} MiB")
        if not args.check:
            return
        tokens = check_tokens(folder, model.config.vocab_size)
    for flash in (True, False):
        opened = LlamaCpp(args.out, args.threads, 512, flash)
        found = compare_logits(model, opened, tokens)
        opened.close()
        print(
            f"flash attention {'on' if flash else 'off'}: over {len(tokens)} tokens the logits are "
            f"{found['distance']:.4f} apart, relative to their size; {found['same_argmax']:.1%} of the most likely "
            f"tokens are the same, and the others {found['largest_gap']:.3f} apart at most"
        )
        if found["distance"] > TOLERANCE:
            raise DraftsmithError(f"the logits differ by more than rounding explains ({TOLERANCE}).")


if __name__ == "__main__":
    main(run)
