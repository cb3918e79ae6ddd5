"""Downloads from signed links, without credentials, atomically; and full disks."""

from __future__ import annotations

import asyncio
import sys
from contextlib import contextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, Final
from urllib.parse import urljoin, urlsplit

from tinkex import urls
from tinkex._version import user_agent
from tinkex.cli.command_errors import CommandError
from tinkex.cli.output import size
from tinkex.engine.checkpoints.storage import free_bytes, full_disk
from tinkex.errors import APIConnectionError, ProxyError, StorageError
from tinkex.new_files import replacing
from tinkex.transport.base import HttpRequest, Pool
from tinkex.transport.http import MAX_REDIRECTS, REDIRECTS, HttpTransport, describe
from tinkex.transport.proxy_failure import ProxyFailure

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path
    from typing import BinaryIO

    from tinkex.config import Config
    from tinkex.transport.base import StreamedReply

_SILENCE_S = 60.0
_CONNECT_S = 20.0
_AGAIN = "Run the command again."
WORK_PREFIX: Final = ".tinkex-download-"
"""The prefix of folders that hold unfinished downloads."""


def fetch(url: str, target: Path, label: str, config: Config) -> int:
    """Download to `target` atomically; returns its size. Of the settings only the proxy is used."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with replacing(target) as file:
        download = _Download(file, target.parent, label, config)
        asyncio.run(download.run(url))
    return download.received


class _Download:
    """One file while it is downloaded."""

    def __init__(self, file: BinaryIO, folder: Path, label: str, config: Config) -> None:
        # Mutable state: the bytes received, and the expected size.
        self._file = file
        self._folder = folder
        self._label = label
        self._config = config
        self._expected: int | None = None
        self.received = 0

    async def run(self, url: str) -> None:
        """Follow redirects and save the file."""
        for _ in range(MAX_REDIRECTS):
            location = await self._ask(url)
            if location is None:
                return
            secure = url.startswith("https://")
            url = urljoin(url, location)
            if secure and not url.startswith("https://"):
                raise self._failed("the server redirects to an address that is not https")
        raise self._failed(f"the server redirects more than {MAX_REDIRECTS} times")

    async def _ask(self, url: str) -> str | None:
        """Save the file at `url`, or return where it redirects to."""
        origin, target = self._parts(url)
        headers = {"Accept-Encoding": "identity", "User-Agent": user_agent()}
        request = HttpRequest("GET", target, Pool.REST, _SILENCE_S, headers=headers)
        transport = HttpTransport(origin, connect_timeout_s=_CONNECT_S, proxy=self._config.proxy)
        try:
            async with transport.stream(request) as reply:
                if reply.status in REDIRECTS and "location" in reply.headers:
                    return reply.headers["location"]
                await self._save(reply)
        except ProxyError as error:
            raise self._failed(error.message, "") from None
        except APIConnectionError as error:
            raise self._broken(error, origin) from error
        finally:
            await transport.aclose()
        return None

    def _parts(self, url: str) -> tuple[str, str]:
        """Origin and request target of a link."""
        try:
            parts = urlsplit(url)
            origin = urls.normalise(f"{parts.scheme}://{parts.netloc}")
        except ValueError:  # InputError is one
            raise CommandError(
                f"The server gave a link that is no web address for {self._label}"
            ) from None
        path = parts.path or "/"
        return origin, f"{path}?{parts.query}" if parts.query else path

    async def _save(self, reply: StreamedReply) -> None:
        if not 200 <= reply.status < 300:
            raise self._failed(
                f"the server answered {reply.status} {_phrase(reply.status)}".rstrip(),
                f"The link may have expired. {_AGAIN}",
            )
        length = reply.headers.get("content-length", "")
        if length.isdigit() and "content-encoding" not in reply.headers:
            self._expected = int(length)
        progress = _Progress(self._label)
        try:
            with writing_into(self._folder, self._expected):
                async for chunk in reply.chunks:
                    self._file.write(chunk)
                    self.received += len(chunk)
                    progress.show(self.received, self._expected)
                self._file.flush()
        finally:
            progress.end()

    def _broken(self, error: APIConnectionError, origin: str) -> CommandError:
        cause = error.__cause__
        if self.received and self._expected is not None:
            so_far = f"{size(self.received)} of {size(self._expected)}"
            return CommandError(f"The download of {self._label} broke off after {so_far}", _AGAIN)
        if isinstance(cause, ProxyFailure) or not isinstance(cause, Exception):
            return self._failed(error.message)
        return self._failed(describe(cause, origin, "check the network"))

    def _failed(self, reason: str, hint: str = _AGAIN) -> CommandError:
        return CommandError(f"Could not download {self._label}: {reason}", hint)


def _phrase(status: int) -> str:
    try:
        return HTTPStatus(status).phrase
    except ValueError:
        return ""


class _Progress:
    """One line on a terminal, redrawn; nothing elsewhere."""

    def __init__(self, label: str) -> None:
        self._label = label
        self._on = sys.stderr.isatty()

    def show(self, received: int, expected: int | None) -> None:
        if not self._on:
            return
        share = f"{100 * received // expected:3d} % of {size(expected)}" if expected else ""
        line = f"{self._label}: {size(received)} {share}"
        print(f"\r\033[K{line[:79]}", end="", file=sys.stderr, flush=True)

    def end(self) -> None:
        if self._on:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


@contextmanager
def writing_into(folder: Path, needed_bytes: int | None = None) -> Generator[None]:
    """Write files into a folder; raises a `CommandError` where they do not fit.

    Raises before anything is written if `needed_bytes` does not fit.
    """
    free = free_bytes(folder)
    if needed_bytes is not None and free is not None and needed_bytes > free:
        raise _no_room(folder, "not enough space", needed_bytes, free)
    try:
        yield
    except CommandError:
        raise  # its message is specific already
    except Exception as error:
        reason = full_disk(error)
        if reason is None:
            raise
        place = error.path if isinstance(error, StorageError) else None
        raise _no_room(place or folder, reason, needed_bytes, free) from error


def _no_room(
    place: Path | str, reason: str, needed_bytes: int | None, free: int | None
) -> CommandError:
    sizes = [
        *([] if needed_bytes is None else [f"{size(needed_bytes)} needed"]),
        *([] if free is None else [f"{size(free)} free"]),
    ]
    shown = str(place).partition(f"/{WORK_PREFIX}")[0]
    about = f" ({', '.join(sizes)})" if sizes else ""
    return CommandError(
        f"Cannot write to {shown}: {reason}{about}",
        "Nothing was saved. Free some space there, or choose another place with -o.",
    )
