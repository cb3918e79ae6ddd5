"""The public names of tinkex.loops; `tinkex.lazy_imports` reads them from here."""

from tinkex.loops.dpo import DpoJob as DpoJob
from tinkex.loops.rl import RlJob as RlJob
from tinkex.loops.run_job import Job as Job, run as run
from tinkex.loops.run_settings import (
    DpoSettings as DpoSettings,
    RlSettings as RlSettings,
    Settings as Settings,
    SftSettings as SftSettings,
)
from tinkex.loops.sft import SftJob as SftJob
from tinkex.loops.training_loop import Outcome as Outcome
