"""The text of a continuation, whatever the tokenizer does between two tokens: it is what the whole text has behind the
prompt's, in pieces that add up, and a stop string is found with the token that completes it.
"""

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from draftsmith.engine import Engine
from draftsmith.engine.text import TextStream
from draftsmith.plan import Plan
from draftsmith.targets import Target
from draftsmith.types import SamplingParams
from tests.helpers.oracle import OracleDrafter
from tests.helpers.tiny import tiny_model
from tests.helpers.tiny_tokenizers import KINDS, WITH_BYTES, tiny_tokenizer_of

BYTE_TOKENS = tuple(kind for kind in WITH_BYTES if kind != "byte-level")
WRITTEN = "Once upon a café — 你好, Ω👍🏽!  Nobody knew\n\nwho\tlived é there."


def decoded(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int]) -> str:
    return tokenizer.decode(list(tokens), skip_special_tokens=True, clean_up_tokenization_spaces=False)


def continuation(tokenizer: PreTrainedTokenizerFast, prompt: list[int], output: list[int]) -> str:
    """Return what decode(prompt + output) has behind decode(prompt), of which it must be the beginning."""
    before, whole = decoded(tokenizer, prompt), decoded(tokenizer, prompt + output)
    assert whole.startswith(before)
    return whole.removeprefix(before)


def streamed(
    tokenizer: PreTrainedTokenizerFast, prompt: list[int], output: list[int], stop: Sequence[str] = (), seed: int = 0
) -> tuple[str, int]:
    """Push tokens, asking for text now and then; return the text, which the pieces add up to, and the tokens taken."""
    stream, ask = TextStream(tokenizer, stop, prompt), random.Random(seed)
    pieces, taken = [], 0
    for token in output:
        taken += 1
        if stream.push(token):
            break
        if ask.random() < 0.6:
            pieces.append(stream.take())
    stream.finish()
    pieces.append(stream.take())
    assert "".join(pieces) == stream.text and stream.take() == ""
    return stream.text, taken


def arbitrary(tokenizer: PreTrainedTokenizerFast, draw: random.Random, count: int) -> list[int]:
    """Draw tokens: of the whole vocabulary and behind it, special ones, and words with characters of many bytes."""
    words = ["é", "你好", "👍🏽", " time", "\n\n", "the houses", " "]
    tokens: list[int] = []
    while len(tokens) < count:
        kind = draw.random()
        if kind < 0.5:
            tokens += tokenizer(draw.choice(words), add_special_tokens=False)["input_ids"]
        elif kind < 0.8:
            tokens += draw.choices(range(len(tokenizer) + 2), k=draw.randint(1, 3))
        else:
            tokens += draw.choices(tokenizer.all_special_ids, k=draw.randint(1, 3))
    return tokens[:count]


@pytest.mark.parametrize("kind", KINDS)
def test_any_tokens_behind_a_whole_prompt_give_the_rest_of_the_whole_text(kind: str):
    tokenizer, draw = tiny_tokenizer_of(kind), random.Random(kind)
    for seed in range(300):
        # A word that is not special ends what a prompt leaves open; the next test has the rest.
        prompt = [*arbitrary(tokenizer, draw, draw.randint(0, 20)), tokenizer.convert_tokens_to_ids("<tool>")]
        if seed % 10 == 0:
            prompt = [tokenizer.bos_token_id]
        output = arbitrary(tokenizer, draw, draw.randint(0, 70))
        text = continuation(tokenizer, prompt, output)
        assert streamed(tokenizer, prompt, output, seed=seed) == (text, len(output))
        at = draw.randrange(len(text)) if text else 0
        stop = text[at : at + draw.randint(1, 5)]
        if not stop or "�" in stop:  # half a character is not looked for: the other half may be on its way
            continue
        taken = next(n for n in range(len(output)) if stop in continuation(tokenizer, prompt, output[: n + 1])) + 1
        cut = continuation(tokenizer, prompt, output[:taken]).partition(stop)[0]
        assert streamed(tokenizer, prompt, output, (stop, "no such text"), seed) == (cut, taken)


@pytest.mark.parametrize("kind", WITH_BYTES)
def test_a_prompt_may_end_anywhere_in_a_text(kind: str):
    tokenizer = tiny_tokenizer_of(kind)
    tokens = tokenizer(WRITTEN)["input_ids"]
    whole = decoded(tokenizer, tokens)
    assert whole == WRITTEN or kind != "byte-level"
    assert "你好, Ω👍🏽!" in whole
    for at in range(len(tokens) + 1):
        before = decoded(tokenizer, tokens[:at])
        text, _ = streamed(tokenizer, tokens[:at], tokens[at:], seed=at)
        if whole.startswith(before):
            assert text == whole.removeprefix(before)
        else:
            # The prompt ends inside a character, which belongs to the text.
            assert whole.endswith(text) and text[0] in "é—你好Ω👍🏽" and before.endswith("�")
            assert whole.removesuffix(text) == decoded(tokenizer, tokens[:at]).rstrip("�") or kind != "byte-level"


