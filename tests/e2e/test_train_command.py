"""`tinkex train` as users run it: a process, the embedded server, Ctrl-C, kill -9, and again.

However often a run is broken off, its adapter is in the end that of the run nobody disturbed, bit
for bit. A seed chooses the steps, signals are sent when a step is reported, and what was exported
is compared tensor by tensor.
"""

from __future__ import annotations

import json
import random
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from benchmarks.sft_parity.work import write_data
from tests.e2e.serving import KEY, ROOT, environment, served
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

# Every start of the command starts a server, which loads torch.
pytestmark = pytest.mark.timeout(600)

STEPS = 48
# So many steps the command can at most be ahead of the line that a test has read: see `train`.
AHEAD = 12
LIMIT_S = 200.0
TASK = """
def prompts():
    return [[{"role": "user", "content": f"say {letter}"}] for letter in "abcdefgh"]

def eval_prompts():
    return prompts()[:2]

def reward(prompt, answer):
    return sum(letter in "aeiou ths" for letter in answer)
"""
OPTIONS: dict[str, tuple[str, ...]] = {
    "sft": ("--eval-fraction", "0.2", "--learning-rate", "0.01", "--warmup", "2"),
    "dpo": ("--eval-fraction", "0.2", "--learning-rate", "0.003"),
    "rl": ("--group-size", "4", "--max-tokens", "8", "--learning-rate", "0.01"),
}
TASK_FILE = ROOT / "benchmarks" / "sft_parity" / "yes_or_no.py"
SOURCES = {"sft": "chats.jsonl", "dpo": "pairs.jsonl", "rl": "task.py"}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """A folder with something to train on."""
    numbers = [f"{number} and {number * 7 % 10}" for number in range(30)]
    chats = [
        {"messages": [{"role": "user", "content": n}, {"role": "assistant", "content": n[::-1]}]}
        for n in numbers
    ]
    pairs = [
        {"prompt": [{"role": "user", "content": n}], "chosen": n[::-1], "rejected": "no idea"}
        for n in numbers
    ]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in chats))
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs))
    (tmp_path / "task.py").write_text(TASK)
    return tmp_path


@dataclass
class Command:
    """A `tinkex train` that runs."""

    popen: subprocess.Popen[str]
    stderr: IO[str]
    said: list[str]

    def wait_for(self, beginning: str) -> None:
        """Read what it says until a line begins so."""
        for line in self.stderr:
            self.said.append(line)
            if line.startswith(beginning):
                return
        raise AssertionError(f"{beginning!r} was never said\n{''.join(self.said)}")

    def end(self) -> int:
        """Wait for its end; returns its exit status."""
        self.said.append(self.stderr.read())
        self.said.append(self.popen.communicate(timeout=LIMIT_S)[0])
        return self.popen.returncode

    @property
    def text(self) -> str:
        return "".join(self.said)


@contextmanager
def train(
    work: Path, kind: str, output: str, *more: str, server: str | None = None
) -> Generator[Command]:
    """Start the command, on a server or the embedded one; killed at the end, if it still runs.

    A step takes milliseconds, and the test may be slow to send its signal. So standard error is a
    socket that takes half a dozen lines; then the command waits until the test has read them.
    """
    if server is None:
        settings = {"TINKEX_THREADS": "1", "TINKEX_EMBEDDED_MODELS": "tinkex/tiny"}
    else:
        settings = {"TINKER_BASE_URL": server, "TINKER_API_KEY": KEY}
    usual = ("--model", "tinkex/tiny", "--steps", str(STEPS), "--batch-size", "4", "--rank", "4")
    every = ("--save-every", "3", "--eval-every", "2", "--seed", "5", *OPTIONS[kind])
    argv = [sys.executable, "-m", "tinkex.cli", "train", kind, SOURCES[kind], "--output", output]
    ours, theirs = socket.socketpair()
    ours.settimeout(LIMIT_S)
    theirs.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1)  # the least that the system allows
    popen = subprocess.Popen(
        [*argv, *more] if "--resume" in more else [*argv, *usual, *every, *more],
        cwd=work,
        env=environment(work, **settings),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
    )
    theirs.close()
    with popen, ours, ours.makefile() as stderr:
        try:
            yield Command(popen, stderr, [])
        finally:
            popen.kill()


def finished(work: Path, kind: str, output: str, *more: str, server: str | None = None) -> str:
    """What the command says when it runs to its end."""
    with train(work, kind, output, *more, server=server) as command:
        assert command.end() == 0, command.text
        return command.text


def broken_off(
    work: Path,
    kind: str,
    output: str,
    step: int,
    *more: str,
    by: signal.Signals = signal.SIGINT,
    server: str | None = None,
) -> str:
    """What a run says that gets a signal when it reports a step, and ends by it."""
    with train(work, kind, output, *more, server=server) as command:
        command.wait_for(f"step {step:>2}/{STEPS}")
        command.popen.send_signal(by)
        assert command.end() == (130 if by == signal.SIGINT else -by), command.text
        return command.text


