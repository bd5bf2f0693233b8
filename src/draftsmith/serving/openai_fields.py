"""The fields of OpenAI's requests that are read here, with those that vLLM adds, and our own three.

Our own are `speculation`, `smooth` and `explain`; see docs/serving.md.
"""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field
from pydantic_core import PydanticCustomError

from draftsmith.serving.body import Fields, Flag, KnownFields, Several
from draftsmith.serving.settings import Detail


def refuse_unserved(value: str | None) -> str | None:
    """Let nothing pass but an empty value, which asks for nothing."""
    if value:
        raise PydanticCustomError("unserved", "it is not served; leave it out")
    return value


class StreamOptions(Fields):
    """What a stream tells of tokens."""

    include_usage: Flag = False
    continuous_usage_stats: Flag = False


class Speculation(KnownFields):
    """How one request is to be drafted: not at all, or by a plan and a drafter of its own."""

    enabled: bool = True
    plan: str | None = None
    drafter: str | None = None


class JsonSchema(Fields):
    """A schema by which an answer is to be written."""

    name: str = ""
    json_schema: dict[str, Any] | None = Field(default=None, alias="schema")
    strict: bool | None = None


class ResponseFormat(Fields):
    """The form that an answer is to have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StructuredOutputs(Fields):
    """vLLM's ways to say what form an answer is to have."""

    json_schema: dict[str, Any] | str | None = Field(default=None, alias="json")
    regex: str | None = None
    choice: Several[str] | None = None
    grammar: str | None = None


class TextPart(Fields):
    """A piece of a message; only text is understood."""

    type: str
    text: str | None = None


class Prediction(Fields):
    """A text that the answer is likely to repeat."""

    type: Literal["content"]
    content: str | Several[TextPart]


class Function(Fields):
    """What a tool is called, and what it is told."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Fields):
    """A function that the model may ask for."""

    type: Literal["function"]
    function: Function


class NamedFunction(Fields):
    """The name of a function."""

    name: str


class NamedTool(Fields):
    """A tool of the request, by its name."""

    type: Literal["function"]
    function: NamedFunction


class AllowedTools(Fields):
    """The tools that may be called, and whether one of them has to be."""

    mode: Literal["auto", "required"]
    tools: Several[NamedTool]


class Generation(Fields):
    """What completions and chats have in common."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    """What chats call it now; where both are given, this one counts."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, Any] | None = None
    """Numbers by token id; checked where they are used."""
    stop: str | Several[str] | None = None
    stop_token_ids: Several[int] | None = None
    ignore_eos: Flag = False
    min_tokens: int | None = None
    seed: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None
    timeout: float | None = None
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    prediction: Prediction | None = None
    spec_decode_metrics: Detail | None = None
    speculation: Speculation | None = None
    smooth: Flag = False
    explain: Flag = False
    # Not offered, and too important to be ignored silently.
    prompt_embeds: Any = None
    use_beam_search: bool | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    grammar: Any = None
    json_schema: Any = None
    allowed_token_ids: Any = None
    bad_words: Any = None
    include_stop_str_in_output: Any = None
    truncate_prompt_tokens: Any = None
    prompt_logprobs: Any = None


class CompletionFields(Generation):
    """The body of `/v1/completions`."""

    prompt: Any = None
    """A text, tokens, or a list of either; checked where its tokens are made."""
    echo: bool | None = None
    logprobs: int | None = None
    suffix: Annotated[str | None, AfterValidator(refuse_unserved)] = None
    best_of: int | None = None


class Message(Fields):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Several[TextPart] | None = None
    name: str | None = None
    tool_calls: Several[dict[str, Any]] | None = None
    tool_call_id: str | None = None


class ChatFields(Generation):
    """The body of `/v1/chat/completions`."""

    messages: Several[Message]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    tools: Several[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | dict[str, Any] | None = None
    """A word, one tool by its name, or `AllowedTools`; checked where it is used."""
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: Flag = False
    """vLLM's two: whether the answer begins a message of its own, or goes on with the last one."""
    chat_template: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    functions: Any = None
    function_call: Any = None
    audio: Any = None
    modalities: Several[str] | None = None
