"""The requests themselves: prompts cut from texts, whole, or made of random token ids, each with a length to write."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftsmith.evaluation.load.settings import DATASETS, MIXED, RANDOM, TASKS, Endpoint, Workload
from draftsmith.evaluation.prompts import Prompt, embedded_prompts, load_prompts
from draftsmith.types import DraftsmithError

EMBEDDED_CHARACTERS = 240
"""Characters of an embedded text that are sent where no number of tokens is given: some 60 tokens."""
SAMPLED_TEXTS = 24
"""How many embedded texts are tokenized to learn which token ids a model has."""

Tokenize = Callable[[str], Awaitable[list[int]]]


@dataclass(frozen=True)
class LoadRequest:
    """What a client sends: a text, token ids or messages, how many tokens to write, and whether it was sent before."""

    prompt: str | list[int] | list[dict[str, Any]]
    output_len: int
    repeated: bool = False


class Windows:
    """Cuts pieces from sequences, each from a different place as long as any are left; then it begins anew.

    Pieces that no other request had keep a server from reusing prompts that it has cached.
    """

    def __init__(self, sequences: Sequence[Any]) -> None:
        self._sequences = sequences
        self._begins = [0] * len(sequences)
        self._next = 0
        self._rounds = 0
        self._given: set[str] = set()

    def take(self, length: int | None) -> tuple[Any, bool]:
        """Return a piece of `length` parts (None: a whole sequence), and whether it has been given before.

        Raises:
            DraftsmithError: no sequence is that long.
        """
        while True:
            piece = self._following(length)
            if piece is None:
                self._begin_anew(length)
                continue
            key = piece if isinstance(piece, str) else repr(piece)
            repeated = key in self._given
            if not repeated or self._rounds:
                self._given.add(key)
                return piece, repeated

    def _following(self, length: int | None) -> Any:
        """Return the next piece in turn; None where all sequences are used up."""
        for turn in range(len(self._sequences)):
            at = (self._next + turn) % len(self._sequences)
            sequence, begin = self._sequences[at], self._begins[at]
            size = len(sequence) if length is None else length
            if 0 < size <= len(sequence) - begin:
                self._begins[at] = begin + size
                self._next = at + 1
                return sequence[begin : begin + size]
        return None

    def _begin_anew(self, length: int | None) -> None:
        if not any(self._begins):
            longest = max((len(sequence) for sequence in self._sequences), default=0)
            raise DraftsmithError(
                f"no text has {length} tokens (the longest has {longest}); shorten --input-len, or give longer texts."
            )
        self._begins = [0] * len(self._sequences)
        self._rounds += 1


class Requests:
    """Makes the requests of one measurement after another, from one random stream.

    Args:
        windows: give pieces of token ids, of characters, or of messages; None for random prompts.
        cut: the length of pieces where no number of tokens is given; None for whole sequences.
        ids: for random prompts, the ids to draw from.
    """

    def __init__(self, workload: Workload, windows: Windows | None, cut: int | None, ids: Sequence[int] = ()) -> None:
        self._workload, self._windows, self._cut = workload, windows, cut
        self._ids = np.asarray(ids, dtype=np.int64)
        self._draws = np.random.default_rng((workload.seed, 0))

    def make(self, count: int) -> list[LoadRequest]:
        """Return the next `count` requests."""
        return [self._one() for _ in range(count)]

    def _one(self) -> LoadRequest:
        lengths = self._workload.input_lens
        length = self._cut if lengths is None else int(self._draws.choice(lengths))
        output = int(self._draws.choice(self._workload.output_lens))
        if self._windows is None:
            return LoadRequest([int(token) for token in self._draws.choice(self._ids, length or 1)], output)
        prompt, repeated = self._windows.take(length)
        return LoadRequest(prompt, output, repeated)


def read_texts(workload: Workload) -> list[Prompt]:
    """Return the texts that a workload names; DraftsmithError for a file that cannot be read."""
    name = workload.dataset
    if name in DATASETS:
        return embedded_prompts(name if name in TASKS and name != MIXED else None)
    return load_prompts(Path(name))


async def gather_requests(
    workload: Workload, endpoint: Endpoint, texts: Sequence[Prompt], tokenize: Tokenize
) -> Requests:
    """Return the `Requests` of a workload.

    Args:
        texts: what `read_texts` returned.
        tokenize: gives the ids of a text; called only where token ids are needed.
    """
    order = np.random.default_rng((workload.seed, 2)).permutation(len(texts))
    chosen = [texts[index] for index in order]
    if workload.dataset == RANDOM:
        return Requests(workload, None, None, await random_ids(workload, chosen, tokenize))
    if endpoint == "completions" and any(prompt.conversation is not None for prompt in chosen):
        raise DraftsmithError(f"{workload.dataset} holds conversations; take --endpoint chat, or give texts.")
    if workload.input_lens is not None:
        return Requests(workload, Windows([await tokenize(prompt.text) for prompt in chosen]), None)
    whole = [prompt.text if prompt.conversation is None else list(prompt.conversation.messages) for prompt in chosen]
    return Requests(workload, Windows(whole), EMBEDDED_CHARACTERS if workload.dataset in TASKS else None)


async def random_ids(workload: Workload, texts: Sequence[Prompt], tokenize: Tokenize) -> list[int]:
    """Return the ids that random prompts are made of: all below the vocabulary's size, or those of the texts."""
    if workload.vocab_size is not None:
        return list(range(workload.vocab_size))
    seen = {token for prompt in texts[:SAMPLED_TEXTS] for token in await tokenize(prompt.text)}
    if not seen:
        raise DraftsmithError("the server's /tokenize gave no ids; say how many the model has with --vocab-size.")
    return sorted(seen)


def body_of(
    request: LoadRequest, workload: Workload, endpoint: Endpoint, model: str, is_ours: bool = False
) -> dict[str, Any]:
    """Return the body of a request; it asks the server to stream, and to report the token counts at the end.

    Args:
        is_ours: whether the server is our own, which is then also asked for the statistics of the request's drafts.
    """
    body: dict[str, Any] = {
        "model": model,
        "temperature": workload.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if endpoint == "chat":
        said = request.prompt if not isinstance(request.prompt, str) else [{"role": "user", "content": request.prompt}]
        body |= {"messages": said, "max_completion_tokens": request.output_len}
    else:
        body |= {"prompt": request.prompt, "max_tokens": request.output_len}
    if is_ours:
        body["spec_decode_metrics"] = "summary"
    if workload.ignore_eos:
        body["ignore_eos"] = True
    return body | dict(workload.extra_body)
