"""Text of a growing token list: pieces that are safe to show, and where a stop string cuts."""

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

LONGEST_CHARACTER = 4
"""Bytes of a character in UTF-8, each of which may be a token."""


class TextStream:
    """Turns tokens into text piece by piece; a piece never ends inside a character or a possible stop string.

    Without stop strings, tokens become text only when somebody asks for it, many at a time.

    Args:
        tokenizer: of the target; None makes every text empty.
        stop: strings that end the text.
    """

    # Decoding a token alone loses the space before it in some tokenizers; a few tokens of context keep it.
    CONTEXT = 6

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None, stop: Sequence[str]) -> None:
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._hold = max((len(s) for s in self._stop), default=1) - 1
        self._tokens: list[int] = []
        self._context = 0
        self._read = 0
        self.text = ""
        self.stopped = False
        self._shown = 0

    @property
    def watches(self) -> bool:
        """Whether it looks for stop strings, and so wants tokens one by one."""
        return bool(self._stop) and self._tokenizer is not None

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens at once; for streams that watch for nothing."""
        if self._tokenizer is not None:
            self._tokens += tokens

    def push(self, token: int) -> bool:
        """Append a token; return whether a stop string is now complete (the text is cut before it)."""
        if self._tokenizer is None:
            return False
        self._tokens.append(token)
        if self._stop:
            self._read_on()
        return self.stopped

    def finish(self) -> None:
        """Take in what was held back: no further token comes."""
        if self._tokenizer is None or self.stopped:
            return
        before = self._decode(self._tokens[self._context : self._read])
        self._append(self._decode(self._tokens[self._context :])[len(before) :])
        self._read = len(self._tokens)
        self._hold = 0

    def take(self) -> str:
        """Return the text that became safe to show since the last call."""
        if self._tokenizer is not None and not self.stopped:
            self._read_on()
        safe = len(self.text) if self.stopped else max(self._shown, len(self.text) - self._hold)
        piece = self.text[self._shown : safe]
        self._shown = safe
        return piece

    def _read_on(self) -> None:
        """Take in the text of the new tokens, but for a last character that is not whole yet."""
        before = self._decode(self._tokens[self._context : self._read])
        for end in range(len(self._tokens), max(self._read, len(self._tokens) - LONGEST_CHARACTER), -1):
            now = self._decode(self._tokens[self._context : end])
            if len(now) > len(before) and not now.endswith("�"):
                self._append(now[len(before) :])
                self._read = end
                self._context = max(self._context, self._read - self.CONTEXT)
                return

    def _append(self, piece: str) -> None:
        start = max(0, len(self.text) - self._hold)
        self.text += piece
        found = [at for s in self._stop if (at := self.text.find(s, start)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _decode(self, tokens: list[int]) -> str:
        assert self._tokenizer is not None
        text = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