@pytest.mark.parametrize("kind", WITH_BYTES)
@pytest.mark.parametrize("character", ["Ж", "你", "👍"])
@pytest.mark.parametrize("before", ["a", "aЖ", "好"])
def test_a_character_that_the_prompt_begins_is_in_the_text_whole(kind: str, character: str, before: str):
    tokenizer = tiny_tokenizer_of(kind)
    tokens = tokenizer(before + character, add_special_tokens=False)["input_ids"]
    after, size = tokenizer("xЖ", add_special_tokens=False)["input_ids"], len(character.encode())
    unbroken = decoded(tokenizer, tokens[:-size])
    assert unbroken.endswith(before)
    for missing in range(1, size):
        prompt, rest = tokens[:-missing], tokens[-missing:]
        text, _ = streamed(tokenizer, prompt, rest + after, seed=missing)
        assert text == decoded(tokenizer, tokens + after).removeprefix(unbroken)
        assert text.startswith(character)
        assert streamed(tokenizer, prompt, rest + after, (character,)) == ("", missing)
        # Where no byte completes it, it is the prompt's own broken end.
        end = [tokenizer.convert_tokens_to_ids("<tool>")]
        assert streamed(tokenizer, prompt, end)[0] == continuation(tokenizer, prompt, end)
        assert streamed(tokenizer, prompt, end)[0].strip() == "<tool>"
        for more in range(1, missing):
            end = [*rest[:more], tokenizer.convert_tokens_to_ids("<tool>")]
            text, _ = streamed(tokenizer, prompt, end, ("no such text",))
            assert text == continuation(tokenizer, prompt, end)


@pytest.mark.parametrize("kind", BYTE_TOKENS)
def test_one_byte_that_does_not_fit_spoils_its_run_and_none_of_it_was_shown(kind: str):
    tokenizer = tiny_tokenizer_of(kind)
    (lead, *rest), word = tokenizer("ab你", add_special_tokens=False)["input_ids"][-3:], [tokenizer.vocab["<tool>"]]
    stream = TextStream(tokenizer, (), word)
    for token in (lead, *rest, lead):
        stream.push(token)
        assert stream.take() == ""
    stream.push(word[0])
    assert stream.take().strip() == "����<tool>"
    stream = TextStream(tokenizer, (), word)
    for token in (lead, *rest, lead, *rest, *word):
        stream.push(token)
    assert stream.take().strip() == "你你<tool>"


def test_a_stop_string_that_a_run_only_seems_to_have_changes_nothing():
    tokenizer = tiny_tokenizer_of("llama")
    # The space that begins a text is not written, and then a byte that does not fit spoils the run.
    run = [tokenizer.convert_tokens_to_ids(name) for name in ("<0x20>", "<0x78>", "<0xC3>", "<tool>")]
    assert decoded(tokenizer, run[:2]) == "x"
    text, taken = streamed(tokenizer, [tokenizer.bos_token_id], run, (" x",))
    assert (text, taken) == (decoded(tokenizer, run), 4) and text.startswith("�")


@pytest.mark.parametrize("kind", WITH_BYTES)
def test_special_tokens_inside_a_character_leave_it_whole(kind: str):
    tokenizer = tiny_tokenizer_of(kind)
    tokens = tokenizer(WRITTEN * 2)["input_ids"]
    for gap in (1, 10, 40):
        broken_up = [tokens[0]]
        for token in tokens[1:]:
            broken_up += [tokenizer.eos_token_id] * gap + [token]
        text, _ = streamed(tokenizer, broken_up[:1], broken_up[1:], ("no such text",))
        assert text == continuation(tokenizer, tokens[:1], tokens[1:])
        assert text.endswith("你好, Ω👍🏽!" + WRITTEN.partition("!")[2])


def test_word_pieces_join_the_prompts_last_word():
    tokenizer = tiny_tokenizer_of("word-piece")
    tokens = tokenizer("timeless houses")["input_ids"]
    pieces = tokenizer.convert_ids_to_tokens(tokens)
    at = next(i for i, piece in enumerate(pieces) if piece.startswith("##"))
    text, _ = streamed(tokenizer, tokens[:at], tokens[at:])
    assert text == decoded(tokenizer, tokens).removeprefix(decoded(tokenizer, tokens[:at]))
    assert not text.startswith((" ", "#"))
    assert streamed(tokenizer, [tokenizer.bos_token_id], tokens[at:])[0].startswith("##")


class CountingTokenizer(PreTrainedTokenizerFast):
    """Counts the tokens that it is asked to decode."""

    decoded = 0

    def decode(self, token_ids: Any, *args: Any, **kwargs: Any) -> Any:
        self.decoded += len(token_ids)
        return super().decode(token_ids, *args, **kwargs)


def counting(kind: str) -> CountingTokenizer:
    backend = tiny_tokenizer_of(kind).backend_tokenizer
    return CountingTokenizer(tokenizer_object=backend, unk_token="<unk>", bos_token="<s>", eos_token="</s>")


