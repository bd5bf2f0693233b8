"""Writes the vocabulary of a target into a GGUF file, so that a server on top of llama.cpp can write text.

Only byte-level BPE is known here, which the embedded target and those padded from it have. Token ids go in, so what
counts is which bytes each token stands for. Special tokens are given names that mean nothing to llama.cpp, and the end
token is said to be another one of them: llama.cpp knows ends of texts by their names and would stop there, or never
write them, where other decoders are asked to go on.
"""

import importlib
import json
from pathlib import Path
from typing import Any

from draftsmith.types import DraftsmithError


def add_vocabulary(writer: Any, folder: Path, size: int) -> None:
    """Add tokens, their kinds and merges.

    Args:
        writer: of the package gguf.
        folder: that of the target, with its tokenizer.json.
        size: rows of the embedding; ids that the tokenizer does not have are written as unused.

    Raises:
        DraftsmithError: the tokenizer is of another kind, or has no special token but its end.
    """
    kinds = importlib.import_module("gguf").TokenType
    told = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    pieces = told.get("pre_tokenizer") or {}
    if told["model"]["type"] != "BPE" or pieces.get("type") != "ByteLevel" or not pieces.get("use_regex"):
        raise DraftsmithError(f"the tokenizer of {folder.name} is not plain byte-level BPE, and no other is exported.")
    special = sorted(token["id"] for token in told["added_tokens"] if token["special"])
    ends = _ends(folder)
    others = [token for token in special if token not in ends]
    if not others:
        raise DraftsmithError(f"{folder.name} has no special token but its end, and none to write in its place.")
    names, types = [f"[unused {token}]" for token in range(size)], [kinds.UNUSED] * size
    for text, token in told["model"]["vocab"].items():
        names[token], types[token] = text, kinds.NORMAL
    for token in special:
        names[token], types[token] = f"[special {token}]", kinds.CONTROL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(names)
    writer.add_token_types([int(kind) for kind in types])
    writer.add_token_merges([pair if isinstance(pair, str) else " ".join(pair) for pair in told["model"]["merges"]])
    writer.add_bos_token_id(others[0])
    writer.add_eos_token_id(others[0])
    writer.add_add_bos_token(False)


def _ends(folder: Path) -> set[int]:
    """Return the ids that end a text, by both files that may say so."""
    found: set[int] = set()
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        if path.exists():
            told = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            found |= set(told) if isinstance(told, list) else {told} - {None}
    return found
