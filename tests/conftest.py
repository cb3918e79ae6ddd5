"""What every test process sets up before it imports a test module.

- Where there is no NVIDIA device, triton runs its kernels in its interpreter. Triton decides when
  it is first imported, and transformers imports it, so the choice is made here. The device's own
  file is looked for: importing torch would cost every run a second.
- A shell starts background jobs with SIGINT ignored, and so do many CI runners. An ignored signal
  is inherited by every child, which then never sees the Ctrl-C that a test sends it.
- Hypothesis fails a test whose examples take long. On a busy or slow machine all of them do, and
  pytest's own time limit already ends a test that hangs.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from hypothesis import HealthCheck, settings

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "any-machine", deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any-machine")
