"""Uploaded adapters whose heads lie: refused in few words, nothing is written, nobody waits."""

from __future__ import annotations

import json
import struct
import tarfile
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.serving import MODEL
from tests.security.world import MOST_BYTES, MOST_CPU_S
from tinkex.adapters.archive import pack

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tests.security.world import Answer, World

    Archive = dict[str, bytes]

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_BLOCK = tarfile.BLOCKSIZE


@pytest.fixture(scope="module")
def adapter(world: World) -> Archive:
    """The files of an adapter that the server takes: one that it has exported itself."""
    us = world.attacker
    session = us.session()
    model = us.model(session)
    us.result(us.made("save_weights_external", model_id=model, seq_id=1, path="x")["request_id"])
    found = us.get(f"training_runs/{model}/checkpoints/external_weights/x/external_weights_urls")
    links = found.json["urls"]
    files = {name: us.get("/" + link.split("/", 3)[3]).body for name, link in links.items()}
    us.finish(session)
    assert set(files) == {CONFIG, WEIGHTS}
    return files


def send(world: World, body: bytes) -> Answer:
    path = f"import_weights?base_model={MODEL}&name=hostile"
    return world.attacker.request("POST", path, body, {"content-type": "application/x-tar"})


def kept(world: World) -> tuple[set[Path], set[Path]]:
    """Every file of the server's folder that is no database, and the folders of uploads."""
    folder = world.server.log.parent
    uploads = set((folder / "tmp").glob("tinkex-import-*"))
    return {path for path in (folder / "data").rglob("*.safetensors") if path.is_file()}, uploads


def test_the_adapter_itself_is_taken(world: World, adapter: Archive) -> None:
    answer = send(world, pack(adapter))
    assert answer.status == 200, answer
    run = answer.json["tinker_path"].split("/")[2]
    path = f"training_runs/{run}/checkpoints/weights/hostile"
    assert world.attacker.request("DELETE", path).status == 200


# -- the heads of a tar ------------------------------------------------------------------------


def _head(**changes: Any) -> bytes:
    """A block that begins a file, as tar writes it, with fields replaced afterwards."""
    raw: dict[int, bytes] = changes.pop("raw", {})
    info = tarfile.TarInfo(changes.pop("name", WEIGHTS))
    for name, value in changes.items():
        setattr(info, name, value)
    block = bytearray(info.tobuf(tarfile.GNU_FORMAT)[:_BLOCK])
    for at, content in raw.items():
        block[at : at + len(content)] = content
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


def _padded(content: bytes) -> bytes:
    return content + b"\0" * (-len(content) % _BLOCK)


def _tar(files: Archive, second: bytes, more: bytes | None = None) -> bytes:
    """An archive whose second file has another head."""
    first = _head(name=CONFIG, size=len(files[CONFIG])) + _padded(files[CONFIG])
    content = _padded(files[WEIGHTS]) if more is None else more
    return first + second + content + b"\0" * 2 * _BLOCK


