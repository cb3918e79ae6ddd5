"""Learning is real: the two examples on SmolLM2-135M, shortened, each in a process of its own.

Seeds are fixed and the engine gives the same bits on every run of a machine, so an outcome does not
change by chance. The margins leave room for other machines, whose last bits may differ.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LIMIT_S = 170.0

pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(180)]


def run(example: str, *options: str) -> str:
    """What an example prints; it exits with 0 only when it reached its margin."""
    # Without the hub, so that every machine trains the same weights: those of the package.
    ours = ("TINKER_", "TINKEX_")
    env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
    env |= {"PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(ROOT / "examples" / example), *options],
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    return done.stdout


def before_and_after(output: str) -> tuple[float, float]:
    found = re.fullmatch(r"ok: .* (\d\.\d\d) -> (\d\.\d\d).*", output.splitlines()[-1])
    assert found is not None, output
    return float(found[1]), float(found[2])


def test_fine_tuning_quarters_the_loss_of_answers_it_was_not_trained_on():
    output = run("sft_smollm2.py", "--steps", "4", "--margin", "0.75")
    before, after = before_and_after(output)
    assert after < 0.25 * before
    assert "before  The capital of Peru is Lima." in output
    assert "after   Arr!" in output


def test_reinforcement_learning_multiplies_the_reward():
    short = ("--rounds", "4", "--questions", "4", "--learning-rate", "6e-4", "--goal", "0.3")
    output = run("rl_smollm2.py", *short)
    before, after = before_and_after(output)
    assert before < 0.2
    assert after > before + 0.2
    gaps = [float(gap) for gap in re.findall(r"logprob_gap (\S+)", output)]
    # fp32: what the engine promises between the sampler and the trainer.
    assert gaps
    assert max(gaps) <= 1e-5
