"""The distribution a request asks for. Shapes: B rows, N drafted, M = N + 1 verified nodes, T tokens, V vocabulary."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.native import LIBRARY
from draftsmith.types import DraftsmithError, SamplingParams


@dataclass(frozen=True)
class Bias:
    """What is added to logits: for each of K entries the row, the token and the value (fp32)."""

    rows_K: Tensor
    tokens_K: Tensor
    values_K: Tensor


@dataclass(frozen=True)
class SamplingBatch:
    """The parameters of B requests as tensors (float64, top_k int64), with flags that let a step skip unused rules.

    `rules_BX` holds temperature, top-p, min-p, repetition, presence and frequency in one tensor; those six fields are
    its columns. `bias` is None if no request has one. `largest_top_k` is 0 if no sampled row has a top-k, and
    `all_top_k` says whether every row is sampled with one.
    """

    rules_BX: Tensor
    temperature_B: Tensor
    top_k_B: Tensor
    top_p_B: Tensor
    min_p_B: Tensor
    repetition_B: Tensor
    presence_B: Tensor
    frequency_B: Tensor
    bias: Bias | None
    all_greedy: bool
    any_greedy: bool
    needs_history: bool
    largest_top_k: int
    all_top_k: bool
    has_top_p: bool
    has_min_p: bool

    @property
    def needs_shaping(self) -> bool:
        """Whether any request changes logits before they become probabilities."""
        return self.needs_history or self.bias is not None

    @staticmethod
    def build(params: Sequence[SamplingParams], vocab_size: int, device: torch.device | str) -> "SamplingBatch":
        """Turn the parameters of a batch into tensors; a bias outside the vocabulary raises DraftsmithError."""
        sampled = [p for p in params if p.temperature > 0]
        rules_BX = torch.tensor(
            [[p.temperature, p.top_p, p.min_p, p.repetition_penalty, p.presence_penalty, p.frequency_penalty]
             for p in params],
            dtype=torch.float64, device=device,
        ).reshape(len(params), 6)
        temperature_B, top_p_B, min_p_B, repetition_B, presence_B, frequency_B = rules_BX.unbind(1)
        # 0 keeps everything, as a k beyond the vocabulary does; a greedy row's k is never used.
        kept = [p.top_k if p.temperature > 0 and 0 < p.top_k < vocab_size else 0 for p in params]
        return SamplingBatch(
            rules_BX=rules_BX,
            temperature_B=temperature_B,
            top_k_B=torch.tensor(kept, dtype=torch.int64, device=device),
            top_p_B=top_p_B,
            min_p_B=min_p_B,
            repetition_B=repetition_B,
            presence_B=presence_B,
            frequency_B=frequency_B,
            bias=_bias(params, vocab_size, device),
            all_greedy=not sampled,
            any_greedy=len(sampled) < len(params),
            needs_history=any(
                p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0 for p in params
            ),
            largest_top_k=max(kept, default=0),
            all_top_k=all(kept),
            has_top_p=any(p.top_p < 1 for p in sampled),
            has_min_p=any(p.min_p > 0 for p in sampled),
        )

    def row(self, row: int) -> "SamplingBatch":
        """Return the parameters of one row as a batch of its own; the flags stay those of all rows."""
        rules_1X, top_k_1, bias = self.rules_BX[row : row + 1], self.top_k_B[row : row + 1], self.bias
        temperature_1, top_p_1, min_p_1, repetition_1, presence_1, frequency_1 = rules_1X.unbind(1)
        if bias is not None:
            own_K = bias.rows_K == row
            bias = Bias(torch.zeros_like(bias.rows_K[own_K]), bias.tokens_K[own_K], bias.values_K[own_K])
        return replace(
            self, rules_BX=rules_1X, temperature_B=temperature_1, top_k_B=top_k_1, top_p_B=top_p_1, min_p_B=min_p_1,
            repetition_B=repetition_1, presence_B=presence_1, frequency_B=frequency_1, bias=bias,
        )


def _bias(params: Sequence[SamplingParams], vocab_size: int, device: torch.device | str) -> Bias | None:
    entries = [(row, token, value) for row, p in enumerate(params) for token, value in p.logit_bias.items()]
    if not entries:
        return None
    for p in params:
        check_bias(p.logit_bias, vocab_size)
    rows, tokens, values = zip(*entries, strict=True)
    return Bias(
        torch.tensor(rows, device=device), torch.tensor(tokens, device=device),
        torch.tensor(values, dtype=torch.float32, device=device),
    )


def check_bias(logit_bias: Mapping[int, float], vocab_size: int) -> None:
    """Raise DraftsmithError for a token that the model does not have."""
    for token in logit_bias:
        if not 0 <= token < vocab_size:
            raise DraftsmithError(
                f"logit_bias names token {token}, but the model's tokens go from 0 to {vocab_size - 1}; "
                "use an id in this range."
            )


@dataclass
class History:
    """Which tokens rows have read and written, for the penalties. The history of row b is in slot `slots_B[b]`.

    Args:
        prompt_seen_RV: whether the token is in the prompt (bool).
        output_counts_RV: how often the token was generated (int32).
        seen_RV: the distinct tokens of a slot's prompt and output (int32), of which only the first `seen_R` (int64)
            are valid; kept only for native operators, which look at these tokens alone, else None.
    """

    prompt_seen_RV: Tensor
    output_counts_RV: Tensor
    slots_B: Tensor
    seen_RV: Tensor | None = None
    seen_R: Tensor | None = None

    @staticmethod
    def empty(slots: int, vocab_size: int, device: torch.device | str) -> "History":
        """Return room for so many rows."""
        history = History(
            torch.zeros((slots, vocab_size), dtype=torch.bool, device=device),
            torch.zeros((slots, vocab_size), dtype=torch.int32, device=device),
            torch.arange(slots, device=device),
        )
        if LIBRARY and history.slots_B.device.type == "cpu":
            history.seen_RV = torch.empty((slots, vocab_size), dtype=torch.int32)
            history.seen_R = torch.zeros(slots, dtype=torch.int64)
        return history

    @staticmethod
    def of(
        prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]], vocab_size: int, device: torch.device | str
    ) -> "History":
        """Return the history of rows with these prompts and outputs (token ids)."""
        history = History.empty(len(prompts), vocab_size, device)
        for slot, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            history.enter(slot, prompt, output)
        return history

    def enter(self, slot: int, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Put a row with this prompt and output into a slot.

        Prompt tokens beyond the width of the logits are left out, because no penalty can apply to them.
        """
        seen_V, counts_V = self.prompt_seen_RV[slot], self.output_counts_RV[slot]
        width, device = seen_V.shape[0], seen_V.device
        seen_V.zero_()
        seen_V[torch.tensor([t for t in prompt if t < width], dtype=torch.int64, device=device)] = True
        counts_V.copy_(torch.bincount(torch.tensor(output, dtype=torch.int64), minlength=width))
        if self.seen_RV is not None and self.seen_R is not None:
            seen = sorted({t for t in prompt if t < width}.union(output))
            self.seen_RV[slot, : len(seen)] = torch.tensor(seen, dtype=torch.int32)
            self.seen_R[slot] = len(seen)

    def at(self, slots_B: Tensor) -> "History":
        """Return the history of the rows in these slots; it shares its memory with this one."""
        return replace(self, slots_B=slots_B)

    @property
    def tensors(self) -> list[Tensor]:
        """The tensors that native operators read; empty if this history is not kept for them."""
        if self.seen_RV is None or self.seen_R is None:
            return []
        return [self.prompt_seen_RV, self.output_counts_RV, self.seen_RV, self.seen_R, self.slots_B]

    def commit(self, tokens_BT: Tensor, counts_B: Tensor) -> None:
        """Count the first `counts_B[b]` tokens of every row as output, in place; the rest may be anything."""
        if self.seen_RV is not None:
            torch.ops.draftsmith.count_tokens(*self.tensors, tokens_BT, counts_B)
            return
        columns_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        valid_BT = columns_T < counts_B.unsqueeze(1)
        self.output_counts_RV.index_put_(
            (self.slots_B.unsqueeze(1), tokens_BT.masked_fill(~valid_BT, 0)), valid_BT.to(torch.int32), accumulate=True
        )


