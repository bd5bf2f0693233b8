"""The clients that people have: OpenAI's and Anthropic's own packages, over a real socket."""

from collections.abc import Iterator

import anthropic
import openai
import pytest

from tests.serving.toy import NAME, listening, make_service, plainly

MESSAGES = [{"role": "user", "content": "hi"}]
WRITTEN = "u:hi;a:"
GREEDY = {"temperature": 0}
"""Anthropic's client has no argument for it any more."""


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with listening(make_service(keys=("k",))) as found:
        yield found


@pytest.fixture
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="k", max_retries=0) as made:
        yield made


def test_completions(client: openai.OpenAI):
    told = client.completions.create(model=NAME, prompt="one", max_tokens=12, temperature=0, logprobs=2)
    assert told.choices[0].text == plainly("one", max_tokens=12).text
    assert told.choices[0].logprobs is not None and len(told.choices[0].logprobs.tokens or ()) == 12
    stream = client.completions.create(model=NAME, prompt="one", max_tokens=12, temperature=0, stream=True)
    assert "".join(chunk.choices[0].text for chunk in stream) == told.choices[0].text


def test_chats(client: openai.OpenAI):
    own = plainly(WRITTEN, max_tokens=12).text
    told = client.chat.completions.create(model=NAME, messages=MESSAGES, max_tokens=12, temperature=0)  # type: ignore[arg-type]
    assert told.choices[0].message.content == own and told.usage is not None
    stream = client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=12, temperature=0, stream=True,  # type: ignore[arg-type]
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == own
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 12


def test_our_own_fields_go_through_extra_body(client: openai.OpenAI):
    told = client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_tokens=12, temperature=0,  # type: ignore[arg-type]
        extra_body={"speculation": {"enabled": False}, "spec_decode_metrics": "summary", "top_k": 3},
    )
    assert told.model_extra is not None
    assert told.model_extra["metrics"]["speculative_decoding"]["num_spec_steps"] == 0


def test_models_and_errors(client: openai.OpenAI, address: str):
    assert [model.id for model in client.models.list()] == [NAME]
    with pytest.raises(openai.NotFoundError, match="not served here"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="temperature is 1e"):
        client.completions.create(model=NAME, prompt="x", temperature=1e308)
    with (
        openai.OpenAI(base_url=f"{address}/v1", api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.models.list()


def test_anthropics_messages(address: str):
    own = plainly(WRITTEN, max_tokens=12).text
    with anthropic.Anthropic(base_url=address, api_key="k", max_retries=0) as client:
        told = client.messages.create(model=NAME, messages=MESSAGES, max_tokens=12, extra_body=GREEDY)  # type: ignore[arg-type]
        assert told.content[0].type == "text" and told.content[0].text == own
        with client.messages.stream(model=NAME, messages=MESSAGES, max_tokens=12, extra_body=GREEDY) as stream:  # type: ignore[arg-type]
            assert "".join(stream.text_stream) == own
        counted = client.messages.count_tokens(model=NAME, messages=MESSAGES)  # type: ignore[arg-type]
        assert counted.input_tokens == len(WRITTEN)
        with pytest.raises(anthropic.BadRequestError, match="max_tokens is 0"):
            client.messages.create(model=NAME, messages=MESSAGES, max_tokens=0)  # type: ignore[arg-type]