_SIZE_AT = 124
TARS: dict[str, Callable[[Archive], bytes]] = {
    "8 GiB": lambda f: _tar(f, _head(size=8**11 - 1)),
    "2**63": lambda f: _tar(f, _head(raw={_SIZE_AT: b"\x80\0\0\0\x80" + b"\0" * 7})),
    "2**94": lambda f: _tar(f, _head(raw={_SIZE_AT: b"\x80" + b"\xff" * 11})),
    "negative": lambda f: _tar(f, _head(raw={_SIZE_AT: b"\xff" * 12})),
    "very negative": lambda f: _tar(f, _head(raw={_SIZE_AT: b"\xff\x80" + b"\0" * 10})),
    "letters": lambda f: _tar(f, _head(raw={_SIZE_AT: b"letters here"})),
    "smaller": lambda f: _tar(f, _head(size=len(f[WEIGHTS]) - 1000)),
    "larger": lambda f: _tar(f, _head(size=len(f[WEIGHTS]) + 100_000)),
    "zero": lambda f: _tar(f, _head(size=0)),
    "checksum": lambda f: _tar(f, b"\1" + _head(size=len(f[WEIGHTS]))[1:]),
    "symbolic link": lambda f: _tar(f, _head(type=tarfile.SYMTYPE, linkname="/etc/passwd")),
    "hard link": lambda f: _tar(f, _head(type=tarfile.LNKTYPE, linkname=CONFIG)),
    "folder": lambda f: _tar(f, _head(type=tarfile.DIRTYPE)),
    "device": lambda f: _tar(f, _head(type=tarfile.CHRTYPE, devmajor=1, devminor=5)),
    "pipe": lambda f: _tar(f, _head(type=tarfile.FIFOTYPE)),
    "sparse": lambda f: _tar(
        f, _head(size=512, type=tarfile.GNUTYPE_SPARSE, raw={386: b"0" * 11 + b"\0" + b"7" * 11})
    ),
    "pax of gigabytes": lambda f: _tar(f, _head(name="x", size=8**11 - 1, type=tarfile.XHDTYPE)),
    "pax size": lambda f: _tar(
        f,
        _head(name="x", size=_BLOCK, type=tarfile.XHDTYPE)
        + _padded(b"25 size=99999999999999999\n")
        + _head(size=len(f[WEIGHTS])),
    ),
    "global pax": lambda f: _tar(f, _head(name="x", size=10**9, type=tarfile.XGLTYPE)),
    "long name": lambda f: _tar(f, _head(name="x", size=10**9, type=tarfile.GNUTYPE_LONGNAME)),
    "dots": lambda f: _tar(f, _head(name=f"../../{WEIGHTS}", size=len(f[WEIGHTS]))),
    "absolute": lambda f: _tar(f, _head(name=f"/{WEIGHTS}", size=len(f[WEIGHTS]))),
    "nul in name": lambda f: _tar(f, _head(size=len(f[WEIGHTS]), raw={0: b"a\0" + b"b" * 50})),
    "once more": lambda f: pack(f)[: -2 * _BLOCK] + pack(f),
    "config twice": lambda f: pack(f)[: _BLOCK * 2] * 2,
    "one more file": lambda f: _tar(
        f,
        _head(size=len(f[WEIGHTS])),
        _padded(f[WEIGHTS]) + _head(name="x.py", size=1) + b"x" * 512,
    ),
    "thousands of files": lambda f: _head(name="x", size=0) * 20_000,
    "gzip": lambda f: b"\x1f\x8b\x08\0" + b"\0" * 5000,
    "zip": lambda f: b"PK\x03\x04" + b"\0" * 5000,
    "nothing": lambda f: b"",
    "zeros": lambda f: b"\0" * 2_000_000,
    "padding without end": lambda f: pack(f) + b"\0" * 30_000_000,
}


# -- the head of a safetensors file ------------------------------------------------------------


def _tensors(files: Archive, change: Callable[[dict[str, Any]], object], data: int = 0) -> Archive:
    """The adapter with another head; `data` bytes are added behind."""
    length = struct.unpack("<Q", files[WEIGHTS][:8])[0]
    head = json.loads(files[WEIGHTS][8 : 8 + length])
    change(head)
    packed = json.dumps(head).encode()
    rest = files[WEIGHTS][8 + length :] + b"\0" * data
    return {**files, WEIGHTS: struct.pack("<Q", len(packed)) + packed + rest}


def _first(head: dict[str, Any]) -> dict[str, Any]:
    return head[min(name for name in head if name != "__metadata__")]


def _entry(**values: Any) -> Callable[[Archive], Archive]:
    return lambda files: _tensors(files, lambda head: _first(head).update(values))


def _length(value: int) -> Callable[[Archive], Archive]:
    return lambda files: {**files, WEIGHTS: struct.pack("<Q", value) + files[WEIGHTS][8:]}


def _text(text: bytes) -> Callable[[Archive], Archive]:
    """Any text as the head."""
    return lambda files: {**files, WEIGHTS: struct.pack("<Q", len(text)) + text + b"\0" * 64}


def _many(head: dict[str, Any]) -> None:
    for number in range(20_000):
        head[f"t{number}"] = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}


