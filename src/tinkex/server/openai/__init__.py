"""The OpenAI-compatible endpoints: text in and out over the same engine, keys and weights.

A request passes `routes` (authentication, errors), `endpoints` with `requests` (parameters),
`models` (which weights), `tokenization` (tokens), `sampling` (the engine) and `responses` with
`choice` (text) and `shapes` (JSON).
"""

from tinkex.server.openai.routes import routes

__all__ = ["routes"]
