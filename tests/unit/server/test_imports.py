"""Uploaded adapters: kept whole or not at all, whatever a stranger sends.

Files are written by threads, for which virtual time does not wait; so the clock here is the real
one, or moved by hand.
"""

from __future__ import annotations

import tarfile
import tempfile
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import anyio
import msgspec
import pytest

from tests.unit.adapters import kit
from tinkex.adapters.archive import pack
from tinkex.clock import SystemClock
from tinkex.errors import EngineDiedError
from tinkex.server import Settings
from tinkex.server.api import imports
from tinkex.testing import FakeClock, FakeServer

from .conftest import Api, Start, datum

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tinkex.clock import Clock
    from tinkex.transport.base import Reply

pytestmark = pytest.mark.anyio

TAR = {"content-type": "application/x-tar"}


@pytest.fixture
def start() -> Start:
    """Make a server with other settings: `async with start(max_import_bytes=5) as api`."""

    @asynccontextmanager
    async def run(clock: Clock | None = None, **settings: Any) -> AsyncIterator[Api]:
        used: Any = clock or SystemClock()
        server = FakeServer(clock=used, settings=Settings(**settings))
        async with server:
            yield Api(server, used)

    return run


@pytest.fixture(autouse=True)
def scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where uploads lie while they come; a test may look whether something is left."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def query(**members: str) -> str:
    return urlencode({"base_model": "tinkex/tiny", **members})


async def upload(
    api: Api, body: bytes | None = None, headers: dict[str, str] | None = None, **members: str
) -> Reply:
    data = pack(kit.files()) if body is None else body
    sent = {**TAR, **(headers or {})}
    return await api.call("POST", "/import_weights", data, query=query(**members), headers=sent)


async def imported(api: Api, **members: str) -> str:
    reply = await upload(api, **members)
    assert reply.status == 200, reply
    return msgspec.json.decode(reply.body)["tinker_path"]


def left_in(folder: Path) -> list[Path]:
    return list(folder.iterdir())


async def refused(api: Api, scratch: Path, reply: Reply) -> tuple[int, str]:
    """What a refusal says; nothing may have been kept."""
    assert (await api.get("/checkpoints"))["checkpoints"] == []
    assert (await api.get("/training_runs"))["training_runs"] == []
    assert left_in(scratch) == []
    return reply.status, msgspec.json.decode(reply.body)["detail"]


async def prefers(api: Api, path: str, number: int = 0) -> float:
    """The log-probability that weights give to the token which the kit's adapter raises."""
    session = await api.session()
    sampler = await api.sampler(session, number, model_path=path)
    future = await api.sample(
        sampler,
        prompt={"chunks": [{"type": "encoded_text", "tokens": [1, 0]}]},
        prompt_logprobs=True,
    )
    found = (await api.sampled(future)).prompt_logprobs
    return found[1]


# -- what it becomes -------------------------------------------------------------------------------


async def test_the_run_of_an_import_is_listed_and_nothing_runs_in_it(api: Api) -> None:
    path = await imported(api)
    (run,) = (await api.get("/training_runs"))["training_runs"]
    assert path.startswith(f"tinker://{run['training_run_id']}/")
    assert await api.server.store.open_models() == []


@pytest.mark.parametrize("kind", ["weights", "sampler_weights"])
async def test_an_adapter_is_sampled_from_trained_on_and_exported(
    api: Api, scratch: Path, kind: str
) -> None:
    path = await imported(api, kind=kind, name="mine")
    assert path.endswith(f"/{kind}/mine")
    assert left_in(scratch) == []
    base = await api.sampler(await api.session())
    future = await api.sample(
        base,
        prompt={"chunks": [{"type": "encoded_text", "tokens": [1, 0]}]},
        prompt_logprobs=True,
    )
    before = (await api.sampled(future)).prompt_logprobs[1]
    assert await prefers(api, path) > before + 1

    session = await api.session()
    body = {"session_id": session, "model_seq_id": 0, "path": path, "optimizer": False}
    model = (await api.result(await api.post("/load_weights", body)))["model_id"]
    first = await api.loss(await api.train(model, 1, datum([1, 2])))
    await api.result(await api.step(model, 2))
    assert await api.loss(await api.train(model, 3, datum([1, 2]))) < first

    run, _, rest = path.removeprefix("tinker://").partition("/")
    archive = await api.get(f"/training_runs/{run}/checkpoints/{rest}/archive")
    assert archive["url"]
    info = await api.post("/weights_info", {"tinker_path": path})
    assert (info["base_model"], info["lora_rank"], info["train_mlp"]) == ("tinkex/tiny", 2, False)


