"""The files of a checkpoint: fetched into a temporary folder, which is renamed when complete."""

from __future__ import annotations

import shutil
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from tinkex.adapters.archive import unpack
from tinkex.adapters.folder import make_peft
from tinkex.cli.command_errors import CommandError, unknown_checkpoint
from tinkex.cli.fetch import WORK_PREFIX, fetch, writing_into
from tinkex.cli.output import say, utc_now
from tinkex.clients.rest import RestClient
from tinkex.errors import APIStatusError, InputError, NotFoundError, TinkerError
from tinkex.new_files import new_folder
from tinkex.types import ParsedCheckpointTinkerPath

if TYPE_CHECKING:
    from collections.abc import Generator
    from pathlib import Path

    from tinkex.adapters.folder import AdapterInfo
    from tinkex.clients.service import ServiceClient
    from tinkex.types import ExternalWeightsUrlsResponse

_ARCHIVE = ".archive.tar"
_EXPORT_TTL_S = 3600
_SIGN_AGAIN = timedelta(minutes=5)


def check_downloadable(path: str) -> None:
    """Raise a `CommandError` for a checkpoint that cannot be downloaded."""
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
    """Download the files of exported weights; a `temporary` export is kept until then."""
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
    if temporary:  # it must not expire before its links do
        rest.set_checkpoint_ttl_from_tinker_path(path, _EXPORT_TTL_S).result()
    return links


def _inside(name: str) -> PurePosixPath:
    """A file name from the server, checked to stay inside its folder."""
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts or not path.parts or "\\" in name or "\0" in name:
        raise CommandError(
            f"The checkpoint has a file with an unsafe name: {name!r}",
            "It may be damaged or malicious; nothing was saved.",
        )
    return path


@contextmanager
def folder_in(parent: Path) -> Generator[Path]:
    """A new folder in `parent`, removed in the end unless it was renamed.

    Parents that had to be created are removed too, if they are empty.
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
    """Rename a complete folder to `target`, replacing an existing one."""
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


def fetch_adapter(
    service: ServiceClient, path: str, folder: Path, base_model: str | None = None
) -> AdapterInfo:
    """Fetch a checkpoint's adapter into an empty folder, in PEFT's layout, and check it.

    Exports have a link for each file. Other checkpoints come as an archive where the server has
    archives; otherwise a training checkpoint is exported temporarily.
    """
    rest = RestClient(service.holder)
    kind = ParsedCheckpointTinkerPath.from_tinker_path(path).checkpoint_type
    if kind == "external":
        fetch_export(rest, path, folder, temporary=False)
    elif not _fetch_archive(rest, path, folder):
        if kind == "sampler":
            raise CommandError(
                "Sampler weights cannot be downloaded from this server",
                "Export a training checkpoint of the run (tinker://RUN/weights/NAME).",
            )
        with exported(service, rest, path) as export:
            fetch_export(rest, export, folder, temporary=True)
    try:
        with writing_into(folder):
            return make_peft(folder, base_model)
    except InputError as error:
        # The path of the temporary folder would not help the user.
        why = error.reason if error.path == str(folder) else str(error)
        raise CommandError(
            f"{path} cannot be exported: {why}",
            "`tinkex checkpoint download` saves the files as the server has them.",
        ) from error


def _fetch_archive(rest: RestClient, path: str, folder: Path) -> bool:
    """Fetch and unpack the archive; returns whether the server has one."""
    try:
        url = rest.get_checkpoint_archive_url_from_tinker_path(path).result().url
    except APIStatusError:  # no archives; an error about the path is raised elsewhere
        return False
    archive = folder / _ARCHIVE
    size_bytes = fetch(url, archive, "the adapter", rest.holder.config)
    with writing_into(folder, size_bytes):
        unpack(archive, folder)
    archive.unlink()
    return True


def base_model_of(service: ServiceClient, path: str) -> str:
    """The base model of a checkpoint; raises a `CommandError` where there is no such checkpoint."""
    rest = RestClient(service.holder)
    try:
        return rest.get_weights_info_by_tinker_path(path).result().base_model
    except NotFoundError as error:
        raise unknown_checkpoint(path) from error
