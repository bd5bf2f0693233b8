"""A piece of one text with all that was asked to be told of it."""

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
        texts: what each of the tokens wrote, for answers that are smoothed or explained.
        logprobs: of the tokens, where they were asked for.
        explained: what a page is shown of it.
        prompt_logprobs: of the prompt, with the first piece, where they were asked for.
        completion: with the last piece.
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
