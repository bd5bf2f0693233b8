"""A wrapped model streams and stops where the model's own `generate` does."""

from threading import Thread
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, TextIteratorStreamer
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

import draftsmith
from draftsmith.engine.wrapped.model import WrappedModel
from draftsmith.types import DraftsmithError
from tests.engine.wrapped.wrapped_toy import PAD, padded, pair, same
from tests.helpers.tiny import TOKENIZER_SIZE, greedy_reference, prompts, tiny_model, tiny_tokenizer
from tests.helpers.tiny_tokenizers import tiny_tokenizer_of

# ---- what streams


class Recorder(BaseStreamer):
    """Keeps what it was given."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def put(self, value: Tensor) -> None:
        self.calls.append((value.dtype, value.tolist()))

    def end(self) -> None:
        self.calls.append("end")


def test_streamers_get_the_calls_that_transformers_makes():
    questions = prompts(4)
    model, fast = pair(questions)
    ends = [greedy_reference(model, question, 12)[5 + row] for row, question in enumerate(questions)]
    own, expected = Recorder(), Recorder()
    settings = {"max_new_tokens": 12, "eos_token_id": ends[:2], "pad_token_id": PAD}
    fast.generate(**padded(questions), **settings, streamer=own)
    model.generate(**padded(questions), **settings, streamer=expected)
    assert own.calls == expected.calls and len(own.calls) == 14


def test_text_streams_as_from_transformers():
    tokenizer = tiny_tokenizer()
    questions = [tokenizer("One two three, one two").input_ids]
    model, fast = pair(questions, vocabulary=TOKENIZER_SIZE)
    pieces = []
    for one in (fast, model):
        streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
        settings = {"input_ids": torch.tensor(questions), "max_new_tokens": 30, "streamer": streamer}
        thread = Thread(target=one.generate, kwargs=settings)
        thread.start()
        pieces.append(list(streamer))
        thread.join()
    assert pieces[0] == pieces[1] and "".join(pieces[0])


def test_a_streamer_that_fails_leaves_nothing_behind():
    class Failing(Recorder):
        def put(self, value: Tensor) -> None:
            super().put(value)
            if len(self.calls) == 4:
                raise RuntimeError("the reader has gone")

    questions = prompts(5)
    model, fast = pair(questions)
    with pytest.raises(RuntimeError, match="the reader has gone"):
        fast.generate(**padded(questions), max_new_tokens=30, streamer=Failing())
    assert not fast.engine.core.has_work
    same(fast, model, **padded(questions), max_new_tokens=10, pad_token_id=PAD)


def test_calls_of_several_threads_are_decoded_together():
    questions = prompts(6)
    model, fast = pair(questions)
    results: dict[int, Any] = {}

    def call(number: int) -> None:
        part = padded(questions[2 * number : 2 * number + 2])
        results[number] = fast.generate(**part, max_new_tokens=20 + number).tolist()

    threads = [Thread(target=call, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(3):
        part = padded(questions[2 * number : 2 * number + 2])
        assert results[number] == model.generate(**part, max_new_tokens=20 + number).tolist()


# ---- stop strings


def stop_pair() -> tuple[PreTrainedModel, WrappedModel, dict[str, Tensor], list[str]]:
    tokenizer = tiny_tokenizer()
    questions = [tokenizer(text).input_ids for text in ("A tale of two", "Call me", "It was the best of times")]
    model, fast = pair(questions, vocabulary=TOKENIZER_SIZE)
    stops = []
    for row, question in enumerate(questions[:2]):
        text = greedy_reference(model, question, 40)
        pairs = (tokenizer.decode(text[at : at + 2]) for at in range(3 + 6 * row, 39))
        stops.append(next(two for two in pairs if len(two) == 2 and "\ufffd" not in two))
    return model, fast, padded(questions), stops


@pytest.mark.parametrize("eos", [None, 256])
def test_stop_strings_end_rows_where_transformers_ends_them(eos: int | None):
    model, fast, batch, stops = stop_pair()
    settings = {"tokenizer": tiny_tokenizer(), "max_new_tokens": 40, "eos_token_id": eos, "pad_token_id": PAD}
    short = same(fast, model, **{name: rows[:2] for name, rows in batch.items()}, **settings, stop_strings=stops)
    assert short.shape[1] < batch["input_ids"].shape[1] + 40
    # The third row does not meet one; without an end token, transformers lets the others go on beside it.
    same(fast, model, **batch, **settings, stop_strings=stops)
    same(fast, model, **{name: rows[:1] for name, rows in batch.items()}, **settings, stop_strings=stops[0])
    recorders = [Recorder(), Recorder()]
    fast.generate(**batch, **settings, stop_strings=stops, streamer=recorders[0])
    model.generate(**batch, **settings, stop_strings=stops, streamer=recorders[1])
    assert recorders[0].calls == recorders[1].calls


@pytest.mark.parametrize("eos", [None, 256])
def test_logits_end_with_the_token_that_completes_a_stop_string(eos: int | None):
    model, fast, batch, stops = stop_pair()
    settings = {
        "tokenizer": tiny_tokenizer(), "max_new_tokens": 40, "eos_token_id": eos, "pad_token_id": PAD,
        "stop_strings": stops, "return_dict_in_generate": True, "output_logits": True,
    }
    own, expected = fast.generate(**batch, **settings), model.generate(**batch, **settings)
    assert isinstance(own, GenerateDecoderOnlyOutput) and own.sequences.tolist() == expected.sequences.tolist()
    own_BNV, expected_BNV = torch.stack(own.logits or (), dim=1), torch.stack(expected.logits, dim=1)
    assert own_BNV.shape == expected_BNV.shape
    # PAD is also a token of the texts: what counts are those that a row ends with.
    pads_BN = own.sequences[:, batch["input_ids"].shape[1] :] == PAD
    ended_BN = pads_BN.flip(1).cumprod(dim=1).flip(1).bool()
    assert bool(ended_BN.any()) == (eos is not None)
    torch.testing.assert_close(own_BNV[~ended_BN], expected_BNV[~ended_BN], rtol=1e-5, atol=1e-5)
    assert not own_BNV[ended_BN].any()


def test_stop_strings_take_the_tokenizer_of_the_wrapper_and_need_one():
    model, fast, batch, stops = stop_pair()
    with pytest.raises(DraftsmithError, match="stop_strings need a tokenizer"):
        fast.generate(**batch, max_new_tokens=10, stop_strings=stops)
    with pytest.raises(DraftsmithError, match="no token of this tokenizer can end"):
        fast.generate(**batch, max_new_tokens=10, stop_strings="\u2603", tokenizer=tiny_tokenizer_of("word-piece"))
    other = draftsmith.wrap(tiny_model(vocabulary=TOKENIZER_SIZE), None, tiny_tokenizer())
    expected = model.generate(**batch, max_new_tokens=40, stop_strings=stops, tokenizer=tiny_tokenizer())
    assert other.generate(**batch, max_new_tokens=40, stop_strings=stops).tolist() == expected.tolist()
