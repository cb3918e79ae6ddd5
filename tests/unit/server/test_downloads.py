"""Downloads: ranges, large exports from disk, links that end with their checkpoint."""

from __future__ import annotations

import io
import struct
import tarfile
from typing import TYPE_CHECKING, Any

import anyio
import anyio.lowlevel
import msgspec
import pytest

from tinkex.errors import StorageError
from tinkex.server.api.downloads import ARCHIVE, Exports, OnDisk
from tinkex.testing import FakeEngine
from tinkex.testing.fake_engine import EngineCall

from .conftest import Api

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinkex.engine.protocol import Layout

pytestmark = pytest.mark.anyio

WEIGHTS = "adapter_model.safetensors"


async def exported(api: Api, **members: Any) -> tuple[str, str]:
    """A model with an export, and the path of the link to its weights."""
    model = await api.model()
    body = {"model_id": model, "seq_id": 1, "path": "out", **members}
    await api.result(await api.post("/save_weights_external", body))
    return model, await link(api, model)


async def link(api: Api, model: str, name: str = WEIGHTS) -> str:
    url = f"/training_runs/{model}/checkpoints/external_weights/out/external_weights_urls"
    return (await api.get(url))["urls"][name].split("/api/v1", 1)[1]


@pytest.fixture
def stranger(api: Api) -> Api:
    """Links need no key."""
    return Api(api.server, api.clock, key="")


@pytest.mark.parametrize(
    ("wanted", "part"),
    [
        ("bytes=0-9", slice(0, 10)),
        ("bytes=10-", slice(10, None)),
        ("bytes=-7", slice(-7, None)),
        ("bytes=5-99999999", slice(5, None)),
    ],
)
async def test_a_part_of_a_file_can_be_asked_for(
    api: Api, stranger: Api, wanted: str, part: slice
) -> None:
    _, path = await exported(api)
    whole = await stranger.call("GET", path)
    assert whole.status == 200
    assert whole.headers["accept-ranges"] == "bytes"
    assert int(whole.headers["content-length"]) == len(whole.body)
    reply = await stranger.call("GET", path, headers={"range": wanted})
    assert reply.status == 206
    assert reply.body == whole.body[part]
    size = len(whole.body)
    first, last = range(size)[part][0], range(size)[part][-1]
    assert reply.headers["content-range"] == f"bytes {first}-{last}/{size}"


async def test_ranges_that_mean_nothing_get_the_whole_and_impossible_ones_are_refused(
    api: Api, stranger: Api
) -> None:
    _, path = await exported(api)
    whole = await stranger.call("GET", path)
    for wanted in ("bytes=-", "pages=1-2", "bytes=0-1,4-5", "bytes=x-y"):
        reply = await stranger.call("GET", path, headers={"range": wanted})
        assert (reply.status, reply.body) == (200, whole.body)
    for wanted in (f"bytes={len(whole.body)}-", "bytes=9-8", "bytes=-0"):
        reply = await stranger.call("GET", path, headers={"range": wanted})
        assert reply.status == 416
        assert reply.headers["content-range"] == f"bytes */{len(whole.body)}"


async def test_a_download_is_only_continued_if_it_is_of_the_same_file(
    api: Api, stranger: Api
) -> None:
    _, path = await exported(api)
    whole = await stranger.call("GET", path)
    asked = {"range": "bytes=4-", "if-range": whole.headers["etag"]}
    assert (await stranger.call("GET", path, headers=asked)).status == 206
    asked["if-range"] = '"another"'
    assert (await stranger.call("GET", path, headers=asked)).status == 200


async def test_a_link_ends_with_its_checkpoint(api: Api, stranger: Api) -> None:
    model, path = await exported(api)
    assert (await stranger.call("GET", path)).status == 200
    url = f"/training_runs/{model}/checkpoints/external_weights/out"
    assert (await api.call("DELETE", url)).status == 200
    assert (await stranger.call("GET", path)).status == 404


async def test_a_link_does_not_outlive_an_expired_checkpoint(api: Api, stranger: Api) -> None:
    model, _ = await exported(api, ttl_seconds=3600)
    await api.clock.sleep(1800)
    path = await link(api, model)
    assert (await stranger.call("GET", path)).status == 200
    await api.clock.sleep(1800)
    assert (await stranger.call("GET", path)).status == 404


