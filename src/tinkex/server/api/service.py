"""Bootstrap and the service itself: flags, capabilities, health, telemetry, keys."""

from __future__ import annotations

import zlib
from typing import TYPE_CHECKING

import msgspec

from tinkex.server.api.audit import who
from tinkex.server.api.call import reply
from tinkex.server.api.errors import refuse
from tinkex.server.api.identity import audit_key
from tinkex.types import (
    AuthTokenResponse,
    GetServerCapabilitiesResponse,
    HealthResponse,
    SupportedModel,
    TelemetryResponse,
)
from tinkex.wire.bodies import (
    ApiKeyDetails,
    ApiKeyOrganization,
    ApiKeyResponse,
    ApiKeyUser,
    TokenizerResponse,
)
from tinkex.wire.json_codec import encode

if TYPE_CHECKING:
    from starlette.responses import Response

    from tinkex.server.api.call import Call


async def client_config(call: Call) -> Response:
    """Start-up flags. Flags that only older clients know travel beside the typed ones."""
    flags = msgspec.json.decode(encode(call.settings.client_config), type=dict[str, object])
    flags.update(call.settings.older_client_flags)
    return reply(flags)


async def client_dynamic_config(call: Call) -> Response:
    """Flags that clients ask for again and again."""
    return reply(call.settings.dynamic_config)


async def auth_token(call: Call) -> Response:
    """A token for the key the request came with."""
    if call.header("x-api-key").startswith("eyJ"):
        raise refuse(400, "A token cannot be exchanged for another one; send the API key.")
    jwt = await call.parts.identity.make_jwt(call.header("x-api-key"))
    return reply(AuthTokenResponse(jwt=jwt))


async def get_api_key(call: Call) -> Response:
    """The key the request came with, but for the key itself."""
    key = await call.parts.identity.key(call.header("x-api-key"))
    return reply(
        ApiKeyResponse(
            # Keys that are not stored have no number; one that stays the same will do.
            key_id=zlib.crc32(call.owner.encode()) if key is None else key.key_id,
            name=call.owner if key is None else key.name or f"key-{key.key_id}",
            note="" if key is None else key.note,
            details=ApiKeyDetails(
                org_details=ApiKeyOrganization(name="tinkex"),
                user_details=ApiKeyUser(
                    email=call.owner if "@" in call.owner else f"{call.owner}@localhost"
                ),
            ),
        )
    )


async def delete_api_key(call: Call) -> Response:
    """Revoke the key the request came with; the owner's other keys, and work, stay."""
    key = await call.parts.identity.key(call.header("x-api-key"))
    if key is None:
        raise refuse(
            501,
            f"This server keeps no keys (it runs in the key mode {call.settings.key_mode!r}), so "
            "there is nothing to delete; its operator decides who has access.",
        )
    await call.parts.identity.revoke(key)
    await audit_key(call.store, call.now(), "api_key_revoked", key, **who(call))
    return reply()


async def get_server_capabilities(call: Call) -> Response:
    """The base models."""
    models = [
        SupportedModel(
            model_name=spec.name,
            max_context_length=spec.max_context_length,
            trainable=True,
            sampleable=True,
        )
        for spec in call.base_models
    ]
    return reply(GetServerCapabilitiesResponse(supported_models=models))


async def get_tokenizer(call: Call) -> Response:
    """The tokenizer of a base model, so that clients need no hub."""
    spec = await call.base_model(call.request.query_params.get("base_model", ""))
    await call.at_engine(spec.name)
    text = spec.text
    if text is None:
        raise refuse(404, f"{spec.name} has no tokenizer here; send token ids.")
    return reply(
        TokenizerResponse(
            tokenizer=text.tokenizer_json.decode(),
            chat_template=text.chat_template,
            bos_token=text.bos_token,
            eos_token=text.eos_token,
        )
    )


async def healthz(call: Call) -> Response:
    """The process answers."""
    return reply(HealthResponse(status="ok"))


async def telemetry(call: Call) -> Response:
    """Accepted and not kept: bodies of official clients can contain API keys."""
    await call.body()
    return reply(TelemetryResponse(status="accepted"))
