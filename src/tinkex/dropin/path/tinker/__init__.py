"""Found only by child processes of a drop-in program; gives its name to tinkex."""

from __future__ import annotations

import importlib
import sys

from tinkex import dropin

del sys.modules[__name__]
dropin.install()
importlib.import_module(__name__)
