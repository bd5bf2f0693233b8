"""Cheap drafters that guess for another drafter, behind tokens that are only guesses themselves.

Shapes: B rows, R of them, F feature width.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import torch
from torch import Tensor

from draftsmith.drafters.base import Drafter, StagewiseDrafter
from draftsmith.drafters.lookup.python_drafter import LookupDrafter
from draftsmith.plan import Plan
from draftsmith.types import Context, Draft, DraftsmithError

S = TypeVar("S")


FEW, MANY = 2, 5
"""Default number of guesses at once: for a drafter that always has some, and for one that guesses only what it found.

A further row in a forward of the 4-bit copy costs less than another pass, but not nothing: the second guess of a small
head still pays for itself, the third hardly.
"""


class Inner(ABC):
    """One or several drafters in this role. It is called many times for each draft, and remembers none of the calls.

    Args:
        drafters: the drafters that guess.
        most: the most guesses at once.
    """

    def __init__(self, drafters: Sequence[Drafter], most: int) -> None:
        self.drafters, self.most = tuple(drafters), most

    @abstractmethod
    def begin(self, context: Context) -> None:
        """Read committed tokens of all rows."""

    @abstractmethod
    def guess(
        self, rows: Sequence[int], chains: Sequence[Sequence[int]], states_RF: Tensor, count: int
    ) -> Sequence[Sequence[int]]:
        """Guess up to `count` tokens, at least one, behind the chains of some rows.

        Args:
            rows: their indices in the context, in rising order.
            chains: the tokens behind the root of each row.
            states_RF: the states that predicted the last token of each chain.
        """


class ByState(Inner):
    """A drafter without a memory: it reads only a token and the state that predicted it."""

    def __init__(self, drafter: Drafter, most: int = FEW) -> None:
        reach = drafter.max_depth if isinstance(drafter, StagewiseDrafter) else drafter.default_plan().depth
        super().__init__([drafter], min(most, reach))
        self._drafter = drafter
        self._context: Context | None = None

    def begin(self, context: Context) -> None:
        """Keep the part of the context that does not change within a draft."""
        self._context = context

    def guess(
        self, rows: Sequence[int], chains: Sequence[Sequence[int]], states_RF: Tensor, count: int
    ) -> Sequence[Sequence[int]]:
        """Let it draft a chain."""
        context = self._context
        assert context is not None, "a draft is begun first"
        plan = Plan((1,) * min(count, self.most))
        if any(chains):
            context = behind(context, rows, chains, states_RF)
        elif len(rows) < len(context.rows_B):
            context = context.some(torch.tensor(rows, device=states_RF.device))
        return chains_of(self._drafter.propose(context, plan))


class ByText(Inner, Generic[S]):
    """A drafter that finds its guesses in texts."""

    def __init__(self, drafter: LookupDrafter[S], most: int = MANY) -> None:
        super().__init__([drafter], most)
        self._lookup = drafter
        self._rows: Sequence[S | None] = ()

    def begin(self, context: Context) -> None:
        """Let it read committed tokens."""
        self._rows = self._lookup.take_in(context)

    def guess(
        self, rows: Sequence[int], chains: Sequence[Sequence[int]], states_RF: Tensor, count: int
    ) -> Sequence[Sequence[int]]:
        """Let it look up the end of every chain."""
        found = []
        for row, chain in zip(rows, chains, strict=True):
            state = self._rows[row]
            found.append([] if state is None else self._lookup.continue_row(state, chain, min(count, self.most)))
        return found


class InTurn(Inner):
    """Several drafters: each guesses for the rows for which the earlier ones found nothing."""

    def __init__(self, members: Sequence[Inner]) -> None:
        super().__init__(
            [drafter for member in members for drafter in member.drafters], max(member.most for member in members)
        )
        self._members = members

    def begin(self, context: Context) -> None:
        """Let all drafters begin."""
        for member in self._members:
            member.begin(context)

    def guess(
        self, rows: Sequence[int], chains: Sequence[Sequence[int]], states_RF: Tensor, count: int
    ) -> Sequence[Sequence[int]]:
        """Let them guess one after the other."""
        found: list[Sequence[int]] = [()] * len(rows)
        for member in self._members:
            left = [at for at, guesses in enumerate(found) if not guesses]
            if not left:
                break
            states = states_RF if len(left) == len(rows) else states_RF[torch.tensor(left, device=states_RF.device)]
            guesses = member.guess([rows[at] for at in left], [chains[at] for at in left], states, count)
            for at, some in zip(left, guesses, strict=True):
                found[at] = some
        return found


def behind(context: Context, rows: Sequence[int], chains: Sequence[Sequence[int]], states_RF: Tensor) -> Context:
    """Return a context of these rows as if each had committed its chain, of at least one token."""
    device = context.tokens_BT.device
    if len(rows) < len(context.rows_B):
        context = context.some(torch.tensor(rows, device=device))
    ends = torch.tensor([[chain[-1], len(chain)] for chain in chains], device=device)
    return context.after(
        ends[:, :1].contiguous(), states_RF.unsqueeze(1), torch.ones_like(context.counts_B),
        context.lengths_B + ends[:, 1],
    )


def chains_of(draft: Draft) -> list[list[int]]:
    """Return for every row the guesses that form a chain from the first guess on."""
    tokens: list[list[int]] = draft.tokens_BN.tolist()
    if draft.is_chain and draft.depth == draft.tokens_BN.shape[1]:
        return tokens
    found = []
    for guesses, parents in zip(tokens, draft.parents_BN.tolist(), strict=True):
        whole = next((node for node, parent in enumerate(parents) if parent != node - 1), len(parents))
        found.append(guesses[:whole])
    return found


def inside(drafter: Drafter, name: str, most: int = 0) -> Inner:
    """Return a drafter in the inner role; DraftsmithError, with its name, if it cannot guess behind guesses.

    Args:
        most: the most guesses at once; 0 takes the default of its kind.
    """
    if isinstance(drafter, LookupDrafter):
        return ByText(drafter, most or MANY)
    if drafter.reads_prompt or drafter.borrows_layers or drafter.observes:
        raise DraftsmithError(
            f"{name!r} cannot guess for a copy of the target, because it keeps a memory of the text or runs layers of "
            "the target; use ngram, suffix, or a drafter trained on the last state, such as mlp or medusa."
        )
    return ByState(drafter, most or FEW)


def all_inside(drafters: Mapping[str, Drafter], most: int = 0) -> Inner:
    """Return several named drafters as one, in which the first that finds something guesses; errors as in `inside`.

    All but the last have to find their guesses in texts, because other drafters always have guesses.
    """
    members = [inside(drafter, name, most) for name, drafter in drafters.items()]
    if len(members) == 1:
        return members[0]
    for name, drafter in list(drafters.items())[:-1]:
        if not isinstance(drafter, LookupDrafter):
            raise DraftsmithError(f"{name!r} always has a guess, so what stands behind it has no turn; put it last.")
    return InTurn(members)
