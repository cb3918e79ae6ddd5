"""The command `tinkex cluster …` with programs of the tests instead of `tinkex serve`.

Fake nodes, where `TINKEX_FAKE_EVENTS` says what file they write to; otherwise real ones whose
connections to the database have their names.
"""

from __future__ import annotations

import os
import sys

from tests.ray.raylets import FAKE_NODE, NAMED_NODE
from tinkex.cli import cluster_ray
from tinkex.cli.commands import Command
from tinkex.cli.main import main

if __name__ == "__main__":
    program = FAKE_NODE if "TINKEX_FAKE_EVENTS" in os.environ else NAMED_NODE
    real = cluster_ray.VERBS["up"]
    other = Command(lambda args: cluster_ray.run_up(args, program), *real.arguments)
    from tinkex.cli import cluster

    cluster.VERBS["up"] = other
    sys.exit(main())