async def test_it_belongs_to_whoever_sent_it_and_is_listed_audited_and_deleted(api: Api) -> None:
    path = await imported(api)
    run = path.removeprefix("tinker://").partition("/")[0]
    (listed,) = (await api.get("/checkpoints"))["checkpoints"]
    assert listed["tinker_path"] == path
    assert listed["size_bytes"] > 0
    assert [e["event"] for e in (await api.get("/audit"))["entries"]] == ["checkpoint_imported"]
    stranger = await api.other().call("POST", "/weights_info", {"tinker_path": path})
    assert stranger.status == 404
    gone = await api.call("DELETE", f"/training_runs/{run}/checkpoints/weights/imported")
    assert gone.status == 200
    assert (await api.get("/checkpoints"))["checkpoints"] == []


async def test_its_optimizer_state_is_asked_for_in_vain(api: Api) -> None:
    path = await imported(api)
    body = {
        "session_id": await api.session(),
        "model_seq_id": 0,
        "path": path,
        "optimizer": True,
    }
    reply = await api.call("POST", "/load_weights", body)
    assert reply.status == 400
    assert b"no optimizer state" in reply.body


async def test_each_import_is_a_run_of_its_own(api: Api) -> None:
    assert await imported(api) != await imported(api)
    assert len((await api.get("/training_runs"))["training_runs"]) == 2


async def test_a_request_that_is_sent_again_is_answered_by_the_first(api: Api) -> None:
    key = {"x-idempotency-key": "once"}
    replies = [await upload(api, headers=key) for _ in range(2)]
    assert replies[0].body == replies[1].body
    assert len((await api.get("/checkpoints"))["checkpoints"]) == 1
    # Somebody else's key is another one.
    assert (await upload(api.other(), headers=key)).body != replies[0].body


async def test_it_is_kept_before_it_is_acknowledged(api: Api) -> None:
    path = await imported(api)
    again = FakeServer(after=api.server, engine=api.server.engine, clock=api.clock)
    async with again:
        later = Api(again, api.clock)
        listed = (await later.get("/checkpoints"))["checkpoints"]
        assert [one["tinker_path"] for one in listed] == [path]
        assert await prefers(later, path) > -6


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", kit.BAD)
async def test_what_is_no_adapter_is_refused_by_what_is_wrong(
    api: Api, scratch: Path, name: str
) -> None:
    changes, message = kit.BAD[name]
    status, detail = await refused(api, scratch, await upload(api, pack(kit.files(**changes))))
    assert status == 400
    assert message in detail
    assert "import_saved" not in [call.name for call in api.server.engine.calls]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (kit.weights(kit.pair(kit.LAYER)), "tinkex/tiny has no (0, 'q_proj')"),
        (kit.weights(kit.pair(outputs=7)), "has shape [7, 2], expected [1024, 2]"),
    ],
)
async def test_an_adapter_of_another_base_model_is_refused(
    api: Api, scratch: Path, weights: bytes, message: str
) -> None:
    reply = await upload(api, pack(kit.files(weights=weights)))
    status, detail = await refused(api, scratch, reply)
    assert status == 400
    assert message in detail


