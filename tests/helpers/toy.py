"""A toy world whose distributions are known: random tables p(.|prefix) and q(.|prefix), decoded by the real step
functions.

Shapes: B rows (independent decodings), N drafted nodes, M = N + 1 verified nodes (root first), T tokens decoded,
V alphabet.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from draftsmith.drafters.base import StagewiseDrafter
from draftsmith.drafters.grow import grow
from draftsmith.plan import Plan
from draftsmith.types import Context, Draft
from draftsmith.verify import Acceptance, ancestor_table

ALPHABET = 8
LENGTH = 3

Grow = Callable[[StagewiseDrafter, Context, Plan], Draft]
Accept = Callable[[Tensor, Draft, Tensor, Tensor], Acceptance]


@dataclass(frozen=True)
class World:
    """`p[t]` (float64) and `log_q[t]` (fp32) give token t by the tokens before it: shape (V,) * (t + 1)."""

    p: tuple[Tensor, ...]
    log_q: tuple[Tensor, ...]

    def joint(self) -> Tensor:
        """Return the probability of every text of LENGTH tokens, shape (V ** LENGTH)."""
        joint = torch.ones((), dtype=torch.float64)
        for table in self.p[:LENGTH]:
            joint = joint.unsqueeze(-1) * table
        return joint.reshape(-1)


def world(seed: int, spread: float = 2.0, error: float = 1.0, depth: int = 3) -> World:
    """Draw tables deep enough for drafts that reach past the end of the text.

    p is the softmax of normal logits of this spread, and q that of the same logits plus normal errors.
    """
    generator = torch.Generator().manual_seed(seed)
    p, log_q = [], []
    for t in range(LENGTH + depth):
        logits, errors = torch.randn((2, *(ALPHABET,) * (t + 1)), generator=generator, dtype=torch.float64)
        p.append((spread * logits).softmax(-1))
        log_q.append((spread * logits + error * errors).log_softmax(-1).float())
    return World(tuple(p), tuple(log_q))


class TableDrafter(StagewiseDrafter):
    """Drafts from q, given the texts so far (B, T) and their lengths; its state is the text of every frontier node."""

    def __init__(self, log_q: tuple[Tensor, ...], texts_BT: Tensor, written: int) -> None:
        self.log_q, self.texts_BT, self.written = log_q, texts_BT, written

    @property
    def max_depth(self) -> int:
        return len(self.log_q) - self.written

    def begin(self, context: Context) -> tuple[Tensor, Tensor]:
        return context.root()[0], prefix_code(self.texts_BT[:, : self.written])

    def step(self, depth: int, state: Tensor, tokens_R: Tensor) -> tuple[Tensor, Tensor]:
        code_R = state * ALPHABET + tokens_R if depth else state
        return self.log_q[self.written + depth].reshape(-1, ALPHABET)[code_R], code_R

    def propose(self, context: Context, plan: Plan) -> Draft:
        return grow(self, context, plan)

    def default_plan(self) -> Plan:
        return Plan((1,))


def prefix_code(texts_BT: Tensor) -> Tensor:
    """Return the number whose digits in base V are the text (B)."""
    code_B = texts_BT.new_zeros(texts_BT.shape[0])
    for column in texts_BT.unbind(1):
        code_B = code_B * ALPHABET + column
    return code_B


def target_probabilities(tables: tuple[Tensor, ...], texts_BT: Tensor, written: int, draft: Draft) -> Tensor:
    """Return p (B, M, V) at the root and at every node, each given its own path."""
    ancestors_BMA = ancestor_table(draft.parents_BN, draft.depth)
    tokens_BM = torch.nn.functional.pad(draft.tokens_BN, (1, 0))
    code_BM = prefix_code(texts_BT[:, :written]).unsqueeze(1).expand_as(tokens_BM)
    for ancestor_BM in ancestors_BMA.unbind(2)[::-1]:
        longer_BM = code_BM * ALPHABET + tokens_BM.gather(1, ancestor_BM)
        code_BM = torch.where(ancestor_BM != 0, longer_BM, code_BM)
    # The tables one under the other: that of depth d begins after all contexts of the shorter ones.
    rows_V = torch.cat([table.reshape(-1, ALPHABET) for table in tables[written : written + draft.depth + 1]])
    first_A = torch.tensor([0, *(tables[written + d].numel() // ALPHABET for d in range(draft.depth))]).cumsum(0)
    return rows_V[first_A[(ancestors_BMA != 0).sum(2)] + code_BM]


def decode(toy: World, plan: Plan, accept: Accept, seeds_B: Tensor, grow: Grow = grow) -> Tensor:
    """Decode LENGTH tokens for every seed, step by step; return texts (B, LENGTH). Position t is token t's own.

    Rows advance by their own number of tokens: at each step those that have written equally much go together.
    """
    batch = seeds_B.shape[0]
    texts_BT = torch.zeros((batch, LENGTH + plan.depth + 1), dtype=torch.int64)
    written_B = torch.zeros(batch, dtype=torch.int64)
    for written in range(LENGTH):
        rows = (written_B == written).nonzero().squeeze(1)
        if not len(rows):
            continue
        texts = texts_BT[rows]
        zeros = torch.zeros_like(rows)
        context = Context(
            tokens_BT=zeros.unsqueeze(1),
            features_BTF=torch.zeros((len(rows), 1, 0)),
            counts_B=zeros + 1,
            lengths_B=zeros + written,
            rows_B=rows,
            temperature_B=torch.ones(len(rows)),
            seeds_B=seeds_B[rows],
        )
        draft = grow(TableDrafter(toy.log_q, texts, written), context, plan)
        p_BMV = target_probabilities(toy.p, texts, written, draft)
        acceptance = accept(p_BMV, draft, seeds_B[rows], zeros + written)
        tokens_BM = torch.nn.functional.pad(draft.tokens_BN, (1, 0))
        accepted_BD = tokens_BM.gather(1, acceptance.path_BD)
        new_BT = torch.cat([accepted_BD, zeros.unsqueeze(1)], dim=1)
        new_BT = new_BT.scatter(1, acceptance.counts_B.unsqueeze(1), acceptance.next_B.unsqueeze(1))
        # Entries after the target's own token are junk, which the next step overwrites.
        texts[:, written : written + draft.depth + 1] = new_BT
        texts_BT[rows] = texts
        written_B[rows] += acceptance.counts_B + 1
    return texts_BT[:, :LENGTH]


def chi_square_p_value(counts: Tensor, expected: Tensor, least: float = 5.0) -> float:
    """Return the chance of a fit as bad as this or worse; cells expected less than `least` times are merged.

    Pearson's statistic with its chi-square distribution, whose survival function is the regularised upper incomplete
    gamma function Q(degrees / 2, statistic / 2).
    """
    counts, expected = counts.double(), expected.double()
    small = expected < least
    if bool(small.any()):
        counts = torch.cat([counts[~small], counts[small].sum().unsqueeze(0)])
        expected = torch.cat([expected[~small], expected[small].sum().unsqueeze(0)])
    statistic = ((counts - expected) ** 2 / expected.clamp(min=1e-300)).sum()
    degrees = torch.tensor(float(len(counts) - 1), dtype=torch.float64)
    return float(torch.special.gammaincc(degrees / 2, statistic / 2))


def p_value_of_texts(
    toy: World, plan: Plan, accept: Accept, draws: int, grow: Grow = grow, first_seed: int = 0, chunk: int = 8_192
) -> float:
    """Decode `draws` texts with as many seeds and test their joint distribution against the target's."""
    counts = torch.zeros(ALPHABET**LENGTH, dtype=torch.int64)
    for start in range(first_seed, first_seed + draws, chunk):
        seeds_B = torch.arange(start, min(start + chunk, first_seed + draws))
        counts += torch.bincount(prefix_code(decode(toy, plan, accept, seeds_B, grow)), minlength=len(counts))
    return chi_square_p_value(counts, toy.joint() * draws)
