"""A piece of one text with everything that the request wants to know about it."""

from dataclasses import dataclass
from typing import Any

from draftsmith.serving.tally import Tally
from draftsmith.types import Completion, TokenLogprob


@dataclass
class Delta:
    """A piece of one text.

    Args:
        choice: which text.
        tokens: committed since the last piece; `text` is what became safe to show, which may be less or more.
        texts: what each of the tokens wrote; filled only for answers that are smoothed or explained.
        logprobs: of the tokens, where they were asked for.
        explained: what the page shows about it, where that was asked for.
        prompt_logprobs: of the prompt, with the first piece, where they were asked for.
        completion: the finished text; only with the last piece.
        tally: of the whole text so far.
    """

    choice: int
    tokens: list[int]
    text: str
    texts: list[str]
    logprobs: list[TokenLogprob] | None
    explained: dict[str, Any] | None
    prompt_logprobs: list[TokenLogprob] | None
    completion: Completion | None
    tally: Tally
