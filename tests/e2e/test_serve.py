"""`tinkex serve` with real processes: started, refused, stopped, and started again."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.serving import (
    KEY,
    MODEL,
    START_S,
    children,
    read_line,
    refused,
    reserved_port,
    served,
    started,
    wait_gone,
)
from tests.e2e.workers import datum, losses, sample
from tests.patience import PATIENCE_S
from tinkex import AdamParams, ServiceClient

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.e2e.serving import Served

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="uses pidfd and /proc"),
]


@pytest.fixture
def port() -> Iterator[str]:
    with reserved_port() as port:
        yield str(port)


def client(server: Served) -> ServiceClient:
    return ServiceClient(base_url=server.url, api_key=KEY)


def status_of(url: str) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(url, timeout=PATIENCE_S) as reply:
            return reply.status, json.load(reply)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


# -- a life ---------------------------------------------------------------------------------------


def test_a_server_trains_samples_and_ends_when_told_to_without_leaving_a_process(tmp_path: Path):
    with served(tmp_path / "data") as server, client(server) as service:
        training = service.create_lora_training_client(MODEL, rank=2, seed=1)
        told = losses(training, 3)
        assert told[2] < told[0]
        assert sample(training.save_weights_and_get_sampling_client())
        service.close().result(PATIENCE_S)
        engine = children(server.pid)
        assert engine
        assert "libtorch" not in Path(f"/proc/{server.pid}/maps").read_text()
        assert server.end() == 0
        for pid in engine:
            wait_gone(pid)
        assert "Traceback" not in server.log.read_text()


def test_what_was_saved_is_there_after_a_restart(tmp_path: Path):
    data_dir = tmp_path / "data"
    with served(data_dir) as server, client(server) as service:
        training = service.create_lora_training_client(MODEL, rank=2, seed=1)
        losses(training, 1)
        path = training.save_state("kept").result(PATIENCE_S).path
        loss = training.forward([datum()], "cross_entropy").result(PATIENCE_S).metrics["loss:sum"]
        service.close().result(PATIENCE_S)
        assert server.end() == 0
    with served(data_dir) as server, client(server) as service:
        again = service.create_training_client_from_state(path)
        result = again.forward([datum()], "cross_entropy").result(PATIENCE_S)
        assert result.metrics["loss:sum"] == loss


def test_a_stop_in_the_middle_of_a_run_loses_nothing_that_was_accepted(tmp_path: Path, port: str):
    with served(tmp_path / "calm") as server, client(server) as service:
        training = service.create_lora_training_client(MODEL, rank=2, seed=1)
        expected = losses(training, 20)
        assert server.end() == 0

    data_dir = tmp_path / "disturbed"
    with served(data_dir, "--port", port) as server:
        service = client(server)
        training = service.create_lora_training_client(MODEL, rank=2, seed=1)
        futures = []
        for _ in range(20):
            futures.append(training.forward_backward([datum()], "cross_entropy"))
            training.optim_step(AdamParams(learning_rate=0.01))
        futures[1].result(PATIENCE_S)
        assert server.end() == 0
    with served(data_dir, "--port", port):
        told = [future.result(PATIENCE_S).metrics["loss:sum"] for future in futures]
        assert told == expected
        service.close().result(PATIENCE_S)


def test_a_killed_engine_is_replaced_and_the_server_goes_on(tmp_path: Path):
    with served(tmp_path / "data") as server, client(server) as service:
        sampler = service.create_sampling_client(base_model=MODEL)
        before = sample(sampler)
        (engine,) = children(server.pid)
        os.kill(engine, signal.SIGKILL)
        wait_gone(engine)
        assert sample(sampler) == before
        assert children(server.pid) != [engine]
        service.close().result(PATIENCE_S)


def test_a_second_interrupt_ends_a_server_at_once(tmp_path: Path):
    waits = ("--set", f"shutdown_s={PATIENCE_S}")
    with served(tmp_path / "data", *waits) as server, client(server) as service:
        training = service.create_lora_training_client(MODEL, rank=2)
        (engine,) = children(server.pid)
        os.kill(engine, signal.SIGSTOP)
        # Work that the server has accepted and that does not end: the first interrupt waits for it.
        pending = training.forward_backward([datum()], "cross_entropy")
        while pending.status().state != "running":
            assert not pending.done()
        server.popen.send_signal(signal.SIGINT)
        # The gate is closed as soon as the first one has arrived.
        while status_of(f"{server.url}/api/v1/get_server_capabilities")[0] != 503:
            assert server.popen.poll() is None
        assert server.end(signal.SIGINT) == 130
        os.kill(engine, signal.SIGCONT)
        wait_gone(engine)


# -- before it is ready ---------------------------------------------------------------------------


def test_a_server_that_loads_is_healthy_not_ready_and_says_what_it_does(tmp_path: Path, port: str):
    folder = tmp_path / "slow"
    folder.mkdir()
    os.mkfifo(folder / "config.json")
    flags = ("--base-model", f"slow={folder}", "--no-auth", "--port", port)
    with started(tmp_path / "data", *flags) as server:
        url = f"http://127.0.0.1:{port}"
        # Opening the pipe waits for the reader: from here on the engine reads, and waits.
        config = (folder / "config.json").open("w")
        assert status_of(f"{url}/healthz")[0] == 200
        code, said = status_of(f"{url}/readyz")
        while "loading slow" not in json.dumps(said):  # the time limit of the test is the limit
            code, said = status_of(f"{url}/readyz")
        assert code == 503
        config.write("{}")
        config.close()
        assert server.popen.wait(START_S) == 1
        assert "slow" in server.log.read_text()
    wait_gone(server.pid)


# -- refused --------------------------------------------------------------------------------------


def test_a_taken_port_is_an_error_that_names_it(tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        code, said = refused(tmp_path / "data", "--no-auth", "--port", port)
    assert code == 1
    assert f"port {port} of 127.0.0.1 is taken" in said
    assert "--port" in said


def test_a_second_server_on_the_same_folder_is_refused_and_told_who_has_it(tmp_path: Path):
    with served(tmp_path / "data") as server:
        code, said = refused(tmp_path / "data", "--no-auth", "--port", "0")
        assert code == 1
        assert f"used by another server (process {server.pid})" in said
        # The first one does not mind.
        assert status_of(f"{server.url}/readyz")[0] == 200


def test_a_folder_that_cannot_be_made_is_an_error_that_names_it(tmp_path: Path):
    (tmp_path / "file").touch()
    code, said = refused(tmp_path / "file" / "data", "--no-auth", "--port", "0")
    assert code == 1
    assert str(tmp_path / "file" / "data") in said
    assert "--data-dir" in said


def test_an_unknown_model_is_an_error_that_names_it(tmp_path: Path):
    flags = ("--no-auth", "--port", "0", "--base-model", "no/such-model")
    code, said = refused(tmp_path / "data", *flags)
    assert code == 1
    assert "no/such-model" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("flags", "env", "said"),
    [
        (("--set", "long_pol_s=1"), {}, "did you mean --long_poll_s?"),
        ((), {"TINKEX_PROT": "1"}, "did you mean TINKEX_PORT?"),
        ((), {"TINKEX_PORT": "eighty"}, "TINKEX_PORT: 'eighty' does not fit"),
        (("--host", "0.0.0.0", "--no-auth"), {}, "lets in everybody who reaches 0.0.0.0"),
        (("--config", "/nowhere/at/all"), {}, "/nowhere/at/all cannot be read"),
    ],
    ids=["a flag", "a variable", "a value", "no keys for all", "no file"],
)
def test_a_misuse_is_refused_by_name_before_anything_starts(
    tmp_path: Path, flags: tuple[str, ...], env: dict[str, str], said: str
):
    code, output = refused(tmp_path / "data", *flags, env=env)
    assert code == 2
    assert said in output
    assert not (tmp_path / "data").exists()


def test_a_server_for_other_machines_needs_a_key_first(tmp_path: Path):
    code, said = refused(tmp_path / "data", "--host", "0.0.0.0", "--port", "0")
    assert code == 1
    assert f"`tinkex key create --data-dir {tmp_path / 'data'}`" in said


def test_a_missing_key_is_made_in_the_database_that_the_server_uses(tmp_path: Path):
    file = tmp_path / "elsewhere.db"
    flags = ("--host", "0.0.0.0", "--port", "0", "--database", f"sqlite:///{file}")
    code, said = refused(tmp_path / "data", *flags)
    assert code == 1
    assert f"`tinkex key create --database {file}`" in said


def test_settings_of_the_file_in_the_data_folder_are_used_and_wrong_ones_refused(tmp_path: Path):
    data_dir = tmp_path / "data"
    data_dir.mkdir()
    file = data_dir / "tinkex.toml"
    file.write_text('base_models = ["tinkex/tiny"]\nport = 0\nauth = "none"\nthreads = 1\n')
    with started(data_dir, "--format", "json") as server:
        said = json.loads(read_line(server.popen, START_S))
        assert said["models"] == [MODEL]
        assert status_of(f"{said['url']}/readyz")[0] == 200
        assert server.end() == 0
    file.write_text("prot = 0\n")
    code, said = refused(data_dir)
    assert code == 2
    assert f"{file}: prot" in said
    assert "did you mean" in said


def test_only_stored_keys_are_let_in(tmp_path: Path):
    flags = ("--base-model", MODEL, "--threads", "1", "--port", "0")
    with started(tmp_path / "data", *flags) as server:
        server.wait_ready()
        code, _ = status_of(f"{server.url}/api/v1/get_server_capabilities")
        assert code == 401
        assert "there is no key yet" in server.log.read_text()