async def test_an_archive_has_the_vendor_s_names_and_an_export_ours(
    api: Api, stranger: Api
) -> None:
    model, path = await exported(api)
    ours = (await stranger.call("GET", path)).body
    url = f"/training_runs/{model}/checkpoints/external_weights/out/archive"
    archive = (await api.get(url))["url"].split("/api/v1", 1)[1]
    reply = await stranger.call("GET", archive)
    assert reply.headers["content-type"] == "application/x-tar"
    with tarfile.open(fileobj=io.BytesIO(reply.body)) as tar:
        assert all(member.isreg() for member in tar)
        theirs = tar.extractfile(WEIGHTS)
        assert theirs is not None
        names = _tensor_names(theirs.read())
    assert any("model.unembed_tokens" in name for name in names)
    assert not any("model.unembed_tokens" in name for name in _tensor_names(ours))


def _tensor_names(file: bytes) -> set[str]:
    (size,) = struct.unpack("<Q", file[:8])
    return set(msgspec.json.decode(file[8 : 8 + size])) - {"__metadata__"}


# -- large ones ------------------------------------------------------------------------------------


class LargeExports(FakeEngine):
    """Exports of a few hundred kilobytes, which tests count as large."""

    async def export_saved(self, location: str, layout: Layout = "peft") -> Mapping[str, bytes]:
        self.calls.append(EngineCall("export_saved", (location,)))
        await anyio.lowlevel.checkpoint()
        content = location.encode() * 40_000
        return {"adapter_config.json": b"{}", WEIGHTS: content}


def _made(engine: FakeEngine) -> int:
    return [call.name for call in engine.calls].count("export_saved")


async def test_a_large_export_is_made_once_and_read_from_disk() -> None:
    engine = LargeExports()
    exports = Exports(engine, in_memory_bytes=1000)
    sources: list[Any] = []

    async def fetch() -> None:
        sources.append(await exports.open("here", "file", WEIGHTS))

    async with anyio.create_task_group() as group:
        for _ in range(4):
            group.start_soon(fetch)
    assert _made(engine) == 1
    exports.close()
    # Whoever has it open reads on, although it was forgotten.
    for source in sources:
        assert isinstance(source, OnDisk)
        assert source.size_bytes == 160_000
        assert await source.read(159_996, 100) == b"here"
        source.close()


async def test_a_large_archive_is_a_tar_of_the_same_files() -> None:
    exports = Exports(LargeExports(), in_memory_bytes=1000)
    source = await exports.open("here", "archive", ARCHIVE)
    assert source is not None
    data = await source.read(0, source.size_bytes)
    source.close()
    exports.close()
    with tarfile.open(fileobj=io.BytesIO(data)) as tar:
        assert [(m.name, m.size) for m in tar] == [("adapter_config.json", 2), (WEIGHTS, 160_000)]


async def test_what_was_not_used_longest_is_forgotten_when_room_runs_out() -> None:
    engine = LargeExports()
    exports = Exports(engine, in_memory_bytes=1000, on_disk_bytes=500_000)
    for location in ("aaaa", "bbbb", "aaaa", "cccc", "dddd"):
        source = await exports.open(location, "file", WEIGHTS)
        assert source is not None
        assert await source.read(0, 4) == location.encode()
        source.close()
    assert _made(engine) == 4
    for location in ("dddd", "cccc", "aaaa"):
        (await _opened(exports, location)).close()
    assert _made(engine) == 4
    (await _opened(exports, "bbbb")).close()
    assert _made(engine) == 5
    exports.close()


async def _opened(exports: Exports, location: str) -> OnDisk:
    source = await exports.open(location, "file", WEIGHTS)
    assert isinstance(source, OnDisk)
    return source


async def test_a_server_without_room_for_a_large_export_says_so_without_a_path(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/no/such/folder")
    with pytest.raises(StorageError) as failed:
        await Exports(LargeExports(), in_memory_bytes=1000).open("here", "file", WEIGHTS)
    said = "the server could not write a copy of the files: No such file or directory"
    assert str(failed.value) == said


async def test_a_file_that_is_no_part_of_an_export_is_not_there() -> None:
    large = Exports(LargeExports(), in_memory_bytes=1000)
    assert await large.open("here", "file", "../secret") is None
    assert await large.open("here", "archive", WEIGHTS) is None
    large.close()
