"""`doctor`, `sample` and `chat` with nothing configured: on a server of the command's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import TYPE_CHECKING

from tests.e2e.serving import environment
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

TINY = "tinkex/tiny"


def tinkex(
    work: Path, *words: str, typed: str = "", **env: str
) -> subprocess.CompletedProcess[str]:
    usual = {"TINKEX_EMBEDDED_MODELS": TINY, "TINKEX_THREADS": "1", **env}
    return subprocess.run(
        [sys.executable, "-m", "tinkex.cli", *words],
        cwd=work,
        env=environment(work, **usual),
        input=typed,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


def test_the_doctor_starts_a_server_and_leaves_nothing_behind(tmp_path: Path):
    done = tinkex(tmp_path, "doctor", "-f", "json", TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    checks = {check["name"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["server"]["status"] == "ok"
    assert checks["server"]["found"].startswith("an embedded server starts; tinkex ")
    assert os.listdir(tmp_path) == []


def test_the_doctor_says_who_uses_the_data_folder(tmp_path: Path):
    (tmp_path / "tinkex-data").mkdir()
    holder = (
        "import fcntl, sys; file = open('tinkex-data/lock', 'a'); fcntl.flock(file, fcntl.LOCK_EX);"
        "file.write('4711'); file.flush(); print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", holder],
        cwd=tmp_path,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as popen:
        assert popen.stdout is not None
        assert popen.stdout.readline() == "held\n"
        done = tinkex(tmp_path, "doctor")
        popen.communicate()
    assert done.returncode == 0
    assert "process 4711" in done.stdout


def test_prompts_are_sampled_and_a_chat_follows_in_the_same_folder(tmp_path: Path):
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    words = ("sample", "prompts.txt", "-o", "out.jsonl", "--model", TINY, "--chat")
    short = ("--max-tokens", "4", "--seed", "1")
    done = tinkex(tmp_path, *words, *short)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [answer["line"] for answer in answers] == [1, 2]
    done = tinkex(tmp_path, "chat", TINY, *short, "-f", "json", typed="one\n/reset\ntwo\n")
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 2
    assert (tmp_path / "tinkex-data").is_dir()
