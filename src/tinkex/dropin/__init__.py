"""Run code written for the official package `tinker` on tinkex, with no line changed.

`install()` makes `import tinker`, the submodules that user code imports, and
`importlib.metadata.version("tinker")` resolve to tinkex in this process;
`python -m tinkex.dropin script.py …` does the same for a script.
"""

from __future__ import annotations

from tinkex.dropin.finder import install, installed, uninstall

__all__ = ["install", "installed", "uninstall"]
