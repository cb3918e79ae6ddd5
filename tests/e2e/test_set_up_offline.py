"""Setting up for `make` with a real environment and no network, after one that was killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.patience import PATIENCE_S

SCRIPT = Path(__file__).parents[2] / "tools" / "set_up.py"


def test_a_killed_set_up_is_begun_anew_and_a_missing_network_is_told(tmp_path: Path):
    venv = tmp_path / "venv"
    venv.mkdir()
    (venv / ".set-up-begun").touch()
    (venv / "half").write_text("of a package")
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(venv), "demo"],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(tmp_path),
            # Nothing listens there.
            "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_RETRIES": "0",
        },
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 1
    assert "beginning anew" in done.stderr
    assert not (venv / "half").exists()
    assert (venv / "bin" / "python").exists()
    assert "Check the network" in done.stderr
    assert "Traceback" not in done.stderr
    # The environment is fine as it is: nothing was installed.
    assert not (venv / ".set-up-begun").exists()
