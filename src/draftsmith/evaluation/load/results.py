"""Results on disk: one JSON of all levels, a CSV table, and files as other serving benchmarks write and read them."""

import csv
import io
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.evaluation.load.settings import LoadSettings
from draftsmith.types import DraftsmithError

NEEDED = ("output_throughput", "median_tpot_ms")


def settings_json(settings: LoadSettings, model: str) -> dict[str, Any]:
    """Return the settings of a measurement, mostly by the names of the options, without the API key."""
    work, arrivals = settings.workload, settings.arrivals
    return {
        "base_url": settings.server.base_url,
        "endpoint": settings.server.endpoint,
        "model": model,
        "dataset": Path(work.dataset).name,
        "clients": "homogeneous" if work.homogeneous else "heterogeneous",
        "input_len": None if work.input_lens is None else list(work.input_lens),
        "output_len": list(work.output_lens),
        "temperature": work.temperature,
        "ignore_eos": work.ignore_eos,
        "extra_body": dict(work.extra_body),
        "seed": work.seed,
        "request_rate": rate_json(arrivals.rate),
        "burstiness": arrivals.burstiness,
        "ramp_up_strategy": arrivals.ramp,
        "ramp_up_start_rps": arrivals.ramp_start,
        "ramp_up_end_rps": arrivals.ramp_end,
        "num_prompts": settings.prompts,
        "num_warmups": settings.warmups,
        "goodput": dict(settings.goodput),
    }


def rate_json(rate: float) -> float | str:
    """Return a rate in a form that JSON can hold."""
    return "inf" if math.isinf(rate) else rate


def common_file(
    level: Mapping[str, Any], settings: Mapping[str, Any], date: str, number: int = 0
) -> tuple[str, dict[str, Any]]:
    """Return the name and the content of the file that serving benchmarks write for one level.

    Args:
        number: how many earlier levels have the same number of clients.
    """
    model = re.sub(r"[^\w.-]+", "-", settings["model"].rsplit("/", 1)[-1])
    clients = level["max_concurrency"]
    stamp = date.replace("-", "").replace(":", "").replace("T", "-").removesuffix("Z")
    parts = [
        settings["endpoint"], f"{settings['request_rate']}qps",
        *([f"concurrency{clients}"] if clients is not None else []), model, stamp,
        *([str(number + 1)] if number else []),
    ]
    content = {
        "date": stamp,
        "endpoint_type": "openai-chat" if settings["endpoint"] == "chat" else "openai",
        "model_id": settings["model"],
        "num_prompts": settings["num_prompts"],
        "request_rate": settings["request_rate"],
        "burstiness": settings["burstiness"],
        "max_concurrency": clients,
        **level,
    }
    return "-".join(parts) + ".json", content


def as_csv(levels: Sequence[Mapping[str, Any]]) -> str:
    """Return one line per level with all single values, under a line of names; lists and failures are left out."""
    flat = [{key: value for key, value in level.items() if not isinstance(value, list | dict)} for level in levels]
    names = list(dict.fromkeys(key for level in flat for key in level))
    text = io.StringIO()
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


@dataclass(frozen=True)
class Saved:
    """A result that was read from a file; `settings` is empty where another benchmark wrote it."""

    levels: list[dict[str, Any]]
    settings: dict[str, Any]
    complete: bool


def read_result(path: Path) -> Saved:
    """Read a result of `draftsmith load --json`, or the file of another serving benchmark.

    Raises:
        DraftsmithError: it cannot be read, or lacks the throughput or the time a token.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DraftsmithError(f"{path} cannot be read ({error.strerror}); check the path.") from error
    except ValueError as error:
        raise DraftsmithError(f"{path} is no JSON; give a result that --json wrote.") from error
    levels = found.get("levels", [found]) if isinstance(found, dict) else None
    if not isinstance(levels, list) or not levels or not all(_is_level(level) for level in levels):
        raise DraftsmithError(
            f"{path} holds no level with {' and '.join(NEEDED)}; give a result that --json wrote, measured with tpot."
        )
    settings = found.get("settings")
    given = dict(settings) if isinstance(settings, dict) else {}
    return Saved([dict(level) for level in levels], given, found.get("complete") is not False)


def differences(first: Saved, second: Saved) -> list[str]:
    """Say which result is incomplete, and in which settings the two differ, except the server's address."""
    told = [f"{name} was interrupted." for name, one in (("A", first), ("B", second)) if not one.complete]
    for name, a in first.settings.items():
        b = second.settings.get(name, a)
        if name != "base_url" and a != b:
            told.append(f"{name} is {a!r} in A and {b!r} in B.")
    return told


def _is_level(level: Any) -> bool:
    return isinstance(level, dict) and all(isinstance(level.get(name), int | float) for name in NEEDED)
