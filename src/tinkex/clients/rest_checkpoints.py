"""The checkpoint half of `RestClient`."""

from __future__ import annotations

import asyncio
import uuid
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, cast, get_args

from tinkex.clients.arguments import given_text, header_text, one_of, whole_number
from tinkex.clients.base_client import ResourceClient, checkpoint_of, page
from tinkex.clients.twins import submitting
from tinkex.errors import InputError, InputTypeError, NotFoundError
from tinkex.types import CopyWeightsRequest
from tinkex.wire import bodies, routes
from tinkex.wire.bodies import ImportedKind

if TYPE_CHECKING:
    from tinkex.types import (
        CheckpointsListResponse,
        ExternalWeightsUrlsResponse,
        WeightsInfoResponse,
    )


class CheckpointCalls(ResourceClient):
    """What can be asked of, and done to, saved checkpoints."""

    async def list_checkpoints_async(self, training_run_id: str) -> CheckpointsListResponse:
        """Every checkpoint of one run."""
        return await self._call(
            "list_checkpoints",
            routes.LIST_RUN_CHECKPOINTS,
            params={"run": given_text(training_run_id, "training_run_id")},
        )

    list_checkpoints = submitting(list_checkpoints_async)

    async def list_user_checkpoints_async(
        self, limit: int = 100, offset: int = 0
    ) -> CheckpointsListResponse:
        """A page of the caller's checkpoints, newest first."""
        return await self._call(
            "list_user_checkpoints", routes.LIST_CHECKPOINTS, query=page(limit, offset)
        )

    list_user_checkpoints = submitting(list_user_checkpoints_async)

    async def get_weights_info_by_tinker_path_async(self, tinker_path: str) -> WeightsInfoResponse:
        """What is needed to rebuild a run from a checkpoint."""
        checkpoint_of(tinker_path)
        return await self._call(
            "get_weights_info_by_tinker_path",
            routes.WEIGHTS_INFO,
            bodies.WeightsInfoRequest(tinker_path=tinker_path),
        )

    get_weights_info_by_tinker_path = submitting(get_weights_info_by_tinker_path_async)

    async def delete_checkpoint_async(self, training_run_id: str, checkpoint_id: str) -> None:
        """Delete a checkpoint for good; `checkpoint_id` is such as `weights/final`."""
        await self._call(
            "delete_checkpoint",
            routes.DELETE_CHECKPOINT,
            params={
                "run": given_text(training_run_id, "training_run_id"),
                "ckpt": given_text(checkpoint_id, "checkpoint_id"),
            },
        )

    delete_checkpoint = submitting(delete_checkpoint_async)

    async def delete_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        """Delete a checkpoint for good."""
        await self._call(
            "delete_checkpoint_from_tinker_path",
            routes.DELETE_CHECKPOINT,
            params=checkpoint_of(tinker_path),
        )

    delete_checkpoint_from_tinker_path = submitting(delete_checkpoint_from_tinker_path_async)

    async def publish_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        """Make a checkpoint public; `ConflictError` when it is public already."""
        await self._call(
            "publish_checkpoint_from_tinker_path",
            routes.PUBLISH_CHECKPOINT,
            params=checkpoint_of(tinker_path),
        )

    publish_checkpoint_from_tinker_path = submitting(publish_checkpoint_from_tinker_path_async)

    async def unpublish_checkpoint_from_tinker_path_async(self, tinker_path: str) -> None:
        """Make a public checkpoint private; `ConflictError` when it is private already."""
        await self._call(
            "unpublish_checkpoint_from_tinker_path",
            routes.UNPUBLISH_CHECKPOINT,
            params=checkpoint_of(tinker_path),
        )

    unpublish_checkpoint_from_tinker_path = submitting(unpublish_checkpoint_from_tinker_path_async)

    async def set_checkpoint_ttl_from_tinker_path_async(
        self, tinker_path: str, ttl_seconds: int | None
    ) -> None:
        """Let a checkpoint expire `ttl_seconds` from now; None keeps it for ever."""
        await self._call(
            "set_checkpoint_ttl_from_tinker_path",
            routes.SET_CHECKPOINT_TTL,
            bodies.SetTtlRequest(ttl_seconds=_lifetime(ttl_seconds)),
            params=checkpoint_of(tinker_path),
        )

    set_checkpoint_ttl_from_tinker_path = submitting(set_checkpoint_ttl_from_tinker_path_async)

    async def copy_weights_async(
        self,
        path: str,
        destination_project_id: str | None = None,
        *,
        ttl_seconds: int | None = None,
        weights_access_token: str | None = None,
    ) -> str:
        """Copy a checkpoint into a project (by default TINKER_PROJECT_ID); returns its path."""
        checkpoint_of(path, "path")
        project = self._connection.config.project_id
        if destination_project_id is not None:
            project = given_text(destination_project_id, "destination_project_id")
        if project is None:
            raise InputError("give a project, or set TINKER_PROJECT_ID", "destination_project_id")
        # One key however often the request is sent: a copy must not be made twice.
        headers = {"X-Idempotency-Key": str(uuid.uuid4())}
        if weights_access_token is not None:
            headers["X-Tinker-Weights-Access-Token"] = header_text(
                weights_access_token, "weights_access_token"
            )
        copied = await self._call(
            "copy_weights",
            routes.COPY_WEIGHTS,
            CopyWeightsRequest(
                source_path=path,
                destination_project_id=project,
                ttl_seconds=_lifetime(ttl_seconds),
            ),
            headers=headers,
        )
        return copied.tinker_path

    copy_weights = submitting(copy_weights_async)

    async def import_adapter_async(
        self,
        folder: str | PathLike[str],
        base_model: str | None = None,
        *,
        name: str | None = None,
        kind: ImportedKind = "weights",
    ) -> str:
        """Upload a PEFT folder to a tinkex server; returns the path of the new checkpoint.

        `base_model` is the one that the folder names, unless given. With the kind `weights` it can
        be trained on and sampled from, with `sampler_weights` sampled from. Other servers cannot
        take adapters and answer `NotFoundError`.
        """
        from tinkex.adapters.archive import pack_folder  # here, as few programs need them
        from tinkex.adapters.folder import read_adapter

        one_of(kind, get_args(ImportedKind), "kind")
        for value, setting in ((name, "name"), (base_model, "base_model")):
            if value is not None:
                given_text(value, setting)
        path = _folder(folder)
        adapter = await asyncio.to_thread(read_adapter, path)
        model = base_model or adapter.config.base_model_name_or_path
        try:
            imported = await self._call(
                "import_adapter",
                routes.IMPORT_WEIGHTS,
                query={"base_model": given_text(model, "base_model"), "name": name, "kind": kind},
                body=await asyncio.to_thread(pack_folder, path),
            )
        except NotFoundError as error:
            error.add_note(f"{self._connection.config.base_url} is no server that takes adapters")
            raise
        return imported.tinker_path

    import_adapter = submitting(import_adapter_async)

    async def get_external_weights_urls_async(
        self, tinker_path: str
    ) -> ExternalWeightsUrlsResponse:
        """Where each file of exported weights can be downloaded, and until when."""
        params = checkpoint_of(tinker_path)
        if not params["ckpt"].startswith("external_weights/"):
            raise InputError(
                "must name exported weights (tinker://RUN/external_weights/NAME); export them "
                f"with save_weights_external first, not {tinker_path!r}",
                "tinker_path",
            )
        return await self._call(
            "get_external_weights_urls", routes.GET_EXTERNAL_WEIGHTS_URLS, params=params
        )

    get_external_weights_urls = submitting(get_external_weights_urls_async)

    async def get_checkpoint_archive_url_from_tinker_path_async(
        self, tinker_path: str
    ) -> bodies.ArchiveUrlResponse:
        """Where a checkpoint can be downloaded as one archive, from servers that offer it."""
        return await self._call(
            "get_checkpoint_archive_url_from_tinker_path",
            routes.GET_CHECKPOINT_ARCHIVE,
            params=checkpoint_of(tinker_path),
        )

    get_checkpoint_archive_url_from_tinker_path = submitting(
        get_checkpoint_archive_url_from_tinker_path_async
    )


def _lifetime(ttl_seconds: int | None) -> int | None:
    if ttl_seconds is None:
        return None
    whole_number(ttl_seconds, "ttl_seconds")
    if ttl_seconds <= 0:
        raise InputError(f"must be positive, or None for ever, not {ttl_seconds}", "ttl_seconds")
    return ttl_seconds


def _folder(folder: object) -> Path:
    if not isinstance(folder, str | PathLike):
        raise InputTypeError(f"must be a path, not {type(folder).__name__}", "folder")
    return Path(given_text(fspath(cast("str | PathLike[str]", folder)), "folder"))
