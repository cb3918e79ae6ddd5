"""Clients and processes: fork, spawn, interrupt, a server that is killed, a sudden end."""

from __future__ import annotations

import json
import multiprocessing
import os
import select
import signal
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e import workers
from tests.e2e.workers import MODEL, datum, sample
from tests.held import held
from tests.patience import PATIENCE_S
from tinkex import (
    APIConnectionError,
    Config,
    CredentialError,
    ForkedError,
    ServerSilentError,
    ServiceClient,
)
from tinkex.clients.session import Session
from tinkex.testing import API_KEY, Delays, FakeServer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ROOT = Path(__file__).parents[2]
KEY = "tml-canary-of-the-processes"


def in_a_forked_child(work: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    """What `work` returns in a forked child; fails when the child says nothing in time."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about threads
        child = os.fork()
    if child == 0:  # pragma: no cover - runs in the child
        try:
            answer = work()
        except BaseException as error:  # noqa: BLE001
            answer = f"{type(error).__name__}: {error}"
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], seconds)
    if not ready:
        os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    answer = os.read(read, 1 << 16) if ready else b""
    os.close(read)
    assert answer, f"the child did not answer within {seconds} s"
    return json.loads(answer)


@pytest.mark.req("B6")
@pytest.mark.req("S22")
def test_a_forked_child_gets_clear_errors_from_old_clients_and_a_working_new_one():
    forked = threading.Event()
    with FakeServer().serve() as server:
        service = ServiceClient(base_url=server.url, api_key=API_KEY)
        training = service.create_lora_training_client(MODEL, rank=2)
        sampler = service.create_sampling_client(base_model=MODEL)
        # Python cannot fork while another thread is importing, as the first calls do.
        expected = sample(sampler)
        training.forward([datum()], "cross_entropy").result(PATIENCE_S)
        server.faults.on("forward_backward", held(forked))
        pending = training.forward_backward([datum()], "cross_entropy")

        def work() -> dict[str, Any]:
            old = {
                "pending": pending,
                "training": training.forward([datum()], "cross_entropy"),
                "sampling": sampler.sample(workers.PROMPT, 1, workers.PARAMS),
                "close": service.close(),
            }
            errors = {
                name: type(future.exception(PATIENCE_S)).__name__ for name, future in old.items()
            }
            said = str(old["training"].exception(1))
            with ServiceClient(base_url=server.url, api_key=API_KEY) as mine:
                tokens = sample(mine.create_sampling_client(base_model=MODEL))
            return {"errors": errors, "tokens": tokens, "said": said}

        answer = in_a_forked_child(work)
        forked.set()
        assert isinstance(answer, dict), answer
        assert set(answer["errors"].values()) == {ForkedError.__name__}
        assert "in the child" in answer["said"]
        # The parent goes on as if nothing had happened.
        assert answer["tokens"] == expected == sample(sampler)
        assert pending.result(PATIENCE_S).metrics
        service.close().result(PATIENCE_S)


@pytest.mark.req("B6")
def test_a_client_that_was_made_but_not_used_before_a_fork_is_refused_or_works():
    with FakeServer().serve() as server:
        service = ServiceClient(base_url=server.url, api_key=API_KEY)

        def work() -> Any:
            return sample(service.create_sampling_client(base_model=MODEL))

        answer = in_a_forked_child(work)
        assert answer == work() or answer.startswith("ForkedError")
        service.close().result(PATIENCE_S)


@pytest.fixture
def spawned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ProcessPoolExecutor]:
    """A pool whose processes have neither a key nor stored credentials."""
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("TINKER_API_KEY", "TINKER_CREDENTIAL_CMD", "TINKER_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn) as pool:
        yield pool


@pytest.mark.req("B9")
@pytest.mark.req("S30")
def test_a_pickled_sampler_works_in_a_spawned_process_with_its_own_key(
    spawned: ProcessPoolExecutor, monkeypatch: pytest.MonkeyPatch
):
    with (
        FakeServer().serve() as server,
        ServiceClient(base_url=server.url, api_key=KEY) as service,
    ):
        sampler = service.create_sampling_client(base_model=MODEL)
        # Processes of the pool start now, with this environment.
        monkeypatch.setenv("TINKER_API_KEY", KEY)
        assert spawned.submit(sample, sampler).result(PATIENCE_S) == sample(sampler)
        # The copy numbers its requests from a block of its own.
        numbers = [seen.json["seq_id"] for seen in server.seen("asample")]
        assert max(numbers) >= 1_000_000_000
        assert min(numbers) == 0
        handle = sampler.get_sampler_handle()
        assert spawned.submit(workers.sample_from_handle, handle, KEY).result(PATIENCE_S) == sample(
            sampler
        )
        assert len(server.seen("create_session")) == 1


@pytest.mark.req("B9")
def test_without_a_key_of_its_own_a_spawned_process_says_what_is_missing(
    spawned: ProcessPoolExecutor,
):
    with (
        FakeServer().serve() as server,
        ServiceClient(base_url=server.url, api_key=KEY) as service,
    ):
        sampler = service.create_sampling_client(base_model=MODEL)
        with pytest.raises(CredentialError, match="TINKER_API_KEY") as caught:
            spawned.submit(sample, sampler).result(PATIENCE_S)
        assert KEY not in repr(caught.value) + str(caught.value.__cause__)
        assert server.seen("asample") == []


# -- other programs ---------------------------------------------------------------------------


def run(*args: str, **options: Any) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.workers", *args],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


@pytest.mark.req("S22")
def test_a_killed_server_ends_every_pending_future_with_a_typed_error():
    server = run("serve")
    try:
        assert server.stdout is not None
        url = server.stdout.readline().strip()
        # A busy machine may keep a server that is still there silent for seconds.
        config = Config(
            base_url=url, api_key=API_KEY, silence_deadline_s=20.0, submit_deadline_s=20.0
        )
        service = ServiceClient.over(Session(config))
        training = service.create_lora_training_client(MODEL, rank=2)
        sampler = service.create_sampling_client(base_model=MODEL)
        futures: list[Any] = [
            training.forward_backward([datum()], "cross_entropy"),
            training.forward_backward([datum()], "cross_entropy"),
            *(sampler.sample(workers.PROMPT, 1, workers.PARAMS) for _ in range(5)),
        ]
        while any(future.status().state != "running" for future in futures):
            assert not any(future.done() for future in futures)
        server.kill()
        server.wait(PATIENCE_S)
        late = training.forward_backward([datum()], "cross_entropy")
        for future in (*futures, late):
            error = future.exception(PATIENCE_S)
            assert isinstance(error, (ServerSilentError, APIConnectionError)), error
        service.close().result(PATIENCE_S)
    finally:
        server.kill()
        server.communicate()


def test_ctrl_c_interrupts_a_blocking_wait_and_the_program_ends():
    with FakeServer(delays=Delays(train_s=3600.0)).serve() as server:
        program = run("wait_for_ever", server.url)
        assert program.stdout is not None
        assert program.stdout.readline() == "waiting\n"
        program.send_signal(signal.SIGINT)
        _, errors = program.communicate(timeout=PATIENCE_S)
        assert program.returncode in (1, 130, -signal.SIGINT)
        assert errors.strip().endswith("KeyboardInterrupt")
        assert "Exception ignored" not in errors


def test_a_program_that_ends_without_closing_ends_at_once_and_silently():
    with FakeServer(delays=Delays(train_s=3600.0, sample_s=3600.0)).serve() as server:
        program = run("leave_without_closing", server.url)
        output, errors = program.communicate(timeout=PATIENCE_S)
    assert (program.returncode, output, errors) == (0, "6\n", "")


# -- threads ----------------------------------------------------------------------------------


@pytest.mark.req("S22")
def test_closing_from_another_thread_ends_a_blocked_wait():
    with FakeServer(delays=Delays(train_s=3600.0)).serve() as server:
        service = ServiceClient(base_url=server.url, api_key=API_KEY)
        training = service.create_lora_training_client(MODEL, rank=2)
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                training.forward_backward([datum()], "cross_entropy").result()
            except BaseException as error:  # noqa: BLE001
                errors.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        while not server.seen("forward_backward"):
            assert waiting.is_alive()
        service.close().result(PATIENCE_S)
        waiting.join(PATIENCE_S)
        assert not waiting.is_alive()
        assert [type(error).__name__ for error in errors] == ["ClosedError"]
