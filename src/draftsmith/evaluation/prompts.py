"""Prompts to measure on: the embedded held-out sets, or the user's own texts, cut to an exact number of tokens."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith import assets
from draftsmith.files import replace_text
from draftsmith.targets.records import Completion, HalfCharacter, read_record
from draftsmith.targets.token_ids import ASSISTANT, Conversation, opening_ids, prompt_ids, text_ids
from draftsmith.text_files import ENCODING, check_width, not_utf8, read_text
from draftsmith.types import DraftsmithError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from draftsmith.targets import Target

FEWEST_NEW = 2
"""So many tokens are written at least, where time is measured: the first one comes with the prompt."""


@dataclass(frozen=True)
class Prompt:
    """A text with the kind of task it stands for ("code", "prose", "dialogue", …) and its source, "" if unknown.

    With a `conversation`, which ends where the assistant has to answer, the text is that of its last message.
    """

    task: str
    source: str
    text: str
    conversation: Conversation | None = None


def embedded_prompts(task: str | None = None, split: str = "prompts") -> list[Prompt]:
    """Return the embedded prompts, all of them or those of one task; DraftsmithError for an unknown task."""
    prompts = read_jsonl(assets.prompt_file(split))
    if task is None:
        return prompts
    chosen = [prompt for prompt in prompts if prompt.task == task]
    if not chosen:
        known = ", ".join(sorted({prompt.task for prompt in prompts}))
        raise DraftsmithError(f"there are no embedded prompts of task {task!r}; choose one of {known}.")
    return chosen


def load_prompts(path: Path) -> list[Prompt]:
    """Read the user's prompts: JSONL with records as training reads them, or a text file as one document.

    A record may also hold only a `prompt`. The last answer of a conversation or completion is left to the target.
    """
    try:
        lines = path.suffix.lower() in (".jsonl", ".ndjson")
        prompts = read_jsonl(path) if lines else [Prompt("text", "", read_text(path))]
    except OSError as error:
        raise DraftsmithError(f"the prompt file {path} cannot be read ({error.strerror}); check the path.") from error
    except UnicodeDecodeError as error:
        raise not_utf8(path) from error
    return _with_text(prompts, path)


def prompts_of(records: Iterable[tuple[Mapping[str, Any], str]], path: Path, task: str | None = None) -> list[Prompt]:
    """Return the prompts that records hold, as `load_prompts` does.

    Args:
        records: each with where it was found.
        path: the file or folder that they come from, for messages.
        task: only prompts of this task; all by default.

    Raises:
        DraftsmithError: a record that is no prompt, no prompt at all, or none of the task.
    """
    found = []
    for record, where in records:
        try:
            found.append(_prompt(record, where))
        except HalfCharacter:
            raise
        except (ValueError, AttributeError, IndexError, DraftsmithError) as error:
            raise DraftsmithError(
                f"{where} has neither a string field `text` or `prompt` nor `messages` that begin with a user's; fix "
                "it."
            ) from error
    kept = _with_text(found, path)
    chosen = [prompt for prompt in kept if task in (None, prompt.task)]
    if not chosen:
        known = ", ".join(sorted({prompt.task for prompt in kept}))
        raise DraftsmithError(f"{path} holds no prompt of task {task!r}; choose one of {known}.")
    return chosen


def _with_text(prompts: Sequence[Prompt], path: Path) -> list[Prompt]:
    kept = [prompt for prompt in prompts if prompt.text.strip()]
    if not kept:
        raise DraftsmithError(f"the prompt file {path} holds no text; give one with at least one prompt.")
    return kept


def read_jsonl(path: Path) -> list[Prompt]:
    """Read one prompt a line; DraftsmithError names the line that is not one."""
    check_width(path)
    prompts = []
    with path.open(encoding=ENCODING) as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                prompts.append(_prompt(json.loads(line), f"line {number} of {path}"))
            except HalfCharacter:
                raise
            except (ValueError, AttributeError, IndexError, DraftsmithError) as error:
                raise DraftsmithError(
                    f"line {number} of {path} is not a JSON object with a string field `text` or `prompt`, or with "
                    "`messages` that begin with a user's; fix it."
                ) from error
    return prompts


def _prompt(record: Mapping[str, Any], where: str) -> Prompt:
    """Return the prompt that a record holds; exceptions of several kinds if it holds none."""
    asked = _asked(record, where)
    task, source = str(record.get("task", "text")), str(record.get("source", ""))
    if isinstance(asked, str):
        return Prompt(task, source, asked)
    return Prompt(task, source, str(asked.messages[-1].get("content")), asked)


def write_prompts(path: Path, prompts: Sequence[Prompt]) -> None:
    """Write prompts to a file that `load_prompts` reads, whole or not at all; OSError if that fails."""
    lines = []
    for prompt in prompts:
        record: dict[str, Any] = {"task": prompt.task, "source": prompt.source}
        if prompt.conversation is None:
            record["text"] = prompt.text
        else:
            more = dict(prompt.conversation.more)
            record["messages"] = list(prompt.conversation.messages)
            record |= {name: more.pop(name) for name in ("tools", "documents") if name in more}
            record |= {"chat_template_kwargs": more} if more else {}
        lines.append(json.dumps(record, ensure_ascii=False) + "\n")
    replace_text(path, "".join(lines))


def _asked(record: Mapping[str, Any], where: str) -> str | Conversation:
    """Return what a record gives the target to continue, read as training reads it.

    A conversation that ends with a turn of the assistant's is given without that turn, which is to be written anew.
    """
    if not any(record.get(name) for name in ("text", "messages", "conversations", "completion")):
        record = {**record, "completion": ""}
    document = read_record(record, where)
    if isinstance(document, str):
        return document
    if isinstance(document, Completion):
        return document.prompt
    messages = document.messages
    last = len(messages) - (messages[-1]["role"] == ASSISTANT)
    return replace(document, messages=messages[:last])


def whole(target: "Target", prompts: Sequence[Prompt]) -> list[list[int]]:
    """Return the tokens of every conversation among the prompts, up to where the answer begins; none is cut."""
    found = []
    for prompt in prompts:
        if prompt.conversation is None:
            continue
        tokenizer = tokenizer_of(target)
        if tokenizer.chat_template is None:
            raise DraftsmithError(f"a prompt is a conversation, but {target.name} has no chat template; give texts.")
        try:
            found.append(prompt_ids(tokenizer, prompt.conversation))
        except Exception as error:  # a template is somebody else's program and may fail in any way
            from draftsmith.targets.loading.template import template_fault

            raise template_fault(error, target.name, "a prompt") from error
    return found


def tokenizer_of(target: "Target") -> "PreTrainedTokenizerBase":
    """Return the target's tokenizer; DraftsmithError where it has none."""
    if target.tokenizer is None:
        raise DraftsmithError(
            f"{target.name} has no tokenizer, which makes tokens of texts; put its tokenizer.json into its folder, or "
            "give another target."
        )
    return target.tokenizer


