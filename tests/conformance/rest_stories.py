"""REST and administration calls."""

from __future__ import annotations

import asyncio
from datetime import UTC, date, datetime
from typing import TYPE_CHECKING, Any

from story import BASE, KEY, attempt, ignoring_deprecations, plain, session_of, trainer

if TYPE_CHECKING:
    from collections.abc import Callable

    from story import Connection


def rest_calls(sdk: Any, to: Connection) -> Any:
    service, training = trainer(sdk, to)
    run, session = training.model_id, session_of(training)
    state = training.save_state("a").result().path
    external = training.save_weights_external("a").result().path
    service.create_sampling_client(base_model=BASE)
    rest = sdk.RestClient(base_url=to.base_url, api_key=KEY)
    types = sdk.types
    wide = types.SessionSearchRequest(
        session_id=session,
        project_ids=["project-1"],
        user_metadata={"k": "v"},
        display_name="my run",
        owner=types.UserSearchOwner(owner_urns=["urn:1"]),
        statuses=[
            types.ActiveSessionStatusQuery(),
            types.ClientFinishedSessionStatusQuery(reasons=["success"]),
        ],
        limit=10,
        cursor=types.SessionSearchCursor(
            last_created_at=datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC), last_session_id="session-9"
        ),
    )
    calls: dict[str, Callable[[], Any]] = {
        "run": lambda: rest.get_training_run(run),
        "shared run": lambda: rest.get_training_run(run, access_scope="accessible"),
        "run of path": lambda: rest.get_training_run_by_tinker_path(state),
        "weights info": lambda: rest.get_weights_info_by_tinker_path(state),
        "runs": lambda: rest.list_training_runs(),
        "runs of project": lambda: rest.list_training_runs(
            limit=5, offset=10, access_scope="accessible", project_id="project-1"
        ),
        "checkpoints": lambda: rest.list_checkpoints(run),
        "my checkpoints": lambda: rest.list_user_checkpoints(),
        "more checkpoints": lambda: rest.list_user_checkpoints(limit=1, offset=1),
        "urls": lambda: rest.get_external_weights_urls(external),
        "publish": lambda: rest.publish_checkpoint_from_tinker_path(state),
        "unpublish": lambda: rest.unpublish_checkpoint_from_tinker_path(state),
        "ttl": lambda: rest.set_checkpoint_ttl_from_tinker_path(state, 3600),
        "no ttl": lambda: rest.set_checkpoint_ttl_from_tinker_path(state, None),
        "delete": lambda: rest.delete_checkpoint(run, "weights/a"),
        "delete path": lambda: rest.delete_checkpoint_from_tinker_path(state),
        "copy": lambda: rest.copy_weights(state, "project-2", ttl_seconds=3600),
        "session": lambda: rest.get_session(session),
        "shared session": lambda: rest.get_session(session, access_scope="accessible"),
        "sessions": lambda: rest.list_sessions(),
        "more sessions": lambda: rest.list_sessions(limit=3, offset=6),
        "assign": lambda: rest.assign_session_project(session, "project-1"),
        "trace": lambda: rest.export_session_trace(session),
        "search": lambda: rest.search_sessions(types.SessionSearchRequest()),
        "wide search": lambda: rest.search_sessions(wide),
        "sampler": lambda: rest.get_sampler(f"{session}:sample:0"),
        "bad path": lambda: rest.get_training_run_by_tinker_path("tinker://x"),
    }
    with ignoring_deprecations():
        seen = {title: attempt(lambda call=call: call().result()) for title, call in calls.items()}
    service.close("success").result()
    return seen


def admin_calls(sdk: Any, to: Connection) -> Any:
    admin = sdk.AdminClient(base_url=to.base_url, api_key=KEY)
    start, end = datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 2, 3, tzinfo=UTC)
    calls: dict[str, Callable[[], Any]] = {
        "audit": lambda: admin.get_audit_log(),
        "audit of a day": lambda: admin.get_audit_log("checkpoints", date(2026, 1, 2)),
        "usage": lambda: admin.get_billing_usage(start, end),
        "usage by text": lambda: admin.get_billing_usage(
            "2026-01-01T00:00:00Z", "2026-01-01T05:00:00+02:00"
        ),
        "storage": lambda: admin.get_current_checkpoint_storage_usage(),
        "storage of a project": lambda: admin.get_current_checkpoint_storage_usage("project-1"),
    }
    return {title: attempt(lambda call=call: call().result()) for title, call in calls.items()}


async def _rest_async(sdk: Any, to: Connection, run: str, state: str, external: str) -> Any:
    session = run.split(":")[0]
    rest = sdk.RestClient(base_url=to.base_url, api_key=KEY)
    admin = sdk.AdminClient(base_url=to.base_url, api_key=KEY)
    seen = [
        await rest.get_training_run_async(run),
        await rest.list_training_runs_async(limit=2),
        await rest.list_checkpoints_async(run),
        await rest.list_user_checkpoints_async(),
        await rest.get_external_weights_urls_async(external),
        await rest.set_checkpoint_ttl_from_tinker_path_async(state, None),
        await rest.get_session_async(session),
        await rest.get_sampler_async(f"{session}:sample:0"),
        await rest.copy_weights_async(state, "project-2"),
        await admin.get_current_checkpoint_storage_usage_async(),
    ]
    return plain(seen)


def rest_async(sdk: Any, to: Connection) -> Any:
    service, training = trainer(sdk, to)
    state = training.save_state("a").result().path
    external = training.save_weights_external("a").result().path
    service.create_sampling_client(base_model=BASE)
    return asyncio.run(_rest_async(sdk, to, training.model_id, state, external))
