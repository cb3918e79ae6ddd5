"""From which step a run begins, and whether it is still the same run."""

from __future__ import annotations

import hashlib
from dataclasses import asdict
from typing import TYPE_CHECKING

from tinkex.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from tinkex.loops.run_folder import Record, RunFolder
    from tinkex.loops.settings import Settings


def record_of(folder: RunFolder, *, resume: bool) -> Record | None:
    """What to go on from; None for a run that begins. Refuses to do one for the other.

    A run that took no step has nothing to lose and is begun again.
    """
    record = folder.read()
    if resume and record is None:
        raise InputError("there is no run to resume", str(folder.path))
    if not resume and folder.begun:
        raise InputError(
            "a run was begun here; resume it, or choose another folder", str(folder.path)
        )
    return record if resume else None


def hashes(files: Mapping[str, Path]) -> dict[str, dict[str, str]]:
    """Path and SHA-256 of each file, by what it is for."""
    return {
        name: {"path": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
        for name, path in files.items()
    }


def refuse_other_run(record: Record, settings: Settings, files: Mapping[str, Path]) -> None:
    """Raise InputError naming every setting and file that is not what the run began with."""
    changed: list[str] = []
    if record.kind != settings.kind:
        changed.append(f"it is a run of `train {record.kind}`, not of `train {settings.kind}`")
    now = asdict(settings)
    for name in record.settings.keys() & now.keys() - settings.free:
        if record.settings[name] != now[name]:
            changed.append(f"{name} was {record.settings[name]}, and is {now[name]} now")
    changed += _changed_files(record, files)
    refuse(sorted(changed))


def refuse_other_tokens(record: Record, rendered: str) -> None:
    """Raise InputError when the same files come to other tokens than at the beginning."""
    if record.rendered != rendered:
        refuse(["the same data comes to other tokens: the model's tokenizer or template differs"])


def refuse(changed: list[str]) -> None:
    """Raise InputError with what has changed, if anything has."""
    if changed:
        lines = "\n".join(f"  {one}" for one in changed)
        raise InputError(
            f"this is not the run that was begun:\n{lines}\n"
            "Resume it as it was begun, or begin another in a folder of its own.",
        )


def _changed_files(record: Record, files: Mapping[str, Path]) -> list[str]:
    now = hashes(files)
    changed: list[str] = []
    for name in sorted(record.files.keys() | now.keys()):
        was, found = record.files.get(name), now.get(name)
        if was is None or found is None:
            changed.append(f"it was begun {'with' if found is None else 'without'} a file: {name}")
        elif was["sha256"] != found["sha256"]:
            changed.append(f"the contents of {found['path']} have changed")
    return changed
