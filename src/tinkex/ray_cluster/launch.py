"""The program that becomes a node: `python -m tinkex.ray_cluster.launch PARENT_PID`.

It reads a command and its environment from standard input, asks the kernel to kill it when its
parent dies, and replaces itself by the command. So the environment is on no command line, and no
node outlives the actor that supervises it. Only the standard library is imported.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from typing import Final, NoReturn

_PR_SET_PDEATHSIG: Final = 1
_ORPHANED: Final = 70


def main() -> NoReturn:
    """Become the command."""
    parent = int(sys.argv[1])
    order = json.loads(sys.stdin.buffer.read())
    _die_with(parent)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.execve(order["command"][0], order["command"], order["environment"])


def _die_with(parent: int) -> None:
    """Be killed when the thread that started this process ends; it ends with the actor.

    The setting survives `execve`. Other systems than Linux have no such call; there a node ends
    when its lease does.
    """
    if not sys.platform.startswith("linux"):
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")
    if os.getppid() != parent:  # it died before the call
        sys.exit(_ORPHANED)


if __name__ == "__main__":
    main()