def shape_logits(
    logits_BMV: Tensor, batch: SamplingBatch, history: History | None, tokens_BN: Tensor, visible_BMM: Tensor
) -> Tensor:
    """Return logits (B, M, V; fp32 if any rule applies) after bias, repetition, frequency and presence penalty.

    Order and meaning are those of transformers and vLLM: repetition (CTRL, arXiv 1909.05858, section 4.1) counts
    prompt and output, the other two only the output. Each node counts the drafted tokens of its own path, itself
    included; the root is committed, and so already in the history. Without penalties `history` may be None.
    """
    if not batch.needs_shaping:
        return logits_BMV
    logits_BMV = logits_BMV.float()
    if batch.bias is not None:
        bias, logits_BMV = batch.bias, logits_BMV.clone()
        logits_BMV[bias.rows_K, :, bias.tokens_K] += bias.values_K.unsqueeze(1)
    if not batch.needs_history:
        return logits_BMV
    if history is None:
        raise ValueError("penalties need the history of their rows")
    nodes = logits_BMV.shape[1]
    counts_BMV = history.output_counts_RV[history.slots_B].unsqueeze(1).repeat(1, nodes, 1)
    tokens_BMN = tokens_BN.clamp(min=0).unsqueeze(1).expand(-1, nodes, -1)
    counts_BMV.scatter_add_(2, tokens_BMN, visible_BMM[:, :, 1:].to(torch.int32))
    seen_BMV = (counts_BMV > 0) | history.prompt_seen_RV[history.slots_B].unsqueeze(1)
    repetition_B11 = batch.repetition_B.float()[:, None, None]
    repeated_BMV = torch.where(logits_BMV > 0, logits_BMV / repetition_B11, logits_BMV * repetition_B11)
    logits_BMV = torch.where(seen_BMV, repeated_BMV, logits_BMV)
    logits_BMV = logits_BMV - batch.frequency_B.float()[:, None, None] * counts_BMV
    return logits_BMV - batch.presence_B.float()[:, None, None] * (counts_BMV > 0)


