"""Versions, and nothing else, so that reading them costs nothing."""

import sys

__version__ = "0.1.0"

# The release of the official client whose protocol this client uses. Servers choose flags, and
# refuse clients that are too old, by this number, so this is the version that requests carry.
PROTOCOL_VERSION = "0.36.0"


def user_agent() -> str:
    """The User-Agent header of every request."""
    return f"tinkex/{__version__} Python/{sys.version_info.major}.{sys.version_info.minor}"
