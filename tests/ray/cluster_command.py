"""The command `tinkex cluster …` with fake nodes instead of `tinkex serve`."""

from __future__ import annotations

import sys

from tests.ray.raylets import FAKE_NODE
from tinkex.cli import cluster_ray
from tinkex.cli.commands import Command
from tinkex.cli.main import main

if __name__ == "__main__":
    real = cluster_ray.VERBS["up"]
    fake = Command(lambda args: cluster_ray.run_up(args, FAKE_NODE), *real.arguments)
    from tinkex.cli import cluster

    cluster.VERBS["up"] = fake
    sys.exit(main())
