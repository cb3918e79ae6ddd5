"""SIGKILL at random moments of a training run: the loop goes on, and every bit is the same."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.killing import Moment, moments, mortal_server
from tests.e2e.serving import KEY, ROOT, environment

PROGRAM = Path(__file__).parent / "durable_loop.py"
OFFICIAL = ROOT / ".venvs" / "official" / "bin" / "python"
KILLS = 5
# Ten runs of five kills each: fifty moments, chosen by these numbers.
SEEDS = {"tinkex": (1, 2, 3, 4, 5), "tinker": (11, 12, 13, 14, 15)}

pytestmark = pytest.mark.timeout(400)


def run(sdk: str, base_url: str, home: Path, key: str = KEY) -> Any:
    """Everything the loop was told."""
    python = sys.executable if sdk == "tinkex" else str(OFFICIAL)
    paths = {} if sdk == "tinkex" else {"PYTHONPATH": ""}
    told = subprocess.run(
        [python, str(PROGRAM), sdk],
        env=environment(
            home, TINKER_BASE_URL=base_url, TINKER_API_KEY=key, TINKER_TELEMETRY="0", **paths
        ),
        capture_output=True,
        text=True,
        timeout=380,
        check=False,
    )
    assert told.returncode == 0, told.stderr[-4000:]
    return json.loads(told.stdout.splitlines()[-1])


def checkpoints(data_dir: Path) -> dict[str, str]:
    """The bytes of everything that was saved under a name."""
    found: dict[str, str] = {}
    for path in sorted(data_dir.rglob("*.safetensors")):
        name = path.name.rpartition("%2F")[2].partition("@")[0]
        if "-step-" in name:
            found[name] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found


def told_and_saved(
    sdk: str, folder: Path, planned: list[Moment]
) -> tuple[Any, dict[str, str], list[Moment]]:
    with mortal_server(folder / "data", planned) as (mortal, url):
        told = run(sdk, url, folder)
        return told, checkpoints(folder / "data"), mortal.killed


@pytest.fixture(scope="module")
def calm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, dict[str, str]]:
    """An undisturbed run; both clients must be told the same by it."""
    folder = tmp_path_factory.mktemp("calm")
    told, saved, _ = told_and_saved("tinkex", folder, [])
    assert len(saved) == 10
    return told, saved


def test_both_clients_are_told_the_same_by_a_calm_server(calm: Any, tmp_path: Path) -> None:
    told, saved, _ = told_and_saved("tinker", tmp_path, [])
    assert (told, saved) == calm


def _runs() -> list[Any]:
    """Five kills with each client, and forty more."""
    return [
        pytest.param(sdk, seed, marks=pytest.mark.exhaustive if place else ())
        for sdk, seeds in SEEDS.items()
        for place, seed in enumerate(seeds)
    ]


@pytest.mark.parametrize(("sdk", "seed"), _runs())
def test_killed_at_any_moment_the_run_ends_with_the_same_bits(
    calm: Any, tmp_path: Path, sdk: str, seed: int
) -> None:
    planned = moments(seed, KILLS)
    told, saved, killed = told_and_saved(sdk, tmp_path, planned)
    assert killed == planned
    assert (told, saved) == calm
