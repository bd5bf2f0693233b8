"""The bytes that every token writes, for whoever has to know a text token by token, such as a grammar.

Three ways of spelling tokens are known: bytes as characters (as GPT-2 has it), spaces as "▁" with bytes such as
`<0x0A>` (as SentencePiece has it), and the text as it is. Which of them is a tokenizer's is found out by decoding.
Where none of them says what it writes, as for WordPiece, its tokens are no pieces of a text.
"""

import re

from transformers import PreTrainedTokenizerBase

from draftsmith.targets.loading.tokens import TokenText
from draftsmith.targets.token_ids import body_ids
from draftsmith.types import DraftsmithError

PROBES = 400
"""Tokens that are decoded to find out how they are spelt."""

_BYTE_NAME = re.compile(r"<0x([0-9A-F]{2})>")


def silent_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the special tokens, which write nothing."""
    added = {token for token, known in tokenizer.added_tokens_decoder.items() if known.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def token_pieces(
    tokenizer: PreTrainedTokenizerBase, width: int, ends: frozenset[int], name: str
) -> list[bytes]:
    """Return what every token writes behind others; nothing for special tokens and for ids that no token has.

    Args:
        width: of the logits, which may be more or fewer than the tokenizer has tokens.
        ends: tokens that end a text, and are no part of it, whatever the tokenizer says.
        name: of the target, for the message.

    Raises:
        DraftsmithError: for a tokenizer whose tokens are no pieces of a text in a row.
    """
    silent = silent_tokens(tokenizer) | ends
    names: list[str | None] = [None] * width
    for token, number in tokenizer.get_vocab().items():
        if number < width and number not in silent:
            names[number] = token
    found = [number for number, token in enumerate(names) if token is not None]
    probed = found[:: max(1, len(found) // PROBES)]
    for spelling in (_as_bytes, _as_pieces, str.encode):
        if _writes(tokenizer, {number: spelling(names[number] or "") for number in probed}):
            return [b"" if token is None else spelling(token) for token in names]
    raise DraftsmithError(
        f"constraints need a tokenizer whose tokens are pieces of the text, and that of {name} joins them in another "
        "way; leave the constraint out, or use another target."
    )


def _writes(tokenizer: PreTrainedTokenizerBase, pieces: dict[int, bytes]) -> bool:
    """Whether these tokens write these bytes, as far as each makes a text by itself."""
    text, before = TokenText(tokenizer), body_ids(tokenizer, "a")
    if not before or not pieces:
        return False
    beginning, checked = text.decode(before), 0
    for token, piece in pieces.items():
        try:
            expected = piece.decode()
        except UnicodeDecodeError:  # a part of a character
            continue
        if text.decode([*before, token]) != beginning + expected:
            return False
        checked += 1
    return checked > 0


def _byte_alphabet() -> dict[str, int]:
    """Return the byte of every character that stands for one: itself if it is printed, or one from U+0100 on."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _as_bytes(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:  # a word that was added, with a space in it
        return token.encode()


def _as_pieces(token: str) -> bytes:
    byte = _BYTE_NAME.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte is not None else token.replace("▁", " ").encode()
