"""Fetching a checkpoint's adapter, in whichever way the server gives it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.adapters.archive import unpack
from tinkex.adapters.folder import make_peft
from tinkex.cli.download import exported, fetch_export
from tinkex.cli.failures import CommandError
from tinkex.cli.fetch import fetch
from tinkex.clients.rest import RestClient
from tinkex.errors import APIStatusError, InputError, TinkerError
from tinkex.types import ParsedCheckpointTinkerPath

if TYPE_CHECKING:
    from pathlib import Path

    from tinkex.adapters.folder import Adapter
    from tinkex.clients.service import ServiceClient

_ARCHIVE = ".archive.tar"


def fetch_adapter(
    service: ServiceClient, path: str, folder: Path, base_model: str | None = None
) -> Adapter:
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
        return make_peft(folder, base_model)
    except InputError as error:
        raise CommandError(
            f"{path} cannot be exported: {error}",
            "`tinkex checkpoint download` saves the files as the server has them.",
        ) from error


def _fetch_archive(rest: RestClient, path: str, folder: Path) -> bool:
    """Whether the server gave an archive; if so, what was in it is in the folder."""
    try:
        url = rest.get_checkpoint_archive_url_from_tinker_path(path).result().url
    except APIStatusError:  # it has none such; what is wrong with the path shows elsewhere
        return False
    archive = folder / _ARCHIVE
    fetch(url, archive, "the adapter")
    unpack(archive, folder)
    archive.unlink()
    return True


def base_model_of(service: ServiceClient, path: str) -> str | None:
    """The base model of a checkpoint, if the server says."""
    try:
        rest = RestClient(service.holder)
        return rest.get_weights_info_by_tinker_path(path).result().base_model
    except TinkerError:
        return None
