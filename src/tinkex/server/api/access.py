"""What a key may do: which routes, reading or writing, in which project.

The tables name every route of the server once; a test compares them with the routes there are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from tinkex.server.api.errors import refuse

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinkex.errors import APIStatusError
    from tinkex.server.store.records import ApiKey

# What every program does with any key, whatever its limits: it learns what the server is, and who
# it is itself.
_ANY: Final = frozenset(
    {
        "client_config",
        "client_dynamic_config",
        "auth_token",
        "get_api_key",
        "get_server_capabilities",
        "get_tokenizer",
        "telemetry",
        "healthz",
        "openai_unknown",
    }
)
# What belongs to training and to sampling alike: a session, and the results of what was sent.
_WORK: Final = frozenset(
    {
        "create_session",
        "session_heartbeat",
        "finish_session",
        "get_session",
        "retrieve_future",
        "retrieve_futures",
        "cancel_future",
    }
)
_SAMPLE: Final = frozenset(
    {
        "create_sampling_session",
        "join_sampling_session",
        "asample",
        "get_sampler",
        "openai_models",
        "openai_model",
        "openai_completions",
        "openai_chat",
    }
)
_TRAIN: Final = frozenset(
    {
        "create_model",
        "attach_model",
        "get_info",
        "forward",
        "forward_backward",
        "optim_step",
        "create_custom_loss",
        "save_weights",
        "save_weights_for_sampler",
        "save_weights_external",
        "load_weights",
        "unload_model",
        "release_numbers",
        "weights_info",
    }
)
_CHECKPOINTS: Final = frozenset(
    {
        "list_training_runs",
        "get_training_run",
        "list_run_checkpoints",
        "list_model_checkpoints",
        "list_checkpoints",
        "weights_info",
        "publish_checkpoint",
        "unpublish_checkpoint",
        "set_checkpoint_ttl",
        "get_external_weights_urls",
        "get_checkpoint_archive",
        "delete_checkpoint",
        "copy_weights",
        "import_weights",
    }
)
_SESSIONS: Final = frozenset(
    {
        "list_sessions",
        "search_sessions",
        "get_session",
        "finish_session",
        "set_session_project",
        "export_trace",
    }
)
_USAGE: Final = frozenset(
    {"get_audit_log", "get_billing_usage", "get_checkpoint_storage_usage", "metrics"}
)

GROUPS: Final[Mapping[str, frozenset[str]]] = {
    "sample": _WORK | _SAMPLE,
    "train": _WORK | _SAMPLE | _TRAIN,
    "checkpoints": _CHECKPOINTS,
    "sessions": _SESSIONS,
    "usage": _USAGE,
}
"""What `--routes` can name."""

READS: Final = frozenset(
    {
        *_ANY,
        "search_sessions",
        "list_sessions",
        "get_session",
        "export_trace",
        "get_info",
        "weights_info",
        "get_sampler",
        "retrieve_future",
        "retrieve_futures",
        "list_training_runs",
        "get_training_run",
        "list_run_checkpoints",
        "list_model_checkpoints",
        "list_checkpoints",
        "get_external_weights_urls",
        "get_checkpoint_archive",
        "openai_models",
        "openai_model",
        *_USAGE,
    }
)
WRITES: Final = (_WORK | _SAMPLE | _TRAIN | _CHECKPOINTS | _SESSIONS | {"delete_api_key"}) - READS
# They show what all projects of a tenant share.
_WHOLE_TENANT: Final = _USAGE | {"delete_api_key"}


@dataclass(frozen=True, slots=True)
class Access:
    """The limits of a key; without any it may do everything its tenant may."""

    key_id: int | None = None
    read_only: bool = False
    project_id: str | None = None
    routes: frozenset[str] | None = None
    groups: tuple[str, ...] = ()

    @classmethod
    def of(cls, key: ApiKey | None) -> Access:
        """The limits of a stored key."""
        if key is None:
            return FULL
        groups = key.routes or ()
        allowed = frozenset[str]().union(*(GROUPS.get(name, frozenset()) for name in groups))
        return cls(
            key_id=key.key_id,
            read_only=key.read_only,
            project_id=key.project_id,
            routes=None if key.routes is None else allowed | _ANY,
            groups=groups,
        )

    @property
    def limited(self) -> bool:
        """Whether it may do less than its tenant."""
        return self.read_only or self.project_id is not None or self.routes is not None

    def refused(self, route: str) -> str | None:
        """Why a route may not be called, in a word; None if it may."""
        if self.read_only and route not in READS:
            return "read_only"
        if self.routes is not None and route not in self.routes:
            return "route"
        if self.project_id is not None and route in _WHOLE_TENANT:
            return "project"
        return None

    def check(self, route: str) -> None:
        """Raise a 403 that says what the key may do."""
        if self.refused(route) is not None:
            raise self.refusal(f"This API key may not call {route}.")

    def sees(self, project_id: str | None) -> bool:
        """Whether something in a project is there for the key."""
        return self.project_id is None or project_id == self.project_id

    def project(self, asked: str | None) -> str | None:
        """The project of something new; raises a 403 for one that the key is not for."""
        if self.project_id is None:
            return asked
        if asked not in (None, self.project_id):
            raise self.refusal("This API key may not use another project.")
        return self.project_id

    def refusal(self, what: str) -> APIStatusError:
        """A 403 with what the key may do."""
        return refuse(403, f"{what} {self.described()} Ask the operator for another key.")

    def described(self) -> str:
        """What the key may do, in a sentence."""
        limits = ["only read"] if self.read_only else []
        if self.routes is not None:
            limits.append(f"only use the routes of {', '.join(self.groups) or 'no group'}")
        if self.project_id is not None:
            limits.append(f"only see the project {self.project_id!r}")
        return f"It may {' and '.join(limits)}."


FULL: Final = Access()