def probabilities(logits_BMV: Tensor, batch: SamplingBatch) -> Tensor:
    """Return p (B, M, V; float64, sums to 1) after temperature, top-k, top-p and min-p, in transformers' order.

    Greedy rows (temperature 0) get 1 at the argmax (the lowest token id among equals) and 0 elsewhere. As in
    transformers, top-k keeps every token equal to the k-th; top-p (arXiv 1904.09751, section 3.1) and min-p (arXiv
    2407.01082) work on the probabilities that the filters before them have left.

    Exponentials are taken in fp32, as transformers does (float64 logits stay so), and normalised in float64, because
    acceptance subtracts q from p and sums over the vocabulary: in fp32 the rounding of 10^5 terms would be as large
    as the rare tokens themselves, and float64 exponentials cost ten times as much for digits that no logit has.
    """
    if batch.all_greedy:
        return _one_hot_argmax(logits_BMV)
    temperature_B11 = batch.temperature_B[:, None, None]
    if batch.any_greedy:
        temperature_B11 = torch.where(temperature_B11 > 0, temperature_B11, 1.0)
    exact = logits_BMV.dtype if logits_BMV.dtype == torch.float64 else torch.float32
    scores_BMV = logits_BMV.to(exact) / temperature_B11.to(exact)
    if batch.largest_top_k > 0:
        scores_BMV = _keep_top_k(scores_BMV, batch)
    if batch.has_top_p:
        scores_BMV = _keep_top_p(scores_BMV, batch)
    if batch.has_min_p:
        p_BMV = scores_BMV.softmax(-1)
        least_BM1 = batch.min_p_B.to(exact)[:, None, None] * p_BMV.amax(-1, keepdim=True)
        scores_BMV = scores_BMV.masked_fill(p_BMV < least_BM1, float("-inf"))
    p_BMV = normalised_exponentials(scores_BMV)
    if batch.any_greedy:
        p_BMV = torch.where(batch.temperature_B[:, None, None] > 0, p_BMV, _one_hot_argmax(logits_BMV))
    return p_BMV


def normalised_exponentials(scores_BMV: Tensor) -> Tensor:
    """Return the softmax in float64 of exponentials in the scores' own precision.

    The sum of a few fp32 numbers is exact in float64, so entries of minus infinity do not change even the last bit: the
    distribution over only the kept tokens has the same values as the one over the whole vocabulary.
    """
    weights_BMV = (scores_BMV - scores_BMV.amax(-1, keepdim=True)).exp().to(torch.float64)
    return weights_BMV / weights_BMV.sum(-1, keepdim=True)


def _one_hot_argmax(logits_BMV: Tensor) -> Tensor:
    zeros_BMV = torch.zeros_like(logits_BMV, dtype=torch.float64)
    return zeros_BMV.scatter(-1, logits_BMV.argmax(-1, keepdim=True), 1.0)


def _keep_top_k(scores_BMV: Tensor, batch: SamplingBatch) -> Tensor:
    best_BMK = scores_BMV.topk(batch.largest_top_k, dim=-1).values
    last_BM1 = (batch.top_k_B - 1).clamp(min=0)[:, None, None].expand(-1, scores_BMV.shape[1], 1)
    dropped_BMV = (scores_BMV < best_BMK.gather(-1, last_BM1)) & (batch.top_k_B > 0)[:, None, None]
    return scores_BMV.masked_fill(dropped_BMV, float("-inf"))


def _keep_top_p(scores_BMV: Tensor, batch: SamplingBatch) -> Tensor:
    # Stable, so that of two equal tokens the same one is dropped in every batch and on every device.
    ascending_BMV, order_BMV = scores_BMV.sort(dim=-1, stable=True)
    below_BMV = ascending_BMV.softmax(-1).cumsum(-1)
    dropped_BMV = below_BMV <= (1 - batch.top_p_B).to(below_BMV.dtype)[:, None, None]
    # A row without top-p must lose nothing, not even tokens whose probability rounds to zero.
    dropped_BMV = dropped_BMV & (batch.top_p_B < 1)[:, None, None]
    dropped_BMV[..., -1] = False
    return scores_BMV.masked_fill(torch.zeros_like(dropped_BMV).scatter(-1, order_BMV, dropped_BMV), float("-inf"))
