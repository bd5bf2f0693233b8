"""Drafters that guess all depths at once: no guess depends on a drafted token, so a tree is a product of the depths.

What is guessed is a property of the row and not of a node, and may be large (whole vocabularies). So it is kept once a
row, and a node only knows which row it belongs to; `draftsmith.drafters.grow` gathers these numbers and nothing else.

Shapes: B rows, R = B × frontier nodes, T positions of a text, P positions that are drafted from, D depths, F feature
width, V vocabulary, W drafted vocabulary, k children.
"""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from draftsmith.drafters.trainable.batch import TrainingBatch
from draftsmith.drafters.trainable.drafter import TrainableDrafter
from draftsmith.types import Context


@dataclass(frozen=True)
class Shared:
    """What all nodes of a row share. The grower gathers tensors; this is none, so it stays one entry a row."""

    guessed: Any


ParallelState = tuple[Shared, Tensor]
"""What was guessed for every row, and the row of every node (R)."""


class ParallelSteps(TrainableDrafter):
    """How a draft grows where a row is guessed for once: a family says what to guess, and how a depth scores.

    Most families derive from `ParallelDrafter`, which wants the scores of all depths together. Derive from this one
    where deep scores are worth leaving out as long as no plan reaches them, or where training comes from another base.
    """

    @abstractmethod
    def prepare(self, context: Context, root_B: Tensor, feature_BF: Tensor) -> Any:
        """Do what has to be done once a draft; return what `depth_scores` reads, see `ParallelDrafter.guess`."""

    @abstractmethod
    def depth_scores(self, depth: int, guessed: Any) -> Tensor:
        """Return the logits (B, W) of one depth from what `prepare` returned."""

    def begin(self, context: Context) -> tuple[Tensor, ParallelState]:
        """Guess for every row; the root is the row's only node yet."""
        root_B, feature_BF = context.root()
        guessed = self.prepare(context, root_B, feature_BF)
        return root_B, (Shared(guessed), torch.arange(len(root_B), device=root_B.device))

    def step(self, depth: int, state: ParallelState, tokens_R: Tensor) -> tuple[Tensor, ParallelState]:
        """Return log q (R, V) in fp32, the same for all nodes of a row."""
        shared, rows_R = state
        log_q_BW = torch.log_softmax(self.depth_scores(depth, shared.guessed).float(), dim=-1)
        return self.to_vocabulary(log_q_BW)[rows_R], state

    def top_k(
        self, depth: int, state: ParallelState, tokens_R: Tensor, k: int, scores: bool
    ) -> tuple[Tensor | None, Tensor, ParallelState]:
        """Find the best k once a row, without a softmax unless scores are wanted."""
        shared, rows_R = state
        log_q_Bk, tokens_Bk = self.best_tokens(self.depth_scores(depth, shared.guessed), k, scores)
        if len(rows_R) == len(tokens_Bk):  # one node a row, in the order of the rows
            return log_q_Bk, tokens_Bk, state
        return (None if log_q_Bk is None else log_q_Bk[rows_R]), tokens_Bk[rows_R], state


class ParallelDrafter(ParallelSteps):
    """A drafter that scores all depths of a row in one go.

    The family gives one function for decoding, `guess`, and one for whole texts, `guess_at`, which have to agree: that
    is what `check_forward_agreement` of the tests compares. Drafting in any plan, sampled or not, a drafted vocabulary
    and training follow from these.

    A family that looks at earlier tokens sets `reads_prompt`, makes its storage in `attach` and writes it in `guess`,
    which is also called for steps that draft nothing; see `draftsmith.drafters.attention.row_cache`.
    """

    @abstractmethod
    def guess(self, context: Context, root_B: Tensor, feature_BF: Tensor) -> Tensor:
        """Return the logits (B, D, W) over the drafted vocabulary, D = `max_depth`.

        Entry d scores the token d + 1 after the root.

        Args:
            context: what was committed since the last draft, and which rows these are.
            root_B: the newest token of every row.
            feature_BF: the state that predicted it.
        """

    @abstractmethod
    def guess_at(self, tokens_BT: Tensor, features_BTF: Tensor, positions_BP: Tensor) -> Tensor:
        """Return the logits (B, P, D, W) that `guess` returns where the tokens at these positions are the roots.

        `features_BTF[:, t]` predicted `tokens_BT[:, t]`. Nothing behind a position may be read for it, and gradients
        have to pass.
        """

    def prepare(self, context: Context, root_B: Tensor, feature_BF: Tensor) -> Any:
        """Guess everything."""
        return self.guess(context, root_B, feature_BF)

    def depth_scores(self, depth: int, guessed: Any) -> Tensor:
        """Return the scores (B, W) of one depth."""
        scores_BW: Tensor = guessed[:, depth]
        return scores_BW

    def forward(self, tokens_BT: Tensor, features_BTF: Tensor) -> list[Tensor]:
        """Predict at every depth, see `TrainableModel.forward`."""
        batch, length = tokens_BT.shape
        positions_BP = torch.arange(length, device=tokens_BT.device).expand(batch, -1)
        logits_BPDW = self.guess_at(tokens_BT, features_BTF, positions_BP)
        return [
            self.to_vocabulary(logits_BPDW[:, : length - depth, depth])
            for depth in range(min(self.max_depth, length))
        ]

    def losses(self, examples: TrainingBatch) -> tuple[Tensor, Tensor]:
        """Return the cross-entropy of every depth, mixed with the divergence from the target where it is asked for."""
        return self.losses_from(
            examples, self.guess_at(examples.tokens_BT, examples.features_BTF, examples.positions_BP)
        )

    def losses_from(self, examples: TrainingBatch, logits_BPDW: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses and accuracies of every depth (D) for what was guessed at the positions trained on."""
        depths, logits_RDW = self.max_depth, logits_BPDW.flatten(0, 1)
        soft, labels_RN = examples.soft_labels(depths, self.d2t), examples.labels_RN(depths, self.d2t, self.vocab_size)
        scored = [examples.loss_and_accuracy(depth, logits_RDW[:, depth], labels_RN, soft) for depth in range(depths)]
        return torch.stack([loss for loss, _ in scored]), torch.stack([accuracy for _, accuracy in scored])
