"""The exact distribution of the next few tokens, by enumeration: what draws with and without drafts are tested against.

Readers of the target give the logits after a prefix: `read_plainly`, by transformers' own forward over the whole
prefix; `read_by_decoding`, by the forward that decodes, over an empty cache; and `read_over_cache`, by the same one
over a filled cache. None of them reads a draft. The penalties are implemented here a second time, because a
distribution that shared code with what it tests could not find a fault in that code.

Shapes: P prefixes, T tokens of a prefix, L tokens of a continuation, C continuations, V vocabulary.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from draftsmith.evaluation.proof.workload import check_continuations
from draftsmith.targets import Nodes, Target
from draftsmith.types import SamplingParams

READ_AT_ONCE = 64
ROOMS = (0, 32)
"""Empty places in the cache with which a distribution is computed, because a longer cache rounds differently."""

Reader = Callable[[Tensor], Tensor]
"""From prefixes (P, T) to the logits after them (P, V)."""


@dataclass(frozen=True)
class ExactDistribution:
    """The probability (C, float64) of every possible continuation of L tokens; all others are impossible."""

    continuations: list[tuple[int, ...]]
    p_C: NDArray[np.float64]

    def count(self, texts: Sequence[Sequence[int]]) -> tuple[NDArray[np.int64], int]:
        """Count how often each continuation was drawn (C), and how many draws the distribution excludes."""
        found = Counter(map(tuple, texts))
        counts_C = np.array([found[continuation] for continuation in self.continuations], dtype=np.int64)
        return counts_C, len(texts) - int(counts_C.sum())

    def entropy(self) -> float:
        """Return the entropy in nats."""
        p_C = self.p_C[self.p_C > 0]
        return float(-(p_C * np.log(p_C)).sum())

    def distance(self, other: "ExactDistribution") -> float:
        """Return the total variation to another distribution."""
        mine, theirs = self.as_dict(), other.as_dict()
        return sum(abs(mine.get(key, 0.0) - theirs.get(key, 0.0)) for key in mine.keys() | theirs.keys()) / 2

    def as_dict(self) -> dict[tuple[int, ...], float]:
        """Return the probabilities by continuation."""
        return dict(zip(self.continuations, self.p_C.tolist(), strict=True))


def read_plainly(target: Target) -> Reader:
    """Return the reader by transformers' own forward: no cache, no tree, no draft."""

    def read(tokens_PT: Tensor) -> Tensor:
        _, logits_PTV = target.encode(tokens_PT, logits=True, by_model=True)
        assert logits_PTV is not None
        return logits_PTV[:, -1]

    return read


def read_by_decoding(target: Target) -> Reader:
    """Return the reader by the forward that decodes, in one piece from an empty cache."""

    def read(tokens_PT: Tensor) -> Tensor:
        prefixes, length = tokens_PT.shape
        device = target.device
        logits_P1V, _ = target.read_chain(
            target.new_cache(prefixes, length),
            tokens_PT,
            torch.zeros(prefixes, dtype=torch.long, device=device),
            (),
            keep_logits=torch.tensor([length - 1], device=device),
        )
        return logits_P1V[:, 0]

    return read


def read_over_cache(target: Target, room: int) -> Reader:
    """Return the reader by the forward that decodes: the last token alone, over a cache that holds those before it.

    Args:
        room: empty places in the cache beyond those that are needed, which change the shape of attention.
    """

    def read(tokens_PT: Tensor) -> Tensor:
        prefixes, length = tokens_PT.shape
        cache, held = target.new_cache(prefixes, length + room), length - 1
        zeros_P = torch.zeros(prefixes, dtype=torch.long, device=target.device)
        if held:
            target.read_chain(cache, tokens_PT[:, :-1], zeros_P, (), longest=0)
        nodes = Nodes(tokens_PT[:, -1:], zeros_P + held, columns_S=target.backend.columns(lambda: cache.capacity))
        logits_P1V, _ = target.forward(cache, nodes, ())
        return logits_P1V[:, 0]

    return read


def rounding_between(
    target: Target, exact: ExactDistribution, prompt: Sequence[int], params: SamplingParams, length: int
) -> float:
    """Return the largest total variation from a distribution to the same one, read token by token over a cache.

    No drafts are read, so that no fault in how they are read is taken for rounding.
    """
    return max(
        exact.distance(enumerate_distribution(read_over_cache(target, room), target, prompt, params, length))
        for room in ROOMS
    )


def apart_from(
    exact: ExactDistribution, target: Target, prompt: Sequence[int], params: SamplingParams, length: int,
    exact_shapes: bool,
) -> float:
    """Return the largest total variation from a distribution to the same one by any forward that reads no drafts.

    Args:
        exact_shapes: whether logits are the same bits in every shape of the forward; otherwise reads over a cache count
            too, see `rounding_between`.
    """
    apart = max(
        exact.distance(enumerate_distribution(reader, target, prompt, params, length))
        for reader in (read_plainly(target), read_by_decoding(target))
    )
    return apart if exact_shapes else max(apart, rounding_between(target, exact, prompt, params, length))


@torch.no_grad()
def enumerate_distribution(
    reader: Reader, target: Target, prompt: Sequence[int], params: SamplingParams, length: int, remembers: bool = True
) -> ExactDistribution:
    """Enumerate every continuation that the parameters allow.

    Args:
        params: temperature, top-k and penalties; top-p, min-p and biases are not enumerated.
        remembers: whether the penalties of a token count the continuation before it, as they must. False gives the
            distribution of a decoder that forgets that continuation.
    """
    if params.top_p < 1 or params.min_p > 0 or params.logit_bias or params.temperature == 0:
        raise ValueError("the exact distribution is enumerated for temperature, top-k and penalties alone")
    exact: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(length):
        prefixes, longer = list(exact), {}
        for first in range(0, len(prefixes), READ_AT_ONCE):
            chunk = prefixes[first : first + READ_AT_ONCE]
            tokens_PT = torch.tensor([[*prompt, *prefix] for prefix in chunk], device=target.device)
            logits_PV = reader(tokens_PT)
            for prefix, logits_V in zip(chunk, logits_PV, strict=True):
                p_V = next_distribution(logits_V, prompt, prefix if remembers else (), params)
                for token in p_V.nonzero().flatten().tolist():
                    longer[(*prefix, token)] = exact[prefix] * float(p_V[token])
        exact = longer
    return ExactDistribution(list(exact), np.array(list(exact.values())))


def next_distribution(logits_V: Tensor, prompt: Sequence[int], output: Sequence[int], params: SamplingParams) -> Tensor:
    """Return the probabilities (V, float64) of the next token, penalties in the order of transformers and vLLM."""
    scores_V = logits_V.double().clone()
    for token in {*prompt, *output}:
        if token < len(scores_V):
            factor = params.repetition_penalty
            scores_V[token] = scores_V[token] / factor if scores_V[token] > 0 else scores_V[token] * factor
    for token, times in Counter(output).items():
        scores_V[token] -= params.frequency_penalty * times + params.presence_penalty
    scores_V = scores_V / params.temperature
    if 0 < params.top_k < len(scores_V):
        scores_V = scores_V.masked_fill(scores_V < scores_V.topk(params.top_k).values[-1], -torch.inf)
    return scores_V.softmax(-1)


def check_size(target: Target, params: SamplingParams, length: int) -> None:
    """Raise DraftsmithError when there are too many continuations to enumerate."""
    kept = min(params.top_k or target.vocab_size, target.vocab_size)
    check_continuations(kept, length)
