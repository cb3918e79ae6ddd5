"""Ready-made training loops on the public clients: supervised, preferences, reinforcement.

`run` runs a `Job` in a run folder: it can be interrupted at any step, and the resumed run ends with
the same adapter. The jobs (`sft`, `dpo`, `rl`) define a step; `training_loop` orders the steps.
Names are loaded when they are first used, so that a run imports only its own kind.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from tinkex.loops.dpo import DpoJob
    from tinkex.loops.rl import RlJob
    from tinkex.loops.run_job import Job, run
    from tinkex.loops.run_settings import DpoSettings, RlSettings, Settings, SftSettings
    from tinkex.loops.sft import SftJob
    from tinkex.loops.training_loop import Outcome

_HOMES = {
    "DpoJob": "dpo",
    "DpoSettings": "run_settings",
    "Job": "run_job",
    "Outcome": "training_loop",
    "RlJob": "rl",
    "RlSettings": "run_settings",
    "Settings": "run_settings",
    "SftJob": "sft",
    "SftSettings": "run_settings",
    "run": "run_job",
}

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


if not TYPE_CHECKING:  # a module __getattr__ would make checkers accept any name

    def __getattr__(name: str) -> object:
        home = _HOMES.get(name)
        if home is None:
            raise AttributeError(f"module 'tinkex.loops' has no attribute {name!r}")
        import importlib

        return getattr(importlib.import_module(f"tinkex.loops.{home}"), name)


def __dir__() -> list[str]:
    return __all__
