"""The engine's process with real processes: killed, frozen, orphaned, out of memory, interrupted.

The times are those of the requirement: a dead engine is noticed within two seconds.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import resource
import select
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.contracts.engine_suite import (
    MODEL,
    base,
    datum,
    optim_op,
    sample_op,
    saved,
    spec,
    step,
    train_op,
)
from tests.e2e.engine_parents import LONG
from tests.e2e.serving import wait_gone
from tests.patience import PATIENCE_S
from tests.s3 import bucket, s3_environment, s3_url
from tinkex.clock import SystemClock
from tinkex.engine.process import (
    EngineSpec,
    LocalSettings,
    ModelSource,
    ProcessEngine,
    ProcessSettings,
)
from tinkex.engine.protocol import TrainResult
from tinkex.errors import (
    ClosedError,
    EngineDiedError,
    InputError,
    ModelError,
    RequestFailedError,
    StorageError,
)

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

pytestmark = [
    pytest.mark.anyio,
    pytest.mark.skipif(sys.platform != "linux", reason="uses pidfd, prlimit and /proc"),
]

__all__ = ["bucket", "s3_environment", "s3_url"]

ROOT = Path(__file__).parents[2]
# What an engine says at its end is waited for, where a server would go on without it.
PATIENT = ProcessSettings(reap_timeout_s=PATIENCE_S)


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


def engine_spec(folder: Path, *sources: str, **options: Any) -> EngineSpec:
    models = tuple(ModelSource(source) for source in sources or (MODEL,))
    return EngineSpec(models=models, folder=folder, threads=1, **options)


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[ProcessEngine]:
    """An engine to be ended by its test."""
    async with await ProcessEngine.start(engine_spec(tmp_path), PATIENT) as engine:
        yield engine


@pytest.fixture(scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ProcessEngine]:
    """An engine that its tests leave alive."""
    folder = tmp_path_factory.mktemp("shared")
    settings = LocalSettings(cache_bytes=1 << 24)
    async with await ProcessEngine.start(engine_spec(folder, settings=settings)) as engine:
        yield engine


async def busy_callers(engine: ProcessEngine) -> list[asyncio.Future[Any]]:
    """Callers of every kind who wait while the engine trains and samples."""
    await engine.create_adapter(spec("m"))
    heard = asyncio.Event()
    data = [datum([i % 256 for i in range(1025)]) for _ in range(400)]
    callers = [
        engine.train([train_op("m", *data)]),
        *(
            engine.sample(sample_op(base(), samples=2, params=LONG), lambda *_: heard.set())
            for _ in range(3)
        ),
        engine.save_adapter("m", "somewhere", optimizer=True),
    ]
    waiting = [asyncio.ensure_future(caller) for caller in callers]
    await heard.wait()
    return waiting


async def deaths(callers: list[asyncio.Future[Any]]) -> set[str]:
    """What the callers were told, each of them.

    How soon is decided by `ProcessSettings`, tested on a virtual clock in `test_process_liveness`.
    """
    async with asyncio.timeout(PATIENCE_S):
        errors = await asyncio.gather(*callers, return_exceptions=True)
    for error in errors:
        assert isinstance(error, EngineDiedError), error
        assert error.retryable
    return {str(error) for error in errors}


# -- its end ----------------------------------------------------------------------------------


async def test_every_caller_of_a_killed_engine_is_told_at_once_and_another_can_be_started(
    engine: ProcessEngine, tmp_path: Path
) -> None:
    callers = await busy_callers(engine)
    os.kill(engine.pid, signal.SIGKILL)
    (said,) = await deaths(callers)
    assert "killed by signal 9 (SIGKILL)" in said
    assert engine.state == "dead"
    death = await engine.wait_dead()
    assert str(death) == said
    with pytest.raises(EngineDiedError, match="signal 9"):
        await engine.sample(sample_op(base()))
    async with await ProcessEngine.start(engine_spec(tmp_path)) as another:
        assert (await another.sample(sample_op(base()))).generated_tokens == 6


async def test_an_engine_that_stays_stopped_is_noticed_and_ended(tmp_path: Path) -> None:
    settings = ProcessSettings(stopped_timeout_s=1.0)
    async with await ProcessEngine.start(engine_spec(tmp_path), settings) as engine:
        callers = await busy_callers(engine)
        os.kill(engine.pid, signal.SIGSTOP)
        (said,) = await deaths(callers)
        assert "was stopped by a signal" in said
        wait_gone(engine.pid)


async def test_an_engine_that_is_stopped_and_continued_goes_on(tmp_path: Path) -> None:
    phases: list[str] = []
    stopped, continued = asyncio.Event(), asyncio.Event()

    def on_phase(phase: str) -> None:
        phases.append(phase)
        if phase.startswith("stopped"):
            stopped.set()
        elif stopped.is_set():
            continued.set()

    async with await ProcessEngine.start(engine_spec(tmp_path), on_phase=on_phase) as engine:
        before = await engine.sample(sample_op(base()))
        os.kill(engine.pid, signal.SIGSTOP)
        call = asyncio.ensure_future(engine.sample(sample_op(base())))
        await stopped.wait()
        # Longer than a silence for which an engine that is not stopped is given up.
        await SystemClock().sleep(2 * ProcessSettings().heartbeat_timeout_s)
        assert engine.state == "ready"
        assert not call.done()
        os.kill(engine.pid, signal.SIGCONT)
        assert (await call).response.sequences == before.response.sequences
        await continued.wait()
        assert phases[-1] == "ready"


async def test_a_crash_comes_with_the_last_lines_of_the_engine(
    engine: ProcessEngine, caplog: pytest.LogCaptureFixture
) -> None:
    callers = await busy_callers(engine)
    os.kill(engine.pid, signal.SIGSEGV)
    (said,) = await deaths(callers)
    assert "signal 11 (SIGSEGV)" in said
    assert "its last lines:\n" in said
    # Python's own report of the crash, forwarded line by line.
    assert "Fatal Python error: Segmentation fault" in caplog.text


async def test_closing_ends_the_child_and_whoever_waits(tmp_path: Path) -> None:
    engine = await ProcessEngine.start(engine_spec(tmp_path))
    dead = asyncio.ensure_future(engine.wait_dead())
    callers = await busy_callers(engine)
    await engine.close()
    wait_gone(engine.pid)
    for error in await asyncio.gather(*callers, return_exceptions=True):
        assert isinstance(error, ClosedError)
    assert await dead is None
    with pytest.raises(ClosedError):
        await engine.drop_adapter("m")
    await engine.close()


async def test_an_engine_belongs_to_the_loop_that_started_it(shared: ProcessEngine) -> None:
    call = asyncio.to_thread(asyncio.run, shared.drop_adapter("nobody"))
    with pytest.raises(InputError, match="another event loop"):
        await call


async def test_a_child_that_does_not_stop_is_ended_by_force(tmp_path: Path) -> None:
    settings = ProcessSettings(close_grace_s=0.1)
    engine = await ProcessEngine.start(engine_spec(tmp_path), settings)
    os.kill(engine.pid, signal.SIGSTOP)
    await engine.close()
    wait_gone(engine.pid)
    assert engine.state == "closed"


# -- with its parent --------------------------------------------------------------------------


def parent(folder: Path) -> tuple[subprocess.Popen[str], int]:
    """A program that owns an engine, in a process group of its own, and the engine's pid."""
    program = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.engine_parents", str(folder)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert program.stdout is not None
    line = program.stdout.readline()
    if not line.strip().isdigit():
        program.kill()
        raise AssertionError(program.communicate())
    return program, int(line)


