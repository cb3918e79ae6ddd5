"""The server that a program starts for itself: `ServiceClient()` with nothing configured.

The SDK's one way to the serving package, which is imported only when a program needs a server.
"""

from tinkex.serving.embedded import DEFAULT_MODELS, Reached, connect, reach, stop

__all__ = ["DEFAULT_MODELS", "Reached", "connect", "reach", "stop"]
