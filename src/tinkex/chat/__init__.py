"""Conversations as tokens: a model's own chat template, and which tokens are trained.

Names are loaded when they are first used: a server needs the template and none of the clients.
"""

from tinkex.lazy_imports import lazy_imports

__getattr__, __dir__ = lazy_imports(__name__)
