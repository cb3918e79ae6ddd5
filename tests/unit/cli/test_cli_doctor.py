"""`tinkex doctor`: every line says how it stands, and what to do where it does not."""

from __future__ import annotations

import fcntl
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.forward_proxy import ForwardProxy
from tinkex.cli.commands import DONE, FAILED
from tinkex.cli.doctor import machine_checks as machine
from tinkex.cli.doctor.command import _lines
from tinkex.cli.doctor.machine_checks import Finding
from tinkex.cli.doctor.server_checks import owner_of
from tinkex.testing import API_KEY, faults

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Ran
    from tinkex.testing import FakeServer

    Run = Callable[..., Ran]

GIB = 2**30


def checks(ran: Ran) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in ran.json["checks"]}


def test_a_server_that_answers_is_described(run: Run, server: FakeServer):
    ran = run("doctor", "-f", "json")
    assert ran.status == DONE
    assert ran.json["ok"] is True
    found = checks(ran)
    assert found["settings"]["found"] == f"the server at {server.url}"
    assert found["credential"]["found"] == "a key in TINKER_API_KEY"
    assert found["server"]["status"] == "ok"
    assert "tinkex/tiny" in found["server"]["found"]
    assert "ms" in found["server"]["found"]
    assert found["server"]["found"].startswith("tinkex ")


@pytest.mark.usefixtures("server")
def test_no_line_is_wider_than_the_terminal_and_no_key_is_shown(run: Run):
    ran = run("doctor")
    lines = ran.out.splitlines()
    assert all(len(line) <= 80 or len(line.split()) == 1 for line in lines)
    assert {line[:4].strip() for line in lines} <= {"ok", "warn", "fail", ""}
    assert API_KEY not in ran.out + ran.err
    assert "\033" not in ran.out


@pytest.mark.parametrize("width", [60, 80])
def test_paths_and_commands_are_never_broken(width: int):
    path = Path("/home/me/projects/fine-tuning/a-name-that-is-long")
    todo = f"Make room: rm -r {path}/runs"
    lines = _lines(Finding("disk", "warn", f"1.0 GB free in {path}", todo), width).splitlines()
    assert any(str(path) in line for line in lines)
    assert any(f"{path}/runs" in line for line in lines)
    if width == 60:
        assert max(map(len, lines[:-1])) <= width
        assert lines[:3] == ["warn  disk", "      1.0 GB free in", f"      {path}"]


