"""`tinkex checkpoint export`: a checkpoint as files that other programs load.

What is exported is computed here and compared with the server before it gets its name. A folder
that is there has passed; one that has not is gone.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.adapters.peft_layout import CONFIG_FILE
from tinkex.cli.adapter_files import base_model_of, fetch_adapter
from tinkex.cli.connect import service_client
from tinkex.cli.disk_space import writing_into
from tinkex.cli.download import folder_in, put_in_place
from tinkex.cli.failures import CommandError, misuse
from tinkex.cli.output import say, show_one, size
from tinkex.cli.target import checkpoint
from tinkex.cli.verify import ask, load_base, shown

if TYPE_CHECKING:
    import argparse

    from tinkex.adapters.compare import Comparison
    from tinkex.cli.verify import Expected
    from tinkex.clients.service import ServiceClient
    from tinkex.engine.checkpoints.merged import DtypeName
    from tinkex.engine.models.loader import BaseModel

_ADAPTER = "adapter"
_REPORT = "Nothing was saved. Please report this, with the checkpoint's path."
_ROUNDED = "Nothing was saved. Pass --dtype float32, or --layout peft, which rounds nothing."


def export_adapter(service: ServiceClient, path: str, folder: Path | str) -> None:
    """Write a checkpoint as a PEFT folder, which is there completely or not at all.

    An adapter that is in the folder already is replaced; anything else in it is not touched.
    """
    target = Path(folder)
    if target.exists() and not (target / CONFIG_FILE).is_file() and any(target.iterdir()):
        raise CommandError(f"{target} holds something else", "Choose another folder.")
    with folder_in(target.parent) as fresh:
        fetch_adapter(service, path, fresh, base_model_of(service, path))
        put_in_place(fresh, target)


def export(args: argparse.Namespace) -> None:
    """Export a checkpoint, compare it with the server, and give it its place."""
    if args.dtype is not None and args.layout != "merged":
        raise misuse("--dtype belongs to --layout merged", "An adapter keeps its own precision.")
    chosen = checkpoint(args.path)
    target = Path(args.output)
    if target.exists() and not args.force:
        raise CommandError(
            f"{target} exists already", "Pass --force to replace it, or -o for another place."
        )
    if args.layout == "peft":
        _say_what_is_there(args.path)
    with service_client(chosen.source) as service, folder_in(target.parent) as work:
        finished, found = _export(service, args, chosen.model, work)
        put_in_place(finished, target)
    _report(args, chosen.model, target, found)


def _say_what_is_there(path: str) -> None:
    """Point to the adapter that a run has exported by itself."""
    made = Path(path) / _ADAPTER
    if (made / CONFIG_FILE).is_file():
        say(f"{made} holds the adapter of this run already, in PEFT's layout.")


def _export(
    service: ServiceClient, args: argparse.Namespace, path: str, work: Path
) -> tuple[Path, Comparison]:
    """Make the folder that was asked for and compare it; returns it and how it compares."""
    name = base_model_of(service, path)
    adapter = work / _ADAPTER
    adapter.mkdir()
    say(f"Fetching {path} …")
    fetch_adapter(service, path, adapter, name)
    base = load_base(args.base or name, name)
    expected = ask(service, path, name, base)
    found = expected.check(base, adapter, _REPORT)
    if args.layout == "peft":
        return adapter, found
    return _merged(base, expected, adapter, work / "merged", args.dtype)


def _merged(
    base: BaseModel, expected: Expected, adapter: Path, folder: Path, dtype: DtypeName | None
) -> tuple[Path, Comparison]:
    from tinkex.engine.checkpoints.merged import merge, merged_bytes, own_dtype

    dtype = dtype or own_dtype(base)
    say(f"Merging in {dtype} …")
    with writing_into(folder.parent, merged_bytes(base, dtype)):
        merge(base, adapter, folder, dtype)
    rounded = dtype != "float32"
    merged = load_base(str(folder), base.decoder.config.name)
    return folder, expected.check(merged, None, _ROUNDED if rounded else _REPORT, rounded=rounded)


def _report(args: argparse.Namespace, path: str, target: Path, found: Comparison) -> None:
    size_bytes = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
    show_one(
        args,
        {
            "checkpoint_path": path,
            "destination": str(target),
            "layout": args.layout,
            "file_size_bytes": size_bytes,
            "verified": shown(found),
        },
        [
            ("Checkpoint Path", path),
            ("Layout", args.layout),
            ("Total Size", size(size_bytes)),
            ("Saved to", target),
            ("Verified", f"log-probabilities differ by {found.difference:.2g}"),
            ("Allowed", f"{found.allowed:.2g} (the adapter changes {found.effect:.2g})"),
        ],
    )
