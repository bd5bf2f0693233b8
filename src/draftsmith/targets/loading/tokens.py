"""The tokenizer of a target: loads and fingerprints it, and gives the text of its tokens and the end tokens."""

import hashlib
import json
import re
from collections.abc import Sequence
from enum import Enum
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.types import DraftsmithError

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
)

_BYTE_NAME = re.compile(r"<0x([0-9A-F]{2})>")


class TokenKind(Enum):
    """What a token contributes to a text that is decoded without special tokens."""

    TEXT = "text"
    BYTE = "byte"
    """One byte of a character that is not in the vocabulary; decoded together with the neighbouring bytes."""
    SILENT = "silent"
    """Nothing: the token is special, or unknown to the tokenizer."""


class TokenText:
    """The text of tokens as the tokenizer writes it, without special tokens and without any clean-up."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._kinds: dict[int, TokenKind] = {}

    def decode(self, tokens: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of some tokens."""
        text = self._tokenizer.decode(
            list(tokens), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    @cached_property
    def has_byte_tokens(self) -> bool:
        """Whether the tokenizer writes the bytes of unknown characters as tokens such as `<0x41>`."""
        token = self._tokenizer.convert_tokens_to_ids("<0x41>")
        return isinstance(token, int) and self._name(token) == "<0x41>" and self.decode([token]) == "A"

    def kind(self, token: int) -> TokenKind:
        """Return what a token contributes to a text."""
        found = self._kinds.get(token)
        if found is None:
            found = self._kinds[token] = self._tell(token)
        return found

    def byte(self, token: int) -> bytes:
        """Return the byte that a token of `TokenKind.BYTE` stands for."""
        found = _BYTE_NAME.fullmatch(self._name(token) or "")
        assert found is not None
        return bytes.fromhex(found[1])

    def _tell(self, token: int) -> TokenKind:
        name = self._name(token)
        if name is None:
            return TokenKind.SILENT
        if self.decode([token]) or not self.decode([token], skip_special_tokens=False):
            return TokenKind.BYTE if self.has_byte_tokens and _BYTE_NAME.fullmatch(name) else TokenKind.TEXT
        return TokenKind.SILENT

    def _name(self, token: int) -> str | None:
        name = self._tokenizer.convert_ids_to_tokens(token)
        return name if isinstance(name, str) else None


def load_tokenizer(name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a folder or hub name; None for a folder without one, DraftsmithError if it is damaged."""
    folder = Path(name)
    if folder.is_dir() and not any((folder / file).exists() for file in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # the loaders raise many kinds of exceptions for damaged files
        if needs_own_code(error):
            raise own_code(name) from error
        raise DraftsmithError(
            f"the tokenizer of {name!r} could not be loaded ({first_line(error)}); fetch its files again."
        ) from error


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """Fingerprint of a vocabulary: SHA-256 over its sorted (token, id) pairs."""
    if tokenizer is None:
        return None
    pairs = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs, ensure_ascii=True).encode()).hexdigest()


def needs_own_code(error: Exception) -> bool:
    """Whether transformers refused to run a model's own code; only that error names `trust_remote_code`."""
    return isinstance(error, ValueError) and "pass the argument `trust_remote_code=True`" in str(error)


def own_code(name: str) -> DraftsmithError:
    """Return the error for a model that loads only with code that came with it."""
    return DraftsmithError(
        f"{name!r} comes with code of its own, which is not run unasked; read it, and if you trust it, add "
        "--trust-remote-code (trust_remote_code=True): the code then runs here, as you."
    )


def check_generation_config(name: str) -> None:
    """Refuse a generation_config.json that cannot be read: transformers would silently use other end tokens.

    Raises:
        DraftsmithError: it is no JSON object.
    """
    path = Path(name) / "generation_config.json"
    if not path.is_file():
        return
    try:
        fault = None if isinstance(json.loads(path.read_bytes()), dict) else "it holds no JSON object"
    except (OSError, ValueError) as error:
        fault = first_line(error)
    if fault is not None:
        raise DraftsmithError(
            f"{path} cannot be read ({fault}), and it may say which tokens end a text; fetch it again, or remove it."
        )


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Return the tokens that end a text, according to the model's generation settings, its config or the tokenizer.

    Raises:
        DraftsmithError: they give something other than token ids.
    """
    generation = model.generation_config
    ids = generation.eos_token_id if generation is not None else None
    if ids is None:
        ids = getattr(model.config.get_text_config(decoder=True), "eos_token_id", None)
    if ids is None and tokenizer is not None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return frozenset()
    found: list[Any] = [ids] if isinstance(ids, int | str) else list(ids)
    if not all(isinstance(token, int) for token in found):
        raise DraftsmithError(
            f"the target has eos_token_id {ids!r}; give whole numbers in its generation_config.json or config.json."
        )
    return frozenset(found)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its class name if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
