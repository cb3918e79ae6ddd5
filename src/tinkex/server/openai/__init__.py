"""The OpenAI-compatible endpoints: text in and out over the same engine, keys and weights.

A request passes `routes` (who calls, errors), `requests` (what is asked), `models` (which weights),
`texts` (tokens), `sampling` (the engine), `choice` (text again) and `shapes` (JSON).
"""

from tinkex.server.openai.routes import routes

__all__ = ["routes"]
