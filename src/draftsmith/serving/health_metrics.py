"""The recent acceptance of drafts as metrics for Prometheus; see `Health`."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from draftsmith.serving.health import Health, Share

SERVER = ["model_name", "engine"]


class HealthMetrics(Collector):
    """The state of a server's drafts, read on each scrape.

    Args:
        labels: the model's name and the engine's, as with all metrics.
    """

    def __init__(self, health: Health, labels: tuple[str, str]) -> None:
        self._health, self._labels = health, labels

    def collect(self) -> Iterator[Metric]:
        recent = [(one.drafter, one.task, one.recent()) for one in self._health]
        yield self._shares("recent", "of the last steps", recent)
        usual = [(one.drafter, one.task, one.usual()) for one in self._health]
        yield self._shares("usual", "before the last steps", usual)
        collapsed = GaugeMetricFamily(
            "draftsmith_acceptance_collapsed", "Whether fewer guesses stay than usual.",
            labels=[*SERVER, "drafter", "task"],
        )
        for one in self._health:
            collapsed.add_metric([*self._labels, one.drafter, one.task], float(one.alarm is not None))
        yield collapsed
        looping = GaugeMetricFamily(
            "draftsmith_texts_repeating", "Texts being written that repeat themselves.", labels=SERVER
        )
        looping.add_metric(self._labels, self._health.looping)
        yield looping
        alarms = CounterMetricFamily("draftsmith_alarms", "Alarms so far, by kind.", labels=[*SERVER, "alarm"])
        for kind, count in self._health.alarms.items():
            alarms.add_metric([*self._labels, kind], count)
        yield alarms

    def _shares(self, name: str, when: str, found: list[tuple[str, str, list[Share]]]) -> Metric:
        family = GaugeMetricFamily(
            f"draftsmith_acceptance_{name}", f"Share of guesses that stayed, {when}, by depth counted from 0.",
            labels=[*SERVER, "drafter", "task", "position"],
        )
        for drafter, task, shares in found:
            for depth, share in enumerate(shares):
                if share.guesses:
                    family.add_metric([*self._labels, drafter, task, str(depth)], share.value)
        return family
