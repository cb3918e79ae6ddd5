"""Bootstrap and the service itself: flags, capabilities, health, telemetry, keys."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from tinkex.server.api.call import reply
from tinkex.server.api.errors import refuse
from tinkex.types import (
    AuthTokenResponse,
    GetServerCapabilitiesResponse,
    HealthResponse,
    SupportedModel,
    TelemetryResponse,
)
from tinkex.wire import routes
from tinkex.wire.bodies import ApiKeyDetails, ApiKeyOrganization, ApiKeyResponse, ApiKeyUser
from tinkex.wire.json_codec import encode

if TYPE_CHECKING:
    from starlette.responses import Response

    from tinkex.server.api.call import Call, Handler


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
    return reply(AuthTokenResponse(jwt=call.parts.identity.make_jwt(call.owner)))


async def get_api_key(call: Call) -> Response:
    """The key the request came with."""
    return reply(
        ApiKeyResponse(
            key_id=int(call.owner.removeprefix("user-")[:7], 16),
            name=call.owner,
            note="",
            details=ApiKeyDetails(
                org_details=ApiKeyOrganization(name="tinkex"),
                user_details=ApiKeyUser(email=f"{call.owner}@localhost"),
            ),
        )
    )


async def delete_api_key(call: Call) -> Response:
    """Keys of this server come from its settings and end there."""
    raise refuse(501, "This server's keys are set by its operator and cannot be deleted here.")


async def get_server_capabilities(call: Call) -> Response:
    """The base models."""
    models = [
        SupportedModel(
            model_name=spec.name,
            max_context_length=spec.max_context_length,
            trainable=True,
            sampleable=True,
        )
        for spec in call.parts.engine.models
    ]
    return reply(GetServerCapabilitiesResponse(supported_models=models))


async def healthz(call: Call) -> Response:
    """The process answers."""
    return reply(HealthResponse(status="ok"))


async def telemetry(call: Call) -> Response:
    """Accepted and not kept: bodies of official clients can contain API keys."""
    await call.body()
    return reply(TelemetryResponse(status="accepted"))


HANDLERS: dict[str, Handler] = {
    routes.CLIENT_CONFIG.name: client_config,
    routes.CLIENT_DYNAMIC_CONFIG.name: client_dynamic_config,
    routes.AUTH_TOKEN.name: auth_token,
    routes.GET_API_KEY.name: get_api_key,
    routes.DELETE_API_KEY.name: delete_api_key,
    routes.GET_SERVER_CAPABILITIES.name: get_server_capabilities,
    routes.HEALTHZ.name: healthz,
    routes.TELEMETRY.name: telemetry,
}
