"""An uploaded adapter on its way from a stranger's request to a folder: a tar, read as it comes.

What can be refused is refused as early as it shows: before the weights arrive their size, names,
shapes and places are known and checked. Names in the archive are compared, never used as paths.
"""

from __future__ import annotations

import tarfile
from typing import TYPE_CHECKING, Final

import anyio.to_thread

from tinkex.adapters.archive import FILES
from tinkex.adapters.folder import MAX_CONFIG_BYTES, check_adapter
from tinkex.adapters.peft_layout import CONFIG_FILE, WEIGHTS_FILE, read_config
from tinkex.adapters.tensor_header import LENGTH, head_length, parse_head
from tinkex.server.api.errors import refuse

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path

    from tinkex.adapters.folder import AdapterInfo
    from tinkex.adapters.peft_layout import AdapterConfig
    from tinkex.server.api.call import Uploads

    Welcome = Callable[[AdapterInfo], Awaitable[None]]

BLOCK_BYTES: Final = 8 << 20
"""So much must arrive within `upload_timeout_s`, again and again."""
_TAR: Final = tarfile.BLOCKSIZE
_MOST_PADDING: Final = 64 * _TAR
EXTRA_BYTES: Final = MAX_CONFIG_BYTES + _MOST_PADDING
"""What an archive may have besides the weights."""


class Incoming:
    """A body that is read piece by piece; each piece has the time that other bodies have."""

    def __init__(self, stream: AsyncIterator[bytes], uploads: Uploads) -> None:
        self._stream = stream
        self._uploads = uploads
        # Mutable state: what has come and was not asked for yet.
        self._held = bytearray()

    async def take(self, count: int) -> bytes:
        """The next bytes; fewer only at the end of the body."""
        if len(self._held) < count:
            await self._uploads.within_limit(self._fill(count))
        taken = bytes(memoryview(self._held)[:count])
        del self._held[:count]
        return taken

    async def exactly(self, count: int, what: str) -> bytes:
        """The next bytes, all of them."""
        taken = await self.take(count)
        if len(taken) < count:
            raise refuse(400, f"The body ends within {what}; send it again.")
        return taken

    async def _fill(self, count: int) -> bytes:
        while len(self._held) < count:
            piece = await anext(self._stream, None)
            if piece is None:
                break
            self._held += piece
        return b""


async def receive_adapter(body: Incoming, folder: Path, most: int, welcome: Welcome) -> AdapterInfo:
    """Write the adapter in a body to a folder.

    `welcome` is told what it is before its weights are read, and raises if it is not.
    """
    size = await _begin(body, CONFIG_FILE, MAX_CONFIG_BYTES)
    content = await body.exactly(size, CONFIG_FILE)
    await _pad(body, size)
    config = read_config(content)
    size = await _begin(body, WEIGHTS_FILE, most)
    first = await body.exactly(min(size, LENGTH.size), WEIGHTS_FILE)
    length = head_length(first, size)
    head = await body.exactly(length, WEIGHTS_FILE)
    left = size - LENGTH.size - length
    # Thousands of tensors, perhaps: others' requests must not wait for that.
    adapter = await anyio.to_thread.run_sync(_described, config, head, left)
    await welcome(adapter)
    await _write(folder / CONFIG_FILE, content)
    await _write(folder / WEIGHTS_FILE, first + head)
    await _copy(body, folder / WEIGHTS_FILE, left)
    await _pad(body, size)
    await _end(body)
    return adapter


def _described(config: AdapterConfig, head: bytes, data_bytes: int) -> AdapterInfo:
    return check_adapter(config, parse_head(head, data_bytes))


async def _begin(body: Incoming, name: str, most: int) -> int:
    """The size of the file that comes next, which must be this one."""
    head = await body.exactly(_TAR, "the archive")
    try:
        info = tarfile.TarInfo.frombuf(head, "utf-8", "surrogateescape")
    except tarfile.HeaderError as error:
        raise refuse(400, f"The body is no tar with {' and '.join(FILES)}: {error}.") from None
    if info.name != name or info.type not in (tarfile.REGTYPE, tarfile.AREGTYPE):
        raise refuse(
            400,
            f"The archive must hold the files {' and '.join(FILES)}, in this order and nothing "
            f"else; {name} was expected and {info.name!r} is there.",
        )
    if info.size > most:
        raise refuse(413, f"{name} has {info.size} bytes; it may have {most} here.")
    return max(info.size, 0)


async def _pad(body: Incoming, size: int) -> None:
    await body.exactly(-size % _TAR, "the archive")


async def _end(body: Incoming) -> None:
    """The end of an archive is empty blocks; how many is a matter of taste."""
    rest = await body.take(_MOST_PADDING + 1)
    if len(rest) > _MOST_PADDING or rest.strip(b"\0"):
        raise refuse(400, f"The archive must hold {' and '.join(FILES)} and nothing else.")


async def _copy(body: Incoming, path: Path, left: int) -> None:
    while left:
        piece = await body.exactly(min(left, BLOCK_BYTES), WEIGHTS_FILE)
        await _write(path, piece)
        left -= len(piece)


async def _write(path: Path, content: bytes) -> None:
    def append() -> None:
        with path.open("ab") as file:
            file.write(content)

    try:
        await anyio.to_thread.run_sync(append)
    except OSError as error:
        detail = f"The server has no room for the upload ({error.strerror}); try again later."
        raise refuse(507, detail) from error
