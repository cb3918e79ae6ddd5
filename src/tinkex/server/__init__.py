"""The server behind the SDK: the protocol over a store and an engine."""

from tinkex.server.app import create_app
from tinkex.server.server_settings import ServerSettings as Settings
from tinkex.server.store.memory import MemoryStore
from tinkex.server.store.protocol import Store

__all__ = ["create_app", "Settings", "Store", "MemoryStore"]
