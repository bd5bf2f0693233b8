"""Keeps the frozen target's states of texts that are used several times, so that it reads each of them only once.

On a CPU, reading takes most of a step, and the target's own texts are used in every epoch. Readings are kept only if
every text is read as if it were alone, because only then do they not depend on what was kept: a run that was killed,
which kept nothing, continues with the same bits.

Shapes: B windows, R of them that are new, L tokens a window, S places of them, F feature width, H width of the target's
states, X of all that is kept of a token, V vocabulary.
"""

import torch
from torch import Tensor

from draftsmith.targets import Target
from draftsmith.training.data.windows import Batch

KEPT_BYTES = 2**30
FINAL = -1
"""The tap of the output projection's input."""


class Readings:
    """Reads texts, and keeps their states in memory up to a limit; the first ones stay.

    Args:
        taps: of the drafter.
        logits: whether the states from which logits are made are needed too.
        room: bytes that may be kept; with 0, every text is read as if it were used once.
    """

    def __init__(self, target: Target, taps: tuple[int, ...], logits: bool, room: int = KEPT_BYTES) -> None:
        self.target, self.taps, self.left = target, taps, room
        self._may_keep = room > 0 and target.backend.reads_apart
        self._all_taps = taps if FINAL in taps or not logits else (*taps, FINAL)
        self._kept: dict[bytes, Tensor] = {}

    def keeps(self, batch: Batch) -> bool:
        """Whether the texts of a batch are kept."""
        return batch.again and self._may_keep

    def states(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return the states at the drafter's taps (B, L, F), and those from which logits are made (B, L, H).

        Behind the last learnt token its states are repeated, so that no invalid states are used; if no logits are
        needed, H is 0.
        """
        lengths = [1 + int(row.nonzero()[-1]) if row.any() else 1 for row in batch.learnt_BL]
        keys = [
            tokens_L[:length].numpy().tobytes() for tokens_L, length in zip(batch.tokens_BL, lengths, strict=True)
        ]
        new = {key: row for row, key in enumerate(keys) if key not in self._kept}
        fresh = self._read(batch.tokens_BL, lengths, new)
        width = self.target.feature_size(self._all_taps)
        states_BLX = torch.empty((*batch.tokens_BL.shape, width), dtype=self.target.dtype)
        for row, (key, length) in enumerate(zip(keys, lengths, strict=True)):
            own_LX = fresh[key] if key in fresh else self._kept[key]
            states_BLX[row, :length], states_BLX[row, length:] = own_LX, own_LX[-1]
        for key, states_LX in fresh.items():
            if states_LX.nbytes <= self.left:
                self.left -= states_LX.nbytes
                self._kept[key] = states_LX
        own = states_BLX[..., : self.target.feature_size(self.taps)]
        if FINAL not in self._all_taps:
            return own, states_BLX[..., :0]
        begin = self._all_taps.index(FINAL) * self.target.hidden_size
        return own, states_BLX[..., begin : begin + self.target.hidden_size]

    def _read(self, tokens_BL: Tensor, lengths: list[int], rows: dict[bytes, int]) -> dict[bytes, Tensor]:
        """Let the target read the rows with these keys."""
        if not rows or not self._all_taps:
            return {key: torch.empty((lengths[row], 0), dtype=self.target.dtype) for key, row in rows.items()}
        longest = max(lengths[row] for row in rows.values())
        read_RLX, _ = self.target.encode(tokens_BL[list(rows.values()), :longest], self._all_taps)
        own = zip(rows.items(), read_RLX, strict=True)
        return {key: read_LX[: lengths[row]].clone() for (key, row), read_LX in own}

    @torch.no_grad()
    def logits(self, states_SH: Tensor) -> Tensor:
        """Return the target's logits for states (S, V)."""
        products_SV: Tensor = self.target.model.get_output_embeddings()(states_SH)
        return self.target.logit_form(products_SV)
