"""Versions, and nothing else, so that reading them costs nothing."""

__version__ = "0.1.0"

# The release of the official client whose protocol we speak. Servers choose flags, and refuse
# clients they find too old, by this number, so it is what we tell them.
PROTOCOL_VERSION = "0.36.0"
