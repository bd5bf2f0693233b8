"""The recent acceptance of drafts, by drafter and by the task of the requests, and alarms where something is wrong.

Only the event loop writes and reads here. What is kept is bounded, whatever requests say and however long they run.
"""

import logging
import math
import re
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from draftsmith.engine import Chunk
from draftsmith.engine.made import Made
from draftsmith.serving.repetition import Repetition, reach

log = logging.getLogger("draftsmith.serving")

BLOCK, RECENT = 128, 8
"""Steps with guesses in one block, and how many finished blocks count as recent."""
FADE = 31 / 32
"""The weight of older blocks shrinks by this with each new one; so "usual" stands for some 4,000 steps."""
ENOUGH_RECENT, ENOUGH_USUAL, ENOUGH_TEXTS = 64, 512, 3
"""An alarm needs at least this many recent guesses of a depth, earlier guesses of it, and different recent texts."""
COLLAPSED, RECOVERED = 0.5, 0.75
"""An alarm begins below the first and ends at the second of these fractions of the usual share."""
MATTERS = 0.1
"""The least usual share for which an alarm is given: guesses that hardly ever stay gain nothing anyway."""
SURE = 4.0
"""Standard errors by which the recent and the usual share have to differ."""
DEPTHS = 8
"""Depths that are counted."""
MOST, FORGOTTEN = 64, 10_000
"""The most pairs of drafter and task that are kept apart, and the steps after which an unused one may be replaced."""
NO_TASK, OTHER = "none", "other"
_NAME = re.compile(r"[\w.:/-]{1,64}")


@dataclass(frozen=True)
class Share:
    """How many guesses of a depth there were, and how many stayed; only guesses whose predecessors stayed count."""

    guesses: float = 0.0
    stayed: float = 0.0

    @property
    def value(self) -> float:
        """The share that stayed."""
        return self.stayed / self.guesses if self.guesses else 0.0

    def __add__(self, other: "Share") -> "Share":
        return Share(self.guesses + other.guesses, self.stayed + other.stayed)

    def faded(self) -> "Share":
        """Return it as it counts one block later."""
        return Share(FADE * self.guesses, FADE * self.stayed)


@dataclass(frozen=True)
class Collapse:
    """Fewer guesses of a depth, counted from 0, stay than usual."""

    drafter: str
    task: str
    position: int
    recent: float
    usual: float


class Block:
    """Steps that are counted together, by how many guesses could have stayed and how many did, and their texts."""

    def __init__(self) -> None:
        self.steps = 0
        self.counts: Counter[tuple[int, int]] = Counter()
        self.texts: set[int] = set()

    def shares(self) -> list[Share]:
        """Return the share that stayed, for every depth."""
        return [
            Share(
                sum(count for (reached, accepted), count in self.counts.items() if reached > depth <= accepted),
                sum(count for (_, accepted), count in self.counts.items() if accepted > depth),
            )
            for depth in range(DEPTHS)
        ]


class Acceptance:
    """How many guesses of one drafter stayed in texts of one task: recently, and before."""

    def __init__(self, drafter: str, task: str) -> None:
        self.drafter, self.task = drafter, task
        self.steps = 0
        self.used = 0
        """The number of its newest step, counted over all pairs."""
        self.alarm: Collapse | None = None
        self._block = Block()
        self._blocks: deque[Block] = deque()
        self._usual = [Share()] * DEPTHS

    def take(self, reached: int, accepted: int, text: int) -> bool:
        """Note a step of a text, known by a number; return whether an alarm began or ended."""
        block = self._block
        self.steps += 1
        block.steps += 1
        block.counts[reached, accepted] += 1
        block.texts.add(text)
        if block.steps < BLOCK:
            return False
        self._blocks.append(block)
        self._block = Block()
        if len(self._blocks) > RECENT:
            oldest = self._blocks.popleft().shares()
            self._usual = [known.faded() + share for known, share in zip(self._usual, oldest, strict=True)]
        before, self.alarm = self.alarm, self._judge()
        return (before is None) != (self.alarm is None)

    def recent(self) -> list[Share]:
        """Return the shares of the last steps, the unfinished block included."""
        found = self._block.shares()
        for block in self._blocks:
            found = [share + more for share, more in zip(found, block.shares(), strict=True)]
        return found

    def usual(self) -> list[Share]:
        """Return the shares of the steps before them."""
        return self._usual

    def _judge(self) -> Collapse | None:
        recent = self.recent()
        if self.alarm is not None:
            at = self.alarm.position
            if recent[at].guesses < ENOUGH_RECENT or recent[at].value >= RECOVERED * self._usual[at].value:
                return None
            return Collapse(self.drafter, self.task, at, recent[at].value, self._usual[at].value)
        if len(set().union(*(block.texts for block in self._blocks))) < ENOUGH_TEXTS:
            return None
        for at, (now, before) in enumerate(zip(recent, self._usual, strict=True)):
            if now.guesses >= ENOUGH_RECENT and before.guesses >= ENOUGH_USUAL and has_collapsed(now, before):
                return Collapse(self.drafter, self.task, at, now.value, before.value)
        return None

    def told(self) -> dict[str, Any]:
        """Return it as JSON; shares are listed by depth, for depths that have guesses."""
        return {
            "drafter": self.drafter, "task": self.task, "steps": self.steps,
            "recent": [round(share.value, 4) for share in self.recent() if share.guesses],
            "usual": [round(share.value, 4) for share in self._usual if share.guesses],
        }


