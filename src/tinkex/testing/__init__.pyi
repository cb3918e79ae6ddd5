"""The public names of tinkex.testing; `tinkex.lazy_imports` reads them from here."""

from tinkex.testing import faults as faults
from tinkex.testing.fake_clock import FakeClock as FakeClock
from tinkex.testing.fake_engine import (
    Delays as Delays,
    EngineCall as EngineCall,
    FakeEngine as FakeEngine,
)
from tinkex.testing.faults import Faults as Faults
from tinkex.testing.recorder import SeenRequest as SeenRequest
from tinkex.testing.fake_server import (
    API_KEY as API_KEY,
    FakeServer as FakeServer,
    InProcessTransport as InProcessTransport,
)
