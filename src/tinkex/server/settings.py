"""The server's settings: one frozen value, built at the edge and handed down."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from tinkex.types import ClientConfigResponse, ClientDynamicConfigResponse

if TYPE_CHECKING:
    from collections.abc import Mapping

_MIB = 1 << 20


def _client_config() -> ClientConfigResponse:
    return ClientConfigResponse(
        create_model_via_load_weights=True,
        sample_use_retrieve_futures=True,
        sample_join_sampling_session=True,
    )


def _older_flags() -> dict[str, bool]:
    return {"proto_write_fwdbwd": True, "fwd_via_fwdbwd": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Limits, waits and what clients are told about themselves."""

    # What clients are told. `older_client_flags` makes 0.19 to 0.24 send protobuf.
    client_config: ClientConfigResponse = field(default_factory=_client_config)
    dynamic_config: ClientDynamicConfigResponse = field(
        default_factory=lambda: ClientDynamicConfigResponse(sample_cancel_enabled=True)
    )
    older_client_flags: Mapping[str, bool] = field(default_factory=_older_flags)
    session_messages: Mapping[str, str] = field(default_factory=dict[str, str])

    # Keys that are let in; None lets in any key, each as a tenant of its own.
    keys: frozenset[str] | None = field(default=None, repr=False)
    # Signs tokens and download links; another secret makes the old ones invalid.
    secret: bytes = field(default_factory=lambda: secrets.token_bytes(32), repr=False)
    token_ttl_s: float = 3600.0
    url_ttl_s: float = 3600.0

    # A poll is answered within this time; official clients give up after 45 s.
    long_poll_s: float = 30.0
    # Results above this size are announced before they are sent, to clients that ask for it.
    inline_result_bytes: int = 4 * _MIB
    result_ttl_s: float = 6 * 3600.0

    max_body_bytes: int = 64 * _MIB
    max_decoded_bytes: int = 256 * _MIB
    max_samples: int = 1024
    max_samples_in_flight: int = 10_000
    max_batch_ops: int = 64
    # How long held operations wait for a missing seq_id after the last arrival.
    gap_timeout_s: float = 60.0

    # Clients send a heartbeat every 10 s; silence this long ends a session.
    session_timeout_s: float = 300.0
    upkeep_interval_s: float = 30.0
