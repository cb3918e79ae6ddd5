"""The embedded server with real programs: shared, found again, replaced, and always gone."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.docs.blocks import ROOT, blocks_of
from tests.e2e.serving import START_S, environment, read_line, wait_gone
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="uses pidfd and /proc"),
]
TINY = {"TINKEX_EMBEDDED_MODELS": "tinkex/tiny", "TINKEX_THREADS": "1"}


def program(home: Path, *args: str, **options: Any) -> subprocess.Popen[str]:
    env = environment(home, **{**TINY, "TMPDIR": str(home), **options.pop("env", {})})
    return subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.embedded_programs", *args],
        cwd=ROOT,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=options.pop("stderr", subprocess.PIPE),
        text=True,
        **options,
    )


def run(
    home: Path, *args: str, env: dict[str, str] | None = None, errors: str = ""
) -> dict[str, Any]:
    """What a program said; it must end well, and say on standard error only what is expected."""
    with program(home, *args, env=env or {}) as running:
        output, said = running.communicate(timeout=PATIENCE_S)
    assert running.returncode == 0
    assert re.fullmatch(errors, said), said
    return json.loads(output)


def folders(home: Path) -> list[str]:
    return [path.name for path in home.iterdir() if path.name.startswith("tinkex-")]


# -- its end --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("returns", 0),
        pytest.param("closes", 0, marks=pytest.mark.exhaustive),
        pytest.param("raises", 1, marks=pytest.mark.exhaustive),
        pytest.param("sys.exit", 3, marks=pytest.mark.exhaustive),
        pytest.param("os._exit", 4, marks=pytest.mark.exhaustive),
        ("kill -9", -signal.SIGKILL),
        ("SIGTERM", -signal.SIGTERM),
    ],
)
def test_however_a_program_ends_server_engine_and_folder_go_with_it(
    tmp_path: Path, how: str, code: int
):
    with program(tmp_path, "end", how) as running:
        said = json.loads(read_line(running, START_S))
        assert len(said["processes"]) == 2, "a server and its engine"
        assert running.wait(START_S) == code
        for pid in said["processes"]:
            wait_gone(pid)
    assert said["folder"].startswith(str(tmp_path))
    assert folders(tmp_path) == []


def test_a_forked_child_that_lives_on_does_not_keep_the_server_of_its_dead_parent(tmp_path: Path):
    with program(tmp_path, "end_with_a_fork_alive") as running:
        said = json.loads(read_line(running, START_S))
        assert running.wait(START_S) == -signal.SIGKILL
        for pid in said["processes"]:
            wait_gone(pid)
    assert folders(tmp_path) == []


def test_ctrl_c_ends_program_and_server_and_nothing_else_is_said(tmp_path: Path):
    with program(tmp_path, "end_with_input", start_new_session=True) as running:
        said = json.loads(read_line(running, START_S))
        os.killpg(running.pid, signal.SIGINT)
        _, errors = running.communicate(timeout=START_S)
        assert errors.strip().endswith("KeyboardInterrupt")
        for pid in said["processes"]:
            wait_gone(pid)
    assert folders(tmp_path) == []


def test_it_can_be_ended_before_the_program_and_is_started_again_when_needed(tmp_path: Path):
    assert run(tmp_path, "stop_early") == {"left": [], "kept": False, "another": True}


# -- who shares it --------------------------------------------------------------------------------


def test_clients_of_one_program_share_a_server_also_when_they_ask_for_it_by_name(tmp_path: Path):
    said = run(tmp_path, "share")
    assert len(set(said["urls"])) == 1
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+", said["urls"][0])
    assert said["same"]


def test_other_processes_of_the_program_find_it_without_a_key_in_their_environment(tmp_path: Path):
    said = run(tmp_path, "other_processes")
    expected = said["expected"]
    assert said["answers"] == dict.fromkeys(("forked", "pickled", "spawned", "separate"), expected)
    assert said["leaks"] == []
    assert said["mode"] == "0o600"


# What a client may say of requests that were under way.
LOST = r"(.*: (The connection to .* broke|.* gave no complete reply) .*\n)*"


def test_a_server_that_is_killed_is_replaced_and_training_goes_on(tmp_path: Path):
    said = run(tmp_path, "outlive_the_server", errors=LOST)
    assert said == {"same": True, "url": True, "replaced": True}


def test_it_goes_without_a_model_that_is_not_to_be_had_and_says_so(tmp_path: Path):
    models = {"TINKEX_EMBEDDED_MODELS": "no/such-model,tinkex/tiny"}
    warned = r"the embedded server: a base model is left out: no/such-model: .*(\n.*)*"
    assert run(tmp_path, "share", env=models, errors=warned)["same"]


def test_with_a_data_folder_a_checkpoint_is_there_in_the_next_run(tmp_path: Path):
    env = {"TINKEX_DATA_DIR": str(tmp_path / "kept")}
    path = run(tmp_path, "save", "mine", env=env)["path"]
    assert run(tmp_path, "load", path, env=env) == {"metrics": True}
    assert (tmp_path / "kept" / "tinkex.db").exists()
    assert not (tmp_path / "kept" / "server.json").exists()


# -- starting -------------------------------------------------------------------------------------


def test_the_readmes_ten_lines_run_without_any_settings(tmp_path: Path):
    (block,) = [b for b in blocks_of(ROOT / "README.md") if "create_lora_training_client" in b.text]
    env = environment(tmp_path, TMPDIR=str(tmp_path), PYTHONWARNINGS="error")
    done = subprocess.run(
        [sys.executable, "-c", block.text],
        env=env,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    losses = [float(line) for line in done.stdout.splitlines()[:10]]
    assert losses[-1] < losses[0]
    assert folders(tmp_path) == []


def test_a_model_that_does_not_exist_is_the_clients_error(tmp_path: Path):
    said = run(tmp_path, "fail", env={"TINKEX_EMBEDDED_MODELS": "no/such-model"})
    assert said["kind"] == "ModelError"
    assert "no/such-model" in said["message"]
    assert folders(tmp_path) == []


def test_a_data_folder_that_cannot_be_made_is_the_clients_error(tmp_path: Path):
    (tmp_path / "file").touch()
    said = run(tmp_path, "fail", env={"TINKEX_DATA_DIR": str(tmp_path / "file" / "data")})
    assert said["kind"] == "StorageError"
    assert str(tmp_path / "file" / "data") in said["message"]


def test_a_wrong_setting_is_the_clients_error(tmp_path: Path):
    said = run(tmp_path, "fail", env={"TINKEX_LONG_POL_S": "1"})
    assert said["kind"] == "InputError"
    assert "did you mean TINKEX_LONG_POLL_S?" in said["message"]


def test_a_folder_that_another_server_uses_is_the_clients_error(tmp_path: Path):
    env = {"TINKEX_DATA_DIR": str(tmp_path / "kept")}
    with program(tmp_path, "end_with_input", env=env) as running:
        read_line(running, START_S)
        said = run(tmp_path, "fail", env=env)
        running.communicate("\n", timeout=START_S)
    assert said["kind"] == "StorageError"
    assert "used by another server" in said["message"]


def test_a_terminal_is_told_what_takes_so_long_and_the_line_is_gone_afterwards(tmp_path: Path):
    slow = tmp_path / "slow"
    slow.mkdir()
    os.mkfifo(slow / "config.json")
    ours, theirs = pty.openpty()
    env = {"TINKEX_EMBEDDED_MODELS": f"slow={slow}"}
    with program(tmp_path, "fail", env=env, stderr=theirs) as running:
        os.close(theirs)
        shown = ""
        while "loading slow" not in shown:
            ready, _, _ = select.select([ours], [], [], START_S)
            assert ready, shown
            shown += os.read(ours, 1 << 12).decode()
        (slow / "config.json").write_text("{}")
        assert json.loads(running.communicate(timeout=START_S)[0])["kind"] == "ModelError"
        shown += os.read(ours, 1 << 12).decode()
    os.close(ours)
    assert "tinkex: starting a server of its own" in shown
    assert shown.endswith("\r\x1b[K")
