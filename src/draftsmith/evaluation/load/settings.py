"""What to send to which server, and what to report: checked before anything is imported or sent."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from math import inf, isfinite
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from draftsmith.types import DraftsmithError

Endpoint = Literal["completions", "chat"]
RampStrategy = Literal["linear", "exponential"]

METRICS = ("ttft", "tpot", "itl", "e2el")
PERCENTILES = (50.0, 95.0, 99.0)
MIXED = "mixed"
TASKS = ("code", "prose", "dialogue", MIXED)
RANDOM = "random"
DATASETS = (*TASKS, RANDOM)


@dataclass(frozen=True)
class Server:
    """The server to be measured; nothing is ever sent anywhere else.

    Args:
        base_url: http or https, host and port; a path before `/v1` is kept, and `/v1` itself is optional.
        model: None takes the server's only model.
        api_key: sent as a bearer token; never written to a result.
        timeout: seconds without a byte after which a request counts as failed.
        ready_timeout: most seconds to wait until the server is ready; 0 does not ask whether it is.
    """

    base_url: str
    model: str | None = None
    endpoint: Endpoint = "completions"
    api_key: str | None = field(default=None, repr=False)
    timeout: float = 600.0
    ready_timeout: float = 600.0

    def __post_init__(self) -> None:
        given = self.base_url
        try:
            parts = urlsplit(given)
            port_fits = parts.port is None or parts.port > 0
        except ValueError:
            port_fits = False
        if not port_fits or parts.scheme not in ("http", "https") or not parts.hostname:
            raise DraftsmithError(f"--base-url is {given!r}; give an address such as http://127.0.0.1:8000.")
        if parts.username or parts.password or parts.query or parts.fragment:
            raise DraftsmithError(
                "--base-url holds more than an address; leave out what stands before an @ or behind a ? or #, and give "
                "a key with --api-key."
            )
        object.__setattr__(self, "base_url", given.rstrip("/").removesuffix("/v1").rstrip("/"))
        if self.endpoint not in get_args(Endpoint):
            raise DraftsmithError(f"--endpoint is {self.endpoint!r}; choose completions or chat.")
        if not self.timeout > 0:
            raise DraftsmithError(f"--timeout is {self.timeout:g}; give seconds above 0.")
        if not self.ready_timeout >= 0:
            raise DraftsmithError(f"--ready-check-timeout-sec is {self.ready_timeout:g}; give 0 or more seconds.")
        if self.api_key is not None and (not self.api_key.isascii() or not self.api_key.isprintable()):
            raise DraftsmithError("--api-key holds characters that no HTTP header can carry; give it as it was issued.")


@dataclass(frozen=True)
class Arrivals:
    """When requests are sent.

    Args:
        rate: requests a second on average; inf sends each as soon as the number of clients allows.
        burstiness: shape of the gamma distribution of gaps: 1 is a Poisson process, less is burstier, more is more
            even; inf makes all gaps equal.
        ramp: lets the rate rise from `ramp_start` to `ramp_end` over the requests, instead of `rate`.
    """

    rate: float = inf
    burstiness: float = 1.0
    ramp: RampStrategy | None = None
    ramp_start: float | None = None
    ramp_end: float | None = None

    def __post_init__(self) -> None:
        for name, value in (("--request-rate", self.rate), ("--burstiness", self.burstiness)):
            if not value > 0:
                raise DraftsmithError(f"{name} is {value:g}; give a number above 0.")
        if self.ramp is None:
            if self.ramp_start is not None or self.ramp_end is not None:
                raise DraftsmithError("a ramp needs --ramp-up-strategy; choose linear or exponential.")
            return
        if self.ramp not in get_args(RampStrategy):
            raise DraftsmithError(f"--ramp-up-strategy is {self.ramp!r}; choose linear or exponential.")
        if isfinite(self.rate):
            raise DraftsmithError("--request-rate and --ramp-up-strategy exclude each other; give one of them.")
        for name, end in (("--ramp-up-start-rps", self.ramp_start), ("--ramp-up-end-rps", self.ramp_end)):
            if end is None or not isfinite(end) or end <= 0:
                raise DraftsmithError(f"a ramp needs {name}, requests a second above 0; give it.")

    @property
    def open(self) -> bool:
        """Whether requests are sent at times of their own, however many the server has finished."""
        return self.ramp is not None or isfinite(self.rate)


@dataclass(frozen=True)
class Workload:
    """What the requests hold.

    Args:
        dataset: a task of the embedded prompts, "mixed" for all of them, "random", or a path to a file of prompts.
        input_lens: tokens of a prompt; with several lengths, one is drawn for every request. None takes the user's
            texts whole, and the beginnings of embedded texts.
        output_lens: tokens to be written; with several numbers, one is drawn for every request.
        vocab_size: the size for random ids; None draws among the ids that `/tokenize` gives for the embedded texts.
        extra_body: fields added to every request; they replace fields of the same name.
    """

    dataset: str = "mixed"
    input_lens: tuple[int, ...] | None = None
    output_lens: tuple[int, ...] = (128,)
    vocab_size: int | None = None
    temperature: float = 0.0
    ignore_eos: bool = False
    extra_body: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dataset not in DATASETS and not Path(self.dataset).is_file():
            near = get_close_matches(self.dataset, DATASETS, 1)
            hint = f"did you mean {near[0]}?" if near else f"give one, or choose among {', '.join(DATASETS)}."
            raise DraftsmithError(f"--dataset is {self.dataset!r}, which is no file; {hint}")
        for name, lengths in (("--input-len", self.input_lens), ("--output-len", self.output_lens)):
            if lengths is not None and (not lengths or min(lengths) < 1):
                given = ",".join(map(str, lengths)) or "empty"
                raise DraftsmithError(f"{name} is {given}; give numbers of tokens of at least 1.")
        if self.dataset == RANDOM and self.input_lens is None:
            object.__setattr__(self, "input_lens", (64,))
        if self.vocab_size is not None and self.vocab_size < 1:
            raise DraftsmithError(f"--vocab-size is {self.vocab_size}; give the number of ids that the model has.")
        if not (isfinite(self.temperature) and self.temperature >= 0):
            raise DraftsmithError(f"--temperature is {self.temperature:g}; give 0 for greedy, or more.")
        if self.seed < 0:
            raise DraftsmithError(f"--seed is {self.seed}; give a whole number of at least 0.")
        copies = self.extra_body.get("n")
        if copies not in (None, 1):
            raise DraftsmithError(
                f"--extra-body asks for n = {json.dumps(copies)[:40]} answers to a request, which come in one stream "
                "with one count of tokens, so none has a time of its own; leave n out, and send more requests by "
                "--num-prompts."
            )

    @property
    def homogeneous(self) -> bool:
        """Whether all requests are alike: one length of prompts, and one of texts, which nothing ends early."""
        lengths = (self.input_lens, self.output_lens)
        return self.ignore_eos and all(choices is not None and len(set(choices)) == 1 for choices in lengths)


@dataclass(frozen=True)
class LoadSettings:
    """A measurement: one level of load, or one for each number of clients.

    Args:
        clients: the most requests in flight, one level for each number; None is no limit.
        prompts: measured requests of a level.
        warmups: requests before them that are not measured.
        goodput: for each metric, the most milliseconds that a good request may take.
        metrics: the metrics that are reported.
    """

    server: Server
    workload: Workload = field(default_factory=Workload)
    arrivals: Arrivals = field(default_factory=Arrivals)
    clients: tuple[int | None, ...] = (None,)
    prompts: int = 64
    warmups: int = 0
    goodput: Mapping[str, float] = field(default_factory=dict)
    metrics: tuple[str, ...] = METRICS
    percentiles: tuple[float, ...] = PERCENTILES

    def __post_init__(self) -> None:
        most = max((count for count in self.clients if count is not None), default=1)
        if any(count is not None and count < 1 for count in self.clients) or not self.clients:
            given = ",".join(map(str, self.clients)) or "empty"
            raise DraftsmithError(
                f"the number of clients is {given}; give --max-concurrency or --sweep numbers of at least 1."
            )
        if self.prompts < most:
            raise DraftsmithError(
                f"--num-prompts is {self.prompts}, too few for {most} at a time; give at least {most}."
            )
        if self.warmups < 0:
            raise DraftsmithError(f"--num-warmups is {self.warmups}; give 0 or more.")
        check_metrics(self.metrics, "--percentile-metrics")
        check_metrics(tuple(self.goodput), "--goodput")
        for value in self.percentiles:
            if not 0 <= value <= 100:
                raise DraftsmithError(f"--metric-percentiles has {value:g}; give numbers from 0 to 100.")
        if self.server.endpoint == "chat" and (self.workload.dataset == RANDOM or self.workload.input_lens is not None):
            raise DraftsmithError(
                "--input-len and --dataset random count the tokens of a plain prompt, and a conversation goes through "
                "a template; leave them out, or take --endpoint completions."
            )


def check_metrics(names: Sequence[str], option: str) -> None:
    """Refuse a name that is no metric, and suggest the nearest one."""
    for name in names:
        if name not in METRICS:
            near = get_close_matches(name, METRICS, 1)
            hint = f"did you mean {near[0]}?" if near else f"choose among {', '.join(METRICS)}."
            raise DraftsmithError(f"{option} has {name!r}, which is no metric; {hint}")


def read_goodput(words: Sequence[str]) -> dict[str, float]:
    """Read "ttft:200", "tpot:30" … in milliseconds; DraftsmithError names the word that is wrong."""
    found: dict[str, float] = {}
    for word in words:
        name, colon, value = word.partition(":")
        try:
            limit = float(value) if colon else -1.0
        except ValueError:
            limit = -1.0
        if not limit > 0:
            raise DraftsmithError(f"{word!r} is no limit of --goodput; give metric and milliseconds, as in ttft:200.")
        check_metrics((name,), "--goodput")
        if name in found:
            raise DraftsmithError(f"--goodput has {name} twice; give it once.")
        found[name] = limit
    return found
