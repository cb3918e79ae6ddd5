"""`tinkex checkpoint import`: an adapter from elsewhere as a checkpoint of a server of ours."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.adapters.folder import read_adapter
from tinkex.cli.connect import service_client
from tinkex.cli.failures import CommandError
from tinkex.cli.output import say, show_one
from tinkex.cli.verify import ask, delete_quietly, load_base, shown
from tinkex.clients.rest import RestClient
from tinkex.errors import MissingPackageError, NotFoundError

if TYPE_CHECKING:
    import argparse

    from tinkex.adapters.compare import Comparison
    from tinkex.clients.service import ServiceClient

_REPORT = "The checkpoint was deleted again. Please report this, with the adapter."


def import_(args: argparse.Namespace) -> None:
    """Upload an adapter, compare what the server makes of it, and print its path."""
    folder = Path(args.folder)
    model: str | None = args.model or read_adapter(folder).config.base_model_name_or_path
    if not model:
        raise CommandError(
            f"{folder} does not say which base model it belongs to", "Give it by --model."
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
    say(f"Uploading {folder} for {model} …")
    rest = RestClient(service.holder)
    try:
        return rest.import_adapter(folder, model, name=args.name, kind=args.kind).result()
    except NotFoundError as error:
        raise CommandError(
            "This server takes no adapters: uploading is no part of the official protocol",
            "Servers started by `tinkex serve`, and the embedded one, do.",
        ) from error


def _compare(
    service: ServiceClient, path: str, folder: Path, model: str, base: str | None
) -> Comparison | None:
    """How far the server's numbers are from the adapter's here; None where that cannot be told."""
    try:
        loaded = load_base(base or model, model)
    except (CommandError, MissingPackageError) as error:
        if base is not None:
            raise
        say(f"Not compared: {error}")
        return None
    return ask(service, path, model, loaded).check(loaded, folder, _REPORT)


def _said(found: Comparison | None) -> str:
    if found is None:
        return "no; the base model is not on this machine"
    return f"log-probabilities differ by {found.difference:.2g}"
