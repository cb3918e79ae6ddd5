"""Fetching a checkpoint's adapter, in whichever way the server gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.adapters.archive import unpack
from tinkex.adapters.folder import make_peft
from tinkex.cli.disk_space import writing_into
from tinkex.cli.download import exported, fetch_export
from tinkex.cli.failures import CommandError
from tinkex.cli.fetch import fetch
from tinkex.cli.target import unknown_checkpoint
from tinkex.clients.rest import RestClient
from tinkex.errors import APIStatusError, InputError, NotFoundError
from tinkex.types import ParsedCheckpointTinkerPath

if TYPE_CHECKING:
    from pathlib import Path

    from tinkex.adapters.folder import AdapterInfo
    from tinkex.clients.service import ServiceClient

_ARCHIVE = ".archive.tar"


def fetch_adapter(
    service: ServiceClient, path: str, folder: Path, base_model: str | None = None
) -> AdapterInfo:
    """Put a checkpoint's adapter into an empty folder, in PEFT's layout, and check it.

    Exports have a link for each file. Other checkpoints come as an archive from a server that has
    those; from one that has not, training checkpoints are exported for this only.
    """
    rest = RestClient(service.holder)
    kind = ParsedCheckpointTinkerPath.from_tinker_path(path).checkpoint_type
    if kind == "external":
        fetch_export(rest, path, folder, temporary=False)
    elif not _fetch_archive(rest, path, folder):
        if kind == "sampler":
            raise CommandError(
                "This server gives no sampler weights away",
                "Export a training checkpoint of the run (tinker://RUN/weights/NAME).",
            )
        with exported(service, rest, path) as export:
            fetch_export(rest, export, folder, temporary=True)
    try:
        with writing_into(folder):
            return make_peft(folder, base_model)
    except InputError as error:
        # The folder is a temporary one, which says nothing to the caller.
        why = error.reason if error.path == str(folder) else str(error)
        raise CommandError(
            f"{path} cannot be exported: {why}",
            "`tinkex checkpoint download` saves the files as the server has them.",
        ) from error


def _fetch_archive(rest: RestClient, path: str, folder: Path) -> bool:
    """Whether the server gave an archive; if so, what was in it is in the folder."""
    try:
        url = rest.get_checkpoint_archive_url_from_tinker_path(path).result().url
    except APIStatusError:  # it has none such; what is wrong with the path shows elsewhere
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
