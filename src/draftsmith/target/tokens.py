"""The tokenizer that belongs to a target: loading it, telling it from others, and the tokens that end a text."""

import hashlib
import json
from pathlib import Path

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from draftsmith.types import DraftsmithError

TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model",
)


def load_tokenizer(name: str, trust_remote_code: bool) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer of a folder or hub name; None for a folder without one, DraftsmithError if it is damaged."""
    folder = Path(name)
    if folder.is_dir() and not any((folder / file).exists() for file in TOKENIZER_FILES):
        return None
    try:
        return AutoTokenizer.from_pretrained(name, trust_remote_code=trust_remote_code)
    except Exception as error:  # the loaders raise a dozen kinds for damaged files
        raise DraftsmithError(
            f"the tokenizer of {name!r} could not be loaded ({first_line(error)}); fetch its files again."
        ) from error


def tokenizer_hash(tokenizer: PreTrainedTokenizerBase | None) -> str | None:
    """Fingerprint of a vocabulary: SHA-256 over its sorted (token, id) pairs."""
    if tokenizer is None:
        return None
    pairs = sorted(tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(pairs, ensure_ascii=True).encode()).hexdigest()


def end_tokens(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Return the tokens that end a text, as the model's generation settings, its config or the tokenizer say."""
    generation = model.generation_config
    ids = generation.eos_token_id if generation is not None else None
    if ids is None:
        ids = model.config.get_text_config(decoder=True).eos_token_id
    if ids is None and tokenizer is not None:
        ids = tokenizer.eos_token_id
    if ids is None:
        return frozenset()
    return frozenset([ids] if isinstance(ids, int) else ids)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's message, or its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
