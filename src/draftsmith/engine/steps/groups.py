"""Groups of running rows that draft alike; the tensors of a group are rebuilt only when its rows change."""

import sys
from collections.abc import Sequence

from draftsmith.drafters.lookup.prediction import MOST_GUESSES
from draftsmith.engine.policy import Choice, Load, Policy
from draftsmith.engine.reasons import ASKED, EXPECTED
from draftsmith.engine.requests.request import Request
from draftsmith.engine.steps.rows import PREDICTED, Penalties, Rows, gather, is_simple, make_rows
from draftsmith.engine.steps.runner import Runner
from draftsmith.plan import Plan
from draftsmith.types import Context, DraftsmithError

PREDICTION = Choice(Plan((1,) * MOST_GUESSES), PREDICTED)
"""What a row drafts while it keeps to its prediction."""
UNTIL_ROWS_CHANGE = sys.maxsize
"""For how many steps the policy need not be asked where every row has a plan of its own."""


class Groups:
    """The rows that decode, in groups that each draft by one `Choice`.

    Args:
        policy: asked before every step, unless its last answer stands or it always answers the same.
        runner: says how many rows a group is padded to.
        spare_slots: where padding rows write.
        penalties: what penalties remember about every slot.
        vocab_size: V of the target.
    """

    def __init__(
        self, policy: Policy, runner: Runner, spare_slots: Sequence[int], penalties: Penalties, vocab_size: int
    ) -> None:
        self.rows: list[Rows] = []
        self._policy, self._runner, self._spare_slots = policy, runner, spare_slots
        self._penalties, self._vocab_size = penalties, vocab_size
        self._allowed = frozenset(policy.choices)
        self._choices: list[Choice] = []
        self._changed = self._has_predictions = False
        self._held = 0  # steps for which the policy's last answer still stands
        # For rows that are not in a group yet, by request id: a context, and their index in it.
        self._sources: dict[int, tuple[Context, int]] = {}

    def enter(self, request: Request, context: Context, b: int) -> None:
        """Let a request in; its tensors are row b of a context."""
        self._sources[request.id] = (context, b)
        self._changed = True

    def leave(self, request: Request) -> None:
        """Let a request go; its row is removed when the groups are settled next."""
        self._sources.pop(request.id, None)
        self._changed = True

    def clear(self) -> None:
        """Forget all rows."""
        self.rows = []
        self._sources.clear()

    def settle(self, running: Sequence[Request], load: Load) -> None:
        """Ask the policy about the rows that have no choice of their own, and group the rows that will draft alike.

        If neither rows nor choices have changed, the groups stay as they are. To be called unless they `hold`.

        Raises:
            DraftsmithError: the policy chose something that is not among its choices.
        """
        own = [request.choice for request in running]
        self._has_predictions = any(request.prediction is not None for request in running)
        if self._has_predictions:
            own = [self._predicted(request) or choice for request, choice in zip(running, own, strict=True)]
            for request, choice in zip(running, own, strict=True):
                request.why = EXPECTED if choice is PREDICTION else None if choice is None else ASKED
        left = [request for request, choice in zip(running, own, strict=True) if choice is None]
        histories = [request.history for request in left]
        asked = self._policy.choose(load, histories)
        self._held = 0 if self._has_predictions else self._policy.holds if left else UNTIL_ROWS_CHANGE
        reasons = self._policy.reasons(load, histories)
        if reasons:
            for request, why in zip(left, reasons, strict=True):
                request.why = why
        answers = iter(asked)
        choices = [choice or next(answers) for choice in own]
        if not self._changed and choices == self._choices:
            return
        unknown = next((choice for choice in set(asked) if choice not in self._allowed), None)
        if unknown is not None:
            raise DraftsmithError(f"the policy chose {unknown}, which is none of its choices; add it to them.")
        stay, self._changed, self._choices = not self._changed, False, choices
        if stay and len(self.rows) == 1 and choices.count(choices[0]) == len(choices):
            # All of the same rows draft in the same new way: no tensors have to be rebuilt.
            self.rows = [self.rows[0].under(choices[0], self._runner.width(choices[0].plan))]
            return
        for rows in self.rows:
            for b, request in enumerate(rows.requests):
                self._sources[request.id] = (rows.context, b)
        alike: dict[tuple[Choice, bool], list[Request]] = {}
        for request, choice in zip(running, choices, strict=True):
            alike.setdefault((choice, request.never_drafts), []).append(request)
        self.rows = [self._group(requests, choice) for (choice, _), requests in alike.items()]
        self._sources.clear()

    def hold(self, reading: bool) -> bool:
        """Let the groups stand for another step without asking, if they can; return whether they do.

        They do for the same rows, for as many steps as the policy's last answer holds, or if it has only one. To be
        called once a step.

        Args:
            reading: whether prompts are being read.
        """
        if self._changed:
            return False
        if self._policy.is_fixed:
            return not self._has_predictions
        if not self._held or reading:
            return False
        self._held -= 1
        return True

    def _predicted(self, request: Request) -> Choice | None:
        """Return the draft of a row that keeps to its prediction; None for others and for rows to decode plainly."""
        plain = request.choice is not None and not request.choice.plan.depth
        if plain or request.prediction is None or not request.prediction.has_guesses:
            return None
        return PREDICTION

    def _group(self, requests: list[Request], choice: Choice) -> Rows:
        """Make a group of these requests, wherever their tensors are now."""
        # Within both kinds by slot, so that rows in the first slots need not be gathered.
        requests.sort(key=lambda request: (not is_simple(request.params), request.slot))
        parts: list[tuple[Context, list[int]]] = []
        for request in requests:
            context, b = self._sources[request.id]
            if parts and parts[-1][0] is context:
                parts[-1][1].append(b)
            else:
                parts.append((context, [b]))
        bucket = self._runner.bucket(len(requests), len(requests) + len(self._spare_slots))
        context = gather(parts, self._runner.width(choice.plan), bucket, self._spare_slots)
        return make_rows(requests, context, choice, self._vocab_size, self._penalties)
