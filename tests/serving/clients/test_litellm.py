"""litellm, which turns one form of request into many: through OpenAI's form and through Anthropic's."""

import asyncio
import json

import pytest

from tests.serving.clients.conftest import MODEL, PROMPTS, Server, client

litellm = client("litellm")
pytestmark = pytest.mark.slow
HI = [{"role": "user", "content": "Hello there"}]
TOOL = {
    "type": "function",
    "function": {
        "name": "weather", "description": "Tells the weather.",
        "parameters": {
            "type": "object", "properties": {"city": {"enum": ["Rome", "Bonn"]}}, "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("prompt", PROMPTS)
def test_completions_whole_and_streamed(server: Server, prompt: str):
    asked = {
        "model": f"text-completion-openai/{MODEL}", "prompt": prompt, "api_base": f"{server.address}/v1",
        "api_key": "none", "max_tokens": 24, "temperature": 0,
    }
    own = server.completed(prompt, 24)
    told = litellm.text_completion(**asked)
    assert told.choices[0].text == own and told.usage.completion_tokens == 24
    assert "".join(chunk.choices[0].text or "" for chunk in litellm.text_completion(stream=True, **asked)) == own


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_chats_whole_and_streamed(server: Server, provider: str):
    asked = {
        "model": f"{provider}/{MODEL}", "messages": HI, "api_base": f"{server.address}/v1", "api_key": "none",
        "max_tokens": 24, "temperature": 0,
    }
    own = server.answered("Hello there", 24)
    told = litellm.completion(**asked)
    assert told.choices[0].message.content == own and told.choices[0].finish_reason == "length"
    chunks = list(litellm.completion(stream=True, stream_options={"include_usage": True}, **asked))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == own
    assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == 24
    many = asyncio.run(_several(asked))
    assert many == [own] * 8


async def _several(asked: dict[str, object]) -> list[str]:
    told = await asyncio.gather(*(litellm.acompletion(**asked) for _ in range(8)))
    return [one.choices[0].message.content for one in told]


def test_tools(server: Server):
    told = litellm.completion(
        model=f"openai/{MODEL}", messages=HI, api_base=f"{server.address}/v1", api_key="none", max_tokens=120,
        temperature=0, tools=[TOOL], tool_choice={"type": "function", "function": {"name": "weather"}},
        logit_bias=server.no_white_space,
    )
    (call,) = told.choices[0].message.tool_calls
    assert call.function.name == "weather" and json.loads(call.function.arguments)["city"] in ("Rome", "Bonn")
    assert told.choices[0].finish_reason == "tool_calls"


def test_messages_in_anthropics_form(server: Server):
    asked = {
        "model": f"anthropic/{MODEL}", "messages": HI, "api_base": server.address, "api_key": "none", "max_tokens": 24,
        "temperature": 0,
    }
    own = server.answered("Hello there", 24)
    assert litellm.completion(**asked).choices[0].message.content == own
    chunks = litellm.completion(stream=True, **asked)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == own


def test_refusals_are_told_by_their_own_names(server: Server):
    asked = {"messages": HI, "api_base": f"{server.address}/v1", "api_key": "none", "num_retries": 0}
    with pytest.raises(litellm.BadRequestError, match="temperature is -1"):
        litellm.completion(model=f"openai/{MODEL}", temperature=-1, **asked)
    with pytest.raises(litellm.NotFoundError, match="is not served here"):
        litellm.completion(model="openai/other", **asked)
    with pytest.raises(litellm.ContextWindowExceededError):
        litellm.completion(model=f"openai/{MODEL}", max_tokens=10**6, **asked)
