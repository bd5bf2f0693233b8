"""Turns prompts into token ids, in a thread of its own: a tokenizer takes long enough to hold up other requests."""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any, Protocol, TypeVar

from jinja2 import meta
from jinja2.sandbox import ImmutableSandboxedEnvironment

from draftsmith.engine.requests.prompts import check_text, tokens_of
from draftsmith.serving.errors import ApiError, bad
from draftsmith.serving.openai_fields import Message, TextPart
from draftsmith.serving.settings import Settings
from draftsmith.serving.thread import BoundedThread
from draftsmith.serving.time_limit import templates_within
from draftsmith.targets import Target
from draftsmith.targets.token_ids import Conversation, body_ids
from draftsmith.types import DraftsmithError

T = TypeVar("T")


class Spoken(Protocol):
    """One message of a conversation, in OpenAI's or Anthropic's form."""

    @property
    def content(self) -> str | Sequence[Any] | None:
        """Its text, or parts."""


OURS = frozenset({
    "messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "raise_exception",
    "strftime_now",
})
"""Variables that the server itself or transformers gives to templates."""
_MARKS = re.compile(r"\{%-?\s*(end)?generation\s*-?%\}")  # a tag of transformers' own
PLAIN = (str, int, float, bool, type(None))


class Prompts:
    """Turns texts and conversations into tokens, one after the other.

    Args:
        target: has the tokenizer and the chat template.
        max_length: the most tokens that a text and its continuation may have.
        most: requests that may be in here at once; further ones are refused (429).
    """

    def __init__(self, target: Target, max_length: int, settings: Settings, most: int) -> None:
        self.target, self.max_length, self._settings = target, max_length, settings
        # One at a time: fast tokenizers must not be called by two threads at once.
        self._thread = BoundedThread("draftsmith-tokenizer", most, "prompts wait for the tokenizer")

    async def of_texts(self, given: Any) -> tuple[list[list[int]], list[str | None]]:
        """Return the tokens of each prompt of a `prompt` field, and its text, or None if it was given as tokens."""
        if isinstance(given, list):
            self._check_list(given)
        several = split_prompts(given)
        if len(several) > self._settings.max_texts:
            raise bad(f"prompt has {len(several)} texts; the most is {self._settings.max_texts}.", "prompt")
        for text in several:
            self._check_size(text)

        def read() -> list[list[int]]:
            return [self._tokens(text, number) for number, text in enumerate(several)]

        tokens = await self._thread.run(read)
        return tokens, [text if isinstance(text, str) else None for text in several]

    async def of_chat(
        self, messages: Sequence[Message], extra: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] = (), goes_on: bool = False, whole: bool = False,
    ) -> list[int]:
        """Return the tokens of a conversation, and of the tools if any, as the target's own template writes them.

        Args:
            goes_on: whether the answer continues the last message.
            whole: whether no answer is to follow.
        """
        tokenizer = self.target.tokenizer
        if tokenizer is None or tokenizer.chat_template is None:
            raise bad(
                f"{self.target.name} has no chat template, so it takes no messages; use /v1/completions.", "messages"
            )
        if not messages:
            raise bad("messages is empty; give at least one.", "messages")
        self.check_count(messages, sum(len(one.tool_calls or ()) for one in messages))
        plain = [as_plain(message, number) for number, message in enumerate(messages)]
        for number, message in enumerate(plain):
            self._check_text(message["content"], number, "messages")
        shown = [tools, *(message.tool_calls for message in messages)]
        told = "".join(json.dumps(one, ensure_ascii=False) for one in shown if one)
        self._check_size("".join(str(message.get("content") or "") for message in plain) + told, "messages")
        more = self._checked(extra or {}) | ({"tools": list(tools)} if tools else {})

        def read() -> list[int]:
            with templates_within(self._settings.template_seconds):
                return self._tokens(Conversation(plain, more, goes_on, whole), 0)

        return await self._thread.run(read)

    async def of_text(self, text: str, special: bool) -> list[int]:
        """Return the tokens of one text, for `/tokenize`; without `special`, no special tokens are added."""
        tokenizer = self.target.tokenizer
        if tokenizer is None:
            raise bad(f"{self.target.name} has no tokenizer.")
        self._check_size(text)
        if not special:
            self._check_text(text, 0, "prompt")
            return await self._thread.run(lambda: body_ids(tokenizer, text))
        return await self._thread.run(lambda: self._tokens(text, 0) if text else [])

    async def texts(self, tokens: Sequence[int], write: Callable[[Sequence[int]], str]) -> str:
        """Return the text of tokens; ApiError for ids that the target does not have."""
        def read() -> str:
            wrong = next((token for token in tokens if not 0 <= token < self.target.vocab_size), None)
            if wrong is not None:
                raise bad(f"tokens has {wrong}, but the model's go from 0 to {self.target.vocab_size - 1}.", "tokens")
            return write(tokens)

        return await self._thread.run(read)

    def _tokens(self, prompt: Any, number: int) -> list[int]:
        try:
            return tokens_of(prompt, number, self.target)
        except DraftsmithError as error:
            raise bad(str(error), "messages" if isinstance(prompt, Conversation) else "prompt") from error

    def check_count(self, messages: Sequence[Spoken], calls: int = 0) -> None:
        """Refuse more messages, parts and calls than there can be tokens, before any work is done on each of them."""
        parts = sum(len(one.content) for one in messages if isinstance(one.content, list))
        if len(messages) + parts + calls > self.max_length:
            raise self._too_long("messages")

    def _check_text(self, text: str, number: int, param: str) -> None:
        try:
            check_text(text, number)
        except DraftsmithError as error:
            raise bad(str(error), param) from error

    def _check_size(self, text: Any, param: str = "prompt") -> None:
        """Refuse what is certainly too long before a tokenizer spends seconds on it."""
        most = self.max_length * (self._longest_token if isinstance(text, str) else 1)
        if len(text) > most:
            raise self._too_long(param)

    def _check_list(self, given: list[Any]) -> None:
        """Refuse a list that is certainly too long before each of its entries is looked at."""
        if given and isinstance(given[0], int):
            self._check_size(given)
        elif len(given) > self._settings.max_texts:
            raise bad(f"prompt has {len(given)} texts; the most is {self._settings.max_texts}.", "prompt")
        else:
            for one in given:
                if isinstance(one, list):
                    self._check_size(one)

    def _too_long(self, param: str) -> ApiError:
        return bad(
            f"This model's maximum context length is {self.max_length} tokens, and a prompt is longer.", param,
            "context_length_exceeded",
        )

    @cached_property
    def template(self) -> str:
        """The target's chat template, all of them where it has several; empty where it has none."""
        tokenizer = self.target.tokenizer
        return "" if tokenizer is None or tokenizer.chat_template is None else str(tokenizer.chat_template)

    @cached_property
    def _longest_token(self) -> int:
        """Most characters of any token."""
        return 1 if self.target.tokenizer is None else max(map(len, self.target.tokenizer.get_vocab()))

    @cached_property
    def _template_names(self) -> frozenset[str]:
        """The variables that the target's template asks for, without those that the server or transformers gives it."""
        assert self.target.tokenizer is not None
        environment = ImmutableSandboxedEnvironment(extensions=["jinja2.ext.loopcontrols"])
        try:
            template = _MARKS.sub("", self.target.tokenizer.get_chat_template())
            asked = meta.find_undeclared_variables(environment.parse(template))
        except Exception:  # a template is somebody else's program and may be wrong in any way
            return frozenset()
        return frozenset(asked) - OURS - frozenset(self.target.tokenizer.special_tokens_map)

    def _checked(self, extra: Mapping[str, Any]) -> dict[str, Any]:
        for name, value in extra.items():
            if name not in self._template_names or not isinstance(value, PLAIN):
                known = ", ".join(sorted(self._template_names)) or "none"
                raise bad(
                    f"chat_template_kwargs has {name[:40]!r}, but the template of {self.target.name} takes {known} "
                    "(texts, numbers, true or false).", "chat_template_kwargs",
                )
        return dict(extra)

    def close(self) -> None:
        """End the thread after the prompt that it reads now; those that wait are not read."""
        self._thread.close()


