"""Damaged adapters: whatever is changed, it is refused in our words or is still an adapter."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import anyio
from hypothesis import given, seed, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from tests.unit.adapters import kit
from tinkex.adapters.archive import pack
from tinkex.adapters.folder import read_adapter
from tinkex.clock import SystemClock
from tinkex.errors import APIStatusError, InputError
from tinkex.server.api.call import Uploads
from tinkex.server.api.imports import Incoming, receive_adapter

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

SMALL = kit.weights(kit.pair(outputs=4))
ARCHIVE = pack(kit.files(weights=SMALL))


@st.composite
def damaged(draw: st.DrawFn, whole: bytes) -> bytes:
    """`whole` with a few pieces replaced, cut out, repeated or put in."""
    found = bytearray(whole)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(found)))
        end = min(start + draw(st.integers(0, 16)), len(found))
        found[start:end] = draw(
            st.one_of(st.binary(max_size=16), st.just(found[start:end] * 2), st.just(b""))
        )
    return bytes(found)


async def received(body: bytes, folder: Path) -> None:
    async def stream() -> AsyncIterator[bytes]:
        for at in range(0, len(body), 700):
            yield body[at : at + 700]

    async def welcome(_: object) -> None:
        """Everybody is."""

    uploads = Uploads(SystemClock(), 30.0)
    await receive_adapter(Incoming(stream(), uploads), folder, 1 << 20, welcome)


@seed(1)
@settings(max_examples=200, deadline=None, database=None)
@given(body=st.one_of(damaged(ARCHIVE), st.binary(max_size=2048)))
def test_a_damaged_archive_is_refused_or_holds_a_whole_adapter(body: bytes):
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            anyio.run(received, body, folder)
        except (APIStatusError, InputError) as error:
            status = error.status_code if isinstance(error, APIStatusError) else 400
            assert 400 <= status < 500
            return
        read_adapter(folder)
        assert sorted(path.name for path in folder.iterdir()) == [kit.CONFIG, kit.WEIGHTS]


@seed(2)
@settings(max_examples=300, deadline=None, database=None)
@given(weights=damaged(SMALL))
def test_a_file_that_we_accept_is_one_that_the_library_reads(weights: bytes):
    with tempfile.TemporaryDirectory() as name:
        folder = kit.write(Path(name) / "x", weights=weights)
        try:
            adapter = read_adapter(folder)
        except InputError:
            return
        loaded = load_file(folder / kit.WEIGHTS)
        assert sum(array.size for array in loaded.values()) == adapter.parameters
