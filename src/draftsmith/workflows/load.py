"""A server under load, level after level: `draftsmith load`, from Python."""

import asyncio
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from draftsmith.evaluation.load.arrivals import planned_times
from draftsmith.evaluation.load.client import Client, connected
from draftsmith.evaluation.load.drive import Level, drive
from draftsmith.evaluation.load.metrics import detailed, summarise
from draftsmith.evaluation.load.ready import OnWait, wait_until_ready
from draftsmith.evaluation.load.results import settings_json
from draftsmith.evaluation.load.settings import LoadSettings
from draftsmith.evaluation.load.workload import Requests, body_of, gather_requests, read_texts
from draftsmith.provenance import client_provenance
from draftsmith.types import DraftsmithError


@dataclass
class LoadResult:
    """What has been measured so far; `as_json` is what `draftsmith load --json` writes.

    Args:
        settings: the settings, by the names of the options.
        levels: the numbers of each level, see `evaluation.load.metrics.summarise`.
        details: for each level, what was measured of every request.
        complete: whether all levels were measured to their end.
        notes: remarks that readers of the numbers should know.
    """

    provenance: dict[str, Any]
    settings: dict[str, Any]
    levels: list[dict[str, Any]] = field(default_factory=list)
    details: list[dict[str, Any]] = field(default_factory=list)
    complete: bool = False
    notes: list[str] = field(default_factory=list)

    @property
    def date(self) -> str:
        """When the measurement began, in UTC."""
        return str(self.provenance["date"])

    def as_json(self, details: bool = False) -> dict[str, Any]:
        """Return everything; with `details`, also the raw times and texts of every request."""
        levels = self.levels
        if details:
            levels = [level | more for level, more in zip(self.levels, self.details, strict=True)]
        return {
            "provenance": self.provenance,
            "settings": self.settings,
            "complete": self.complete,
            "notes": self.notes,
            "levels": levels,
        }


Progress = Callable[[str, int, int], None]
LATE = 0.1
"""Waiting for a free client is reported if it exceeds this share of the median time to the first token."""


def measure_load(
    settings: LoadSettings,
    *,
    on_level: Callable[[LoadResult], None] = lambda result: None,
    on_progress: Progress = lambda label, done, every: None,
    on_wait: OnWait = lambda told: None,
) -> LoadResult:
    """Measure a server under every load of the settings, one after the other, as soon as it is ready.

    Args:
        on_level: called with the result so far after each level, also if it was interrupted.
        on_progress: called after each request with the level's name, the number of finished requests, and their total.
        on_wait: called with a sentence if the server is not ready yet.

    Raises:
        DraftsmithError: the server cannot be reached, is not ready in time, refuses access, or answered no request of a
            level.
        KeyboardInterrupt: Ctrl-C; `on_level` has received what was measured by then.
    """
    return asyncio.run(_measure(settings, on_level, on_progress, on_wait))


async def _measure(
    settings: LoadSettings, on_level: Callable[[LoadResult], None], on_progress: Progress, on_wait: OnWait
) -> LoadResult:
    texts = read_texts(settings.workload)
    await wait_until_ready(settings.server, on_wait)
    async with connected(settings.server) as (client, model):
        result = LoadResult(client_provenance(secret=settings.server.api_key), settings_json(settings, model))

        async def tokenize(text: str) -> list[int]:
            return await client.tokenize(text, model)

        requests = await gather_requests(settings.workload, settings.server.endpoint, texts, tokenize)
        await _warm_up(client, model, requests, settings, on_progress)
        for clients in settings.clients:
            level = Level(clients)
            before = await client.counters()
            try:
                await _run_level(level, client, model, requests, settings, result, on_progress)
            finally:
                # After an interruption there is no time to ask the server again.
                after = await client.counters() if level.complete else None
                if any(record.ok for record in level.records):
                    result.levels.append(summarise(level, settings, before, after))
                    result.details.append(detailed(level))
                    _note(result, level)
                    result.complete = level.complete and len(result.levels) == len(settings.clients)
                    on_level(result)
            _check_any(level)
    return result


async def _run_level(
    level: Level,
    client: Client,
    model: str,
    requests: Requests,
    settings: LoadSettings,
    result: LoadResult,
    on_progress: Progress,
) -> None:
    made = requests.make(settings.prompts)
    repeated = sum(request.repeated for request in made)
    if repeated:
        result.notes.append(
            f"{level.name}: {repeated} of {len(made)} prompts had been sent before, and a server that remembers "
            "prompts reads those faster; give more texts for other times to the first token."
        )
    bodies = [
        body_of(request, settings.workload, settings.server.endpoint, model, client.is_ours) for request in made
    ]
    times = planned_times(settings.arrivals, len(bodies), settings.workload.seed)
    await drive(
        level, bodies, times, client.send,
        lambda record: on_progress(level.name, len(level.records), len(bodies)),
    )


async def _warm_up(
    client: Client, model: str, requests: Requests, settings: LoadSettings, on_progress: Progress
) -> None:
    """Send requests that are not measured, as many at once as the largest level has clients."""
    if not settings.warmups:
        return
    counts = [count for count in settings.clients if count is not None]
    level = Level(max(counts) if len(counts) == len(settings.clients) else None)
    made = requests.make(settings.warmups)
    bodies = [
        body_of(request, settings.workload, settings.server.endpoint, model, client.is_ours) for request in made
    ]
    await drive(
        level, bodies, [0.0] * len(bodies), client.send,
        lambda record: on_progress("warming up", len(level.records), len(bodies)),
    )
    _check_any(level)


def _check_any(level: Level) -> None:
    """Refuse a level without a single answer: only the server's error message can be reported."""
    if level.records and not any(record.ok for record in level.records):
        raise DraftsmithError(f"all {len(level.records)} requests failed; the first because {level.records[0].error}.")


def _note(result: LoadResult, level: Level) -> None:
    """Add remarks that readers of this level's numbers should know."""
    found = result.levels[-1]
    if level.bottleneck:
        result.notes.append(
            f"{level.name}: the load generator itself was held up (its timers were late by {1000 * level.lag:.0f} ms "
            f"at the 99th percentile, and it took {level.cpu_share:.0%} of a core), so the server may be faster than "
            "shown; run it on another machine, or with fewer clients."
        )
    if found["failed"]:
        most = next(iter(found["failures"]))
        result.notes.append(
            f"{level.name}: {found['failed']} of {len(level.records)} requests failed, most because {most}."
        )
    if found["without_text"]:
        result.notes.append(
            f"{level.name}: {found['without_text']} answers had no text in any chunk, so nobody knows when their first "
            "token came; they have no TTFT and no TPOT."
        )
    if found["sent_again"]:
        result.notes.append(
            f"{level.name}: {found['sent_again']} requests were sent again, because the server had closed a connection "
            "that was kept."
        )
    late, known = found["p99_client_wait_ms"] or 0.0, [record.ttft for record in level.records if record.ttft]
    if known and late > LATE * 1000 * statistics.median(known):
        result.notes.append(
            f"{level.name}: requests waited for a free client, {late:.0f} ms at the 99th percentile, and no time here "
            "and no goodput counts that; allow more clients to see what users would."
        )
    if not level.complete:
        result.notes.append(
            f"{level.name}: interrupted with {found['unfinished']} requests not finished; they count nowhere."
        )
