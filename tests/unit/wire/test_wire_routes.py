import re
from pathlib import Path
from urllib.parse import unquote

import pytest

from tinkex import types
from tinkex.errors import InputError
from tinkex.wire import bodies, routes
from tinkex.wire.routes import ROUTES, Route

# Method, path, timeout and patience of the current protocol's catalogue.
CATALOGUE = """
POST   /client/config 60 full
POST   /client/dynamic_config 10 full
POST   /auth/token 60 submit
POST   /create_session 60 submit
POST   /session_heartbeat 10 none
POST   /sessions/{}/finish 60 full
POST   /create_model 60 submit
POST   /forward_backward 60 full
POST   /optim_step 60 full
POST   /save_weights 60 full
POST   /save_weights_for_sampler 60 full
POST   /save_weights_external 60 full
POST   /load_weights 60 full
POST   /create_custom_loss 60 full
POST   /get_info 60 full
POST   /weights_info 60 full
POST   /copy_weights 60 full
POST   /create_sampling_session 60 submit
POST   /join_sampling_session 60 full
POST   /asample 60 sample
POST   /retrieve_future 45 poll
POST   /retrieve_futures 45 poll
POST   /cancel_future 30 full
POST   /telemetry 5 none
GET    /get_server_capabilities 60 full
GET    /healthz 60 submit
GET    /samplers/{} 60 full
GET    /training_runs 60 full
GET    /training_runs/{} 60 full
GET    /training_runs/{}/checkpoints 60 full
GET    /checkpoints 60 full
DELETE /training_runs/{}/checkpoints/{} 60 full
POST   /training_runs/{}/checkpoints/{}/publish 60 full
DELETE /training_runs/{}/checkpoints/{}/publish 60 full
PUT    /training_runs/{}/checkpoints/{}/ttl 60 full
GET    /training_runs/{}/checkpoints/{}/external_weights_urls 60 full
GET    /sessions 60 full
GET    /sessions/{} 60 full
PUT    /sessions/{}/project 60 full
GET    /sessions/{}/trace_export 60 full
POST   /sessions/search 60 full
GET    /audit 60 full
GET    /billing/usage/events 60 full
GET    /billing/usage/checkpoints/current 60 full
GET    /auth/apikey/me 30 none
DELETE /auth/apikey/me 30 none
"""


def test_the_table_is_the_protocols_catalogue():
    expected = {tuple(line.split()) for line in CATALOGUE.strip().splitlines()}
    current = {
        (
            route.method,
            re.sub(r"\{\w+\}", "{}", route.path.removeprefix("/api/v1")),
            f"{route.timeout_s:g}",
            route.retry,
        )
        for route in ROUTES
        if not route.legacy
    }
    own = {
        ("GET", "/tokenizer", "60", "full"),
        ("POST", "/import_weights", "300", "full"),
        ("POST", "/tinkex/release_numbers", "60", "full"),
        ("POST", "/tinkex/attach_model", "60", "full"),
    }
    assert current == expected | own, "four routes are our own"


def test_older_clients_find_their_endpoints():
    legacy = {(route.method, route.path) for route in ROUTES if route.legacy}
    assert legacy == {
        ("POST", "/api/v1/forward"),
        ("POST", "/api/v1/unload_model"),
        ("GET", "/api/v1/training_runs/{run}/checkpoints/{ckpt}/archive"),
        ("GET", "/api/v1/models/{run}/checkpoints"),
    }


def test_every_constant_is_in_the_table_once():
    constants = [value for value in vars(routes).values() if isinstance(value, Route)]
    assert sorted(r.name for r in constants) == sorted(r.name for r in ROUTES)
    assert len({route.name for route in ROUTES}) == len(ROUTES)
    assert len({(route.method, route.path) for route in ROUTES}) == len(ROUTES)


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_a_route_is_well_formed(route: Route):
    assert route.path.startswith("/api/v1/")
    assert (route.request is None) == (route.request_encoding in ("none", "tar"))
    assert (route.future is None) == (route.request_type is None)
    assert (route.future is None) or route.reply is types.UntypedAPIFuture
    assert not route.query or route.method == "GET" or route.request_encoding == "tar"
    for kind in (route.request, route.reply, route.future):
        assert kind is None or kind.__module__.startswith(("tinkex.types", bodies.__name__))


@pytest.mark.parametrize("route", ROUTES, ids=lambda route: route.name)
def test_a_route_comes_before_every_route_that_would_hide_it(route: Route):
    params = {name: "weights/x" if name == "ckpt" else "search" for name in route.parameters}
    filled = route.url(**params)
    first = next(
        other
        for other in ROUTES
        if other.method == route.method and re.fullmatch(_pattern(other), filled)
    )
    assert first is route


def _pattern(route: Route) -> str:
    pattern = route.path.replace("{ckpt}", "[^/]+/[^/]+")
    return re.sub(r"\{\w+\}", "[^/]+", pattern)


def test_ids_keep_their_colons_and_checkpoints_their_slash():
    url = routes.DELETE_CHECKPOINT.url(run="s-1:train:0", ckpt="sampler_weights/step 3")
    assert url == "/api/v1/training_runs/s-1:train:0/checkpoints/sampler_weights/step%203"


def test_what_could_leave_the_path_is_escaped():
    url = routes.GET_SESSION.url(session="a?b#c%2F..")
    assert url == "/api/v1/sessions/a%3Fb%23c%252F.."
    assert unquote(url).endswith("a?b#c%2F..")


@pytest.mark.parametrize("session", ["", ".", "..", "a/b", "/"])
def test_an_id_that_is_no_path_segment_is_refused(session: str):
    with pytest.raises(InputError, match="session: must be"):
        routes.GET_SESSION.url(session=session)


@pytest.mark.parametrize("ckpt", ["", "weights", "weights/", "/x", "a/b/c", "../x"])
def test_a_checkpoint_id_has_two_parts(ckpt: str):
    with pytest.raises(InputError, match="weights/final"):
        routes.DELETE_CHECKPOINT.url(run="r", ckpt=ckpt)


@pytest.mark.parametrize("params", [{}, {"run": "r"}, {"session": "s", "run": "r"}])
def test_missing_and_unknown_parameters_are_refused(params: dict[str, str]):
    with pytest.raises(InputError, match="takes the path parameters: session"):
        routes.GET_SESSION.url(**params)


def test_the_transport_reads_pools_from_the_table():
    from tinkex.transport import base

    assert base.Pool is routes.Pool


def test_the_proto_file_is_part_of_the_package():
    assert (Path(routes.__file__).parent / "proto" / "tinkex.proto").is_file()