TENSORS: dict[str, Callable[[Archive], Archive]] = {
    "head of 2**64": _length(2**64 - 1),
    "head of 2**63": _length(2**63),
    "head of nothing": _length(0),
    "head of a gigabyte": _length(2**30),
    "head beyond the end": _length(2_000_000),
    "offsets beyond the end": _entry(data_offsets=[0, 2**40]),
    "offsets of 2**70": _entry(data_offsets=[2**70, 2**71]),
    "negative offsets": _entry(data_offsets=[-4, 0]),
    "reversed offsets": _entry(data_offsets=[100, 0]),
    "overlap": lambda f: _tensors(
        f,
        lambda head: [
            tensor.update(data_offsets=[0, tensor["data_offsets"][1] - tensor["data_offsets"][0]])
            for name, tensor in head.items()
            if name != "__metadata__"
        ],
    ),
    "gap": lambda f: _tensors(f, lambda _: None, data=4096),
    "one offset": _entry(data_offsets=[0]),
    "offsets of letters": _entry(data_offsets=["a", "b"]),
    "offsets of fractions": _entry(data_offsets=[0.5, 1.5]),
    "huge shape": _entry(shape=[2**40, 2**40]),
    "shape that overflows": _entry(shape=[2**32, 2**32, 2**32]),
    "shape of zero": _entry(shape=[0, 2**62]),
    "negative shape": _entry(shape=[-1, -8]),
    "shape of a million": _entry(shape=[1] * 400_000),
    "no shape": _entry(shape=[]),
    "dtype": _entry(dtype="U8"),
    "dtype of letters": _entry(dtype="x" * 500_000),
    "many tensors": lambda f: _tensors(f, _many),
    "long names": lambda f: _tensors(f, lambda head: head.update({"x" * 1_000_000: _first(head)})),
    "odd names": lambda f: _tensors(f, lambda head: head.update({"../../x\0": _first(head)})),
    "metadata": lambda f: _tensors(f, lambda head: head.update(__metadata__={"a": "b" * 10**6}), 4),
    "nested": _text(b'{"a":' * 300_000),
    "list": _text(b"[1,2,3]"),
    "no JSON": _text(b"\x80\x04\x95" + b"x" * 1000),
    "not UTF-8": _text(b'{"\xff\xfe":1}'),
    "numbers of digits": _text(b'{"a":{"dtype":"F32","shape":[' + b"9" * 5000 + b"]}}"),
}


# -- the configuration -------------------------------------------------------------------------


def _config(**values: Any) -> Callable[[Archive], Archive]:
    def change(files: Archive) -> Archive:
        return {**files, CONFIG: json.dumps({**json.loads(files[CONFIG]), **values}).encode()}

    return change


CONFIGS: dict[str, Callable[[Archive], Archive]] = {
    "rank of 2**31": _config(r=2**31),
    "rank of 2**70": _config(r=2**70),
    "rank of zero": _config(r=0),
    "negative rank": _config(r=-1),
    "rank of letters": _config(r="4"),
    "alpha of letters": _config(lora_alpha="inf"),
    "alpha of 10**400": _config(lora_alpha=10**400),
    "pickle": _config(peft_type="PICKLE"),
    "nested": lambda f: {**f, CONFIG: b'{"r":' * 150_000},
    "nested targets": lambda f: {**f, CONFIG: b'{"target_modules":' + b"[" * 400_000 + b"}"},
    "digits": lambda f: {**f, CONFIG: b'{"r":' + b"9" * 100_000 + b"}"},
    "not UTF-8": lambda f: {**f, CONFIG: b'{"r":"\xff\xfe"}'},
    "megabytes": lambda f: {**f, CONFIG: b" " * 2_000_000 + f[CONFIG]},
    "empty": lambda f: {**f, CONFIG: b""},
    "list": lambda f: {**f, CONFIG: b"[]"},
}

ARCHIVES: dict[str, Callable[[Archive], bytes]] = {
    **{f"tar {name}": make for name, make in TARS.items()},
    **{
        f"{kind} {name}": lambda files, make=make: pack(make(files))
        for kind, table in (("tensors", TENSORS), ("config", CONFIGS))
        for name, make in table.items()
    },
}


def test_an_archive_that_lies_is_refused_and_leaves_nothing(world: World, adapter: Archive) -> None:
    before, listed = kept(world), world.attacker.get("checkpoints").json
    with world.watching() as seen:
        for name, make in ARCHIVES.items():
            answer = send(world, make(adapter))
            assert answer.status in (400, 413), (name, answer.status, answer.body[:300])
            assert len(answer.body) < 2048, (name, len(answer.body))
            assert str(world.server.log.parent).encode() not in answer.body, name
    assert seen.peak_bytes < MOST_BYTES
    assert world.metric("tinkex_loop_longest_cpu_seconds", route="import_weights") < MOST_CPU_S
    assert kept(world) == before
    assert world.attacker.get("checkpoints").json == listed
    world.assert_well()


def test_a_pattern_of_targets_is_not_run_as_a_regular_expression(
    world: World, adapter: Archive
) -> None:
    """PEFT reads a text as a pattern; one that takes exponential time must not hold anything."""
    for targets in ("(a+)+$", "(.*)*x", ".*" * 200, "(" * 5000, ["x" * 100] * 5000):
        answer = send(world, pack(_config(target_modules=targets)(adapter)))
        assert answer.status in (200, 400), (targets[:20], answer)
    world.assert_well()
