"""What a comparison trains, tunes and measures on: embedded texts or the user's own, in parts that share no source."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftsmith import assets
from draftsmith.evaluation.prompts import Prompt
from draftsmith.files import replace_text
from draftsmith.targets.records import Completion, Document, read_record
from draftsmith.targets.token_ids import Conversation
from draftsmith.training.data.record_files import missing_file, records_at
from draftsmith.types import DraftsmithError
from draftsmith.workflows.held_out import as_prompt, fits
from draftsmith.workflows.partition import (
    MEASURED,
    PARTS,
    TUNING,
    Found,
    Parts,
    Text,
    keep_apart,
    of_other_sources,
    split,
    spread,
)
from draftsmith.workflows.sources import gather_prompts, name_of_source

if TYPE_CHECKING:
    from draftsmith.targets import Target

EXCHANGES = 12
"""This many pieces of one source make a document, as many as the embedded dialogues have."""
MOST_CHARACTERS = 10_000_000
"""At most this much of the user's data is read: five times what the default number of texts can begin with."""
EMBEDDED = "the embedded texts"


@dataclass(frozen=True)
class ComparisonTexts:
    """The parts, and what a report says about their origin.

    `by` says what separates the parts, `cut_off` whether there were more data than were read. `given` are the prompts
    to measure on if they come from elsewhere, else None. `data` and `prompts_of` name where the texts come from.
    """

    parts: Parts
    given: list[Prompt] | None
    found: Found
    by: str
    data: str
    prompts_of: str | None
    cut_off: bool

    def prompts(self, part: str, target: "Target", new_tokens: int) -> list[Prompt]:
        """Return the prompts of a part, without conversations that leave no room for `new_tokens` tokens.

        Raises:
            DraftsmithError: no prompt is left.
        """
        if part == MEASURED and self.given is not None:
            return self.given
        every = (as_prompt(text.content, text.task, text.source) for text in self.parts[part])
        room = target.max_length - new_tokens
        found = [prompt for prompt in every if prompt is not None and fits(prompt, target, room)]
        if not found:
            raise DraftsmithError(
                f"none of the {len(self.parts[part])} texts that are kept to be {part} on can be a prompt of "
                f"{target.name!r} with room for {new_tokens} new tokens; give shorter ones."
            )
        return found

    def digest(self) -> str:
        """Return a hash that tells these parts from others."""
        records = [[part, as_record(text)] for part in PARTS for text in self.parts[part]]
        return hashlib.sha256(json.dumps(records, sort_keys=True, default=str).encode()).hexdigest()

    def write(self, folder: Path) -> None:
        """Write a JSON-lines file for every part, for training and for inspection."""
        for part in PARTS:
            lines = [json.dumps(as_record(text), ensure_ascii=False, default=str) + "\n" for text in self.parts[part]]
            replace_text(folder / f"{part}.jsonl", "".join(lines))

    def account(self) -> dict[str, Any]:
        """Return what a report says about the texts, as plain JSON."""
        found = self.found
        return {
            "told_apart_by": self.by,
            "data": self.data,
            "prompts": self.prompts_of,
            "only_the_first_characters": MOST_CHARACTERS if self.cut_off else None,
            "parts": [
                {
                    "part": part, "task": task, "texts": len(own),
                    "sources": sorted({text.source for text in own} - {""}),
                    "without_source": sum(not text.source for text in own),
                }
                for part in PARTS
                for task in dict.fromkeys(text.task for text in self.parts[part])
                for own in [[text for text in self.parts[part] if text.task == task]]
            ],
            "left_out": dict(found.left_out),
            "shared_sources": list(found.shared_sources),
            "shared_texts": found.shared_texts,
            "shared_windows": found.shared_windows,
            "common_windows": found.common,
        }


def comparison_texts(
    data: Path | None, prompts: Path | str | Sequence[str | Prompt] | None
) -> ComparisonTexts:
    """Return the texts to train, tune and measure on, kept apart.

    Without `prompts`, the measured texts are a part of the data, or of the embedded texts if there are no data.

    Raises:
        DraftsmithError: files that cannot be read, or too little text to set some of it aside.
    """
    given = None if prompts is None else gather_prompts(prompts)
    asked = [Text(one.task, one.source, one.conversation or one.text) for one in given or ()]
    pool, cut_off = (embedded_pool(), False) if data is None else read_data(data)
    others = of_other_sources(pool, asked)
    dealt, by = split(others, measured=given is None)
    parts = {part: [piece for text in dealt[part] for piece in text.pieces()] for part in PARTS}
    parts[TUNING] = spread(parts[TUNING])
    if given is not None:
        parts[MEASURED] = asked
    elif data is not None:
        parts[MEASURED] = spread(parts[MEASURED])
    else:
        names = {text.source for text in parts[MEASURED]}
        parts[MEASURED] = [text for text in embedded_texts("prompts") if text.source in names]
    kept, found = keep_apart(parts, len(pool) - len(others))
    named_data = EMBEDDED if data is None else data.name
    named_prompts = None if prompts is None else name_of_source(prompts)
    return ComparisonTexts(kept, given, found, by, named_data, named_prompts, cut_off)


def embedded_pool() -> list[Text]:
    """Return all embedded texts; measured ones come only from the prompts, which nothing embedded was trained on."""
    return [text for name in ("train", "prompts") for text in embedded_texts(name)]


def embedded_texts(name: str) -> Iterator[Text]:
    """Yield the texts of an embedded file; pieces of one source are joined into documents."""
    pieces: dict[tuple[str, str], list[str]] = {}
    for line in assets.prompt_file(name).read_text(encoding="utf-8").splitlines():
        record = json.loads(line)
        if "pieces" not in record:
            yield Text(record["task"], record["source"], record["text"])
        begin = 0
        for source, length in record.get("pieces", ()):
            own = pieces.setdefault((record["task"], source), [])
            own.append(record["text"][begin : begin + length].removesuffix("\n"))
            begin += length
    for (task, source), own in pieces.items():
        for begin in range(0, len(own), EXCHANGES):
            yield Text(task, source, "\n".join(own[begin : begin + EXCHANGES]))


def read_data(path: Path) -> tuple[list[Text], bool]:
    """Return the texts of a file or folder, and whether there were more than the limit allows to read."""
    path = path.expanduser()
    if not path.exists():
        raise missing_file(path)
    texts, characters = [], 0
    for record, where in records_at(path):
        text = Text(named(record, "task") or "text", named(record, "source"), read_record(record, where))
        if not text.words:
            continue
        texts.append(text)
        characters += len(str(text.content))
        if characters > MOST_CHARACTERS:
            return texts, True
    if not texts:
        raise DraftsmithError(f"{path} holds no text; give data with some.")
    return texts, False


def named(record: Mapping[str, Any], field: str) -> str:
    """Return a field that holds a name; "" where the field is missing or holds something else."""
    value = record.get(field)
    return str(value) if isinstance(value, str | int) else ""


def as_record(text: Text) -> dict[str, Any]:
    """Return a text as a line of a file of texts; it reads back as the same document."""
    return {"task": text.task, "source": text.source} | content_of(text.content)


def content_of(content: Document) -> dict[str, Any]:
    """Return the fields that hold a document."""
    if isinstance(content, Conversation):
        messages = [dict(message) for message in content.messages]
        return {"messages": messages, "chat_template_kwargs": dict(content.more)}
    if isinstance(content, Completion):
        return {"prompt": content.prompt, "completion": content.completion}
    return {"text": content}