@pytest.mark.parametrize("stop", [(), ("no such text",)])
@pytest.mark.parametrize("kind", ["byte-level", "llama", "word-piece"])
def test_a_token_costs_the_same_however_long_the_text_is(kind: str, stop: tuple[str, ...]):
    tokenizer = counting(kind)
    broken = tokenizer("你", add_special_tokens=False)["input_ids"][-1:]
    streams = (tokenizer(WRITTEN)["input_ids"], [tokenizer.eos_token_id], broken, tokenizer("你")["input_ids"][-3:])
    for repeated in streams:
        costs = []
        for length in (2000, 4000):
            tokenizer.decoded = 0
            stream = TextStream(tokenizer, stop, repeated * 400)
            for token in (repeated * length)[:length]:
                stream.push(token)
                stream.take()
            stream.finish()
            costs.append(tokenizer.decoded)
        assert costs[1] < 2.1 * costs[0] + 100 and costs[1] < 40 * 4000, (repeated, costs)


def test_without_stop_strings_nothing_is_decoded_before_somebody_asks():
    tokenizer = counting("llama")
    stream = TextStream(tokenizer, (), [5, 6])
    for token in tokenizer(WRITTEN)["input_ids"]:
        stream.push(token)
    assert tokenizer.decoded == 0
    stream.finish()
    assert 0 < tokenizer.decoded < 200 and stream.text.endswith("there.")


# Through the engine.


@cache
def engine_of(kind: str) -> Engine:
    tokenizer = tiny_tokenizer_of(kind)
    return Engine(Target(tiny_model(vocabulary=len(tokenizer)), tokenizer))


def forced(tokenizer: PreTrainedTokenizerFast, word: str) -> dict[int, float]:
    """Return a bias under which the target writes this one token again and again."""
    return {tokenizer.convert_tokens_to_ids(word): 1000.0}


@pytest.mark.parametrize("kind", ["metaspace-always", "metaspace-first", "unigram-always"])
def test_the_space_before_the_first_word_is_kept_and_found(kind: str):
    engine = engine_of(kind)
    assert engine.target.tokenizer is not None
    bias = forced(engine.target.tokenizer, "▁time")
    params = SamplingParams(max_tokens=3, logit_bias=bias)
    assert engine.generate(["Once upon a"], params)[0].text == " time time time"
    assert [chunk.text for chunk in engine.stream(["Once upon a"], params)] == [" time"] * 3
    stopped = SamplingParams(max_tokens=3, logit_bias=bias, stop=" t")
    (completion,) = engine.generate(["Once upon a"], stopped)
    assert (completion.text, len(completion.tokens), completion.finish_reason) == ("", 1, "stop")
    bos = [engine.target.tokenizer.bos_token_id]
    assert engine.generate([bos], params)[0].text == "time time time"


@pytest.mark.parametrize("kind", ["llama", "unigram-bytes"])
def test_a_stop_string_is_found_at_the_byte_that_completes_it(kind: str):
    engine = engine_of(kind)
    tokenizer = engine.target.tokenizer
    assert tokenizer is not None
    params = SamplingParams(max_tokens=9, logit_bias=forced(tokenizer, "<0x0A>"))
    assert engine.generate(["Once"], params)[0].text == "\n" * 9
    for length in range(1, 5):
        stop = SamplingParams(max_tokens=9, logit_bias=forced(tokenizer, "<0x0A>"), stop="\n" * length)
        (completion,) = engine.generate(["Once"], stop)
        assert (completion.text, len(completion.tokens), completion.finish_reason) == ("", length, "stop")


@pytest.mark.parametrize("kind", KINDS)
def test_what_the_engine_streams_is_what_it_returns_is_what_the_tokenizer_says(kind: str):
    engine = engine_of(kind)
    tokenizer = engine.target.tokenizer
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    asked = ["Once upon a", "the house", "<s>"]
    rules = {"max_tokens": 60, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    params = SamplingParams(**rules, n=2)
    completions = engine.generate(asked, params)
    for completion in completions:
        assert completion.text == continuation(tokenizer, completion.prompt_tokens, completion.tokens)
    pieces = [""] * len(completions)
    for chunk in engine.stream(asked, params):
        pieces[chunk.index] += chunk.text
    assert pieces == [completion.text for completion in completions]
    # Drafting commits several tokens at a time, and a stop string cuts in their middle.
    whole = completions[0]
    oracle = OracleDrafter([whole.prompt_tokens + whole.tokens], len(tokenizer), error_rate=0.2)
    drafting = Engine(engine.target, oracle, plan=Plan((2, 1, 1, 1)))
    stop = next(letter for letter in whole.text[3:] if letter not in " �")
    cut = drafting.generate([asked[0]], SamplingParams(**rules, stop=stop))[0]
    assert cut.text == whole.text.partition(stop)[0] and cut.finish_reason == "stop"
    assert cut.tokens == whole.tokens[: len(cut.tokens)]
    assert stop in continuation(tokenizer, cut.prompt_tokens, cut.tokens)
    assert stop not in continuation(tokenizer, cut.prompt_tokens, cut.tokens[:-1])
