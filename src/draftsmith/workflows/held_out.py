"""Prompts to measure τ on while training: the held-out part of the user's data, given prompts, or embedded ones."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.evaluation.prompts import Prompt, cut, distinct, whole
from draftsmith.targets.records import Completion, Document, plain_text
from draftsmith.targets.token_ids import ASSISTANT
from draftsmith.training.data.sources import Source, names_of
from draftsmith.training.sections import DataSection
from draftsmith.types import DraftsmithError
from draftsmith.workflows.sources import EMBEDDED, gather_prompts, name_of_source

if TYPE_CHECKING:
    from draftsmith.targets import Target

PROMPTS, PROMPTS_A_TASK = 32, 16
"""Number of prompts in all, and at least this many of every task."""
FEWEST_PROMPTS = 8
NEW_TOKENS, PROMPT_TOKENS = 64, 64
OWN = "the held-out part of your data"
READ_PIECES = 64
"""At most this many held-out pieces of a source are read."""


@dataclass(frozen=True)
class Evaluation:
    """What τ is measured on while training: prompts per task, their length, and the new tokens after each.

    `prompts` are a file or folder, as training data are, or texts. None takes the held-out part of the training data,
    or the embedded held-out prompts if the training data are embedded too. Numbers that are None default to 32 prompts
    in all, with at least 16 of every task or source, and to lengths of 64 tokens, or less if the target's context is
    short.
    """

    prompts: Path | str | Sequence[str | Prompt] | None = None
    prompts_a_task: int | None = None
    new_tokens: int | None = None
    prompt_tokens: int | None = None


@dataclass(frozen=True)
class Probe:
    """Prompts to measure τ on, all numbers settled, with a description of the prompts and of what was assumed.

    Texts are cut to `prompt_tokens`, conversations are not; `longest` is the length of the longest prompt.
    """

    prompts: list[Prompt]
    prompts_a_task: int
    new_tokens: int
    prompt_tokens: int
    source: str
    count: int
    longest: int
    warning: str = ""

    def sentence(self) -> str:
        """Return what τ is measured on, and what that assumes, in words."""
        return (
            f"τ is measured by greedy decoding of {self.new_tokens} tokens behind {self.count} "
            f"prompt{'s' if self.count != 1 else ''} of at most {self.longest} tokens from {self.source}, on the "
            "assumption that what you will decode is like them."
        )


def settle(asked: Evaluation, data: DataSection, embedded: bool, target: "Target") -> Probe:
    """Return the prompts to measure on.

    Args:
        embedded: whether the run trains on the embedded texts; there are embedded held-out prompts for those.

    Raises:
        DraftsmithError: prompts that do not exist, or lengths above the target's context.
    """
    third = target.max_length // 3
    new_tokens = asked.new_tokens or min(NEW_TOKENS, third)
    prompt_tokens = asked.prompt_tokens or min(PROMPT_TOKENS, third)
    if new_tokens + prompt_tokens > target.max_length:
        raise DraftsmithError(
            f"the evaluation reads {prompt_tokens} tokens and writes {new_tokens}, but the target's context has "
            f"{target.max_length}; lower --eval-prompt-tokens or --eval-tokens."
        )
    warning, own = "", asked.prompts is None and not embedded
    if own:
        prompts = held_out_prompts(data, target, target.max_length - new_tokens)
        source = OWN
        if not prompts:
            warning = (
                "Your data leave nothing to hold out, so τ is measured on the embedded prompts, which may be unlike "
                "your texts; give your own with --eval-data."
            )
            prompts, source = gather_prompts(None), f"the {EMBEDDED}"
    else:
        prompts, source = gather_prompts(asked.prompts), name_of_source(asked.prompts)
    tasks = sorted({prompt.task for prompt in prompts})
    a_task = asked.prompts_a_task or max(PROMPTS_A_TASK, -(-PROMPTS // len(tasks)))
    lengths = [
        len(tokens) for task in tasks
        for tokens in distinct(
            cut(target, [p for p in prompts if p.task == task], prompt_tokens, a_task, exact=False)
        )
    ]
    count = len(lengths)
    if own and not warning and count < min(FEWEST_PROMPTS, a_task):
        warning = (
            f"The held-out part of your data gives only {count} prompt{'s' if count != 1 else ''}, so τ is uncertain; "
            "add text, give prompts with --eval-data, or hold out more, such as every tenth document with "
            "data.held_out_every=10."
        )
    return Probe(prompts, a_task, new_tokens, prompt_tokens, source, count, max(lengths), warning)


def held_out_prompts(data: DataSection, target: "Target", longest: int) -> list[Prompt]:
    """Return the held-out texts of every source, one task each; conversations that do not fit are left out."""
    found = []
    for task, section in zip(names_of(data.sources), data.sources, strict=True):
        source = Source(section, data.held_out_every, data.piece_characters, held_out=True)
        pieces = source.pieces()
        for piece in islice(pieces, READ_PIECES):
            prompt = as_prompt(piece.content, task, source.label)
            if prompt is not None and fits(prompt, target, longest):
                found.append(prompt)
    return found


def as_prompt(document: Document, task: str, source: str) -> Prompt | None:
    """Return the part of a document that serves as a prompt; None if the assistant has no turn in it."""
    if isinstance(document, Completion):
        return Prompt(task, source, document.prompt)
    if isinstance(document, str):
        return Prompt(task, source, document)
    turns = [at for at, message in enumerate(document.messages) if at and message["role"] == ASSISTANT]
    if not turns:
        return None
    begun = replace(document, messages=document.messages[: turns[0]])
    return Prompt(task, source, plain_text(begun), begun)


def fits(prompt: Prompt, target: "Target", longest: int) -> bool:
    """Tell whether a conversation fits the target; a text is cut, so it only must not be blank."""
    if prompt.conversation is None:
        return bool(prompt.text.strip())
    try:
        return len(whole(target, [prompt])[0]) <= longest
    except DraftsmithError:  # the template refuses this conversation
        return False


