"""A Tinker-compatible SDK: write the training loop, run it anywhere.

Scripts written for the official package run after `import tinkex as tinker`. Names are loaded
when they are first used, so importing this package costs next to nothing and never loads torch,
transformers or numpy. `__init__.pyi` lists them.
"""

from __future__ import annotations

from tinkex._version import __version__ as __version__
from tinkex.lazy_imports import import_lazily

__title__ = "tinkex"

__getattr__, __dir__ = import_lazily(__name__)
