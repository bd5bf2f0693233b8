"""What a prompt may be, and which tokens it becomes."""

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from draftsmith.targets import Target
from draftsmith.targets.loading.template import template_fault
from draftsmith.targets.token_ids import Conversation, Message, prompt_ids, text_ids
from draftsmith.types import DraftsmithError

Prompt = str | Sequence[int] | np.ndarray | Tensor | Mapping[str, Any] | Sequence[Message] | Conversation
"""Text; token ids; what a tokenizer returned for one text; or messages, each with its "role" and its "content".

A `Conversation` is messages together with the template's other inputs, such as tools.
"""

_KINDS = 'text, token ids, what a tokenizer returned for one text, or a list of messages such as {"role": "user", ...}'


def list_of_prompts(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the prompts as a list; DraftsmithError for a single prompt instead of a list, and for an empty list."""
    if isinstance(prompts, str):
        raise DraftsmithError("prompts is a single text; give a list of prompts.")
    if isinstance(prompts, Mapping):
        raise DraftsmithError("prompts is a mapping, such as a tokenizer returns; give a list with one for each text.")
    if not isinstance(prompts, (Sequence, np.ndarray, Tensor)):
        raise DraftsmithError(f"prompts is of type {type(prompts).__name__}; give a list of prompts.")
    listed = list(prompts)
    if not listed:
        raise DraftsmithError("the list of prompts is empty; give at least one.")
    return listed


def tokens_of(prompt: Prompt, number: int, target: Target) -> list[int]:
    """Return the tokens of prompt `number`.

    A text is encoded as by calling the tokenizer, but with only one BOS if the text brings its own. Messages go through
    the tokenizer's chat template and end with its generation prompt.

    Raises:
        DraftsmithError: for anything that is not a `Prompt`, for an empty prompt, and for token ids that the target
            does not have.
    """
    encoded = isinstance(prompt, (str, Conversation))  # by the tokenizer of the target
    if isinstance(prompt, str):
        given: list[Any] = _read_text(prompt, number, _tokenizer(target, "text"))
    elif isinstance(prompt, Conversation):
        given = _read_messages(prompt, number, _tokenizer(target, "a conversation"), target.name)
    elif isinstance(prompt, Mapping):
        given = _read_encoding(prompt, number)
    elif isinstance(prompt, (np.ndarray, Tensor)):
        given = _one_text(prompt.tolist(), number)
    elif isinstance(prompt, Sequence) and not isinstance(prompt, (bytes, bytearray)):
        given = list(prompt)
        if given and isinstance(given[0], Mapping):
            encoded = True
            tokenizer = _tokenizer(target, "a list of messages")
            given = _read_messages(Conversation(given), number, tokenizer, target.name)
    else:
        raise DraftsmithError(f"prompt {number} is of type {type(prompt).__name__}; give {_KINDS}.")
    if not given:
        raise DraftsmithError(f"prompt {number} is empty; give at least one token.")
    tokens = [token if type(token) is int else _as_index(token) for token in given]
    wrong = [i for i, token in enumerate(tokens) if not 0 <= token < target.vocab_size]
    if wrong:
        foreign = f"; its tokenizer belongs to another model: put the one of {target.name} into its folder"
        raise DraftsmithError(
            f"prompt {number} has token {given[wrong[0]]!r}, but {target.name} knows the whole numbers "
            f"from 0 to {target.vocab_size - 1}{foreign if encoded else ''}."
        )
    return tokens


def _tokenizer(target: Target, kind: str) -> PreTrainedTokenizerBase:
    if target.tokenizer is None:
        raise DraftsmithError(
            f"{target.name} has no tokenizer, which {kind} as a prompt needs; put its tokenizer.json into its folder, "
            "or give token ids from Python."
        )
    return target.tokenizer


def _read_text(text: str, number: int, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    check_text(text, number)
    return text_ids(tokenizer, text)


def check_text(text: str, number: int) -> None:
    """Raise DraftsmithError for a lone surrogate (half a character) in prompt `number`: tokenizers fail on it."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DraftsmithError(
            f"prompt {number} has {text[error.start]!r} at character {error.start}, which is half of a character or a "
            "byte that was not UTF-8; fix the text."
        ) from error


def _read_messages(
    conversation: Conversation, number: int, tokenizer: PreTrainedTokenizerBase, name: str
) -> list[int]:
    for place, message in enumerate(conversation.messages):
        whole = isinstance(message, Mapping) and isinstance(message.get("role"), str)
        if not whole or not ("content" in message or "tool_calls" in message):
            raise DraftsmithError(
                f'message {place} of prompt {number} is {message!r}; give {{"role": "user", "content": "..."}}, or '
                "another role."
            )
    if tokenizer.chat_template is None:
        raise DraftsmithError(
            f"prompt {number} is a list of messages, but {name} has no chat template; give text or token ids."
        )
    try:
        return prompt_ids(tokenizer, conversation)
    except Exception as error:  # a template is third-party code
        raise template_fault(error, name, f"prompt {number}") from error


def _read_encoding(encoding: Mapping[str, Any], number: int) -> list[Any]:
    """Return the ids of one encoded text, without those that its attention mask excludes."""
    if "input_ids" not in encoding:
        hint = "put a message into a list" if "role" in encoding else 'it needs "input_ids"'
        raise DraftsmithError(f"prompt {number} is a mapping of {', '.join(map(str, encoding)) or 'nothing'}; {hint}.")
    ids = _one_text(_plain(encoding["input_ids"]), number)
    mask = _one_text(_plain(encoding.get("attention_mask", [1] * len(ids))), number)
    if len(mask) != len(ids):
        raise DraftsmithError(
            f"prompt {number} has {len(ids)} tokens and an attention mask of {len(mask)}; give one for each."
        )
    return [token for token, seen in zip(ids, mask, strict=True) if seen]


def _plain(values: Any) -> Any:
    return values.tolist() if isinstance(values, (np.ndarray, Tensor)) else values


def _one_text(values: Any, number: int) -> list[Any]:
    """Return the values of one text, given as they are or as a batch of one."""
    if not isinstance(values, Sequence):
        raise DraftsmithError(f"prompt {number} is {values!r} alone; give {_KINDS}.")
    if values and isinstance(_plain(values[0]), Sequence):
        if len(values) > 1:
            raise DraftsmithError(f"prompt {number} holds {len(values)} texts; give each as a prompt of its own.")
        return list(_plain(values[0]))
    return list(values)


def _as_index(token: Any) -> int:
    """Return a whole number of another type, such as numpy's, as an int; -1 for anything else."""
    try:
        return operator.index(token)
    except TypeError:
        return -1
