"""Turns texts and conversations into token ids. This is the only place that does, so training sees what serving sees.

The engine's prompts, training windows and prompts, evaluation and `check` all use it. Special tokens come from the
tokenizer for a text, and from the chat template for a conversation.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = Mapping[str, Any]
Span = tuple[int, int]
"""Begin and end; the end is not included."""

ASSISTANT = "assistant"
PROBE = "Once upon a time,\n\tthe café's 12 guests said:  “No!” \U0001f600 <x> def f(x): return x"
"""A text whose tokens show whether two tokenizers make tokens in the same way."""

_BEFORE = ("\n", ".", "a", ")")
"""Texts after which a continuation is placed, to see its tokens there."""
_MARKS_WHAT_IT_WRITES = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Conversation:
    """Messages, each with its "role" and "content", and further inputs of the template: tools, documents and so on.

    `goes_on`: the last message is unfinished, and the next words continue it; `whole`: nothing comes next.
    """

    messages: Sequence[Message]
    more: Mapping[str, Any] = field(default_factory=dict)
    goes_on: bool = False
    whole: bool = False


def body_ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Return the tokens of a text, without special tokens around it."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def text_ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Return the tokens of the tokenizer's own call, but with a single BOS if the text itself begins with one."""
    ids: list[int] = list(tokenizer(text, verbose=False)["input_ids"])
    bos = tokenizer.bos_token_id
    if bos is None or ids[:2] != [bos, bos]:
        return ids
    written = body_ids(tokenizer, text)
    # Of two BOS tokens, the first comes from the tokenizer if the text alone begins with the second.
    doubled = written[:1] == [bos] and ids[1 : 1 + len(written)] == written
    return ids[1:] if doubled else ids


def opening_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the special tokens that the tokenizer puts before a text."""
    whole, plain = text_ids(tokenizer, "a"), body_ids(tokenizer, "a")
    starts = (at for at in range(len(whole)) if plain and whole[at : at + len(plain)] == plain)
    return whole[: next(starts, 0)]


def beginning_ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Return the tokens of a text that will be continued: those of `text_ids` without the closing special tokens."""
    ids, body = text_ids(tokenizer, text), body_ids(tokenizer, text)
    at = next((at for at in range(len(ids)) if ids[at : at + len(body)] == body), None)
    return ids if at is None else ids[: at + len(body)]


def continuation_ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Return the tokens of a text that follows another one: without BOS, and without the space that some tokenizers put
    before the beginning of a text."""
    for before in _BEFORE:
        ids, own = body_ids(tokenizer, before + text), body_ids(tokenizer, before)
        # If two texts join into one token at their border, another beginning may keep them apart.
        if own and ids[: len(own)] == own:
            return ids[len(own) :]
    return body_ids(tokenizer, text)


def prompt_ids(tokenizer: "PreTrainedTokenizerBase", conversation: Conversation) -> list[int]:
    """Return a conversation as the template writes it, up to where the assistant's next words belong, if any come.

    A template is a program by somebody else, so this can raise any exception.
    """
    messages, goes_on = conversation.messages, conversation.goes_on
    begins = not (goes_on or conversation.whole)
    return body_ids(tokenizer, _render(tokenizer, conversation, messages, begins, goes_on))


def conversation_ids(
    tokenizer: "PreTrainedTokenizerBase", conversation: Conversation, end_tokens: Iterable[int]
) -> tuple[list[int], list[Span]]:
    """Return a whole conversation, and the spans that the assistant wrote, each up to its end token.

    The template's `{% generation %}` marks the spans. For a template without it, a turn is what follows the prompt of
    that turn in the whole text. A turn is left out if the whole text does not begin with its prompt, as with templates
    that drop the reasoning of earlier turns: the assistant never wrote the turn after these words. If none of
    `end_tokens` follows, the turn ends where the template ends it. This can raise any exception, see `prompt_ids`.
    """
    messages = conversation.messages
    text = _render(tokenizer, conversation, messages, False)
    ids = body_ids(tokenizer, text)
    spans = _marked_spans(tokenizer, conversation, text)
    if spans is None:
        spans = []
        for place, message in enumerate(messages):
            if message["role"] != ASSISTANT:
                continue
            # Some templates refuse a conversation in which the assistant speaks first.
            before = _render(tokenizer, conversation, messages[:place], True) if place else None
            if before is not None and text.startswith(before):
                through = text if place == len(messages) - 1 else (
                    _render(tokenizer, conversation, messages[: place + 1], False)
                )
                begin = _common(ids, body_ids(tokenizer, before))
                spans.append((begin, len(ids) if through == text else _common(ids, body_ids(tokenizer, through))))
    ends = frozenset(end_tokens)
    cut = [(begin, next((at + 1 for at in range(begin, end) if ids[at] in ends), end)) for begin, end in spans]
    return ids, [(begin, end) for begin, end in cut if begin < end]


def _render(
    tokenizer: "PreTrainedTokenizerBase", conversation: Conversation, messages: Sequence[Message], prompt: bool,
    goes_on: bool = False,
) -> str:
    text = tokenizer.apply_chat_template(
        [dict(message) for message in messages], add_generation_prompt=prompt, continue_final_message=goes_on,
        tokenize=False, **conversation.more,
    )
    assert isinstance(text, str)
    return text


def _marked_spans(tokenizer: "PreTrainedTokenizerBase", conversation: Conversation, text: str) -> list[Span] | None:
    """Return the spans that the template marks as the assistant's; None if it marks none, or the tokenizer cannot say.

    Tokens are located here by their places in the text. `return_assistant_tokens_mask` is not used, because it marks
    everything up to the end if a marked part ends with a character that has no token, such as a dropped space.
    """
    more = {"tools": None, "documents": None, **conversation.more}
    template = tokenizer.get_chat_template(tools=more["tools"])
    if not tokenizer.is_fast or not _MARKS_WHAT_IT_WRITES.search(template):
        return None
    messages = [{name: value for name, value in turn.items() if value is not None} for turn in conversation.messages]
    # It is declared to return one text, but returns the texts, and the places of the marked parts in each.
    from transformers.utils.chat_template_utils import render_jinja_template

    returned: Any = render_jinja_template(
        conversations=[messages], chat_template=template, return_assistant_tokens_mask=True,
        **{**tokenizer.special_tokens_map, **more},
    )
    rendered, marked = returned[0][0], returned[1][0]
    if rendered != text:
        return None
    places = tokenizer(text, add_special_tokens=False, verbose=False, return_offsets_mapping=True)["offset_mapping"]
    spans = []
    for first, last in marked:
        inside = [at for at, (start, _) in enumerate(places) if first <= start < last]
        spans += [(inside[0], inside[-1] + 1)] if inside else []
    return spans


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return how many tokens two texts have in common at the beginning."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Ways(NamedTuple):
    """The facts that show whether tokens are made in the same way; None without a tokenizer; see `TargetFacts`."""

    opening: tuple[int, ...] | None = None
    text_hash: str | None = None
    template_hash: str | None = None


def ways(tokenizer: "PreTrainedTokenizerBase | None") -> Ways:
    """Return how a tokenizer makes tokens of texts and conversations; without a template, its hash is that of ""."""
    if tokenizer is None:
        return Ways()
    template = tokenizer.chat_template or ""
    # A template that writes bos_token writes another text if bos_token is another token.
    named = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name in str(template)}
    return Ways(
        tuple(opening_ids(tokenizer)), _hash(text_ids(tokenizer, PROBE)),
        _hash([template, named] if named else template),
    )


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