def has_collapsed(now: Share, before: Share) -> bool:
    """Return whether far fewer guesses stay now than before, by more than chance explains."""
    if before.value < MATTERS:
        return False
    both = (now + before).value
    error = math.sqrt(both * (1 - both) * (1 / now.guesses + 1 / before.guesses))
    return now.value < COLLAPSED * before.value and before.value - now.value > SURE * error


class Health:
    """Acceptance by drafter and task, and the alarms that are on."""

    def __init__(self) -> None:
        self._found: OrderedDict[tuple[str, str], Acceptance] = OrderedDict()  # the one used longest ago is the first
        self._steps = self._texts = 0
        self.alarms: Counter[str] = Counter({"collapse": 0, "loop": 0})
        """How many alarms there were, by kind."""
        self.looping = 0
        """Texts that are being written and repeat themselves."""

    def watch(self, task: str) -> "Watch":
        """Return a `Watch` for one text; its `end` has to be called."""
        self._texts += 1
        return Watch(self, task, self._texts)

    def note(self, task: str, made: Made, reached: int, text: int) -> None:
        """Note a step with guesses."""
        self._steps += 1
        one = self._found.get((made.drafter, task)) or self._new(made.drafter, task)
        one.used = self._steps
        self._found.move_to_end((one.drafter, one.task))
        if one.take(reached, made.accepted, text):
            self._tell(one)

    def __iter__(self) -> Iterator[Acceptance]:
        return iter(sorted(self._found.values(), key=lambda one: (one.drafter, one.task)))

    def collapses(self) -> list[Collapse]:
        """Return the alarms for guesses that stay less often than usual."""
        return [one.alarm for one in self if one.alarm is not None]

    def told(self) -> dict[str, Any]:
        """Return it as JSON."""
        alarms: list[dict[str, Any]] = [{"alarm": "collapse", **asdict(alarm)} for alarm in self.collapses()]
        if self.looping:
            alarms.append({"alarm": "loop", "texts": self.looping})
        return {"alarms": alarms, "acceptance": [one.told() for one in self]}

    def _new(self, drafter: str, task: str) -> Acceptance:
        """Return a new entry for a pair; where there is no room, the drafter's entry for all other tasks."""
        if len(self._found) >= MOST:
            oldest = next(iter(self._found.values()))
            if self._steps - oldest.used > FORGOTTEN:
                del self._found[oldest.drafter, oldest.task]
            else:
                task = OTHER
        found = self._found.get((drafter, task))
        if found is None:
            found = self._found[drafter, task] = Acceptance(drafter, task)
        return found

    def _tell(self, one: Acceptance) -> None:
        fields = one.told()
        if one.alarm is None:
            log.warning("the alarm of fewer guesses than usual has ended", extra={"fields": fields})
            return
        self.alarms["collapse"] += 1
        fields |= {"position": one.alarm.position}
        log.warning("fewer guesses stay than usual", extra={"fields": fields})


class Watch:
    """Follows one text for `Health`.

    Args:
        text: its number, which no other text has.
    """

    def __init__(self, health: Health, task: str, text: int) -> None:
        self._health, self._task, self._text = health, task, text
        self._repetition = Repetition()

    def take(self, chunk: Chunk) -> bool:
        """Note a piece of the text; return whether this piece showed that the text repeats itself."""
        made = chunk.made
        if made is None or (made.why is not None and made.why.label == "prediction"):
            self._repetition.note(chunk.tokens)
            return False  # guesses from the client's own prediction say nothing about a drafter
        reached = reach(made)
        if reached and chunk.completion is None:  # the last step of a text is cut where the text ends
            self._health.note(self._task, made, reached, self._text)
        if not self._repetition.take(chunk.tokens, made):
            return False
        self._health.looping += 1
        self._health.alarms["loop"] += 1
        log.warning("a text repeats itself", extra={"fields": {
            "drafter": made.drafter, "task": self._task, "period": self._repetition.period,
        }})
        return True

    def end(self) -> None:
        """Note that the text has ended, or that the client has left."""
        self._health.looping -= self._repetition.period is not None


def task_of(metadata: Mapping[str, Any] | None) -> str:
    """Return the task that a request names in `metadata.task`, a short name; anything else counts as none."""
    task = None if metadata is None else metadata.get("task")
    return task if isinstance(task, str) and _NAME.fullmatch(task) else NO_TASK
