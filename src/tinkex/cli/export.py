"""`tinkex checkpoint download`, `export` and `import`: checkpoints as files.

An exported folder gets its name only after its log-probabilities were computed here and compared
with the server's; one that differs is removed. Downloads are not compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.cli.command_errors import CommandError, misuse
from tinkex.cli.commands import FORCE, PATH_OR_RUN, Argument, Command
from tinkex.cli.connect import service_client
from tinkex.cli.output import say, show_one, size
from tinkex.errors import MissingPackageError, NotFoundError

if TYPE_CHECKING:
    import argparse

    from tinkex.adapters.compare import Comparison
    from tinkex.cli.verify import Expected
    from tinkex.clients.service import ServiceClient
    from tinkex.engine.checkpoints.merged import DtypeName
    from tinkex.engine.models.loader import BaseModel

_ADAPTER = "adapter"
_REPORT = "Nothing was saved. Please report this, with the checkpoint's path."
_IMPORT_REPORT = "The checkpoint was deleted again. Please report this, with the adapter."
_ROUNDED = "Nothing was saved. Pass --dtype float32, or --layout peft, which rounds nothing."


def download(args: argparse.Namespace) -> None:
    """Download a checkpoint's files into a new folder."""
    from tinkex.cli import checkpoint_files as files
    from tinkex.cli.target import checkpoint_named

    chosen = checkpoint_named(args.path)
    path = chosen.model
    files.check_downloadable(path)
    parent = Path(args.output or ".")
    target = parent / path.removeprefix("tinker://").replace("/", "_")
    _refuse_existing(target, args)
    with service_client(chosen.source) as service, files.folder_in(parent) as folder:
        size_bytes = files.fetch_checkpoint(service, path, folder)
        files.put_in_place(folder, target)
    show_one(
        args,
        {
            "checkpoint_path": path,
            "destination": str(target),
            "file_size_bytes": size_bytes,
        },
        [("Checkpoint Path", path), ("Total Size", size(size_bytes)), ("Saved to", target)],
    )


def _refuse_existing(target: Path, args: argparse.Namespace) -> None:
    if target.exists() and not args.force:
        raise CommandError(
            f"{target} exists already", "Pass --force to replace it, or -o for another place."
        )


def export_adapter(service: ServiceClient, path: str, folder: Path | str) -> None:
    """Write a checkpoint as a PEFT folder, atomically.

    Replaces an adapter; raises a `CommandError` for a folder with other files.
    """
    from tinkex.adapters.peft_layout import CONFIG_FILE
    from tinkex.cli import checkpoint_files as files

    target = Path(folder)
    if target.exists() and not (target / CONFIG_FILE).is_file() and any(target.iterdir()):
        raise CommandError(f"{target} holds something else", "Choose another folder.")
    with files.folder_in(target.parent) as fresh:
        files.fetch_adapter(service, path, fresh, files.base_model_of(service, path))
        files.put_in_place(fresh, target)


def export(args: argparse.Namespace) -> None:
    """Write a checkpoint as a PEFT adapter or a merged model, and verify it."""
    from tinkex.cli.checkpoint_files import folder_in, put_in_place
    from tinkex.cli.target import checkpoint_named

    if args.dtype is not None and args.layout != "merged":
        raise misuse("--dtype belongs to --layout merged", "An adapter keeps its own precision.")
    chosen = checkpoint_named(args.path)
    target = Path(args.output)
    _refuse_existing(target, args)
    if args.layout == "peft":
        _say_what_is_there(args.path)
    with service_client(chosen.source) as service, folder_in(target.parent) as work:
        finished, found = _export(service, args, chosen.model, work)
        put_in_place(finished, target)
    _report(args, chosen.model, target, found)


def _say_what_is_there(path: str) -> None:
    """Point to the adapter that the run has exported itself."""
    from tinkex.adapters.peft_layout import CONFIG_FILE

    made = Path(path) / _ADAPTER
    if (made / CONFIG_FILE).is_file():
        say(f"{made} holds the adapter of this run already, in PEFT's layout.")


