"""Reads what an offline run holds for W&B.

Its files are records of W&B's own protocol in LevelDB's log format, after a header of seven bytes.
"""

from __future__ import annotations

import json
import struct
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

BLOCK, HEADER, MAGIC = 32768, 7, b":W&B"
FULL, LAST = 1, 4


def records(data: bytes) -> Iterator[bytes]:
    """The records of a log: whole ones, and those in pieces put together."""
    assert data.startswith(MAGIC)
    at, pieces = HEADER, b""
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        pieces += data[at + HEADER : at + HEADER + size]
        at += HEADER + size
        if kind in (FULL, LAST):
            yield pieces
            pieces = b""


def held_for_wandb(folder: Path) -> dict[str, Any]:
    """Project, name, settings and rows of all that was written."""
    from wandb.proto import wandb_internal_pb2

    found: dict[str, Any] = {"rows": [], "settings": {}}
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in records(file.read_bytes()):
            record: Any = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                found |= {"project": record.run.project, "name": record.run.display_name}
            found["settings"] |= _values(record.run.config.update)
            if record.history.item:
                found["rows"].append(_values(record.history.item))
    return found


def _values(items: Any) -> dict[str, Any]:
    return {item.key or item.nested_key[0]: json.loads(item.value_json) for item in items}
