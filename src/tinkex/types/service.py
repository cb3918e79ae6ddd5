"""The service itself: sessions, identity, and the flags a server sets for its clients."""

from typing import Any, Literal

from tinkex.types.value import Request, Response


class CreateSessionRequest(Request):
    """Open a session."""

    tags: list[str]
    user_metadata: dict[str, Any] | None
    sdk_version: str
    project_id: str | None = None
    display_name: str | None = None
    type: Literal["create_session"] = "create_session"


class CreateSessionResponse(Response):
    """The session's id, and messages for the client to log."""

    type: Literal["create_session"] = "create_session"
    info_message: str | None = None
    warning_message: str | None = None
    error_message: str | None = None
    session_id: str


class SessionHeartbeatRequest(Request):
    """Keep a session alive."""

    session_id: str
    type: Literal["session_heartbeat"] = "session_heartbeat"


class SessionHeartbeatResponse(Response):
    """The session is alive."""

    type: Literal["session_heartbeat"] = "session_heartbeat"


class GetSessionResponse(Response):
    """What a session holds."""

    training_run_ids: list[str]
    sampler_ids: list[str]
    user_metadata: dict[str, str] | None = None
    display_name: str | None = None


class ListSessionsResponse(Response):
    """Session ids."""

    sessions: list[str]


class WhoamiResponse(Response):
    """Who the caller is."""

    user_urn: str
    org_urn: str
    email: str | None = None


class AuthTokenResponse(Response):
    """A token in exchange for a credential."""

    jwt: str

    def __repr__(self) -> str:
        return self._repr_with(jwt="<hidden>")


class HealthResponse(Response):
    """The server is up."""

    status: Literal["ok"]


class ClientConfigRequest(Request):
    """Ask for the flags a client should start with."""

    sdk_version: str


class ClientConfigResponse(Response):
    """Flags a client reads once, when it connects."""

    pjwt_auth_enabled: bool = False
    credential_default_source: str = "api_key"
    sample_dispatch_bytes_semaphore_size: int = 10 * 1024 * 1024
    inflight_response_bytes_semaphore_size: int = 50 * 1024 * 1024
    parallel_fwdbwd_chunks: bool = True
    proto_compress_fwdbwd: bool = False
    fwdbwd_max_chunk_len: int = 1024
    fwdbwd_max_chunk_bytes_count: int = 5_000_000
    fwdbwd_dispatch_bytes_semaphore_size: int = 50_000_000
    billing_exception_max_pause_duration_sec: int = 3600
    sample_no_retries: bool = False
    sample_enable_stuck_detection: bool = True
    sample_max_concurrent_requests: int = 2000
    use_pyqwest_transport: bool = True
    create_model_via_load_weights: bool = False
    sample_use_retrieve_futures: bool = False
    custom_loss_server_side: bool = False
    sample_join_sampling_session: bool = False


class ClientDynamicConfigResponse(Response):
    """Flags a client reads again every `refresh_interval_sec`."""

    refresh_interval_sec: int = 300
    sample_cancel_enabled: bool = False
    sample_cancel_max_batch_size: int = 64
