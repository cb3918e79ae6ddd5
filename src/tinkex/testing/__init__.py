"""Tools for testing programs that use tinkex: a fake server, a fake clock, scripted faults.

See `tinkex.testing.server` for the server, `tinkex.testing.faults` for the effects and
`tinkex.testing.plugin` for the pytest fixtures that come with the package.
"""

from tinkex.testing import faults
from tinkex.testing.clock import FakeClock
from tinkex.testing.engine import Delays, EngineCall, FakeEngine
from tinkex.testing.faults import Faults
from tinkex.testing.recorder import SeenRequest
from tinkex.testing.server import API_KEY, FakeServer, InProcessTransport

__all__ = [
    "API_KEY",
    "Delays",
    "EngineCall",
    "FakeClock",
    "FakeEngine",
    "FakeServer",
    "Faults",
    "InProcessTransport",
    "SeenRequest",
    "faults",
]
