"""The one place that decides which form an answer must have and which text it is predicted to repeat.

The rest of the server passes a request to `form_of` and hands on the `Form` that it gets back.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from draftsmith.serving.call_readers import CallReader
from draftsmith.serving.errors import bad
from draftsmith.serving.openai_fields import ChatFields, Generation, Prediction, ResponseFormat, StructuredOutputs
from draftsmith.serving.tool_schemas import arguments_schema, calls_schema
from draftsmith.serving.tools import choice_of, reader_of
from draftsmith.types import Constraint, DraftsmithError


@dataclass(frozen=True)
class Form:
    """The form that an answer must have, and the text that it is expected to repeat.

    Args:
        constraint: on the answer's text; its `origin` is the field that asked for it.
        prediction: a text that the answer is likely to repeat.
        calls: makes the reader that finds tool calls in the answer; None where it is only text.
        tools: the tool definitions that the chat template gets.
    """

    constraint: Constraint | None = None
    prediction: str | None = None
    calls: Callable[[], CallReader] | None = None
    tools: tuple[dict[str, Any], ...] = ()


def form_of(fields: Generation, template: str = "") -> Form:
    """Return the form that a request asks for.

    Args:
        template: the chat template, which shows how the model writes tool calls.

    Raises:
        ApiError: 400 for a form that cannot be enforced, or for two forms at once.
    """
    prediction = _predicted(fields.prediction)
    asked = [
        one for one in (_format(fields.response_format), _structured(fields.structured_outputs)) if one is not None
    ]
    if len(asked) > 1:
        raise bad("response_format and structured_outputs both ask for a form; leave one out.", "structured_outputs")
    constraint = asked[0] if asked else None
    if not isinstance(fields, ChatFields) or not fields.tools:
        if isinstance(fields, ChatFields) and fields.tool_choice not in (None, "none", "auto"):
            raise bad("tool_choice asks for a tool, but there are no tools; give some.", "tool_choice")
        return Form(constraint, prediction)
    if fields.tool_choice == "none":
        return Form(constraint, prediction)
    if constraint is not None:
        clash = 'an answer cannot be both a form and calls of tools; leave one out, or set tool_choice to "none".'
        raise bad(clash, constraint.origin)
    choice = choice_of(fields)
    for tool in fields.tools:
        arguments_schema(tool)
    reader = reader_of(template, choice)
    shown = choice.tools if choice.is_narrow else fields.tools
    told = tuple(tool.model_dump(exclude_none=True) for tool in shown)
    if not choice.must:
        return Form(None, prediction, reader, told)
    schema = calls_schema(choice.tools, choice.most)
    return Form(_made(lambda: Constraint.of_schema(schema), "tools"), prediction, reader, told)


def _format(asked: ResponseFormat | None) -> Constraint | None:
    if asked is None or asked.type == "text":
        return None
    if asked.type == "json_object":
        return Constraint("json_object")
    if asked.json_schema is None or asked.json_schema.json_schema is None:
        raise bad("response_format has no json_schema with a schema in it; give one.", "response_format")
    schema = asked.json_schema.json_schema
    return _made(lambda: Constraint.of_schema(schema), "response_format")


def _structured(asked: StructuredOutputs | None) -> Constraint | None:
    if asked is None:
        return None
    if sum(value is not None for _, value in asked) != 1:
        raise bad(
            "structured_outputs takes one of json, regex, choice and grammar; give exactly one.", "structured_outputs"
        )

    def made() -> Constraint:
        if asked.choice is not None:
            return Constraint.of_choices(asked.choice)
        if asked.regex is not None:
            return Constraint("regex", asked.regex)
        if asked.grammar is not None:
            return Constraint("grammar", asked.grammar)
        schema = asked.json_schema
        return Constraint("json_schema", schema) if isinstance(schema, str) else Constraint.of_schema(schema or {})

    return _made(made, "structured_outputs")


def _made(make: Callable[[], Constraint], field: str) -> Constraint:
    try:
        return replace(make(), origin=field)
    except DraftsmithError as error:
        raise bad(str(error), field) from error


def _predicted(prediction: Prediction | None) -> str | None:
    if prediction is None:
        return None
    if isinstance(prediction.content, str):
        return prediction.content or None
    for part in prediction.content:
        if part.type != "text":
            raise bad(f"prediction has a part of type {part.type[:40]!r}; only text is understood.", "prediction")
    return "".join(part.text or "" for part in prediction.content) or None
