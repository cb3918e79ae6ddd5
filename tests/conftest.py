"""Where there is no NVIDIA device, triton runs its kernels in its interpreter.

Triton decides when it is first imported, and transformers imports it, so the choice is made
before any test module is. The device's own file is asked: torch would cost every run a second.
"""

from __future__ import annotations

import os
from pathlib import Path

if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