def test_the_engine_ends_when_its_parent_is_killed(tmp_path: Path):
    program, child = parent(tmp_path)
    program.kill()
    program.communicate()
    wait_gone(child)


def test_ctrl_c_leaves_it_to_the_parent_to_close_the_engine(tmp_path: Path):
    program, child = parent(tmp_path)
    # A terminal sends it to the whole group.
    os.killpg(program.pid, signal.SIGINT)
    said, errors = program.communicate(timeout=PATIENCE_S)
    # The engine was alive when its parent was interrupted, and closed by it.
    assert said.splitlines() == ["was ready, now closed"], errors
    wait_gone(child)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_the_engine_leaves_signals_for_a_whole_group_to_its_parent(
    shared: ProcessEngine, number: signal.Signals
) -> None:
    os.kill(shared.pid, number)
    assert (await shared.sample(sample_op(base()))).generated_tokens == 6


# -- one request ------------------------------------------------------------------------------


def address_space(pid: int) -> int:
    fields = Path(f"/proc/{pid}/statm").read_text().split()
    return int(fields[0]) * resource.getpagesize()


async def test_out_of_memory_fails_one_request_and_every_tenant_goes_on(
    shared: ProcessEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """The system itself refuses memory here: the child's address space is limited for a while."""
    for tenant in ("large", "small"):
        await shared.create_adapter(spec(tenant))
        await step(shared, tenant)
    before = resource.prlimit(shared.pid, resource.RLIMIT_AS)
    limit = address_space(shared.pid) + (64 << 20)
    resource.prlimit(shared.pid, resource.RLIMIT_AS, (limit, before[1]))
    try:
        large = datum([i % 256 for i in range(8000)])
        failed, went_on = await shared.train([train_op("large", large), train_op("small")])
        assert isinstance(failed, RequestFailedError)
        assert failed.category == "server"
        assert "memory" in failed.message
        assert isinstance(went_on, TrainResult)
        # What the engine logged about it is in the parent's log.
        levels = [record.levelno for record in caplog.records if "memory" in record.getMessage()]
        assert logging.WARNING in levels
        # And nothing of it stays: both tenants train and sample under the same limit.
        for tenant in ("large", "small"):
            await step(shared, tenant)
            await shared.publish(tenant, tenant)
        assert (await shared.sample(sample_op(base()))).generated_tokens == 6
    finally:
        resource.prlimit(shared.pid, resource.RLIMIT_AS, before)
    (answer,) = await shared.train([train_op("large", large)])
    assert isinstance(answer, TrainResult)


async def test_a_pass_longer_than_the_heartbeat_timeout_is_not_taken_for_silence(
    tmp_path: Path,
) -> None:
    settings = ProcessSettings(heartbeat_interval_s=0.05, heartbeat_timeout_s=0.1)
    async with await ProcessEngine.start(engine_spec(tmp_path), settings) as engine:
        await engine.create_adapter(spec("m"))
        (answer,) = await engine.train([train_op("m", datum([i % 256 for i in range(6000)]))])
        assert isinstance(answer, TrainResult)
        assert engine.state == "ready"


async def test_a_sign_of_life_that_comes_while_its_threads_are_looked_at_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ProcessSettings(heartbeat_interval_s=0.2, heartbeat_timeout_s=1.0)
    async with await ProcessEngine.start(engine_spec(tmp_path), settings) as engine:
        looked = asyncio.Event()

        def computes(pid: int) -> bool:
            """It gets CPU time only now, sends what is due, and sleeps before it is looked at."""
            os.kill(pid, signal.SIGCONT)
            connection = engine._channel._transport.get_extra_info("socket")
            assert select.select([connection], [], [], PATIENCE_S)[0]
            looked.set()
            return False

        # A process that is not scheduled is silent like one that is stopped.
        module = "tinkex.engine.process.process_engine"
        monkeypatch.setattr(f"{module}.is_stopped", lambda pid: False)
        monkeypatch.setattr(f"{module}.computes", computes)
        os.kill(engine.pid, signal.SIGSTOP)
        await looked.wait()
        monkeypatch.setattr(f"{module}.computes", lambda pid: True)
        await engine.create_adapter(spec("m"))
        assert engine.state == "ready"


STAND_IN = """
import asyncio, sys, threading, types
from tinkex.testing import FakeEngine

float32 = None
device = lambda name: types.SimpleNamespace(type=name)
set_num_threads = lambda threads: None

class LocalEngine(FakeEngine):
    def __init__(self, models, folder, settings, artifacts):
        super().__init__()

    async def train(self, batch):
        raise RuntimeError("CUDA error: device-side assert triggered")

    async def optim_step(self, batch):
        def fails():
            raise ValueError("a mistake in the engine's thread")
        threading.Thread(target=fails).start()
        await asyncio.Event().wait()

    async def close(self):
        pass

sys.modules["tinkex.engine.local"] = sys.modules[__name__]
sys.modules["tinkex.engine.models.loader"] = types.SimpleNamespace(
    load_model=lambda *a, **k: None, defer_model=None
)
"""


@pytest.fixture
async def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[ProcessEngine]:
    """A real child whose engine only pretends: there is no device here that could fail."""
    (tmp_path / "torch.py").write_text(STAND_IN)
    monkeypatch.syspath_prepend(str(tmp_path))
    async with await ProcessEngine.start(engine_spec(tmp_path), PATIENT) as engine:
        yield engine


async def test_after_a_fault_of_the_device_the_engine_reports_it_and_ends(
    faulty: ProcessEngine,
) -> None:
    # Whoever ran into it is told so; everybody else that the engine is gone.
    with pytest.raises(RequestFailedError, match="device-side assert"):
        await faulty.train([train_op("m")])
    death = await faulty.wait_dead()
    assert "gave up: RuntimeError: CUDA error: device-side assert triggered" in str(death)
    wait_gone(faulty.pid)


async def test_an_engine_whose_thread_has_ended_lets_nobody_wait(faulty: ProcessEngine) -> None:
    with pytest.raises(EngineDiedError, match="gave up: ValueError: a mistake in the engine"):
        await faulty.optim_step([optim_op("m")])


# -- its storage ------------------------------------------------------------------------------


async def test_a_full_disk_fails_the_save_as_such_and_keeps_what_was_saved_before(
    tmp_path: Path,
) -> None:
    async with await ProcessEngine.start(engine_spec(tmp_path)) as engine:
        await engine.create_adapter(spec("m"))
        await engine.save_adapter("m", "x", optimizer=False)
        await engine.publish("m", "snapshot")
        before = await engine.export_saved("x")
        await step(engine, "m")
        # The child's writes end in the middle of the file, as on a disk that is full.
        resource.prlimit(engine.pid, resource.RLIMIT_FSIZE, (1 << 14, resource.RLIM_INFINITY))
        for call in (
            lambda: engine.save_adapter("m", "x", optimizer=True),
            lambda: engine.save_snapshot("snapshot", "y"),
            lambda: engine.copy_saved("x", "y"),
        ):
            with pytest.raises(StorageError, match=r"File too large \(\d+ bytes needed") as caught:
                await call()
            assert str(tmp_path) in caught.value.path
            assert caught.value.retryable
        assert _names(tmp_path) == {"x.safetensors", "lock"}
        assert await engine.export_saved("x") == before
        resource.prlimit(engine.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
        assert (await engine.save_adapter("m", "x", optimizer=True)).has_optimizer
        assert await engine.export_saved("x") != before


def _names(folder: Path) -> set[str]:
    return {path.name for path in folder.rglob("*") if path.is_file()}


async def test_what_was_saved_at_a_url_is_found_by_an_engine_on_another_machine(
    tmp_path: Path, bucket: str
) -> None:
    url = f"s3://{bucket}/adapters"
    here, there = (engine_spec(tmp_path / place, artifacts=url) for place in ("here", "there"))
    async with await ProcessEngine.start(here) as engine:
        await engine.create_adapter(spec("m"))
        await step(engine, "m")
        await engine.train([train_op("m")])
        await engine.save_adapter("m", "runs/half", optimizer=True)
        unbroken = [await step(engine, "m") for _ in range(2)]
        await engine.publish("m", "end")
        await engine.save_snapshot("end", "runs/end")
        exported = await engine.export_saved("runs/end", "tinker")
        scored = await engine.sample(sample_op(saved("runs/end")))
        os.kill(engine.pid, signal.SIGKILL)
        await engine.wait_dead()
    async with await ProcessEngine.start(there) as engine:
        await engine.create_adapter(spec("again"))
        await engine.load_adapter("again", "runs/half", optimizer=True)
        assert [await step(engine, "again") for _ in range(2)] == unbroken
        assert await engine.export_saved("runs/end", "tinker") == exported
        result = await engine.sample(sample_op(saved("runs/end")))
        assert result.response.sequences == scored.response.sequences
        await engine.copy_saved("runs/half", "runs/copy")
        for location in ("runs/half", "runs/end"):
            await engine.delete_saved(location)
        with pytest.raises(RequestFailedError, match="nothing is saved at 'runs/half'"):
            await engine.load_adapter("again", "runs/half", optimizer=True)
        await engine.load_adapter("again", "runs/copy", optimizer=True)


async def test_artifacts_that_cannot_be_used_keep_the_engine_from_starting(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="artifacts: 'nowhere' cannot be used"):
        await ProcessEngine.start(engine_spec(tmp_path, artifacts="nowhere://x"))


# -- its start --------------------------------------------------------------------------------


def folder_of(tmp_path: Path, **config: Any) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


async def test_an_unknown_architecture_is_named_by_the_one_who_starts(tmp_path: Path) -> None:
    source = folder_of(tmp_path, architectures=["MambaForCausalLM"])
    with pytest.raises(ModelError, match="MambaForCausalLM is not supported"):
        await ProcessEngine.start(engine_spec(tmp_path, source))


async def test_a_device_that_is_not_there_is_named_and_the_phases_were_told(
    tmp_path: Path,
) -> None:
    phases: list[str] = []
    with pytest.raises(InputError) as caught:
        await ProcessEngine.start(engine_spec(tmp_path, device="cuda:99"), on_phase=phases.append)
    assert caught.value.path == "device"
    assert phases == ["importing torch"]


async def test_a_child_that_dies_while_it_starts_is_reported_with_what_it_was_doing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "torch.py").write_text("import sys; sys.exit('this torch is broken')")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EngineDiedError, match="this torch is broken"):
        await ProcessEngine.start(engine_spec(tmp_path), PATIENT)


async def test_a_child_that_falls_silent_while_it_starts_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stops = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    (tmp_path / "torch.py").write_text(stops)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(EngineDiedError, match=r"no sign of life(.|\n)*importing torch"):
        await ProcessEngine.start(engine_spec(tmp_path), ProcessSettings(start_timeout_s=3.0))


async def test_a_start_that_is_cancelled_leaves_no_child(tmp_path: Path) -> None:
    before = engine_children()
    told = asyncio.Event()
    starting = asyncio.ensure_future(
        ProcessEngine.start(engine_spec(tmp_path), on_phase=lambda _: told.set())
    )
    await told.wait()
    (child,) = engine_children() - before
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    wait_gone(child)


def engine_children() -> set[int]:
    """The engine processes that this one has started."""
    return {int(path.name) for path in Path("/proc").iterdir() if _is_child(path)}


def _is_child(path: Path) -> bool:
    try:
        status = (path / "stat").read_text().rpartition(")")[2].split()
        return int(status[1]) == os.getpid() and b"process.child" in (path / "cmdline").read_bytes()
    except (OSError, IndexError, ValueError):
        return False
