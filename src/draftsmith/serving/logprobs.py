"""Log-probabilities in the forms of OpenAI's completions and chats."""

from collections.abc import Sequence
from typing import Any

from draftsmith.serving.token_texts import TokenTexts
from draftsmith.types import TokenLogprob

LEAST = -9999.0
"""What stands for a probability of zero, since JSON has no minus infinity."""


class CompletionLogprobs:
    """Collects the log-probabilities of one text; every piece begins where the last one ended.

    Args:
        texts: gives the text of each token.
        prompt: the tokens before the text; empty where the prompt is shown as the beginning of the text.
    """

    def __init__(self, texts: TokenTexts, prompt: Sequence[int] = ()) -> None:
        self._texts, self._pieces = texts, texts.pieces(prompt)
        self._offset = 0

    def take(self, entries: Sequence[TokenLogprob], first: int | None = None) -> dict[str, Any]:
        """Return the next tokens in the form of completions.

        Args:
            first: a token before them that was not predicted, so that it has no probability.
        """
        tokens: list[str] = []
        logprobs: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        if first is not None:
            tokens.append(self._enter(first, offsets))
            logprobs.append(None)
            tops.append(None)
        for entry in entries:
            tokens.append(self._enter(entry.token, offsets))
            logprobs.append(max(entry.logprob, LEAST))
            tops.append(self._top(entry))
        return {"text_offset": offsets, "token_logprobs": logprobs, "tokens": tokens, "top_logprobs": tops}

    def _enter(self, token: int, offsets: list[int]) -> str:
        offsets.append(self._offset)
        # Tokens that are parts of one character have the offset of that character.
        self._offset += len(self._pieces.read([token])[0])
        return self._texts.text(token)

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        """Return the best alternatives and the token itself, by text; of several with the same text, the best."""
        found: dict[str, float] = {}
        for token, logprob in (*entry.top.items(), (entry.token, entry.logprob)):
            found.setdefault(self._texts.text(token), max(logprob, LEAST))
        return found


def chat_logprobs(texts: TokenTexts, entries: Sequence[TokenLogprob]) -> dict[str, Any]:
    """Return log-probabilities in the form of chats."""
    return {
        "content": [
            {
                **_one(texts, entry.token, entry.logprob),
                "top_logprobs": [_one(texts, token, logprob) for token, logprob in entry.top.items()],
            }
            for entry in entries
        ],
        "refusal": None,
    }


def _one(texts: TokenTexts, token: int, logprob: float) -> dict[str, Any]:
    return {"token": texts.text(token), "logprob": max(logprob, LEAST), "bytes": list(texts.bytes_of(token))}
