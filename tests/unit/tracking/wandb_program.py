"""Sends steps to an offline W&B run, and prints where it went or why it could not, as JSON.

    python wandb_program.py FOLDER STEP...

A program of its own, because the package keeps its settings for as long as its process lives, and
has written everything only when that ends.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tinkex.errors import InputError
from tinkex.tracking.sinks import open_sinks


def main(folder: Path, steps: list[int]) -> dict[str, object]:
    """Record each step with a loss; an evaluation comes with the second."""
    try:
        sinks = open_sinks(["wandb:mine"], folder, "a name", {"learning_rate": 1e-4})
    except InputError as error:
        return {"error": str(error)}
    for step in steps:
        sinks.record(step, {"loss": 2.0 / step} | ({"eval_loss": 1.5} if step == 2 else {}))
    sinks.close()
    return {"places": sinks.places}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(main(Path(sys.argv[1]), [int(each) for each in sys.argv[2:]])))
