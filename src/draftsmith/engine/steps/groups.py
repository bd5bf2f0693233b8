"""Which running rows draft alike: they form a group, whose tensors are put together anew only when somebody changes."""

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


class Groups:
    """The rows that decode, in groups that each draft by one choice of the policy.

    Args:
        policy: is asked before every step, unless its last answer stands or it always answers the same.
        runner: says how many rows a group is padded to.
        spare_slots: where the rows of padding write.
        penalties: what penalties remember of every slot.
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
        # Of rows that are not in their group yet: a context, and where in it they are.
        self._sources: dict[int, tuple[Context, int]] = {}

    def enter(self, request: Request, context: Context, b: int) -> None:
        """Let a request in whose tensors are row b of a context."""
        self._sources[request.id] = (context, b)
        self._changed = True

    def leave(self, request: Request) -> None:
        """Let a request go; its row goes when the groups are settled next."""
        self._sources.pop(request.id, None)
        self._changed = True

    def clear(self) -> None:
        """Forget everybody."""
        self.rows = []
        self._sources.clear()

    def settle(self, running: Sequence[Request], load: Load) -> None:
        """Ask the policy about the rows that have no choice of their own, and put those that will draft alike together.

        Nothing moves where nothing changed.

        Raises:
            DraftsmithError: the policy chose what is none of its choices.
        """
        if self._held and not self._changed and load.reading == 0:
            self._held -= 1
            return
        own = [request.choice for request in running]
        self._has_predictions = any(request.prediction is not None for request in running)
        if self._has_predictions:
            own = [self._predicted(request) or choice for request, choice in zip(running, own, strict=True)]
            for request, choice in zip(running, own, strict=True):
                request.why = EXPECTED if choice is PREDICTION else None if choice is None else ASKED
        left = [request for request, choice in zip(running, own, strict=True) if choice is None]
        histories = [request.history for request in left]
        asked = self._policy.choose(load, histories)
        self._held = 0 if self._has_predictions else self._policy.holds
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
            # The same rows draft otherwise, all of them: nothing has to be put together.
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

    @property
    def are_settled(self) -> bool:
        """Whether the policy cannot answer otherwise than last time, for the rows that were there."""
        return not self._changed and self._policy.is_fixed and not self._has_predictions

    def _predicted(self, request: Request) -> Choice | None:
        """Return the draft of a row that keeps to its prediction; one that is to decode plainly has none."""
        plain = request.choice is not None and not request.choice.plan.depth
        if plain or request.prediction is None or not request.prediction.has_guesses:
            return None
        return PREDICTION

    def _group(self, requests: list[Request], choice: Choice) -> Rows:
        """Make a group of these requests, wherever their tensors are now."""
        # In the order of their slots, which spares gathering where these are the first ones.
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
