"""Converts padded batches to prompts, and results to padded batches, as in transformers' `generate`.

Shapes: B rows (every prompt as often as it is continued), T tokens of the padded prompts, N new tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from transformers import LogitsProcessorList

from draftsmith.engine.requests.request import Request
from draftsmith.engine.wrapped.rules import GenerateRules
from draftsmith.types import DraftsmithError

_WHOLE = {torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8}
"""What token ids may be stored as."""


@dataclass(frozen=True)
class Batch:
    """Prompts with and without their padding.

    Args:
        ids_BT: the prompts as given, each repeated for every continuation; outputs go to its device.
        prompts: for every row, its tokens without the padding.
    """

    ids_BT: Tensor
    prompts: list[list[int]]

    @property
    def width(self) -> int:
        """T: tokens of a prompt with its padding."""
        return self.ids_BT.shape[1]


def read_batch(ids: Tensor | None, mask: Tensor | None, rules: GenerateRules, device: torch.device) -> Batch:
    """Strip the padding on the left of every prompt.

    Args:
        ids: prompts (batch, T), or None for a text that begins with the BOS token alone.
        mask: zero where a prompt is padded; None finds the padding by the pad token, unless that is an end token.
        device: of the model.

    Raises:
        DraftsmithError: for anything but token ids in two dimensions, a mask of another shape, padding that is not on
            the left, and a prompt that is all padding.
    """
    if ids is None:
        if rules.bos is None:
            raise DraftsmithError("there is neither inputs nor a bos_token_id to begin with; give input_ids.")
        ids = torch.tensor([[rules.bos]], device=device)
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype not in _WHOLE or ids.numel() == 0:
        shape = f"of shape {tuple(ids.shape)} and {ids.dtype}" if isinstance(ids, Tensor) else f"a {type(ids).__name__}"
        raise DraftsmithError(f'input_ids is {shape}; give token ids (batch, length), as return_tensors="pt" makes.')
    if mask is None:
        seen_BT = torch.ones_like(ids, dtype=torch.bool)
        if rules.masks_pad and rules.pad is not None:
            seen_BT = ids.ne(rules.pad)
    elif not isinstance(mask, Tensor) or mask.shape != ids.shape:
        shape = f"of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else f"a {type(mask).__name__}"
        raise DraftsmithError(f"attention_mask is {shape}, but input_ids {tuple(ids.shape)}; give one of that shape.")
    else:
        seen_BT = mask.to(ids.device).ne(0)
    if not bool(seen_BT.all()):
        _check_padding(seen_BT)
    prompts = [
        row[len(row) - count :] for row, count in zip(ids.tolist(), seen_BT.sum(dim=1).tolist(), strict=True)
    ]
    return Batch(
        ids.long().repeat_interleave(rules.copies, dim=0), [prompt for prompt in prompts for _ in range(rules.copies)]
    )


def _check_padding(seen_BT: Tensor) -> None:
    for row, seen in enumerate(seen_BT.tolist()):
        if True not in seen:
            raise DraftsmithError(f"row {row} of the prompts is all padding; give it at least one token.")
        if not all(seen[seen.index(True) :]):
            raise DraftsmithError(
                f"row {row} of the prompts has padding behind its first token; pad on the left, with "
                'padding_side="left" in the tokenizer.'
            )


def whole_rows(batch: Batch, columns: Sequence[Sequence[int]]) -> Tensor:
    """Return every row's prompt followed by its new tokens (B, T + N).

    Args:
        columns: for each of N places, the tokens of all rows there, padding included.
    """
    new_BN = torch.tensor(columns, dtype=torch.long).T.to(batch.ids_BT.device)
    return torch.cat([batch.ids_BT, new_BN], dim=1)


def logits_of(requests: Sequence[Request], lengths: Sequence[int], device: torch.device) -> tuple[Tensor, ...]:
    """Return the target's logits for every step, each (B, V) in fp32; zeros where a row had ended.

    Args:
        lengths: for every row, how many of its new tokens count.
    """
    rows = zip(requests, lengths, strict=True)
    return _by_steps([torch.cat(request.raw_logits)[:length].to(device) for request, length in rows], max(lengths))


def scores_of(
    requests: Sequence[Request], lengths: Sequence[int], processors: LogitsProcessorList, device: torch.device
) -> tuple[Tensor, ...]:
    """Return what the processors make of the logits for every step, each (B, V) in fp32; zeros where a row had ended.

    Every row is processed by itself, without its padding, so that no penalty counts the padding.
    """
    rows = []
    for request, length in zip(requests, lengths, strict=True):
        logits_NV = torch.cat(request.raw_logits)[:length]
        ids_1T = torch.tensor([request.prompt + request.tokens], device=logits_NV.device)
        begin, scores = len(request.prompt), []
        for n, logits_V in enumerate(logits_NV):
            before_1T = cast(torch.LongTensor, ids_1T[:, : begin + n])
            scores.append(processors(before_1T, cast(torch.FloatTensor, logits_V.unsqueeze(0))))
        rows.append(torch.cat(scores).to(device))
    return _by_steps(rows, max(lengths))


def _by_steps(rows: Sequence[Tensor], steps: int) -> tuple[Tensor, ...]:
    whole_BNV = rows[0].new_zeros((len(rows), steps, rows[0].shape[1]))
    for b, row_NV in enumerate(rows):
        whole_BNV[b, : len(row_NV)] = row_NV
    return tuple(whole_BNV.unbind(dim=1))
