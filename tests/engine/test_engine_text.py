"""Text of the engine: prompts as strings, stop strings, and streams that never split a character."""

from pathlib import Path

import pytest
import torch

from draftsmith.engine import Engine
from draftsmith.engine.text import TextStream
from draftsmith.plan import NO_DRAFT, Plan
from draftsmith.targets import Target
from draftsmith.types import SamplingParams
from tests.helpers.oracle import OracleDrafter
from tests.helpers.tiny import TOKENIZER_SIZE, save_tiny_target

PRINTABLE = dict.fromkeys(range(0, 94), 60.0)
"""A bias under which the byte-level target writes ASCII letters, digits and signs."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder: Path = tmp_path_factory.mktemp("target")
    return Target.from_pretrained(save_tiny_target(folder, dtype=torch.float64), dtype="fp64", device="cpu")


@pytest.fixture(scope="module")
def drafted(target: Target) -> Engine:
    """Return an engine whose drafter knows the continuation of `PROMPT`."""
    question = target.tokenizer(PROMPT)["input_ids"]
    answer = Engine(target).generate([PROMPT], SamplingParams(max_tokens=60, logit_bias=PRINTABLE))[0]
    oracle = OracleDrafter([question + answer.tokens], TOKENIZER_SIZE, error_rate=0.2)
    return Engine(target, oracle, plan=Plan((2, 1, 1, 1)))


PROMPT = "def area(r):\n"


def test_a_text_prompt_and_its_tokens_are_the_same(target: Target):
    engine, tokens = Engine(target), target.tokenizer(PROMPT)["input_ids"]
    by_text, by_tokens = engine.generate([PROMPT, tokens], SamplingParams(max_tokens=8))
    assert by_text.tokens == by_tokens.tokens
    assert by_text.prompt_tokens == tokens


def test_the_text_is_the_decoded_tokens(target: Target):
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=1)
    for completion in Engine(target).generate([PROMPT, "é", "x"], params):
        kept = [token for token in completion.tokens if token != target.tokenizer.eos_token_id]
        assert completion.text == target.tokenizer.decode(kept)


@pytest.mark.parametrize("width", [1, 2, 3, 5])
@pytest.mark.parametrize("start", [0, 1, 7, 20])
@pytest.mark.parametrize("plan", [None, NO_DRAFT])
def test_a_stop_string_is_cut_off_wherever_it_falls(drafted: Engine, plan: Plan | None, width: int, start: int):
    whole = drafted.generate([PROMPT], SamplingParams(max_tokens=60, logit_bias=PRINTABLE), plan=plan)[0]
    assert whole.text.isascii() and len(whole.text) == 60
    stop = whole.text[start : start + width]
    params = SamplingParams(max_tokens=60, logit_bias=PRINTABLE, stop=(stop, "no such text"))
    cut = drafted.generate([PROMPT], params, plan=plan)[0]
    at = whole.text.index(stop)
    assert (cut.text, cut.finish_reason) == (whole.text[:at], "stop")
    assert cut.tokens == whole.tokens[: at + width]
    chunks = list(drafted.stream([PROMPT], params, plan=plan))
    assert "".join(chunk.text for chunk in chunks) == cut.text
    assert chunks[-1].completion is not None and chunks[-1].completion.text == cut.text


def test_the_earlier_of_two_stop_strings_wins(drafted: Engine):
    whole = drafted.generate([PROMPT], SamplingParams(max_tokens=60, logit_bias=PRINTABLE))[0].text
    stops = (whole[12:15], whole[6:8])
    cut = drafted.generate([PROMPT], SamplingParams(max_tokens=60, logit_bias=PRINTABLE, stop=stops))[0].text
    assert cut == whole[: min(whole.index(stop) for stop in stops)]


@pytest.mark.parametrize("stop", [(), ("ééééééé",)])
@pytest.mark.parametrize("seed", range(4))
def test_streamed_text_adds_up_and_never_ends_inside_a_character(target: Target, seed: int, stop: tuple[str, ...]):
    # Two-byte characters only: half of all places are inside one.
    lead, tail = target.tokenizer("é")["input_ids"]
    params = SamplingParams(
        max_tokens=30, temperature=1.0, seed=seed, logit_bias={lead: 40.0, tail: 40.0}, stop=stop
    )
    completion = Engine(target).generate(["é"], params)[0]
    pieces = [chunk.text for chunk in Engine(target).stream(["é"], params)]
    assert "".join(pieces) == completion.text
    if completion.finish_reason == "length":
        assert completion.text == target.tokenizer.decode(completion.tokens)


def test_a_step_that_ends_inside_a_character_shows_what_comes_before_it(target: Target):
    stream = TextStream(target.tokenizer, ())
    tokens = target.tokenizer("ab€")["input_ids"]
    for token in tokens[:-1]:
        stream.push(token)
    assert stream.take() == "ab"
    stream.push(tokens[-1])
    assert (stream.take(), stream.take()) == ("€", "")
    stream.push(tokens[-2])
    assert stream.take() == ""
    stream.finish()
    assert (stream.take(), stream.text) == ("\ufffd", "ab€\ufffd")


def test_an_end_token_is_not_shown(target: Target):
    bias = {target.tokenizer.eos_token_id: 1000.0}
    completion = Engine(target).generate([PROMPT], SamplingParams(max_tokens=5, logit_bias=bias))[0]
    assert (completion.tokens, completion.text, completion.finish_reason) == ([256], "", "stop")


def test_a_stop_string_that_only_the_last_token_completes_is_a_stop(target: Target):
    """Half of a character is shown as a sign of its own, once no other half can come."""
    half = target.tokenizer("é")["input_ids"][0]
    only = SamplingParams(max_tokens=1, logit_bias={half: 1e4}, stop=("�",))
    done = Engine(target).generate([PROMPT], only)[0]
    assert (done.tokens, done.text, done.finish_reason) == ([half], "", "stop")
    more = SamplingParams(max_tokens=1, logit_bias={half: 1e4}, stop=("x",))
    assert Engine(target).generate([PROMPT], more)[0].finish_reason == "length"
