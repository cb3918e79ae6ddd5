"""Ready-made training loops on the public clients: supervised, preferences, reinforcement.

`run` runs a `Job` in a run folder: it can be interrupted at any step, and the resumed run ends with
the same adapter. The jobs (`sft`, `dpo`, `rl`) define a step; `training_loop` orders the steps.
Names are loaded when they are first used, so that a run imports only its own kind.
"""

from tinkex.lazy_imports import import_lazily

__getattr__, __dir__ = import_lazily(__name__)
