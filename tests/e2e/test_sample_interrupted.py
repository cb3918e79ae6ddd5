"""`tinkex sample`, interrupted or killed: the same command goes on, and nothing is asked twice."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from tests.e2e.serving import environment
from tinkex.testing import API_KEY, FakeServer, faults

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PROMPTS = 6


@pytest.fixture
def server() -> Iterator[FakeServer]:
    """The third prompt is never answered the first time, so the command waits for the signal."""
    with FakeServer().serve() as server:
        server.faults.on("asample", faults.hang(), nth=2)
        yield server


def started(work: Path, url: str) -> subprocess.Popen[str]:
    words = ("sample", "prompts.txt", "-o", "out.jsonl", "--model", "tinkex/tiny")
    short = ("--max-tokens", "4", "--seed", "1", "--concurrency", "1")
    return subprocess.Popen(
        [sys.executable, "-m", "tinkex.cli", *words, *short],
        cwd=work,
        env=environment(work, TINKER_BASE_URL=url, TINKER_API_KEY=API_KEY),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_what_was_answered_is_not_asked_again(
    tmp_path: Path, server: FakeServer, number: signal.Signals
):
    (tmp_path / "prompts.txt").write_text("".join(f"prompt {i}\n" for i in range(PROMPTS)))
    with started(tmp_path, server.url) as popen:
        assert popen.stderr is not None
        said = iter(popen.stderr)
        assert any(line.startswith("prompt 2/6") for line in said)
        while len(server.seen("asample")) < 3:
            assert popen.poll() is None
        popen.send_signal(number)
        rest = "".join(said)
    if number is signal.SIGINT:
        assert popen.returncode == 130
        assert "the same command continues" in rest
    answered = len((tmp_path / "out.jsonl").read_text().splitlines())
    assert 2 <= answered < PROMPTS
    before = len(server.seen("asample"))
    with started(tmp_path, server.url) as popen:
        popen.communicate()
    assert popen.returncode == 0
    assert len(server.seen("asample")) == before + PROMPTS - answered
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["line"] for line in lines] == list(range(1, PROMPTS + 1))
    assert all(line["samples"] for line in lines)
