"""An adapter as one tar: its configuration, then its weights, and nothing else.

Servers send and receive such archives. tinkex writes plain tar (POSIX); those of hosted Tinker may
be compressed and have their files in a folder.
"""

from __future__ import annotations

import io
import shutil
import tarfile
import zlib
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Final

from tinkex.adapters.peft_layout import CONFIG_FILE, WEIGHTS_FILE
from tinkex.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

FILES: Final = (CONFIG_FILE, WEIGHTS_FILE)


def pack(files: Mapping[str, bytes]) -> bytes:
    """Files in their order as an archive to send."""
    parts = [part for name, content in files.items() for part in _entry(name, content)]
    return b"".join([*parts, bytes(2 * tarfile.BLOCKSIZE)])


def pack_folder(folder: Path) -> bytes:
    """The adapter in a PEFT folder as an archive to send."""
    return pack({name: (folder / name).read_bytes() for name in FILES})


def _entry(name: str, content: bytes) -> list[bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    head = info.tobuf(tarfile.USTAR_FORMAT)
    return [head, content, bytes(-len(content) % tarfile.BLOCKSIZE)]


def unpack(archive: Path, folder: Path) -> None:
    """Write the adapter in an archive to a folder; member names are never used as paths."""
    try:
        with tarfile.open(archive) as tar:
            for member in tar:
                name = PurePosixPath(member.name).name
                if name in FILES and member.isreg():
                    source = tar.extractfile(member) or io.BytesIO()
                    with source, (folder / name).open("xb") as target:
                        shutil.copyfileobj(source, target)
    except (tarfile.TarError, zlib.error, EOFError, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the system's, such as a full disk, and not about the archive
        raise InputError(f"is no readable archive: {error}", archive.name) from error