def adapter(work: Path, output: str) -> dict[str, Any]:
    return load_file(work / output / "adapter" / "adapter_model.safetensors")


def assert_same_adapter(work: Path, one: str, other: str) -> None:
    """Every tensor of both is the same, to the bit; and they are not all zero."""
    first, second = adapter(work, one), adapter(work, other)
    assert first.keys() == second.keys()
    for name in first:
        assert np.array_equal(first[name].view(np.uint8), second[name].view(np.uint8)), name
    assert any(first[name].any() for name in first if "lora_B" in name)


def metrics(work: Path, output: str) -> list[dict[str, float]]:
    """The numbers of each step, without how long it took."""
    times = ("time_s", "tokens_per_s")
    found = map(json.loads, lines(work / output))
    return [{k: v for k, v in row.items() if k not in times} for row in found]


def test_a_run_that_is_broken_off_again_and_again_ends_with_the_same_adapter(work: Path):
    finished(work, "sft", "whole")
    chosen = random.Random(20)
    first, second, third = (chosen.randint(1, 3) + part * (AHEAD + 3) for part in range(3))
    said = broken_off(work, "sft", "broken", first)
    assert "  tinkex train sft chats.jsonl --output broken --resume\n" in said
    assert max(map(len, said.splitlines())) <= 85, said
    # Later than the steps that the run before can have reached when its signal came.
    broken_off(work, "sft", "broken", second, "--resume", by=signal.SIGKILL)
    broken_off(work, "sft", "broken", third, "--resume")
    finished(work, "sft", "broken", "--resume")
    assert_same_adapter(work, "whole", "broken")
    assert metrics(work, "whole") == metrics(work, "broken")
    assert [row["step"] for row in metrics(work, "whole")] == list(range(STEPS + 1))


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["dpo", "rl"])
def test_the_other_kinds_of_run_go_on_to_the_same_adapter(work: Path, kind: str):
    chosen = random.Random(kind)
    with served(work / "data") as server:
        finished(work, kind, "whole", server=server.url)
        broken_off(work, kind, "broken", chosen.randint(1, 4), server=server.url)
        step = chosen.randint(8, 9) + AHEAD
        broken_off(work, kind, "broken", step, "--resume", by=signal.SIGKILL, server=server.url)
        finished(work, kind, "broken", "--resume", server=server.url)
    assert_same_adapter(work, "whole", "broken")
    assert metrics(work, "whole") == metrics(work, "broken")


def test_a_second_ctrl_c_leaves_at_once_and_the_run_goes_on_from_its_last_save(work: Path):
    with served(work / "data") as server:
        finished(work, "sft", "whole", server=server.url)
        with train(work, "sft", "broken", server=server.url) as command:
            command.wait_for(f"step  5/{STEPS}")
            command.popen.send_signal(signal.SIGINT)
            command.wait_for("Stopping after the step that is being computed")
            command.popen.send_signal(signal.SIGINT)
            assert command.end() == 130, command.text
        assert "--output broken --resume" in command.text
        finished(work, "sft", "broken", "--resume", server=server.url)
    assert_same_adapter(work, "whole", "broken")


@pytest.mark.exhaustive
def test_a_run_is_not_resumed_on_a_server_that_does_not_have_it(work: Path):
    with served(work / "data") as server:
        broken_off(work, "sft", "broken", 3, server=server.url)
    with (
        served(work / "other") as server,
        train(work, "sft", "broken", "--resume", server=server.url) as command,
    ):
        assert command.end() == 2
    assert "this server does not have tinker://" in command.text


@pytest.mark.exhaustive
@pytest.mark.smollm2
def test_a_real_model_learns_what_it_was_not_shown(tmp_path: Path):
    data, held_out = write_data(tmp_path)
    run = tmp_path / "run"
    words = ["train", "sft", str(data), "--eval", str(held_out), "--output", str(run)]
    real(tmp_path, *words, "--steps", "5", "--learning-rate", "1e-3", "--rank", "8")
    losses = [json.loads(line)["eval_loss"] for line in lines(run) if "eval_loss" in line]
    assert losses[-1] < 0.65 * losses[0]
    assert load_file(run / "adapter" / "adapter_model.safetensors")


@pytest.mark.exhaustive
@pytest.mark.smollm2
def test_a_real_model_finds_out_what_is_rewarded(tmp_path: Path):
    run = tmp_path / "run"
    words = ["train", "rl", str(TASK_FILE), "--output", str(run), "--steps", "4", "--batch-size"]
    real(tmp_path, *words, "4", "--max-tokens", "6", "--learning-rate", "6e-4", "--rank", "8")
    rewards = [json.loads(line)["reward"] for line in lines(run)]
    assert rewards[-1] > max(2 * rewards[0], 0.3)


def real(work: Path, *words: str) -> None:
    """Run a command on the embedded server with its usual models."""
    done = subprocess.run(
        [sys.executable, "-m", "tinkex.cli", *words],
        cwd=work,
        env=environment(work),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def lines(run: Path) -> list[str]:
    return (run / "metrics.jsonl").read_text().splitlines()
