"""Reads pieces of prompts: puts keys and values into the cache, gives states to drafters that want them, and chooses
the first token of the text where a prompt ends.

To a drafter with a memory a piece is like any other step. When the target has read the tokens begin … end - 1 of a
prompt, their states predict the tokens begin + 1 … end. These count as the tokens that the step committed; the last of
them is the root, which the target has not read yet.

Shapes: B prompts, M tokens of a piece (padded), T context tokens, F feature width, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from draftsmith.engine.policy import Choice
from draftsmith.engine.requests.request import Request
from draftsmith.engine.requests.scheduler import Piece
from draftsmith.engine.steps.allowed import constrain
from draftsmith.engine.steps.commit import count_finite, guesses_or_flag
from draftsmith.engine.steps.layout import lay_out
from draftsmith.engine.steps.logprobs import logprobs_of
from draftsmith.engine.steps.rows import Penalties, Rows, guessing_temperature, is_simple, make_rows
from draftsmith.engine.steps.step import Stepper
from draftsmith.plan import NO_DRAFT
from draftsmith.types import Context, empty_draft


@dataclass
class FirstTokens:
    """The first tokens of texts whose prompts were read to their ends.

    Args:
        rows: ready for their first step.
        table_BX: as in `StepResult`.
        raw_logits_B1V: the target's logits after every prompt, if a row wants log-probabilities.
    """

    rows: Rows
    table_BX: Tensor
    raw_logits_B1V: Tensor | None


class PromptReader:
    """Reads with the target and the drafters of a stepper, whose cache it fills."""

    def __init__(self, stepper: Stepper, penalties: Penalties) -> None:
        self._stepper, self._penalties = stepper, penalties
        self._remembers = any(drafter.reads_prompt for drafter in stepper.workers)

    def read(self, pieces: Sequence[Piece]) -> list[FirstTokens]:
        """Read pieces of prompts; pieces that are stored already are only shown to drafters."""
        fresh = []
        for piece in pieces:
            if piece.stored:
                self._tell_stored(piece)
            else:
                fresh.append(piece)
        scored = [piece for piece in fresh if piece.request.params.prompt_logprobs is not None]
        fresh = [piece for piece in fresh if piece.request.params.prompt_logprobs is None]
        batches = self._stepper.target.backend.batches([piece.end - piece.begin for piece in fresh])
        read = [self._read([fresh[index] for index in batch]) for batch in batches]
        # Each by itself, because it needs logits after every token; the others need them after the last one at most.
        read += [self._read([piece]) for piece in scored]
        return [found for found in read if found is not None]

    def _read(self, pieces: list[Piece]) -> FirstTokens | None:
        # The simple rows first, as in every group.
        pieces = sorted(pieces, key=lambda piece: not is_simple(piece.request.params))
        logits_BV, features_BMF = self._forward(pieces)
        if self._remembers:
            self._store_states(pieces, features_BMF)
            self._tell_drafters(pieces, features_BMF)
        ending = [b for b, piece in enumerate(pieces) if piece.ends_prompt]
        if not ending:
            return None
        device = logits_BV.device
        index_B = torch.tensor(ending, device=device)
        lasts_B = torch.tensor([pieces[b].end - pieces[b].begin - 1 for b in ending], device=device)
        return self._begin(
            [pieces[b].request for b in ending], logits_BV[index_B].unsqueeze(1),
            features_BMF[index_B, lasts_B].unsqueeze(1),
        )

    def _forward(self, pieces: Sequence[Piece]) -> tuple[Tensor, Tensor]:
        """Return the logits after the last token of every piece (B, V), and all states (B, M, F)."""
        stepper, target = self._stepper, self._stepper.target
        device = target.device
        texts = [piece.request.prompt[piece.begin : piece.end] for piece in pieces]
        longest = max(map(len, texts))
        # Padded with a token of the row's own, because another one may have no finite state, and attention multiplies
        # masked entries too (0 × NaN = NaN).
        tokens_BM = torch.tensor([text + text[-1:] * (longest - len(text)) for text in texts], device=device)
        counts_B = torch.tensor([len(text) for text in texts], device=device)
        # Logits are computed after the last token of each piece, and only if a prompt ends there; but after all tokens
        # of a prompt that is scored.
        scored = pieces[0].request.params.prompt_logprobs is not None
        wanted = [piece.ends_prompt for piece in pieces]
        columns_BU: Tensor | None = None
        if not scored:
            columns_BU = (counts_B - 1).unsqueeze(1) if any(wanted) else counts_B.new_empty((len(texts), 0))
        logits_BUV, features_BMF = target.read_chain(
            stepper.cache, tokens_BM, torch.tensor([piece.begin for piece in pieces], device=device), stepper.taps,
            slots_B=torch.tensor([piece.request.slot for piece in pieces], device=device), keep_logits=columns_BU,
            longest=max(piece.begin for piece in pieces), counts_B=counts_B,
        )
        if scored:
            self._score(pieces[0], logits_BUV[0])
        return logits_BUV[:, -1] if any(wanted) else logits_BUV.new_empty((len(texts), 0)), features_BMF

    def _score(self, piece: Piece, logits_MV: Tensor) -> None:
        """Record the log-probabilities of the prompt's tokens that the tokens of a piece predict."""
        request, top = piece.request, piece.request.params.prompt_logprobs
        assert top is not None
        following = request.prompt[piece.begin + 1 : piece.end + 1]
        request.prompt_logprobs += logprobs_of(logits_MV[: len(following)], following, top)

    def _store_states(self, pieces: Sequence[Piece], features_BMF: Tensor) -> None:
        cache = self._stepper.cache
        if cache.states_NEF is None:
            return
        for b, piece in enumerate(pieces):
            slots_1 = torch.tensor([piece.request.slot], device=features_BMF.device)
            places_1P = torch.arange(piece.begin, piece.end, device=features_BMF.device).unsqueeze(0)
            cache.store_states(slots_1, places_1P, features_BMF[b : b + 1, : piece.end - piece.begin])

    def _context(self, requests: Sequence[Request], tokens_BT: Tensor, features_BTF: Tensor, counts_B: Tensor,
                 lengths_B: Tensor) -> Context:
        device = tokens_BT.device
        return Context(
            tokens_BT=tokens_BT,
            features_BTF=features_BTF,
            counts_B=counts_B,
            lengths_B=lengths_B,
            rows_B=torch.tensor([request.id for request in requests], device=device),
            temperature_B=torch.tensor(
                [guessing_temperature(request.params) for request in requests], device=device
            ),
            seeds_B=torch.tensor([request.seed for request in requests], device=device),
            first_B=torch.tensor([request.prompt[0] for request in requests], device=device),
            slots_B=torch.tensor([request.slot for request in requests], device=device),
        )

    def _tell_drafters(self, pieces: Sequence[Piece], features_BMF: Tensor) -> None:
        """Show tokens of prompts to drafters with a memory; the first token of the text comes with the first step."""
        telling = []
        for b, piece in enumerate(pieces):
            if piece.request.never_drafts:
                continue
            if not piece.ends_prompt or piece.end - piece.begin > 1:
                telling.append((b, piece))
        if not telling:
            return
        requests = [piece.request for _, piece in telling]
        # The states of a piece predict the tokens one place further on.
        texts = [piece.request.prompt[piece.begin + 1 : piece.end + 1] for _, piece in telling]
        longest = max(map(len, texts))
        device = features_BMF.device
        tokens_BT = torch.tensor([text + [0] * (longest - len(text)) for text in texts], device=device)
        counts_B = torch.tensor([len(text) for text in texts], device=device)
        lengths_B = torch.tensor([piece.begin + 1 for _, piece in telling], device=device) + counts_B
        index_B = torch.tensor([b for b, _ in telling], device=device)
        features_BTF = features_BMF[index_B, :longest]
        self._stepper.follow_prompts(self._context(requests, tokens_BT, features_BTF, counts_B, lengths_B))

    def _tell_stored(self, piece: Piece) -> None:
        """Show drafters the part of a prompt that is shared and so not read again, with the states that were kept."""
        request, (begin, end) = piece.request, (piece.begin, piece.end)
        target, cache = self._stepper.target, self._stepper.cache
        tokens_1T = torch.tensor([request.prompt[begin + 1 : end + 1]], device=target.device)
        features_1TF = torch.empty((1, end - begin, 0), dtype=target.dtype, device=target.device)
        if cache.states_NEF is not None:
            features_1TF = cache.read_states(request.slot, begin, end).unsqueeze(0)
        counts_1 = torch.tensor([end - begin], device=target.device)
        self._stepper.follow_prompts(self._context([request], tokens_1T, features_1TF, counts_1, counts_1 + begin + 1))

    def _begin(self, requests: list[Request], logits_B1V: Tensor, features_B1F: Tensor) -> FirstTokens:
        """Choose the first tokens of texts, by the logits after their prompts; the states are from the same place."""
        device, vocab_size = logits_B1V.device, self._stepper.target.vocab_size
        lengths_B = torch.tensor([len(request.prompt) for request in requests], device=device)
        none_B1 = torch.zeros((len(requests), 1), dtype=torch.long, device=device)
        ones_B = torch.ones_like(lengths_B)
        context = self._context(requests, none_B1, features_B1F, ones_B, lengths_B)
        rows = make_rows(requests, context, Choice(NO_DRAFT), vocab_size, self._penalties)
        draft = empty_draft(context)
        simple = rows.simple_rows
        chosen = []
        if simple:
            chosen.append(logits_B1V[:simple, 0].argmax(dim=-1))
        if simple < rows.size:
            others = context.part(simple, rows.size)
            layout = lay_out(others, empty_draft(others))
            if rows.constrained is not None:
                layout = constrain(layout, rows.constrained.behind(simple), others, lay_out)
            chosen.append(self._stepper.choose(rows, others, logits_B1V[simple:], layout).next_B)
        first_B = torch.cat(chosen)
        if rows.history is not None:
            rows.history.commit(first_B[simple:].unsqueeze(1), ones_B[simple:])
        rows.context = replace(context, tokens_BT=first_B.unsqueeze(1), lengths_B=lengths_B + 1)
        flag_B = guesses_or_flag(draft, count_finite(logits_B1V, none_B1, none_B1.squeeze(1)))
        table_BX = torch.stack([ones_B, flag_B, first_B], dim=1)
        return FirstTokens(rows, table_BX, logits_B1V if rows.has_logprobs else None)
