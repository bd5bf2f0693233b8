"""langchain-openai: chats, streams, batches, tools and answers by a schema."""

from typing import Any

import pytest

from tests.serving.clients.conftest import MODEL, PROMPTS, Server, client

langchain_openai = client("langchain_openai")
pytestmark = pytest.mark.slow
SCHEMA = {
    "title": "person", "type": "object", "properties": {"name": {"enum": ["ann", "bob"]}, "old": {"type": "boolean"}},
    "required": ["name", "old"], "additionalProperties": False,
}
WEATHER = {
    "name": "weather", "description": "Tells the weather.",
    "parameters": {
        "type": "object", "properties": {"city": {"enum": ["Rome", "Bonn"]}}, "required": ["city"],
        "additionalProperties": False,
    },
}


def chat(server: Server, **more: Any) -> Any:
    asked = {"max_tokens": 40, "temperature": 0, "max_retries": 0, **more}
    return langchain_openai.ChatOpenAI(model=MODEL, base_url=f"{server.address}/v1", api_key="none", **asked)


def test_answers_whole_streamed_and_several_at_once(server: Server):
    own = server.answered("Hello there", 40)
    told = chat(server).invoke("Hello there")
    assert told.content == own and told.usage_metadata["output_tokens"] == 40
    chunks = list(chat(server, stream_usage=True).stream("Hello there"))
    assert "".join(chunk.content for chunk in chunks) == own
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 40
    several = chat(server).batch(list(PROMPTS))
    assert [one.content for one in several] == [server.answered(prompt, 40) for prompt in PROMPTS]


def test_completions(server: Server):
    model = langchain_openai.OpenAI(
        model=MODEL, base_url=f"{server.address}/v1", api_key="none", max_tokens=24, temperature=0, max_retries=0
    )
    assert model.generate(list(PROMPTS)).generations[0][0].text == server.completed(PROMPTS[0], 24)
    assert "".join(model.stream(PROMPTS[1])) == server.completed(PROMPTS[1], 24)


@pytest.mark.parametrize("choice", ["any", "weather"])
def test_tools(server: Server, choice: str):
    bound = chat(server, max_tokens=120, logit_bias=server.no_white_space).bind_tools([WEATHER], tool_choice=choice)
    call = bound.invoke("How is it in Rome?").tool_calls[0]
    assert call["name"] == "weather" and call["args"]["city"] in ("Rome", "Bonn")
    whole = None
    for chunk in bound.stream("How is it in Rome?"):
        whole = chunk if whole is None else whole + chunk
    assert whole is not None and whole.tool_calls[0]["args"] == call["args"]


def test_a_schema(server: Server):
    biased = chat(server, max_tokens=120, logit_bias=server.no_white_space)
    told = biased.with_structured_output(SCHEMA, method="json_schema").invoke("Who?")
    assert told["name"] in ("ann", "bob") and told["old"] in (True, False)


def test_log_probabilities(server: Server):
    told = chat(server, logprobs=True, top_logprobs=2).invoke("Hello there")
    entries = told.response_metadata["logprobs"]["content"]
    assert len(entries) == 40 and all(len(entry["top_logprobs"]) == 2 for entry in entries)
