"""The HTTP interface as an OpenAPI 3.1 document, written from the routes table and the types.

Nothing is described by hand that the code already says: paths, methods and bodies come from
`wire.routes`, schemas from the wire types. Served at `/openapi.json`, and what the tests send
random requests from.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from tinkex._version import __version__
from tinkex.types import TensorData
from tinkex.types.bounds import PAGE_ITEMS, PAGE_OFFSET
from tinkex.wire.bodies import ImportedKind
from tinkex.wire.json_requests import TRAINING_BODIES
from tinkex.wire.routes import (
    ATTACH_MODEL,
    HEALTHZ,
    MEDIA_JSON,
    MEDIA_PROTOBUF,
    MEDIA_TAR,
    RETRIEVE_FUTURE,
    ROUTES,
)

if TYPE_CHECKING:
    from tinkex.wire.routes import Route

_REF = "#/components/schemas/{name}"
_ERROR = {"$ref": "#/components/schemas/Error"}
_KINDS = ["weights", "sampler_weights", "external_weights"]

# What each parameter of a query may be; the others are text.
_QUERY: dict[str, dict[str, Any]] = {
    "limit": {"type": "integer", "minimum": 0, "maximum": PAGE_ITEMS},
    "offset": {"type": "integer", "minimum": 0, "maximum": PAGE_OFFSET},
    "access_scope": {"enum": ["owned", "accessible"]},
    "event_type": {"enum": ["all", "checkpoints", "projects", "teams", "organizations"]},
    "day": {"type": "string", "format": "date"},
    "starting_on": {"type": "string", "format": "date-time"},
    "ending_before": {"type": "string", "format": "date-time"},
    "kind": {"enum": list(get_args(ImportedKind))},
}
_REQUIRED = frozenset({"starting_on", "ending_before"})

_SEQUENCE: dict[str, Any] = {"type": "array", "items": {"type": "number"}}
_TENSOR: dict[str, Any] = {
    "type": "object",
    "required": ["data", "dtype"],
    "properties": {
        "data": _SEQUENCE,
        "dtype": {"enum": ["int64", "float32"]},
        "shape": {"anyOf": [{"type": "array", "items": {"type": "integer"}}, {"type": "null"}]},
        "sparse_crow_indices": {"anyOf": [_SEQUENCE, {"type": "null"}]},
        "sparse_col_indices": {"anyOf": [_SEQUENCE, {"type": "null"}]},
    },
}

_FAILURES: dict[str, str] = {
    "400": "The request is wrong; `detail` says what and where.",
    "401": "The key is missing or not valid here.",
    "403": "A link has expired.",
    "404": "There is no such thing, or it is not yours.",
    "408": "The body did not arrive in time.",
    "410": "It existed and is gone: a session that is over, a result no longer kept.",
    "413": "The body is too large.",
    "415": "The body's type or encoding is not understood.",
    "429": "Too much at once; try again after `Retry-After` seconds.",
    "501": "A self-hosted server cannot mean anything by this; `detail` says why.",
    "503": "The server cannot do this now and may a little later.",
    "507": "The server's storage is full or read-only.",
}


@cache
def describe() -> dict[str, Any]:
    """The whole document."""
    kinds = [kind for route in ROUTES for kind in (_body(route), route.reply) if kind is not None]
    schemas, components = msgspec.json.schema_components(
        kinds, schema_hook=_schema_hook, ref_template=_REF
    )
    named = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in ROUTES:
        path = route.path.replace("{ckpt}", "{kind}/{name}")
        paths.setdefault(path, {})[route.method.lower()] = _operation(route, named)
    return {
        "openapi": "3.1.0",
        "info": {"title": "tinkex", "version": __version__},
        "paths": paths,
        "security": [{"key": []}],
        "components": {
            "schemas": {**components, "Error": _error_schema()},
            "securitySchemes": {"key": {"type": "apiKey", "in": "header", "name": "X-API-Key"}},
        },
    }


def _operation(route: Route[Any, Any], named: dict[Any, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": route.name,
        "parameters": [*_path_parameters(route), *_query_parameters(route)],
        "responses": {"200": _success(route, named), **_failures()},
    }
    if route.legacy:
        operation["deprecated"] = True
    if route.name == HEALTHZ.name:
        operation["security"] = []
    if route.name == ATTACH_MODEL.name:
        operation["responses"]["409"] = _failure("Another program trains it; `detail` says more.")
    if route.follow_redirects or route.name == "get_checkpoint_archive":
        operation["responses"]["302"] = {"description": "Look there."}
    body = _body(route)
    if body is not None:
        content: dict[str, Any] = {MEDIA_JSON: {"schema": named[body]}}
        if route.request_encoding == "protobuf":
            content[MEDIA_PROTOBUF] = {"schema": {"type": "string", "format": "binary"}}
        operation["requestBody"] = {"required": True, "content": content}
    if route.request_encoding == "tar":
        content = {MEDIA_TAR: {"schema": {"type": "string", "format": "binary"}}}
        operation["requestBody"] = {"required": True, "content": content}
    return operation


def _body(route: Route[Any, Any]) -> type[Any] | None:
    return TRAINING_BODIES.get(route.name, route.request)


def _path_parameters(route: Route[Any, Any]) -> list[dict[str, Any]]:
    names = [n for p in route.parameters for n in (("kind", "name") if p == "ckpt" else (p,))]
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "schema": {"enum": _KINDS} if name == "kind" else {"type": "string", "minLength": 1},
        }
        for name in names
    ]


def _query_parameters(route: Route[Any, Any]) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "query",
            "required": name in _REQUIRED,
            "schema": _QUERY.get(name, {"type": "string"}),
        }
        for name in route.query
    ]


def _success(route: Route[Any, Any], named: dict[Any, Any]) -> dict[str, Any]:
    schema: dict[str, Any] = {"type": "object"} if route.reply is None else named[route.reply]
    content: dict[str, Any] = {MEDIA_JSON: {"schema": schema}}
    if route.name == RETRIEVE_FUTURE.name:
        content[MEDIA_PROTOBUF] = {"schema": {"type": "string", "format": "binary"}}
    return {"description": "Done, or accepted: see `request_id`.", "content": content}


def _failures() -> dict[str, Any]:
    return {status: _failure(text) for status, text in _FAILURES.items()}


def _failure(text: str) -> dict[str, Any]:
    return {"description": text, "content": {MEDIA_JSON: {"schema": _ERROR}}}


def _error_schema() -> dict[str, Any]:
    return {
        "type": "object",
        "required": ["detail"],
        "properties": {"detail": {"type": "string"}, "request_id": {"type": "string"}},
    }


def _schema_hook(kind: type) -> dict[str, Any]:
    if kind is TensorData:
        return _TENSOR
    raise NotImplementedError(f"no schema of {kind.__name__}")