@pytest.mark.parametrize(
    ("members", "status", "message"),
    [
        ({"base_model": "no/such"}, 400, "not served here; there is: tinkex/tiny"),
        ({"base_model": ""}, 400, "not served here"),
        ({"name": "../../etc"}, 400, "is not possible"),
        ({"name": "a/b"}, 400, "is not possible"),
        ({"name": ""}, 400, "is not possible"),
        ({"name": "x" * 200}, 400, "is not possible"),
        ({"kind": "external_weights"}, 400, "kind must be weights or sampler_weights"),
        ({"kind": "../weights"}, 400, "kind must be"),
    ],
)
async def test_bad_names_are_refused_before_the_body_is_read(
    api: Api, scratch: Path, members: dict[str, str], status: int, message: str
) -> None:
    found = await refused(api, scratch, await upload(api, **members))
    assert found[0] == status
    assert message in found[1]


def swapped() -> bytes:
    return pack(dict(reversed(kit.files().items())))


def link() -> bytes:
    info = tarfile.TarInfo(kit.CONFIG)
    info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
    return info.tobuf(tarfile.USTAR_FORMAT)


WHOLE = pack(kit.files())


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"", "ends within the archive"),
        (b"x" * 2000, "is no tar"),
        (bytes(2000), "is no tar"),
        (swapped(), "'adapter_model.safetensors' is there"),
        (link(), "'adapter_config.json' is there"),
        (pack({f"../{kit.CONFIG}": b"{}"}), "'../adapter_config.json' is there"),
        (pack({f"/{kit.CONFIG}": b"{}"}), "is there"),
        (pack({"adapter_model.bin": b"\x80\x02."}), "'adapter_model.bin' is there"),
        (pack({kit.CONFIG: kit.config(), "adapter_model.bin": b"x"}), "'adapter_model.bin'"),
        (pack({**kit.files(), "more": b"x"}), "nothing else"),
        (WHOLE[: WHOLE.index(b"lora_B") + 400], "ends within adapter_model.safetensors"),
        (WHOLE + b"x", "nothing else"),
        (WHOLE + bytes(1 << 20), "nothing else"),
    ],
    ids=range(13),
)
async def test_an_archive_that_holds_something_else_is_refused(
    api: Api, scratch: Path, body: bytes, message: str
) -> None:
    status, detail = await refused(api, scratch, await upload(api, body))
    assert status == 400
    assert message in detail


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "application/json"},
        {"content-type": "application/octet-stream"},
        {**TAR, "content-encoding": "gzip"},
        {**TAR, "content-encoding": "zstd"},
    ],
)
async def test_other_kinds_of_bodies_are_not_read(
    api: Api, scratch: Path, headers: dict[str, str]
) -> None:
    reply = await upload(api, headers=headers)
    assert (await refused(api, scratch, reply))[0] == 415


# -- limits ----------------------------------------------------------------------------------------


async def test_a_file_above_the_limit_is_refused_when_its_size_is_known(
    start: Start, scratch: Path
) -> None:
    async with start(max_import_bytes=5000) as api:
        status, detail = await refused(api, scratch, await upload(api))
        assert status == 413
        assert "it may have 5000 here" in detail


async def test_a_declared_length_above_the_limit_is_refused_before_anything_is_read(
    start: Start,
) -> None:
    async def never() -> dict[str, Any]:
        raise AssertionError("the body was read")

    async with start(max_import_bytes=5000) as api:
        status, body = await send(api, never, content_length=str(1 << 40))
        assert status == 413
        assert b"max_import_bytes" in body


async def test_an_adapter_larger_than_the_quota_is_refused_before_its_weights_are_read(
    start: Start, scratch: Path
) -> None:
    async with start(max_stored_bytes=4000) as api:
        body = WHOLE[: WHOLE.index(b"lora_B") + 400]  # the rest never comes
        status, detail = await refused(api, scratch, await upload(api, body))
        # Larger than the whole quota: waiting would not help.
        assert status == 400
        assert "takes 8200 bytes" in detail
        assert "max_stored_bytes" in detail


async def test_an_import_that_does_not_fit_now_is_put_off_and_not_kept(
    start: Start, scratch: Path
) -> None:
    # The fake engine keeps eight bytes for each of the 1024 tokens.
    async with start(max_stored_bytes=8200) as api:
        path = await imported(api)
        reply = await upload(api)
        assert (reply.status, reply.headers["x-should-retry"]) == (429, "false")
        assert path in reply.body.decode()
        listed = (await api.get("/checkpoints"))["checkpoints"]
        assert [one["tinker_path"] for one in listed] == [path]


