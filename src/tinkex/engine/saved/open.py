"""Chooses where saved adapters lie."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import unquote, urlsplit

from tinkex.engine.saved.cache import FileCache
from tinkex.engine.saved.folder import FolderFiles
from tinkex.engine.saved.remote import RemoteFiles
from tinkex.errors import InputError

if TYPE_CHECKING:
    from tinkex.engine.saved.base import SavedFiles

_SAVED: Final = "saved"
_CACHE: Final = "cache"


def open_saved(folder: Path, url: str | None, cache_bytes: int) -> SavedFiles:
    """Files below `folder`, or at `url` with copies below `folder`.

    A path, or a URL that begins with `file:`, is a folder too, and needs no copies.
    """
    if url is None:
        return FolderFiles(folder / _SAVED)
    parts = urlsplit(url)
    if parts.scheme in ("", "file", "local"):
        path = Path(unquote(parts.path) if parts.scheme else url)
        if not path.is_absolute() or parts.netloc:
            raise InputError(f"{url!r} must be an absolute path or a URL", "artifacts")
        return FolderFiles(path)
    return RemoteFiles(url, FileCache(folder / _CACHE, cache_bytes))
