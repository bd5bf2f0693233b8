"""The texts of single tokens, for answers that list tokens one by one: log-probabilities, or the page's colours."""

from collections.abc import Iterable, Sequence

from transformers import PreTrainedTokenizerBase

from draftsmith.engine.text import TextStream
from draftsmith.targets.loading.tokens import TokenKind, TokenText

UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def _byte_symbols() -> dict[str, int]:
    """Return the bytes that byte-level vocabularies write as one visible character each."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in visible]
    return {chr(byte): byte for byte in visible} | {chr(256 + at): byte for at, byte in enumerate(hidden)}


_BYTES = _byte_symbols()


class TokenTexts:
    """The text and the bytes of tokens of one tokenizer; without one, every text is empty.

    A token that is only part of a character has `UNKNOWN` as its text; its bytes say which part.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.tokenizer = tokenizer
        self._reader = None if tokenizer is None else TokenText(tokenizer)
        self._texts: dict[int, str] = {}
        self._bytes: dict[int, bytes] = {}

    def text(self, token: int) -> str:
        """Return the text that a token has between other tokens; the text of a special token is its name."""
        found = self._texts.get(token)
        if found is None:
            found = self._texts[token] = self._read(token)
        return found

    def bytes_of(self, token: int) -> bytes:
        """Return what a token adds to a text in UTF-8."""
        found = self._bytes.get(token)
        if found is None:
            found = self._bytes[token] = self._read_bytes(token)
        return found

    def whole(self, tokens: Sequence[int]) -> str:
        """Return the text of some tokens, special tokens left out."""
        return "" if self._reader is None else self._reader.decode(tokens)

    def pieces(self, prompt: Sequence[int] = ()) -> "Pieces":
        """Return a decoder that gives the text after a prompt token by token."""
        return Pieces(TextStream(self.tokenizer, (), prompt))

    def _read(self, token: int) -> str:
        if self._reader is None:
            return ""
        # Decoded alone, a token may lose the space that it begins with.
        once = self._reader.decode([token], skip_special_tokens=False)
        twice = self._reader.decode([token, token], skip_special_tokens=False)
        return twice[len(once) :] if twice.startswith(once) else once

    def _read_bytes(self, token: int) -> bytes:
        text = self.text(token)
        if UNKNOWN not in text or self._reader is None or self.tokenizer is None:
            return text.encode("utf-8", "replace")
        if self._reader.has_byte_tokens and self._reader.kind(token) is TokenKind.BYTE:
            return self._reader.byte(token)
        name = self.tokenizer.convert_ids_to_tokens(token)
        if isinstance(name, str) and all(symbol in _BYTES for symbol in name):
            return bytes(_BYTES[symbol] for symbol in name)
        return text.encode("utf-8", "replace")


class Pieces:
    """Decodes tokens one after the other; a character of several tokens comes with the last of them."""

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream

    def read(self, tokens: Iterable[int], last: bool = False) -> list[str]:
        """Return the text that each of these tokens completes; with the last tokens, what is left over too."""
        found = []
        for token in tokens:
            self._stream.push(token)
            found.append(self._stream.take())
        if last and found:
            self._stream.finish()
            found[-1] += self._stream.take()
        return found
