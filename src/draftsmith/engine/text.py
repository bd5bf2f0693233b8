"""The text that a growing list of tokens adds to its prompt, in pieces that are safe to show, cut at a stop string."""

import codecs
from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from draftsmith.targets.loading.tokens import TokenKind, TokenText


class TextStream:
    """Turns tokens into text piece by piece; a piece never ends inside a character or a possible stop string.

    The text is what `decode(prompt + output)` has after `decode(prompt)`, without special tokens. So a space between
    two tokens is kept wherever the tokenizer writes one, also between prompt and output. If the prompt ends inside a
    character, the output changes the end of the prompt's own text. Then the text begins where the two begin to differ,
    or with that character, whichever is later: the character belongs to the output that completes it.

    Only the last few tokens are decoded with each new one, so a token costs the same however long the text is.
    Without stop strings, tokens become text only when somebody asks for it, many at a time.

    Args:
        tokenizer: of the target; None makes every text empty.
        stop: strings that end the text.
        prompt: the tokens before the first one pushed.
    """

    # How many earlier tokens a new one is decoded with: enough for a character whose bytes are all tokens, and for the
    # special treatment that a tokenizer gives to the first token. The window grows to WINDOW, then is cut to CONTEXT.
    CONTEXT, WINDOW = 8, 24

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase | None, stop: Sequence[str], prompt: Sequence[int] = ()
    ) -> None:
        self._tokenizer = TokenText(tokenizer) if tokenizer is not None else None
        self._stop = tuple(stop)
        self._hold = max((len(s) for s in self._stop), default=1) - 1
        self._prompt = prompt
        self._unread: list[int] = []
        self._finished = False
        self.text = ""
        self.stopped = False
        self._shown = 0
        # The window holds the last tokens that write something, also of the prompt. Its first `_read` tokens have been
        # read, its first `_settled` characters are in `text` or in the prompt's text, and its tokens from `_run` on are
        # a run of byte tokens.
        self._window: list[int] = []
        self._settled = 0
        self._read = 0
        self._run = 0
        self._prompt_texts: list[str] = []
        self._begun = False
        # A stop string may become complete inside a run. These hold the run's last bytes, and the last characters.
        self._bytes = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._tail = ""

    @property
    def watches(self) -> bool:
        """Whether it looks for stop strings, and so wants tokens one by one."""
        return bool(self._stop) and self._tokenizer is not None

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens at once; only for streams that do not look for stop strings."""
        if self._tokenizer is not None:
            self._unread += tokens

    def push(self, token: int) -> bool:
        """Append a token; return whether a stop string is now complete (the text is cut before it)."""
        if self._tokenizer is None:
            return False
        self._unread.append(token)
        if self._stop and not self.stopped:
            self._read_on(self._tokenizer)
            if self._tokenizer.kind(token) is TokenKind.BYTE:
                self._look_into_run(self._tokenizer)
        return self.stopped

    def finish(self) -> None:
        """Take in what was held back: no further token comes."""
        if self._tokenizer is None or self._finished:
            return
        self._finished = True
        if self.stopped:
            return
        self._begin(self._tokenizer)
        whole = self._tokenizer.decode([*self._window, *self._unread])
        self._take_in(whole, len(whole))

    def take(self) -> str:
        """Return the text that became safe to show since the last call."""
        if self._tokenizer is not None and not self.stopped and not self._finished:
            self._read_on(self._tokenizer)
        held = 0 if self.stopped or self._finished else self._begun_stop()
        piece = self.text[self._shown : len(self.text) - held]
        self._shown += len(piece)
        return piece

    def _begin(self, tokenizer: TokenText) -> None:
        """Fill the window with the end of the prompt: any run of byte tokens that it ends with, and what is before."""
        if self._begun:
            return
        self._begun = True
        run = others = 0
        for token in reversed(self._prompt):
            kind = tokenizer.kind(token)
            if kind is TokenKind.SILENT:
                continue
            if kind is TokenKind.BYTE and not others:
                run += 1
            else:
                others += 1
            self._window.append(token)
            if others == self.CONTEXT:
                break
        self._window.reverse()
        self._read = len(self._window)
        self._run = self._read - run
        for token in self._window[self._run :]:
            self._bytes.decode(tokenizer.byte(token))
        unfinished = len(self._bytes.getstate()[0])
        self._prompt_texts = [tokenizer.decode(self._window)]
        if unfinished:
            self._prompt_texts.append(tokenizer.decode(self._window[:-unfinished]))

    def _read_on(self, tokenizer: TokenText) -> None:
        """Take in the text of the new tokens, except for what later tokens may still change."""
        self._begin(tokenizer)
        for token in self._unread:
            kind = tokenizer.kind(token)
            if kind is TokenKind.SILENT:
                continue
            self._window.append(token)
            if kind is TokenKind.TEXT:
                self._run = len(self._window)
        self._unread.clear()
        # A run is left until it has ended, because one byte that does not fit spoils the text of the whole run.
        if self._run <= self._read:
            return
        self._read = self._run
        text = tokenizer.decode(self._window[: self._read])
        # With other tokenizers only a last, incomplete character can change.
        open_end = 1 if text.endswith("�") and not tokenizer.has_byte_tokens else 0
        self._take_in(text, len(text) - open_end)
        self._bytes.reset()
        self._tail = self.text[-self._hold :] if self._hold else ""
        if self._read > self.WINDOW:
            self._move_window(tokenizer, open_end)

    def _take_in(self, text: str, settled: int) -> None:
        """Append what is new in the window's text, whose first `settled` characters cannot change any more."""
        if self._prompt_texts:
            common = max(_common_beginning(before, text[:settled]) for before in self._prompt_texts)
            if not self._finished and common == settled < max(map(len, self._prompt_texts)):
                return
            self._settled, self._prompt_texts = common, []
        if settled <= self._settled:
            return
        start = max(0, len(self.text) - self._hold)
        self.text += text[self._settled : settled]
        self._settled = settled
        found = [at for s in self._stop if (at := self.text.find(s, start)) >= 0]
        if found:
            self.text = self.text[: min(found)]
            self.stopped = True

    def _move_window(self, tokenizer: TokenText, open_end: int) -> None:
        """Forget the first tokens of the window, unless the remaining ones write nothing by themselves."""
        first = self._read - self.CONTEXT
        shorter = tokenizer.decode(self._window[first : self._read])
        if shorter and not self._prompt_texts:
            self._settled = len(shorter) - open_end
            self._window = self._window[first:]
            self._read -= first
            self._run -= first

    def _look_into_run(self, tokenizer: TokenText) -> None:
        """Find a stop string that the window's text completes in the middle of a run of byte tokens."""
        self._tail += self._bytes.decode(tokenizer.byte(self._window[-1]))
        seen = any(s in self._tail for s in self._stop)
        self._tail = self._tail[-self._hold :] if self._hold else ""
        if not seen:
            return
        kept = self.text, self._settled, self._prompt_texts
        now = tokenizer.decode(self._window)
        self._take_in(now, len(now))
        if not self.stopped:
            self.text, self._settled, self._prompt_texts = kept

    def _begun_stop(self) -> int:
        """Return the length of the longest suffix of the text that is the beginning of a stop string."""
        for length in range(min(self._hold, len(self.text) - self._shown), 0, -1):
            if any(s.startswith(self.text[-length:]) for s in self._stop):
                return length
        return 0


def _common_beginning(one: str, other: str) -> int:
    """Return the number of characters after which two texts differ or one ends."""
    pairs = zip(one, other, strict=False)
    return next((at for at, (a, b) in enumerate(pairs) if a != b), min(len(one), len(other)))
