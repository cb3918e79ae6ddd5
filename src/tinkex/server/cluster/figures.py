"""The metrics of a node: what it owns, what it passes on, who is there."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client.core import Metric

    from tinkex.server.cluster.member import Member


class ClusterFigures(Collector):
    """Counted by the parts of a node, and read for each scrape."""

    def __init__(self, member: Member) -> None:
        self._member = member
        # Mutable state: requests passed on by outcome.
        self.passed_on: Counter[str] = Counter(answered=0, unreachable=0, not_owner=0)

    def collect(self) -> Iterator[Metric]:
        """Read for each scrape."""
        member, keys = self._member, self._member.keys
        yield GaugeMetricFamily(
            "tinkex_cluster_keys", "Models and samplers that this node owns.", len(keys.owned)
        )
        yield GaugeMetricFamily(
            "tinkex_cluster_lease_age_seconds",
            "Time since this node renewed its lease.",
            member.lease_age_s,
        )
        nodes = GaugeMetricFamily(
            "tinkex_cluster_nodes", "Nodes, as this one sees them.", labels=["state"]
        )
        states = Counter("silent" if n.silent else n.state for n in member.roster.nodes.values())
        for state, count in states.items():
            nodes.add_metric([state], count)
        yield nodes
        passed_on = CounterMetricFamily(
            "tinkex_cluster_passed_on", "Requests passed on to other nodes.", labels=["outcome"]
        )
        for outcome, count in self.passed_on.items():
            passed_on.add_metric([outcome], count)
        yield passed_on
        yield CounterMetricFamily(
            "tinkex_cluster_taken_over", "Keys that this node took over.", keys.taken_over
        )
        yield CounterMetricFamily(
            "tinkex_cluster_handed_over", "Keys that this node handed over.", keys.handed_over
        )
        yield CounterMetricFamily(
            "tinkex_samples_elsewhere",
            "Samples of this node's samplers that other nodes computed.",
            member.samples.computed,
        )