@pytest.mark.usefixtures("server")
def test_every_path_is_in_one_piece_on_a_narrow_terminal(
    run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    long = tmp_path / ("long-" * 12) / "folder"
    long.mkdir(parents=True)
    monkeypatch.chdir(long)
    monkeypatch.setenv("COLUMNS", "60")
    assert f" {long}\n" in run("doctor").out


def test_a_server_that_is_not_there_is_a_failure_with_a_next_step(
    run: Run, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setenv("TINKER_API_KEY", API_KEY)
    ran = run("doctor", "-f", "json")
    assert ran.status == FAILED
    assert ran.json["ok"] is False
    assert checks(ran)["server"]["status"] == "fail"
    assert "connection refused" in checks(ran)["server"]["found"]
    assert "tinkex serve" in checks(ran)["server"]["todo"]
    assert ran.err == "", "the table says it, so no warning does"


def test_a_proxy_is_named_and_so_is_its_refusal(run: Run, monkeypatch: pytest.MonkeyPatch):
    with ForwardProxy(user_info="me:right") as proxy:
        monkeypatch.setenv("TINKER_BASE_URL", "https://tinker.invalid")
        monkeypatch.setenv("TINKER_API_KEY", API_KEY)
        monkeypatch.setenv("HTTPS_PROXY", proxy.url("me:canary"))
        ran = run("doctor", "-f", "json")
    assert ran.status == FAILED
    found = checks(ran)
    assert (
        found["settings"]["found"] == f"the server at https://tinker.invalid; proxy {proxy.url()}"
    )
    assert "refused the user name or the password in HTTPS_PROXY" in found["server"]["found"]
    assert "serve" not in found["server"].get("todo", "")
    assert "canary" not in ran.out + ran.err


def test_a_refused_key_is_told_from_a_missing_server(run: Run, server: FakeServer):
    server.faults.on("client_config", faults.reply(401), times=None)
    found = checks(run("doctor", "-f", "json"))["server"]
    assert found["status"] == "fail"
    assert "tinkex auth login" in found["todo"]


def test_a_server_that_is_none_of_ours_is_fine_without_a_version(run: Run, server: FakeServer):
    server.faults.on(None, faults.reply(404), when=lambda seen: seen.path == "/openapi.json")
    found = checks(run("doctor", "-f", "json"))["server"]
    assert found["status"] == "ok"
    assert found["found"].startswith("answers in")


@pytest.mark.parametrize(
    ("name", "value", "word"),
    [
        ("TINKER_BASE_URL", "nonsense://x", "TINKER_BASE_URL"),
        ("TINKER_LOG", "loud", "TINKER_LOG"),
        ("TINKEX_THREADS", "many", "TINKEX_THREADS"),
        ("TINKEX_NONSENSE", "1", "TINKEX_NONSENSE"),
    ],
)
def test_a_malformed_setting_is_named(
    run: Run, server: FakeServer, monkeypatch: pytest.MonkeyPatch, name: str, value: str, word: str
):
    monkeypatch.setenv(name, value)
    ran = run("doctor", "-f", "json")
    assert ran.status == FAILED
    failed = [check for check in ran.json["checks"] if check["status"] == "fail"]
    assert len(failed) == 1
    assert word in failed[0]["found"]
    assert failed[0]["todo"]


def test_a_missing_credential_is_a_failure(run: Run, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TINKER_BASE_URL", "http://127.0.0.1:9")
    ran = run("doctor", "-f", "json")
    assert ran.status == FAILED
    assert checks(ran)["credential"]["status"] == "fail"
    assert "server" not in checks(ran)


# -- the machine ----------------------------------------------------------------------------------


def test_an_old_python_is_a_failure():
    assert machine.python((3, 10, 1), "python3").status == "fail"
    assert machine.python((3, 11, 0), "python3").status == "ok"


@pytest.mark.parametrize(
    ("free", "status"), [(10 * GIB, "ok"), (GIB, "warn"), (GIB // 10, "fail"), (0, "fail")]
)
def test_a_full_disk_is_noticed(free: int, status: str):
    finding = machine.disk(Path("/data"), free)
    assert finding.status == status
    assert bool(finding.todo) == (status != "ok")


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("MemTotal: 16000000 kB\nMemAvailable: 9000000 kB\n", "ok"),
        ("MemTotal: 16000000 kB\nMemAvailable: 900000 kB\n", "warn"),
        ("nonsense", "ok"),
        ("MemTotal: x\nMemAvailable:\n", "ok"),
    ],
)
def test_little_memory_is_noticed_and_an_unknown_amount_is_no_reason_to_worry(
    tmp_path: Path, text: str, status: str
):
    (tmp_path / "meminfo").write_text(text)
    assert machine.memory(tmp_path / "meminfo").status == status
    assert machine.memory(tmp_path / "nothing").found == "unknown on this system"


def test_extras_are_read_from_what_the_package_says_of_itself():
    needs = [
        "msgspec>=0.20",
        'rich>=13; extra == "cli"',
        "no-such-thing>=1; extra == 'plots'",
        'no-such-thing>=1; platform_system == "Windows" and extra == "cli"',
        'tinkex[cli]; extra == "all"',
        'pytest>=8; extra == "dev"',
    ]
    found = machine.needed(needs)
    assert found.keys() == {"cli", "plots"}
    assert found["cli"].keys() == {"rich"}
    assert found["plots"] == {"no-such-thing": None}


def test_a_missing_extra_comes_with_the_command_that_installs_it():
    lines = list(
        machine.judge_extras({"cli": {"rich": "15"}, "plots": {"matplotlib": None}, "s3": {}})
    )
    assert [(line.name, line.status) for line in lines] == [
        ("[cli]", "ok"),
        ("[plots]", "warn"),
        ("[others]", "ok"),
    ]
    assert "pip install 'tinkex[plots]'" in lines[1].todo
    assert lines[2].found == "s3 installed"


def test_a_data_folder_that_a_server_uses_is_noticed(tmp_path: Path):
    assert owner_of(tmp_path / "nothing") is None
    lock = tmp_path / "lock"
    lock.write_text("4711\n")
    assert owner_of(tmp_path) is None
    with lock.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        assert owner_of(tmp_path) == "4711"
