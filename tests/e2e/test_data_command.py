"""`tinkex data view` as a new user types it: nothing configured, SmolLM2, output in a pipe."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S

pytestmark = [pytest.mark.smollm2]

SOURCE = str(Path(__file__).parents[2] / "src")
CHAT = {
    "messages": [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ahoy!"},
    ]
}
EXPECTED = """\
--- line 1: 35 tokens, 4 trained
<|im_start|>system
You are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>
<|im_start|>user
Hi<|im_end|>
<|im_start|>assistant
[[Ahoy!<|im_end|>]]

1 example, 35 tokens, 4 of them trained, the longest has 35
"""


def test_a_file_is_shown_as_the_default_model_would_be_trained_on_it(tmp_path: Path):
    (tmp_path / "data.jsonl").write_text(json.dumps(CHAT))
    env = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER_", "TINKEX_"))}
    done = subprocess.run(
        [sys.executable, "-m", "tinkex.cli", "data", "view", "data.jsonl"],
        cwd=tmp_path,
        env={**env, "PYTHONPATH": SOURCE, "HOME": str(tmp_path), "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == EXPECTED
