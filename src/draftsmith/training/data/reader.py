"""From documents to token ids: whole texts to learn from, and prompts for the target to continue.

All tokens are those of `targets.token_ids`, which serving uses too.
"""

import re
from collections.abc import Callable
from functools import partial
from typing import Literal, TypeVar

from transformers import PreTrainedTokenizerBase

from draftsmith.targets import Target
from draftsmith.targets.loading.tokens import first_line
from draftsmith.targets.records import Completion
from draftsmith.targets.token_ids import (
    ASSISTANT,
    Conversation,
    Span,
    beginning_ids,
    conversation_ids,
    opening_ids,
    prompt_ids,
    text_ids,
)
from draftsmith.training.data.sources import Piece
from draftsmith.training.data.windows import Window
from draftsmith.types import DraftsmithError

Learn = Literal["assistant", "everything"]

ENOUGH_CHARACTERS = 8
"""Characters per token that are surely enough."""
NEAR = 200
"""Within so many characters a prompt from the middle of a text begins with the next word; where there is no white
space, as in Chinese or in minified code, it begins anywhere."""

_SPACE = re.compile(r"\s+")

T = TypeVar("T")


class Unusable(Exception):
    """A document that cannot be used.

    Args:
        reason: by which such documents are counted.
        advice: what to do where no document can be used for this reason.
    """

    def __init__(self, reason: str, advice: str = "add others") -> None:
        super().__init__(reason)
        self.advice = advice


class Reader:
    """Turns documents into tokens as the target's tokenizer and chat template do.

    Args:
        learn: what is learnt in conversations and in completions of a prompt: the assistant's text, or everything.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, end_tokens: frozenset[int], name: str, learn: Learn) -> None:
        self.tokenizer, self.end_tokens, self.name, self.learn = tokenizer, end_tokens, name, learn
        self.opening = opening_ids(tokenizer)

    @classmethod
    def of(cls, target: Target, learn: Learn) -> "Reader":
        """Return the reader for a target; DraftsmithError if it has no tokenizer."""
        if target.tokenizer is None:
            raise DraftsmithError(
                f"the target {target.name!r} has no tokenizer, so it cannot read the data; put its tokenizer.json into "
                "its folder."
            )
        return cls(target.tokenizer, frozenset(target.eos_token_ids), target.name, learn)

    def text(self, piece: Piece) -> Window:
        """Return the tokens of a piece, and which are learnt; an end token is added if the document ends there.

        Raises:
            Unusable: nothing in the piece can be learnt.
            DraftsmithError: the piece is a conversation, and the target has no chat template.
        """
        content = piece.content
        if isinstance(content, Conversation):
            return self._conversation(content)
        if isinstance(content, Completion):
            before = beginning_ids(self.tokenizer, content.prompt)
            tokens = beginning_ids(self.tokenizer, content.prompt + content.completion)
            begin = next((at for at, (a, b) in enumerate(zip(before, tokens, strict=False)) if a != b), len(before))
        else:
            tokens, begin = beginning_ids(self.tokenizer, content), len(self.opening)
        if piece.ends and self.end_tokens and tokens[-1:] != [min(self.end_tokens)]:
            tokens = [*tokens, min(self.end_tokens)]
        return self._window(tokens, [(begin, len(tokens))])

    def _conversation(self, content: Conversation) -> Window:
        tokens, spans = self._through_template(lambda: conversation_ids(self.tokenizer, content, self.end_tokens))
        if not spans and self.learn == "assistant":
            raise Unusable(
                "no turn of the assistant's found in what the chat template wrote"
                if any(message["role"] == ASSISTANT for message in content.messages) else "no turn of an assistant"
            )
        return self._window(tokens, spans)

    def _window(self, tokens: list[int], spans: list[Span]) -> Window:
        window = Window(tokens, [(0, len(tokens))] if self.learn == "everything" else spans)
        if not window.learns:
            raise Unusable("too few tokens to learn")
        return window

    def prompt(self, piece: Piece, length: int, longest: int, chance: Callable[[str], int]) -> list[int]:
        """Return a prompt from a piece.

        A text gives `length` tokens from the beginning of a word in the piece on, if one is near. A conversation gives
        everything up to a turn of the assistant, and a completion its prompt; these two are taken whole.

        Args:
            longest: the most tokens of a prompt that is taken whole.
            chance: returns a large random number for each purpose.
        Raises:
            Unusable: the prompt is too short or too long.
        """
        content = piece.content
        if isinstance(content, str):
            start = chance("start") % max(1, len(content) - ENOUGH_CHARACTERS * length)
            if start and (space := _SPACE.search(content, start - 1, start + NEAR)):
                start = space.end()
            tokens = beginning_ids(self.tokenizer, content[start : start + 2 * ENOUGH_CHARACTERS * length])
            if len(tokens) < length:
                raise Unusable(f"shorter than {length} tokens", "add longer ones, or lower stage2.prompt_tokens")
            return tokens[:length]
        if isinstance(content, Completion):
            candidates = iter([text_ids(self.tokenizer, content.prompt)])
        else:
            turns = [at for at, message in enumerate(content.messages) if at and message["role"] == ASSISTANT]
            if not turns:
                raise Unusable("no turn of an assistant")
            turn = chance("turn") % len(turns)
            # If the prompt up to the chosen turn is too long, an earlier turn is taken.
            begun = (Conversation(content.messages[:at], content.more) for at in reversed(turns[: turn + 1]))
            candidates = (self._through_template(partial(prompt_ids, self.tokenizer, some)) for some in begun)
        fitting = next((tokens for tokens in candidates if len(tokens) <= longest), None)
        if fitting is None:
            raise Unusable(
                f"prompt longer than {longest} tokens",
                "give shorter ones, lower stage2.new_tokens to leave them room, or raise stage2.longest_prompt",
            )
        if not fitting:
            raise Unusable("empty prompt")
        return fitting

    def _through_template(self, made: Callable[[], T]) -> T:
        if self.tokenizer.chat_template is None:
            raise DraftsmithError(
                f"data.sources holds conversations, but {self.name} has no chat template; give texts, or a target that "
                "was trained to chat."
            )
        try:
            return made()
        except Exception as error:  # a template is somebody else's program, and can raise anything
            raise Unusable(f"refused by the chat template ({first_line(error)})") from error
