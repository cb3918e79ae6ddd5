"""Tools for testing programs that use tinkex: a fake server, a fake clock, scripted faults.

See `tinkex.testing.server` for the server, `tinkex.testing.faults` for the effects and
`tinkex.testing.plugin` for the pytest fixtures that come with the package. Names are loaded when
they are first used: pytest loads the plugin in every run, also where no server can be installed.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tinkex.testing import faults
    from tinkex.testing.clock import FakeClock
    from tinkex.testing.engine import Delays, EngineCall, FakeEngine
    from tinkex.testing.faults import Faults
    from tinkex.testing.recorder import SeenRequest
    from tinkex.testing.server import API_KEY, FakeServer, InProcessTransport

_HOME_OF = {
    "API_KEY": "server",
    "Delays": "engine",
    "EngineCall": "engine",
    "FakeClock": "clock",
    "FakeEngine": "engine",
    "FakeServer": "server",
    "Faults": "faults",
    "InProcessTransport": "server",
    "SeenRequest": "recorder",
}

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


if not TYPE_CHECKING:  # a module __getattr__ would make checkers accept any name

    def __getattr__(name: str) -> object:
        import importlib

        if name == "faults":
            return importlib.import_module("tinkex.testing.faults")
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module 'tinkex.testing' has no attribute {name!r}")
        value = getattr(importlib.import_module(f"tinkex.testing.{home}"), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return __all__
