"""A drafter that knows the text beforehand and errs on purpose, so that tests meet every accepted length.

B rows, R = B × frontier nodes, N drafted nodes, M = N + 1, V vocabulary.
"""

from collections.abc import Sequence
from random import Random
from typing import Any, Literal

import torch
from torch import Tensor
from transformers import PreTrainedModel

from draftsmith.drafters.base import Drafter, StagewiseDrafter
from draftsmith.drafters.grow import grow
from draftsmith.plan import Plan
from draftsmith.types import ROOT, UNUSED, Context, Draft
from tests.helpers.tiny import greedy_reference


class OracleDrafter(Drafter):
    """Drafts known texts as trees of exactly the plan's branching.

    Args:
        texts: prompt and continuation, as token ids; a row whose prompt is none of theirs gets random guesses.
        vocabulary: guesses are below it.
        error_rate: how often the true token is missing among a node's children.
        place: where among its siblings the true token stands.
        ragged: turn some of the wrong guesses into `UNUSED` padding.
        seed: of the errors; they depend on the text and the position alone.
        plan: the default plan.
    """

    can_sample = True

    taps = ()
    reads_prompt = True

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        vocabulary: int,
        *,
        error_rate: float = 0.0,
        place: Literal["first", "last", "any"] = "any",
        ragged: bool = False,
        seed: int = 0,
        plan: Plan | None = None,
    ) -> None:
        self.texts = [list(text) for text in texts]
        self.vocabulary = vocabulary
        self.error_rate, self.place, self.ragged, self.seed = error_rate, place, ragged, seed
        self.plan = plan if plan is not None else Plan((1, 1, 1, 1))
        self.text_of_row: dict[int, list[int]] = {}

    def default_plan(self) -> Plan:
        return self.plan

    def reset_rows(self, rows: list[int]) -> None:
        for row in rows:
            self.text_of_row.pop(row, None)

    def propose(self, context: Context, plan: Plan) -> Draft:
        assert plan.paths is None and plan.nodes is None and plan.beam is None, "the oracle grows whole trees only"
        tokens, parents, q_rows = [], [], []
        rows, counts, lengths = context.rows_B.tolist(), context.counts_B.tolist(), context.lengths_B.tolist()
        for row, count, length, newest in zip(rows, counts, lengths, context.tokens_BT.tolist(), strict=True):
            text = self.text_of_row.get(row)
            if text is None:
                text = self.text_of_row[row] = self._recognise(newest[:count], length)
            grown = self._grow(text, length, plan)
            tokens.append(grown[0])
            parents.append(grown[1])
            q_rows.append(grown[2])
        return Draft(
            tokens_BN=torch.tensor(tokens),
            parents_BN=torch.tensor(parents),
            depth=plan.depth,
            q_BMV=torch.stack(q_rows) if plan.sampled else None,
            branching=plan.branching,
        )

    def _recognise(self, read: list[int], length: int) -> list[int]:
        """Find the text that a first context, the prompt from its second token on and one more, begins."""
        return next((text for text in self.texts if text[1:length] == read), [])

    def _grow(self, text: list[int], length: int, plan: Plan) -> tuple[list[int], list[int], Tensor]:
        tokens: list[int] = []
        parents: list[int] = []
        q_MV = torch.zeros((plan.max_nodes + 1, self.vocabulary))
        level = [(ROOT, ROOT, True)]
        for depth, children in enumerate(plan.branching):
            random = Random(hash((self.seed, length, depth, *text[:4])))
            truth = text[length + depth] if length + depth < len(text) else None
            below = []
            for parent, shown, on_path in level:
                known = truth if on_path else None
                if plan.sampled:
                    guesses = self._draw(q_MV[parent + 1], known, children, random)
                else:
                    guesses = self._choose(known, children, random)
                for guess in guesses:
                    right = on_path and guess == truth
                    unused = shown == UNUSED or (self.ragged and not right and random.random() < 0.4)
                    below.append((len(tokens), UNUSED if unused else len(tokens), right))
                    tokens.append(guess)
                    parents.append(UNUSED if unused else parent)
            level = below
        return tokens, parents, q_MV

    def _choose(self, truth: int | None, children: int, random: Random) -> list[int]:
        guesses = random.sample([token for token in range(self.vocabulary) if token != truth], children)
        if truth is not None and random.random() >= self.error_rate:
            place = {"first": 0, "last": children - 1, "any": random.randrange(children)}[self.place]
            guesses[place] = truth
        return guesses

    def _draw(self, q_V: Tensor, truth: int | None, children: int, random: Random) -> list[int]:
        q_V.fill_(1 / self.vocabulary)
        if truth is not None:
            q_V.mul_(self.error_rate)[truth] += 1 - self.error_rate
        generator = torch.Generator().manual_seed(random.randrange(2**31))
        return torch.multinomial(q_V, children, generator=generator).tolist()


def oracle_for(
    model: PreTrainedModel,
    questions: Sequence[list[int]],
    new_tokens: int = 60,
    kind: type[OracleDrafter] = OracleDrafter,
    **options: Any,
) -> OracleDrafter:
    """Return an oracle that knows the greedy continuation of each prompt, as transformers decodes it."""
    texts = [question + greedy_reference(model, question, new_tokens) for question in questions]
    return kind(texts, model.config.vocab_size, **options)


class StagewiseOracle(OracleDrafter, StagewiseDrafter):
    """The same as a family that goes stage by stage, so that it drafts in every shape that `grow` knows.

    Its q is uneven and most often likes the true token best. The state of a node says whose text it is in, at which
    place, and whether all guesses so far were right.
    """

    @property
    def max_depth(self) -> int:
        return 6

    def propose(self, context: Context, plan: Plan) -> Draft:
        rows, counts, lengths = context.rows_B.tolist(), context.counts_B.tolist(), context.lengths_B.tolist()
        for row, count, length, newest in zip(rows, counts, lengths, context.tokens_BT.tolist(), strict=True):
            if row not in self.text_of_row:
                self.text_of_row[row] = self._recognise(newest[:count], length)
        return grow(self, context, plan)

    def begin(self, context: Context) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        return context.root()[0], (context.rows_B, context.lengths_B, torch.ones_like(context.rows_B))

    def step(
        self, depth: int, state: tuple[Tensor, Tensor, Tensor], tokens_R: Tensor
    ) -> tuple[Tensor, tuple[Tensor, Tensor, Tensor]]:
        rows_R, place_R, _ = state
        log_q, still_right = [], []
        for row, place, right, token in zip(*(t.tolist() for t in (*state, tokens_R)), strict=True):
            text = self.text_of_row[row]
            right = right and (depth == 0 or (place - 1 < len(text) and text[place - 1] == token))
            generator = torch.Generator().manual_seed(hash((self.seed, place, *text[:4])) % 2**31)
            scores_V = torch.randn(self.vocabulary, generator=generator)
            if right and place < len(text):
                scores_V[text[place]] += 6.0 * float(torch.rand((), generator=generator) >= self.error_rate)
            log_q.append(scores_V.log_softmax(0))
            still_right.append(int(right))
        return torch.stack(log_q), (rows_R, place_R + 1, torch.tensor(still_right))