def cut(target: "Target", prompts: Sequence[Prompt], tokens: int, count: int, exact: bool = True) -> list[list[int]]:
    """Return `count` prompts of `tokens` tokens: the beginnings of all texts first, then later windows.

    Every window begins with what the tokenizer puts before a text. A conversation gives its last tokens, so that the
    prompt ends where the assistant begins. Windows repeat once all are used up.

    Args:
        exact: shorter prompts are skipped; otherwise they are taken whole, and so are all conversations.

    Raises:
        DraftsmithError: no text is long enough.
    """
    tokenizer = tokenizer_of(target)
    opening, texts = opening_ids(tokenizer), [prompt.text for prompt in prompts if prompt.conversation is None]
    encoded = [text_ids(tokenizer, text) for text in texts]
    chats = whole(target, prompts)
    longest = max((len(ids) for ids in [*chats, *encoded]), default=0)
    windows = [ids[-tokens:] for ids in chats if len(ids) >= tokens] if exact else chats
    windows += [ids[:tokens] for ids in encoded if ids and (len(ids) >= tokens or not exact)]
    own = max(1, tokens - len(opening))
    for start in range(tokens, max(0, longest - own + 1), own):
        if len(windows) >= count:
            break
        windows += [(opening + ids[start : start + own])[:tokens] for ids in encoded if len(ids) >= start + own]
    if not windows:
        raise DraftsmithError(
            f"no prompt has {tokens} tokens (the longest has {longest}); shorten the prompt length, or give longer "
            "texts with --data."
        )
    return [windows[index % len(windows)] for index in range(count)]


def check_room(context: int, prompt_tokens: int, new_tokens: int) -> None:
    """Raise DraftsmithError, with the options that would fit, where prompt and new tokens exceed a context."""
    needed = max(new_tokens, FEWEST_NEW)
    if prompt_tokens + needed <= context:
        return
    ways = []
    if prompt_tokens + FEWEST_NEW <= context:
        ways.append(f"--new-tokens {context - prompt_tokens} or fewer")
    if needed < context:
        ways.append(f"--prompt-tokens {context - needed} or fewer")
    raise DraftsmithError(
        f"{prompt_tokens} prompt tokens and {new_tokens} new ones do not fit the context of {context}; give "
        f"{', or '.join(ways) or 'fewer of both, by --prompt-tokens and --new-tokens'}."
    )


def distinct(prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return each prompt once, in the order in which they first come."""
    return [list(prompt) for prompt in dict.fromkeys(map(tuple, prompts))]