def _export(
    service: ServiceClient, args: argparse.Namespace, path: str, work: Path
) -> tuple[Path, Comparison]:
    """Write the folder and compare it with the server."""
    from tinkex.cli.checkpoint_files import base_model_of, fetch_adapter
    from tinkex.cli.verify import ask, load_base

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
    from tinkex.cli.fetch import writing_into
    from tinkex.cli.verify import load_base
    from tinkex.engine.checkpoints.merged import merge, merged_bytes, own_dtype

    dtype = dtype or own_dtype(base)
    say(f"Merging in {dtype} …")
    with writing_into(folder.parent, merged_bytes(base, dtype)):
        merge(base, adapter, folder, dtype)
    rounded = dtype != "float32"
    merged = load_base(str(folder), base.decoder.config.name)
    return folder, expected.check(merged, None, _ROUNDED if rounded else _REPORT, rounded=rounded)


def _report(args: argparse.Namespace, path: str, target: Path, found: Comparison) -> None:
    from tinkex.cli.verify import shown

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


# -- import --------------------------------------------------------------------------------------


def import_(args: argparse.Namespace) -> None:
    """Upload a PEFT adapter to a tinkex server, and verify it there. Prints its path."""
    from tinkex.adapters.folder import read_adapter
    from tinkex.cli.verify import delete_quietly, shown

    folder = Path(args.folder)
    model: str | None = args.model or read_adapter(folder).config.base_model_name_or_path
    if not model:
        raise CommandError(
            f"{folder} does not say which base model it belongs to", "Name it with --model."
        )
    with service_client(args.model) as service:
        path = _upload(service, folder, model, args)
        try:
            found = _compare(service, path, folder, model, args.base)
        except BaseException:
            delete_quietly(service, path)
            raise
    show_one(
        args,
        {
            "tinker_path": path,
            "base_model": model,
            "verified": None if found is None else shown(found),
        },
        [
            ("Tinker Path", path),
            ("Base Model", model),
            ("Verified", _said(found)),
        ],
    )


def _upload(service: ServiceClient, folder: Path, model: str, args: argparse.Namespace) -> str:
    from tinkex.clients.rest import RestClient

    say(f"Uploading {folder} for {model} …")
    rest = RestClient(service.holder)
    try:
        return rest.import_adapter(folder, model, name=args.name, kind=args.kind).result()
    except NotFoundError as error:
        raise CommandError(
            "This server does not accept adapters: uploads are not part of the official protocol",
            "Servers started by `tinkex serve` and the embedded server accept them.",
        ) from error


def _compare(
    service: ServiceClient, path: str, folder: Path, model: str, base: str | None
) -> Comparison | None:
    """The difference between the server and this machine; None without the base model here."""
    from tinkex.cli.verify import ask, load_base

    try:
        loaded = load_base(base or model, model)
    except (CommandError, MissingPackageError) as error:
        if base is not None:
            raise
        say(f"Not compared: {error}")
        return None
    return ask(service, path, model, loaded).check(loaded, folder, _IMPORT_REPORT)


def _said(found: Comparison | None) -> str:
    if found is None:
        return "no; the base model is not on this machine"
    return f"log-probabilities differ by {found.difference:.2g}"


_BASE = "folder, GGUF file or hub id of the base model"

DOWNLOAD = Command(
    download,
    PATH_OR_RUN,
    Argument("-o --output DIR", "where to create the folder"),
    FORCE,
)

EXPORT = Command(
    export,
    PATH_OR_RUN,
    Argument("-o --output DIR", "the folder to write", required=True),
    Argument(
        "--layout NAME",
        "peft: the adapter alone; merged: a whole model",
        choices=("peft", "merged"),
        default="peft",
    ),
    Argument("--base MODEL", f"{_BASE} (default: its name)"),
    Argument(
        "--dtype NAME",
        "of a merged model: float32, bfloat16, float16 (default: its base's)",
        choices=("float32", "bfloat16", "float16"),
    ),
    FORCE,
)

IMPORT = Command(
    import_,
    Argument("folder PEFT_DIR", "a folder with an adapter"),
    Argument("--model NAME", "its base model (default: as in the adapter's configuration)"),
    Argument("--name NAME", "the checkpoint's name (default: imported)"),
    Argument(
        "--kind KIND",
        "weights to train and sample; sampler_weights to sample",
        choices=("weights", "sampler_weights"),
        default="weights",
    ),
    Argument("--base MODEL", f"{_BASE}, to compare with"),
)
