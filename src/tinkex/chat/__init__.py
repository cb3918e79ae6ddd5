"""Conversations as tokens: a model's own chat template, and which tokens are trained.

Names are loaded when they are first used: a server needs the template and none of the clients.
"""

from tinkex.lazy_imports import import_lazily

__getattr__, __dir__ = import_lazily(__name__)
