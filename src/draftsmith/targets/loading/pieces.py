"""The bytes that every token writes, for code that follows a text token by token, such as a grammar.

Tokenizers spell tokens in three known ways: bytes as characters (GPT-2), spaces as "▁" with bytes such as `<0x0A>`
(SentencePiece), and the text as it is. Decoding some tokens shows which way a tokenizer uses. If none of them gives the
right text, as for WordPiece, its tokens are no pieces of a text.
"""

import re

from transformers import PreTrainedTokenizerBase

from draftsmith.targets.loading.tokens import TokenText
from draftsmith.targets.token_ids import body_ids
from draftsmith.types import DraftsmithError

PROBES = 400
"""Number of tokens that are decoded to find out how tokens are spelt."""

_BYTE_NAME = re.compile(r"<0x([0-9A-F]{2})>")


def silent_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the special tokens, which write nothing."""
    added = {token for token, known in tokenizer.added_tokens_decoder.items() if known.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def token_pieces(
    tokenizer: PreTrainedTokenizerBase, width: int, ends: frozenset[int], name: str
) -> list[bytes]:
    """Return the bytes that every token writes behind others; empty for special tokens and for unused ids.

    Args:
        width: of the logits; the tokenizer may have fewer or more tokens.
        ends: tokens that end a text; they write nothing, whatever the tokenizer says.
        name: of the target, for the message.

    Raises:
        DraftsmithError: a tokenizer whose tokens do not write consecutive pieces of a text.
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
    """Whether these tokens write these bytes behind other text; bytes that are not valid UTF-8 are not checked."""
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
    """Return the byte of each character that GPT-2 writes for it: itself if it is printed, or one from U+0100 on."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printed]
    return {chr(byte): byte for byte in printed} | {chr(256 + place): byte for place, byte in enumerate(others)}


_ALPHABET = _byte_alphabet()


def _as_bytes(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[character] for character in token)
    except KeyError:  # an added word that contains a space
        return token.encode()


def _as_pieces(token: str) -> bytes:
    byte = _BYTE_NAME.fullmatch(token)
    return bytes.fromhex(byte[1]) if byte is not None else token.replace("▁", " ").encode()
