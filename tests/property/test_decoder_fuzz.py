"""Bytes from strangers: decoders refuse them with InputError, soon, and never otherwise.

Mutations of good bodies run here for a fixed number of inputs, in a process of their own. For a
longer look there is `python -m tests.property.fuzz TARGET --atheris -max_total_time=600`; this
runs it briefly. Every input that ever broke the rule is kept in `crashers/` and tried again.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT
from tests.patience import PATIENCE_S
from tests.property import fuzz

CRASHERS = [
    path
    for path in sorted((Path(__file__).parent / "crashers").iterdir())
    if not path.name.startswith("sessions-")  # of `test_session_fuzz.py`
]
# As many as fit into some seconds of one busy core.
RUNS = {
    "protobuf": 4000,
    "protobuf_results": 4000,
    "json": 6000,
    "compression": 4000,
    "custom_loss": 120,
    "scans": 4000,
    "heads": 4000,
    "openai": 4000,
    "results": 2000,
    "events": 1500,
    "queries": 2000,
    "http_heads": 1000,
    "tokens": 1000,
    "adapter_config": 4000,
    "safetensors_head": 2000,
    "archive": 1000,
    "gguf": 2000,
    "model_folder": 300,
    "chat_template": 1000,
    "retry_headers": 4000,
    "settings": 200,
}


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", "tests.property.fuzz", *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_every_target_is_run() -> None:
    assert set(RUNS) == set(fuzz.TARGETS)


@pytest.mark.parametrize("target", RUNS)
def test_mutated_bodies_are_decoded_or_refused(target: str) -> None:
    done = run(target, "--runs", str(RUNS[target]), "--seed", "20")
    # A process that died of a signal has a negative status.
    assert done.returncode == 0, f"{done.returncode} {done.stdout} {done.stderr[-2000:]}"


@pytest.mark.parametrize("target", ["protobuf", "json"])
def test_bodies_sought_by_coverage_are_decoded_or_refused(target: str, tmp_path: Path) -> None:
    done = run(
        target, "--atheris", "-runs=3000", "-seed=5", f"-timeout={PATIENCE_S:.0f}", cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Done 3000 runs" in done.stderr


@pytest.mark.parametrize("target", sorted({path.name.partition("-")[0] for path in CRASHERS}))
def test_what_once_broke_a_decoder_is_refused(target: str) -> None:
    found = [str(path) for path in CRASHERS if path.name.startswith(f"{target}-")]
    done = run(target, "--input", *found)
    assert done.returncode == 0, f"{done.returncode} {done.stdout} {done.stderr[-2000:]}"
    assert len(done.stdout.splitlines()) == len(found)


def test_the_search_finds_a_decoder_that_breaks_the_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(data: bytes) -> None:
        if data[:1] == b"\x00":
            raise IndexError("out of range")

    monkeypatch.setitem(fuzz.TARGETS, "compression", careless)
    found = fuzz.search("compression", 5000, 1)
    assert found is not None
    assert found[1] == "IndexError: out of range"
