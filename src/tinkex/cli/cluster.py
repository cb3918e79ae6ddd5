"""`tinkex cluster`: the nodes of a cluster."""

from __future__ import annotations

from tinkex.cli import cluster_ray

VERBS = {**cluster_ray.VERBS}
