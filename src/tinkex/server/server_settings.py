"""The server's settings: one frozen value, built at the edge and handed down."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from tinkex.errors import InputError
from tinkex.types import ClientConfigResponse, ClientDynamicConfigResponse

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_MIB = 1 << 20
_GIB = 1 << 30

KeyMode = Literal["open", "single", "fixed", "stored"]


def _client_config() -> ClientConfigResponse:
    return ClientConfigResponse(
        create_model_via_load_weights=True,
        sample_use_retrieve_futures=True,
        sample_join_sampling_session=True,
        custom_loss_server_side=True,
    )


def _older_flags() -> dict[str, bool]:
    return {"proto_write_fwdbwd": True, "fwd_via_fwdbwd": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Limits, time-outs, keys, and the flags that clients get."""

    # The flags that clients get. `older_client_flags` makes 0.19 to 0.24 send protobuf.
    client_config: ClientConfigResponse = field(default_factory=_client_config)
    dynamic_config: ClientDynamicConfigResponse = field(
        default_factory=lambda: ClientDynamicConfigResponse(sample_cancel_enabled=True)
    )
    older_client_flags: Mapping[str, bool] = field(default_factory=_older_flags)
    session_messages: Mapping[str, str] = field(default_factory=dict[str, str])

    # Who has access: `open` any key, each as a tenant of its own; `single` any key, all of them
    # the tenant `local`; `fixed` only `keys`, as `local`; `stored` the keys in the store.
    key_mode: KeyMode = "open"
    keys: frozenset[str] = field(default_factory=frozenset[str], repr=False)
    # Signs tokens and download links; another secret makes the old ones invalid.
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    token_ttl_s: float = 3600.0
    url_ttl_s: float = 3600.0
    # The address of links; None is the one that a request was sent to.
    public_url: str | None = None

    # A poll is answered within this time; official clients give up after 45 s.
    long_poll_s: float = 30.0
    # Results above this size are announced before they are sent, to clients that ask for it.
    inline_result_bytes: int = 4 * _MIB
    result_ttl_s: float = 6 * 3600.0

    # What training, sampling and telemetry may send, as it comes and decompressed. Decoding
    # takes up to thirty times a body's size, so all other requests are kept small.
    max_body_bytes: int = 64 * _MIB
    max_decoded_bytes: int = 64 * _MIB
    max_small_body_bytes: int = 4 * _MIB
    # The weights of one uploaded adapter, which are written to disk as they come.
    max_import_bytes: int = 4 * _GIB
    # A body that takes longer to arrive is refused; clients wait a minute for a reply.
    upload_timeout_s: float = 120.0
    # A request that is not answered by then is logged as a warning; polls get `long_poll_s` more.
    slow_request_s: float = 5.0
    max_samples: int = 1024
    max_batch_ops: int = 64
    # How long held operations wait for a missing seq_id after the last arrival.
    gap_timeout_s: float = 60.0

    # Clients send a heartbeat every 10 s; silence this long ends a session.
    session_timeout_s: float = 300.0
    # Another program may attach to a model whose session has been silent for this long.
    attach_after_s: float = 30.0
    upkeep_interval_s: float = 30.0
    # How long lines of the audit log are kept.
    audit_days: float = 365.0
    # How long sessions that are over stay listed; runs and checkpoints stay until they are deleted.
    history_s: float = 30 * 24 * 3600.0

    # What one tenant may have at a time. All but the stored bytes free themselves, so being over
    # them is answered by 429: clients wait and try again.
    max_sessions: int = 1000
    max_models: int = 256
    max_samples_in_flight: int = 10_000
    # Training operations queued and running. Above the first number polls say that the client
    # is ahead of the server, above the second and above the bytes new ones are refused.
    max_training_ops: int = 512
    max_queued_ops: int = 4096
    max_queued_bytes: int = 2 * _GIB
    # Everything that is kept for it: checkpoints, samplers, losses, requests, results, metadata.
    max_stored_bytes: int = 100 * _GIB
    # Records of each kind: of a tenant, and of one session.
    max_kept_sessions: int = 1_000_000
    max_runs: int = 1_000_000
    max_checkpoints: int = 100_000
    max_samplers: int = 50_000
    max_losses: int = 1000
    # Requests per second of a tenant, on average and apart from heartbeats; None is no limit.
    max_requests_per_s: float | None = None
    # Checkpoints and sessions published, deleted, moved, copied, imported, linked to: each leaves a
    # line in the audit log. On average; more at once are fine for a while.
    max_changes_per_s: float = 5.0
    # Tries with a bad key per second and address, on average; more are put off.
    max_bad_keys_per_s: float = 10.0

    # With less room than this on the disk of `watched_folder`, `/readyz` says not ready.
    min_free_bytes: int = 256 * _MIB
    watched_folder: Path | None = None

    # A crash replays at most this much of a model: a snapshot is written after so many operations,
    # bytes of requests, or seconds with progress.
    snapshot_ops: int = 64
    snapshot_bytes: int = 64 * _MIB
    snapshot_s: float = 30.0
    # An operation that was running at so many deaths of the engine counts as their cause.
    max_engine_deaths: int = 3
    # Sequences that the engine is given at once; the rest wait here, owner by owner in turn.
    max_sequences_running: int = 2048
    # Polls for an operation that has waited so long behind others say that the server is busy.
    busy_after_s: float = 10.0
    # How long a shutdown waits for what runs. The next server on the same store runs again what has
    # not ended by then.
    grace_s: float = 0.0

    def __post_init__(self) -> None:
        # Keys that are never checked would leave a server open whose operator believes it is not.
        if bool(self.keys) != (self.key_mode == "fixed"):
            raise InputError("keys belong to key_mode='fixed', and it needs some", "keys")
