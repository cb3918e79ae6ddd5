"""Learning is real: the examples on SmolLM2-135M, some shortened, each in a process of its own.

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
LIMIT_S = 280.0

pytestmark = [pytest.mark.smollm2, pytest.mark.exhaustive]


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


def claims(output: str) -> list[str]:
    """What an example checked, from its last lines; nothing of it failed."""
    found = [line for line in output.splitlines() if line.startswith(("ok: ", "NO: "))]
    assert all(line.startswith("ok: ") for line in found), output
    return found


def counts(claim: str) -> tuple[int, int]:
    found = re.search(r" (\d+) -> (\d+) of 8", claim)
    assert found is not None, claim
    return int(found[1]), int(found[2])


def test_fine_tuning_divides_the_loss_of_answers_it_was_not_trained_on_by_four():
    output = run("sft_smollm2.py", "--steps", "4", "--margin", "0.75")
    before, after = before_and_after(output)
    assert after < 0.25 * before
    assert "before  The capital of Peru is Lima." in output
    assert "after   Arr!" in output
    trained = re.findall(r"\[\[(.+)\]\]", output)
    assert len(trained) == 2
    assert all(re.fullmatch(r"Arr! .* matey!<\|im_end\|>", text) for text in trained)


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


def test_preferences_move_answers_to_questions_that_were_not_trained():
    margin, pairs, named = claims(run("dpo_smollm2.py"))
    assert float(margin.rpartition(" ")[2]) > 2
    assert pairs == "ok: the right answer gained more in 8 of 8 pairs"
    before, after = counts(named)
    assert after >= before + 2


def test_a_student_comes_close_to_its_teacher_by_its_own_samples():
    closeness, agreement = claims(run("distill_smollm2.py", "--rounds", "5"))
    found = re.search(r" (\d+\.\d+) -> (\d+\.\d+) nats", closeness)
    assert found is not None
    assert float(found[2]) < 0.5 * float(found[1])
    before, after = counts(agreement)
    assert (before, after > 0) == (0, True)


def test_openais_client_sees_what_was_learned():
    (right,) = claims(run("evaluate_openai.py"))
    before, after = counts(right)
    assert (before, after >= 5) == (0, True)
