"""The fields of Anthropic's requests that are read here, and their conversion to OpenAI's form."""

from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from draftsmith.serving.body import Fields, Flag, Several
from draftsmith.serving.errors import bad
from draftsmith.serving.openai_fields import (
    ChatFields,
    Function,
    JsonSchema,
    Message,
    ResponseFormat,
    Speculation,
    TextPart,
    Tool,
)
from draftsmith.serving.prompts import given_text, plain_text


class Block(Fields):
    """A part of a message: a text, a call of a tool ("tool_use"), or what a tool answered ("tool_result")."""

    type: str
    text: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: str | Several[TextPart] | None = None
    is_error: bool | None = None


class Turn(Fields):
    """One message of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | Several[Block]


class ToolDefinition(Fields):
    """What a tool is called, and the schema of what it is told."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None


class ToolChoice(Fields):
    """Whether tools may be called ("auto"), must be ("any", or "tool" with its name), or must not be ("none")."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class OutputFormat(Fields):
    """A schema that the answer follows."""

    type: Literal["json_schema"]
    json_schema: dict[str, Any] = Field(alias="schema")


class OutputConfig(Fields):
    """How the answer is to be written; of this only its form is read."""

    format: OutputFormat | None = None


class CountFields(Fields):
    """The body of `/v1/messages/count_tokens`."""

    model: str
    messages: Several[Turn]
    system: str | Several[TextPart] | None = None
    tools: Several[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    """What `output_config.format` was called while Anthropic was trying it."""


class MessageFields(CountFields):
    """The body of `/v1/messages`."""

    max_tokens: int
    stop_sequences: Several[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool | None = None
    metadata: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    speculation: Speculation | None = None
    smooth: Flag = False


def as_chat(fields: CountFields) -> ChatFields:
    """Return the conversation and its tools in OpenAI's form.

    Raises:
        ApiError: 400 for parts that are neither text nor tool use, for tools that the client does not run itself, and
            for two forms at once.
    """
    messages: list[Message] = []
    if fields.system is not None:
        messages.append(Message(role="system", content=plain_text(fields.system, "system")))
    names: dict[str, str] = {}
    for number, turn in enumerate(fields.messages):
        messages += _messages_of(turn, f"message {number}", names)
    choice = fields.tool_choice
    last = messages[-1] if messages else None
    return ChatFields(
        messages=messages, tools=[_tool(one) for one in fields.tools or ()] or None, tool_choice=_choice(choice),
        parallel_tool_calls=False if choice is not None and choice.disable_parallel_tool_use else None,
        response_format=_format(fields),
        # The answer continues a conversation's last message if that is the assistant's.
        continue_final_message=last is not None and last.role == "assistant" and not last.tool_calls,
    )


def _tool(given: ToolDefinition) -> Tool:
    if given.type not in (None, "custom"):
        raise bad(
            f"the tool {given.name[:40]!r} is of type {given.type[:40]!r}, which does not run here; give tools of your "
            "own, with an input_schema.", "tools",
        )
    if given.input_schema is None:
        raise bad(f"the tool {given.name[:40]!r} has no input_schema; give one.", "tools")
    return Tool(
        type="function",
        function=Function(name=given.name, description=given.description, parameters=given.input_schema),
    )


def _format(fields: CountFields) -> ResponseFormat | None:
    """Return the schema that the answer is to follow, as OpenAI's `response_format`."""
    new = None if fields.output_config is None else fields.output_config.format
    if new is not None and fields.output_format is not None:
        raise bad("output_config and output_format both ask for a form; leave output_format out.", "output_format")
    asked = new or fields.output_format
    if asked is None:
        return None
    return ResponseFormat(type="json_schema", json_schema=JsonSchema(schema=asked.json_schema))


def _choice(given: ToolChoice | None) -> Any:
    """Return the same choice as OpenAI's `tool_choice`."""
    if given is None or given.type in ("auto", "none"):
        return None if given is None else given.type
    if given.type == "any":
        return "required"
    if given.name is None:
        raise bad('tool_choice is of type "tool", but has no name; name one of the tools.', "tool_choice")
    return {"type": "function", "function": {"name": given.name}}


def _messages_of(turn: Turn, where: str, names: dict[str, str]) -> list[Message]:
    """Return the chat messages that one turn stands for: each answer of a tool is a message of its own.

    Args:
        names: the names of the tools called so far, by the ids of the calls; calls of this turn are added.
    """
    if isinstance(turn.content, str):
        return [Message(role=turn.role, content=turn.content)]
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    found: list[Message] = []
    for block in turn.content:
        if block.type == "text":
            texts.append(given_text(block.text, where))
        elif block.type == "tool_use" and turn.role == "assistant":
            calls.append(_call(block, where, names))
        elif block.type == "tool_result" and turn.role == "user":
            found += _spoken(turn, texts)
            texts = []
            found.append(_result(block, where, names))
        else:
            raise bad(
                f"{where} has a part of type {block.type[:40]!r}; understood are text, tool_use of the assistant and "
                "tool_result of the user.", "messages",
            )
    if calls:
        return [Message(role="assistant", content="".join(texts), tool_calls=calls)]
    return found + _spoken(turn, texts) if found else [Message(role=turn.role, content="".join(texts))]


def _spoken(turn: Turn, texts: Sequence[str]) -> list[Message]:
    return [Message(role=turn.role, content="".join(texts))] if texts else []


def _call(block: Block, where: str, names: dict[str, str]) -> dict[str, Any]:
    if block.id is None or block.name is None or block.input is None:
        raise bad(f"{where} has a tool_use without id, name or input; give all three.", "messages")
    names[block.id] = block.name
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": block.input}}


def _result(block: Block, where: str, names: dict[str, str]) -> Message:
    name = names.get(block.tool_use_id or "")
    if name is None:
        raise bad(f"{where} has a tool_result whose tool_use_id names no tool_use before it; name one.", "messages")
    text = plain_text(block.content, where)
    if block.is_error and not text.lower().startswith("error:"):
        # Chat templates have no other place for it.
        text = f"Error: {text or 'the tool failed.'}"
    return Message(role="tool", content=text, name=name, tool_call_id=block.tool_use_id)
