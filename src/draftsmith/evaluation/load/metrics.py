"""The numbers of one level, by the names and in the units that serving benchmarks share."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from draftsmith.evaluation.load.drive import Level
from draftsmith.evaluation.load.records import Record
from draftsmith.evaluation.load.settings import LoadSettings
from draftsmith.evaluation.load.speculation import Counters, acceptance


def summarise(
    level: Level, settings: LoadSettings, before: Counters | None = None, after: Counters | None = None
) -> dict[str, Any]:
    """Return the result of a level: counts, rates a second, and milliseconds of each metric.

    TTFT is the time to the first chunk with text, E2EL the time to the end of the answer, TPOT (E2EL - TTFT) / (n - 1)
    of each request, and ITL the gaps between chunks with text, each of which may carry several tokens. Token counts are
    those of the server's usage chunks. Times of failed requests are left out; an answer without text has neither TTFT
    nor TPOT.
    """
    done = [record for record in level.records if record.ok]
    failed = [record for record in level.records if not record.ok]
    seconds = level.duration
    inputs = sum(record.input_tokens or 0 for record in done)
    outputs = sum(record.output_tokens or 0 for record in done)
    good = [record for record in done if is_good(record, settings.goodput)]
    found: dict[str, Any] = {
        "max_concurrency": level.clients,
        "complete": level.complete,
        "duration": seconds,
        "completed": len(done),
        "failed": len(failed),
        "without_text": sum(record.first is None for record in done),
        "sent_again": sum(record.again for record in level.records),
        "unfinished": level.unfinished + level.unsent,
        "total_input_tokens": inputs,
        "total_output_tokens": outputs,
        "request_throughput": len(done) / seconds,
        "request_goodput": len(good) / seconds if settings.goodput else None,
        "goodput_share": len(good) / len(level.records) if settings.goodput and level.records else None,
        "output_throughput": outputs / seconds,
        "total_token_throughput": (inputs + outputs) / seconds,
        "max_concurrent_requests": level.peak,
        # Clients that ask again as soon as they are answered are never late.
        "p99_client_wait_ms": milliseconds(np.percentile(level.waits, 99)) if settings.arrivals.open else None,
        "p99_client_lag_ms": milliseconds(level.lag),
        "client_cpu_share": level.cpu_share,
        "client_was_bottleneck": level.bottleneck,
    }
    values = metric_values(done)
    for name in settings.metrics:
        found |= statistics_of(name, values[name], settings.percentiles)
    found |= acceptance(before, after)
    lengths = [record.acceptance_length for record in done if record.acceptance_length is not None]
    if lengths:
        found["spec_decode_mean_request_acceptance_length"] = float(np.mean(lengths))
    if failed:
        found["failures"] = dict(Counter(record.error for record in failed).most_common(5))
    return found


def detailed(level: Level) -> dict[str, Any]:
    """Return the measurements of every request, in the order in which they were sent; times in seconds."""
    ordered = sorted(level.records, key=lambda record: record.sent)
    return {
        "input_lens": [record.input_tokens or 0 for record in ordered],
        "output_lens": [record.output_tokens or 0 for record in ordered],
        "start_times": [record.sent - level.began for record in ordered],
        "client_waits": list(level.waits),
        "ttfts": [(record.ttft or 0.0) if record.ok else 0.0 for record in ordered],
        "itls": [record.gaps for record in ordered],
        "latencies": [record.e2el if record.ok else 0.0 for record in ordered],
        "generated_texts": ["".join(record.text) for record in ordered],
        "errors": [record.error for record in ordered],
    }


def metric_values(done: Sequence[Record]) -> dict[str, list[float]]:
    """Return all values of every metric, in seconds."""
    return {
        "ttft": [record.ttft for record in done if record.ttft is not None],
        "tpot": [record.tpot for record in done if record.tpot is not None],
        "itl": [gap for record in done for gap in record.gaps],
        "e2el": [record.e2el for record in done],
    }


def statistics_of(name: str, values: Sequence[float], percentiles: Sequence[float]) -> dict[str, float | None]:
    """Return mean, median, standard deviation and percentiles in milliseconds; None of no values."""
    of = np.asarray(values, dtype=np.float64)
    some = of.size > 0
    found = {
        f"mean_{name}_ms": milliseconds(of.mean()) if some else None,
        f"median_{name}_ms": milliseconds(np.median(of)) if some else None,
        f"std_{name}_ms": milliseconds(of.std()) if some else None,
    }
    for percentile in percentiles:
        key = f"p{percentile:g}_{name}_ms"
        found[key] = milliseconds(np.percentile(of, percentile)) if some else None
    return found


def is_good(record: Record, limits: Mapping[str, float]) -> bool:
    """Whether a request kept every limit; the limit of ITL is for the mean gap, and one token has no TPOT to limit.

    An answer without text misses limits of TTFT and TPOT, because the time of its first token is unknown.
    """
    if record.first is None and not limits.keys().isdisjoint(("ttft", "tpot")):
        return False
    mean_gap = sum(record.gaps) / len(record.gaps) if record.gaps else None
    taken = {"ttft": record.ttft, "tpot": record.tpot, "itl": mean_gap, "e2el": record.e2el}
    for name, most in limits.items():
        value = taken[name]
        if value is not None and milliseconds(value) > most:
            return False
    return True


def milliseconds(seconds: "float | np.floating[Any]") -> float:
    """Return seconds as milliseconds."""
    return float(seconds) * 1000.0
