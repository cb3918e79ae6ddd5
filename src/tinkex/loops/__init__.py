"""Ready-made training loops on the public clients: supervised, preferences, reinforcement.

`run` does a whole `Job` in a run folder: it can be interrupted at any step and goes on from there
to the same adapter. The recipes (`sft`, `dpo`, `rl`) say what a step is; `loop` says when.
"""

from __future__ import annotations

from tinkex.loops.dpo import DpoJob
from tinkex.loops.loop import Outcome
from tinkex.loops.rl import RlJob
from tinkex.loops.run import Job, run
from tinkex.loops.settings import DpoSettings, RlSettings, Settings, SftSettings
from tinkex.loops.sft import SftJob

__all__ = [
    "DpoJob",
    "DpoSettings",
    "Job",
    "Outcome",
    "RlJob",
    "RlSettings",
    "Settings",
    "SftJob",
    "SftSettings",
    "run",
]
