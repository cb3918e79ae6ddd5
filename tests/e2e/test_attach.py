"""A training program is killed, another one attaches to its run, and the result is the same."""

from __future__ import annotations

import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.e2e.serving import KEY, environment, read_line, served
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.req("S41")

STEPS = 5
# Each step is one pass and one optimizer step, so the next number says how far the run is.
PROGRAM = """
import sys, threading
from tinkex import AdamParams, Datum, ModelInput, ServiceClient

STEPS, HANGS_IN = map(int, sys.argv[1:3])


def batch(step):
    tokens = list(range(step, step + 9))
    return [Datum(ModelInput.from_ints(tokens[:-1]), {"target_tokens": tokens[1:]})]


service = ServiceClient()
if len(sys.argv) > 3:
    training = service.attach_training_client(sys.argv[3])
else:
    training = service.create_lora_training_client("tinkex/tiny", rank=4, seed=3)
print(training.model_id, flush=True)
step, half_done = divmod(training.next_seq_id - 1, 2)
while step < STEPS:
    if not half_done:
        passed = training.forward_backward(batch(step), "cross_entropy").result()
        print(step, passed.metrics["loss:sum"], flush=True)
    if step == HANGS_IN:
        threading.Event().wait()
    half_done = False
    training.optim_step(AdamParams(learning_rate=0.01)).result()
    step += 1
print("end", training.forward(batch(0), "cross_entropy").result().metrics["loss:sum"], flush=True)
"""


def program(url: str, home: Path, *model_id: str, hangs_in: int = STEPS) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(STEPS), str(hangs_in), *model_id],
        env=environment(home, TINKER_BASE_URL=url, TINKER_API_KEY=KEY, TINKER_TELEMETRY="0"),
        stdout=subprocess.PIPE,
        text=True,
    )


def told(popen: subprocess.Popen[str]) -> list[str]:
    """The losses that a program prints until its end, without its first line."""
    with popen:
        out, _ = popen.communicate(timeout=PATIENCE_S)
    assert popen.returncode == 0
    return out.splitlines()[1:]


def test_a_run_whose_program_was_killed_ends_with_the_same_losses(tmp_path: Path) -> None:
    with served(tmp_path / "data", TINKEX_ATTACH_AFTER_S="0") as server:
        unbroken = told(program(server.url, tmp_path))
        with program(server.url, tmp_path, hangs_in=2) as first:
            model_id = read_line(first, PATIENCE_S).strip()
            before = [read_line(first, PATIENCE_S).strip() for _ in range(3)]
            first.send_signal(signal.SIGKILL)
            first.communicate(timeout=PATIENCE_S)
        # The third step has its pass and not its optimizer step, which is all that is sent of it.
        after = told(program(server.url, tmp_path, model_id))
    assert before + after == unbroken
    assert len(unbroken) == STEPS + 1