async def test_an_import_that_the_quota_refuses_afterwards_leaves_no_file(
    start: Start, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "_KEPT_ITEM_BYTES", 1)
    async with start(max_stored_bytes=4000) as api:
        status, detail = await refused(api, scratch, await upload(api))
        assert (status, "max_stored_bytes" in detail) == (400, True)
        assert [call.name for call in api.server.engine.calls][-1] == "delete_saved"
        assert api.server.engine._saved == {}


async def test_one_tenant_may_have_two_imports_under_way_and_another_its_own(api: Api) -> None:
    release = anyio.Event()

    async def slow() -> dict[str, Any]:
        await release.wait()
        return {"type": "http.request", "body": WHOLE, "more_body": False}

    async def first(statuses: list[int]) -> None:
        statuses.append((await send(api, slow))[0])

    statuses: list[int] = []
    async with anyio.create_task_group() as group:
        for _ in range(2):
            group.start_soon(first, statuses)
        await anyio.wait_all_tasks_blocked()
        third = await upload(api)
        assert third.status == 429
        assert third.headers["retry-after"] == "5"
        assert (await upload(api.other())).status == 200
        release.set()
    assert statuses == [200, 200]
    assert (await upload(api)).status == 200


async def test_a_body_that_does_not_arrive_is_given_up(start: Start, scratch: Path) -> None:
    asked = anyio.Event()

    async def never() -> dict[str, Any]:
        asked.set()
        return await anyio.sleep_forever()

    clock = FakeClock()
    async with start(clock, upload_timeout_s=5.0) as api, anyio.create_task_group() as group:

        async def exchange() -> None:
            status, body = await send(api, never)
            assert status == 408
            assert b"within 5 s" in body
            assert left_in(scratch) == []

        group.start_soon(exchange)
        await asked.wait()
        await clock.advance(6.0)


async def test_a_body_may_take_long_as_long_as_it_comes(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "BLOCK_BYTES", 1024)
    parts = [WHOLE[at : at + 512] for at in range(0, len(WHOLE), 512)]
    clock = FakeClock()

    async def slowly() -> dict[str, Any]:
        await clock.advance(1.0)
        part = parts.pop(0)
        return {"type": "http.request", "body": part, "more_body": bool(parts)}

    async with start(clock, upload_timeout_s=5.0) as api:
        assert (await send(api, slowly))[0] == 200
    assert clock.now() > 10.0


async def test_a_full_disk_is_said_and_nothing_stays(
    api: Api, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Path.open

    def full(self: Path, mode: str = "r", *args: Any, **options: Any) -> Any:
        if self.name == kit.WEIGHTS and "a" in mode:
            raise OSError(28, "No space left on device")
        return original(self, mode, *args, **options)

    monkeypatch.setattr(Path, "open", full)
    status, detail = await refused(api, scratch, await upload(api))
    assert status == 507
    assert "No space left" in detail


async def test_a_dead_engine_is_a_reason_to_send_it_again(api: Api, scratch: Path) -> None:
    api.server.engine.fail_next("import_saved", EngineDiedError("gone"))
    status, _ = await refused(api, scratch, await upload(api))
    assert status == 503
    assert (await upload(api)).status == 200


async def send(
    api: Api, receive: Callable[[], Awaitable[dict[str, Any]]], **headers: str
) -> tuple[int, bytes]:
    """One upload whose body comes from `receive`, as a server reads it from a socket."""
    named = {"x-api-key": api.key, **TAR, **{k.replace("_", "-"): v for k, v in headers.items()}}
    scope = {
        "type": "http",
        "method": "POST",
        "path": "/api/v1/import_weights",
        "raw_path": b"/api/v1/import_weights",
        "query_string": query().encode(),
        "headers": [(name.encode(), value.encode()) for name, value in named.items()],
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 2),
        "scheme": "http",
        "http_version": "1.1",
    }
    sent: list[Any] = []

    async def out(message: Any) -> None:
        sent.append(message)

    await api.server._inner(scope, receive, out)
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:])