def split_prompts(given: Any) -> list[Any]:
    """Return the prompts of a field: a text, tokens, or a list of either."""
    if isinstance(given, str):
        return [given]
    if isinstance(given, list) and given:
        if all(type(one) is int for one in given):
            return [given]
        if all(isinstance(one, str) for one in given):
            return given
        if all(isinstance(one, list) and all(type(token) is int for token in one) for one in given):
            return given
    raise bad("prompt must be a text, a list of token ids, or a list of texts or of lists of token ids.", "prompt")


def as_plain(message: Message, number: int) -> dict[str, Any]:
    """Return a message as templates read it; "developer", OpenAI's newer name for the role, becomes "system"."""
    role = "system" if message.role == "developer" else message.role
    plain: dict[str, Any] = {"role": role, "content": plain_text(message.content, f"message {number}")}
    for name in ("name", "tool_calls", "tool_call_id"):
        value = getattr(message, name)
        if value is not None:
            plain[name] = value
    if message.tool_calls:
        plain["tool_calls"] = [with_arguments(call, number) for call in message.tool_calls]
    return plain


def with_arguments(call: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, as templates want them; clients send JSON text.

    Args:
        number: the place of its message, for errors.

    Raises:
        ApiError: 400 for a call that names no function. The template would stop at it and be blamed.
    """
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise bad(
            f"message {number} has a tool call without the name of a function; give its function with name and "
            "arguments.", "messages",
        )
    arguments = function.get("arguments")
    # Of a call without arguments some clients send nothing instead of an empty object.
    found = {} if arguments in (None, "") else arguments
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except (ValueError, RecursionError):
            return dict(call)
    return {**call, "function": {**function, "arguments": found}}


def plain_text(content: str | Sequence[TextPart] | None, where: str) -> str:
    """Return the text of a message's content; pictures and the like are refused."""
    if content is None or isinstance(content, str):
        return content or ""
    for part in content:
        if part.type != "text":
            raise bad(f"{where} has a part of type {part.type[:40]!r}; only text is understood.", "messages")
    return "".join(given_text(part.text, where) for part in content)


def given_text(text: str | None, where: str) -> str:
    """Return the text of a part of the type "text"; ApiError where it has none."""
    if text is None:
        raise bad(f"{where} has a part of type 'text' without a text; give one.", "messages")
    return text
