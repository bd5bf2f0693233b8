"""From a text or a conversation to token ids: the one place, so that training sees what serving will see.

Prompts of the engine, windows and prompts of training, evaluation and `check` all come through here. Special tokens are
the tokenizer's business for a text, the chat template's for a conversation.
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
"""Begin and end, the end not included."""

ASSISTANT = "assistant"
PROBE = "Once upon a time,\n\tthe café's 12 guests said:  “No!” \U0001f600 <x> def f(x): return x"
"""Text whose tokens tell one way of making tokens from another."""

_BEFORE = ("\n", ".", "a", ")")
"""Texts that a continuation is put behind, to see what its tokens are there."""
_MARKS_WHAT_IT_WRITES = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Conversation:
    """Messages, each with its "role" and "content", and what else the template is given: tools, documents and so on.

    `goes_on` says that the last message is not over: what comes next continues it; `whole`, that nothing comes next.
    """

    messages: Sequence[Message]
    more: Mapping[str, Any] = field(default_factory=dict)
    goes_on: bool = False
    whole: bool = False


def body_ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Return the tokens of a text without special tokens around it."""
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def text_ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Return what the tokenizer's own call makes of a text, but with one BOS where the text brings it along."""
    ids: list[int] = list(tokenizer(text, verbose=False)["input_ids"])
    bos = tokenizer.bos_token_id
    if bos is None or ids[:2] != [bos, bos]:
        return ids
    written = body_ids(tokenizer, text)
    # Of two, the first is the tokenizer's own if the text alone begins with the other one.
    doubled = written[:1] == [bos] and ids[1 : 1 + len(written)] == written
    return ids[1:] if doubled else ids


def opening_ids(tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Return the special tokens that the tokenizer puts before a text."""
    whole, plain = text_ids(tokenizer, "a"), body_ids(tokenizer, "a")
    starts = (at for at in range(len(whole)) if plain and whole[at : at + len(plain)] == plain)
    return whole[: next(starts, 0)]


def beginning_ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Return the tokens of a text that goes on: those of `text_ids` without what would close it."""
    ids, body = text_ids(tokenizer, text), body_ids(tokenizer, text)
    at = next((at for at in range(len(ids)) if ids[at : at + len(body)] == body), None)
    return ids if at is None else ids[: at + len(body)]


def continuation_ids(tokenizer: "PreTrainedTokenizerBase", text: str) -> list[int]:
    """Return the tokens of a text that stands behind another: without BOS, and without the space that some tokenizers
    put before a text that begins."""
    for before in _BEFORE:
        ids, own = body_ids(tokenizer, before + text), body_ids(tokenizer, before)
        # Where the two join into one token, another beginning may keep them apart.
        if own and ids[: len(own)] == own:
            return ids[len(own) :]
    return body_ids(tokenizer, text)


def prompt_ids(tokenizer: "PreTrainedTokenizerBase", conversation: Conversation) -> list[int]:
    """Return a conversation as the template writes it, up to where the assistant's next words stand, if any come.

    Any exception may come out of it: a template is a program of somebody else's.
    """
    messages, goes_on = conversation.messages, conversation.goes_on
    begins = not (goes_on or conversation.whole)
    return body_ids(tokenizer, _render(tokenizer, conversation, messages, begins, goes_on))


def conversation_ids(
    tokenizer: "PreTrainedTokenizerBase", conversation: Conversation, end_tokens: Iterable[int]
) -> tuple[list[int], list[Span]]:
    """Return a whole conversation, and where in it the assistant wrote, each time up to its end token.

    The template's `{% generation %}` says where; of a template without it, what stands behind the prompt of the turn in
    the text of the whole. A turn is left out where that prompt is not how the whole begins, as with templates that drop
    the reasoning of earlier turns: the assistant never wrote it behind these words. Without the tokens in `end_tokens`,
    the turn ends where the template ends it. Any exception may come out of it, see `prompt_ids`.
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
            # Some templates refuse a conversation that begins with the assistant.
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
    """Return what the template marks as the assistant's; None where it marks nothing, or the tokenizer cannot say.

    The tokens are found by their places in the text here, because `return_assistant_tokens_mask` takes everything up to
    the end for the assistant's where a marked part ends with a character that has no token, such as a dropped space.
    """
    more = {"tools": None, "documents": None, **conversation.more}
    template = tokenizer.get_chat_template(tools=more["tools"])
    if not tokenizer.is_fast or not _MARKS_WHAT_IT_WRITES.search(template):
        return None
    messages = [{name: value for name, value in turn.items() if value is not None} for turn in conversation.messages]
    # It is declared to return a text, and returns the texts with the places of what is marked in each.
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
    """Return how many tokens two texts have in common at their beginning."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


class Ways(NamedTuple):
    """What tells one way of making tokens from another, None without a tokenizer; see `TargetFacts`."""

    opening: tuple[int, ...] | None = None
    text_hash: str | None = None
    template_hash: str | None = None


def ways(tokenizer: "PreTrainedTokenizerBase | None") -> Ways:
    """Return how a tokenizer makes tokens of texts and conversations; no template has the hash of an empty text."""
    if tokenizer is None:
        return Ways()
    template = tokenizer.chat_template or ""
    # A template that writes bos_token writes another text when that is another token.
    named = {name: str(token) for name, token in tokenizer.special_tokens_map.items() if name in str(template)}
    return Ways(
        tuple(opening_ids(tokenizer)), _hash(text_ids(tokenizer, PROBE)),
        _hash([template, named] if named else template),
    )


def _hash(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
