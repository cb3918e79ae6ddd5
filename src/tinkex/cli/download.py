"""`tinkex checkpoint download`: a checkpoint's files in a folder, all of them or none."""

from __future__ import annotations

import shutil
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from tinkex.cli.connect import service_client
from tinkex.cli.disk_space import WORK_PREFIX, writing_into
from tinkex.cli.failures import CommandError
from tinkex.cli.fetch import fetch
from tinkex.cli.output import say, show_one, size, utc_now
from tinkex.cli.target import checkpoint
from tinkex.clients.rest import RestClient
from tinkex.errors import TinkerError
from tinkex.new_files import new_folder
from tinkex.types import ParsedCheckpointTinkerPath

if TYPE_CHECKING:
    import argparse
    from collections.abc import Generator

    from tinkex.clients.service import ServiceClient
    from tinkex.types import ExternalWeightsUrlsResponse

_EXPORT_TTL_S = 3600
_SIGN_AGAIN = timedelta(minutes=5)


def download(args: argparse.Namespace) -> None:
    """Download a checkpoint into a new folder."""
    chosen = checkpoint(args.path)
    path = chosen.model
    check_downloadable(path)
    parent = Path(args.output or ".")
    target = parent / path.removeprefix("tinker://").replace("/", "_")
    if target.exists() and not args.force:
        raise CommandError(
            f"{target} exists already", "Pass --force to replace it, or -o for another place."
        )
    with service_client(chosen.source) as service, folder_in(parent) as folder:
        size_bytes = fetch_checkpoint(service, path, folder)
        put_in_place(folder, target)
    show_one(
        args,
        {
            "checkpoint_path": path,
            "destination": str(target),
            "file_size_bytes": size_bytes,
        },
        [("Checkpoint Path", path), ("Total Size", size(size_bytes)), ("Saved to", target)],
    )


def check_downloadable(path: str) -> None:
    """Refuse what cannot be downloaded."""
    if ParsedCheckpointTinkerPath.from_tinker_path(path).checkpoint_type == "sampler":
        raise CommandError(
            "Sampler weights cannot be downloaded",
            "Download a training checkpoint (tinker://RUN/weights/NAME), or export the weights "
            "with save_weights_external().",
        )


def fetch_checkpoint(service: ServiceClient, path: str, folder: Path) -> int:
    """Download the files of a checkpoint into `folder`; returns their size."""
    rest = RestClient(service.holder)
    if ParsedCheckpointTinkerPath.from_tinker_path(path).checkpoint_type == "external":
        return fetch_export(rest, path, folder, temporary=False)
    with exported(service, rest, path) as export:
        return fetch_export(rest, export, folder, temporary=True)


@contextmanager
def exported(service: ServiceClient, rest: RestClient, path: str) -> Generator[str]:
    """A temporary export of a training checkpoint, deleted afterwards."""
    say(f"Exporting {path} (this loads it into a new training run) …")
    training = service.create_training_client_from_state(
        path, user_metadata={"created_by": "tinkex checkpoint download"}
    )
    export = training.save_weights_external("download", ttl_seconds=_EXPORT_TTL_S).result().path
    try:
        yield export
    finally:
        try:
            rest.delete_checkpoint_from_tinker_path(export).result()
        except TinkerError as error:
            say(f"The temporary export {export} was not deleted ({error}); it expires in an hour.")


def fetch_export(rest: RestClient, path: str, folder: Path, *, temporary: bool) -> int:
    """Download the files of exported weights; a `temporary` export is kept until it is here."""
    links = _sign(rest, path, temporary)
    if not links.urls:
        raise CommandError(f"{path} has no files")
    total = 0
    for name in sorted(links.urls):
        if utc_now() >= links.expires - _SIGN_AGAIN:
            links = _sign(rest, path, temporary)
        if name not in links.urls:
            raise CommandError(f"{path} changed during the download", "Run the command again.")
        total += fetch(links.urls[name], folder / _inside(name), name, rest.holder.config)
    return total


def _sign(rest: RestClient, path: str, temporary: bool) -> ExternalWeightsUrlsResponse:
    links = rest.get_external_weights_urls(path).result()
    if temporary:  # must not expire before its links do
        rest.set_checkpoint_ttl_from_tinker_path(path, _EXPORT_TTL_S).result()
    return links


def _inside(name: str) -> PurePosixPath:
    """A file name of the server's that stays in its folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in name or "\0" in name:
        raise CommandError(
            f"The checkpoint has a file with an unsafe name: {name!r}",
            "It may be damaged or malicious; nothing was saved.",
        )
    return path


@contextmanager
def folder_in(parent: Path) -> Generator[Path]:
    """A new folder beside its final place, removed unless it has been moved there.

    What had to be made around it goes, too, if it holds nothing else.
    """
    missing = [folder for folder in (parent, *parent.parents) if not folder.exists()]
    parent.mkdir(parents=True, exist_ok=True)
    folder = new_folder(parent, WORK_PREFIX)
    try:
        with writing_into(parent):
            yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):
            for made in missing:
                made.rmdir()


def put_in_place(folder: Path, target: Path) -> None:
    """Rename a finished folder to its name, instead of what may be there."""
    if not target.exists():
        folder.rename(target)
        return
    with folder_in(target.parent) as aside:
        target.rename(aside / "old")
        try:
            folder.rename(target)
        except OSError:
            (aside / "old").rename(target)
            raise
