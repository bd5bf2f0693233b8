"""Drafters that guess all depths at once: no guess depends on a drafted token, so a tree is a product of the depths.

The guesses belong to a row and not to a node, and may be large (whole vocabularies). So they are kept once per row, and
a node only stores the index of its row; `draftsmith.drafters.grow` gathers these indices and nothing else.

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
    """What all nodes of a row share. The grower gathers only tensors, so this object stays one entry per row."""

    guessed: Any


ParallelState = tuple[Shared, Tensor]
"""The guesses of every row, and the row of every node (R)."""


class ParallelSteps(TrainableDrafter):
    """Grows drafts whose guesses are made once per row: a family defines the guesses, and how a depth is scored.

    Most families derive from `ParallelDrafter`, which takes the scores of all depths together. Derive from this class
    if scores of depths that no plan reaches are worth skipping, or if training comes from another base class.
    """

    @abstractmethod
    def prepare(self, context: Context, root_B: Tensor, feature_BF: Tensor) -> Any:
        """Do the work needed once per draft; return the input of `depth_scores`, see `ParallelDrafter.guess`."""

    @abstractmethod
    def depth_scores(self, depth: int, guessed: Any) -> Tensor:
        """Return the logits (B, W) of one depth from what `prepare` returned."""

    def begin(self, context: Context) -> tuple[Tensor, ParallelState]:
        """Guess for every row; the root is still the row's only node."""
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

    The family provides one function for decoding, `guess`, and one for whole texts, `guess_at`. Both have to agree,
    which `check_forward_agreement` of the tests checks. Drafting with any plan, sampled or not, a drafted vocabulary
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
        """Return the logits (B, P, D, W) that `guess` returns if the tokens at these positions are the roots.

        `features_BTF[:, t]` predicted `tokens_BT[:, t]`. Nothing behind a position may be read for it, and gradients
        have to pass.
        """

    def prepare(self, context: Context, root_B: Tensor, feature_BF: Tensor) -> Any:
        """Guess all depths."""
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
        """Return the cross-entropy of every depth, mixed with the divergence from the target if that is requested."""
        return self.losses_from(
            examples, self.guess_at(examples.tokens_BT, examples.features_BTF, examples.positions_BP)
        )

    def losses_from(self, examples: TrainingBatch, logits_BPDW: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses and accuracies of every depth (D), given the guesses at the positions trained on."""
        depths, logits_RDW = self.max_depth, logits_BPDW.flatten(0, 1)
        soft, labels_RN = examples.soft_labels(depths, self.d2t), examples.labels_RN(depths, self.d2t, self.vocab_size)
        scored = [examples.loss_and_accuracy(depth, logits_RDW[:, depth], labels_RN, soft) for depth in range(depths)]
        return torch.stack([loss for loss, _ in scored]), torch.stack([accuracy for _, accuracy in scored])
