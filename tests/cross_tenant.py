"""How to name somebody else's things on every route, and what must be answered.

One table for the unit tests (a fake server) and for `tests/security` (a real one). Every route has
a row, so that a new route without one fails `tests/unit/server/test_isolation.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

from tinkex.types import Datum, ModelInput
from tinkex.wire.proto_training import encode_forward_backward


@dataclass(frozen=True)
class Things:
    """Names of somebody's things; `mine` is the session of whoever asks for them."""

    session: str
    model: str
    sampler: str
    operation: str
    sample: str
    loss: str
    state: str
    export: str
    mine: str = ""

    @property
    def path(self) -> str:
        return f"tinker://{self.model}/weights/{self.state}"

    @property
    def exported(self) -> str:
        return f"/training_runs/{self.model}/checkpoints/external_weights/{self.export}"

    @property
    def saved(self) -> str:
        return f"/training_runs/{self.model}/checkpoints/weights/{self.state}"


ABSENT = Things(
    session="no-session",
    model="no-session:train:0",
    sampler="no-session:sample:0",
    operation="no-session:train:0:1",
    sample="no-session:sample:0:0",
    loss="no-session:loss:0",
    state="nothing",
    export="no-export",
)

Ask = Callable[[Things], tuple[str, str, Any]]
_DATUM = Datum(
    model_input=ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [1.0, 1.0, 1.0]},
)
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
DONE = {"reason": {"type": "success"}, "detail": None}
JSON_BATCH = {
    "data": [
        {
            "model_input": PROMPT,
            "loss_fn_inputs": {"target_tokens": {"data": [2], "dtype": "int64", "shape": [1]}},
        }
    ],
    "loss_fn": "cross_entropy",
}


LOSS = {
    "custom_loss_seq_id": 0,
    "name": "mine",
    "inputs": [{"name": "x", "rank": 1}],
    "graph": {"nodes": [{"op": "placeholder", "name": "x", "target": "x"}]},
}


def post(url: str, /, **members: Any) -> tuple[str, str, Any]:
    return "POST", url, members


def train(model: str, seq_id: int = 9, **options: Any) -> tuple[str, str, Any]:
    options.setdefault("loss_fn", "cross_entropy")
    body = encode_forward_backward(model_id=model, seq_id=seq_id, data=[_DATUM], **options)
    return "POST", "/forward_backward", body


def create(t: Things, session: str, path: str) -> tuple[str, str, Any]:
    return post("/load_weights", session_id=session, model_seq_id=7, path=path, optimizer=False)


def sampling(session: str, **members: Any) -> tuple[str, str, Any]:
    return post(
        "/create_sampling_session", session_id=session, sampling_session_seq_id=7, **members
    )


def sample(**members: Any) -> tuple[str, str, Any]:
    params = {"max_tokens": 1}
    return post("/asample", num_samples=1, prompt=PROMPT, sampling_params=params, **members)


BASE = "tinkex/tiny"

# Requests that name somebody's thing. They are answered as if there were no such thing.
HIDDEN: dict[str, list[Ask]] = {
    "session_heartbeat": [lambda t: post("/session_heartbeat", session_id=t.session)],
    "finish_session": [lambda t: post(f"/sessions/{t.session}/finish", **DONE)],
    "set_session_project": [
        lambda t: ("PUT", f"/sessions/{t.session}/project", {"project_id": "p"})
    ],
    "export_trace": [lambda t: ("GET", f"/sessions/{t.session}/trace_export", None)],
    "get_session": [
        lambda t: ("GET", f"/sessions/{t.session}", None),
        lambda t: ("GET", f"/sessions/{t.session}?access_scope=accessible", None),
    ],
    "create_model": [
        lambda t: post("/create_model", session_id=t.session, model_seq_id=0, base_model=BASE),
        lambda t: post("/create_model", session_id=t.session, model_seq_id=5, base_model=BASE),
    ],
    "forward_backward": [
        lambda t: train(t.model),
        lambda t: post("/forward_backward", model_id=t.model, seq_id=9),
    ],
    "forward": [
        lambda t: post("/forward", forward_input=JSON_BATCH, model_id=t.model, seq_id=9),
        lambda t: post("/forward", forward_input=JSON_BATCH, model_id=t.model),
    ],
    "optim_step": [
        lambda t: post("/optim_step", model_id=t.model, seq_id=9, adam_params={}),
        # Known already to its owner, not to anybody else.
        lambda t: post("/optim_step", model_id=t.model, seq_id=1, adam_params={}),
    ],
    "create_custom_loss": [lambda t: post("/create_custom_loss", session_id=t.session, **LOSS)],
    "get_info": [lambda t: post("/get_info", model_id=t.model)],
    "save_weights": [lambda t: post("/save_weights", model_id=t.model, seq_id=9, path="x")],
    "save_weights_for_sampler": [
        lambda t: post("/save_weights_for_sampler", model_id=t.model, seq_id=9, path="x")
    ],
    "save_weights_external": [
        lambda t: post("/save_weights_external", model_id=t.model, seq_id=9, path="x")
    ],
    "load_weights": [
        lambda t: post("/load_weights", model_id=t.model, seq_id=9, path=t.path, optimizer=False),
        lambda t: create(t, t.session, t.path),
        lambda t: create(t, t.mine, t.path),
    ],
    "weights_info": [lambda t: post("/weights_info", tinker_path=t.path)],
    "copy_weights": [
        lambda t: post("/copy_weights", source_path=t.path, destination_project_id="p"),
        lambda t: post("/copy_weights", source_path=t.path, session_id=t.session, model_seq_id=0),
    ],
    "create_sampling_session": [
        lambda t: sampling(t.session, base_model=BASE),
        lambda t: sampling(t.mine, model_path=t.path),
    ],
    "join_sampling_session": [
        lambda t: post("/join_sampling_session", sampling_session_id=t.sampler)
    ],
    "asample": [
        lambda t: sample(sampling_session_id=t.sampler, seq_id=9),
        lambda t: sample(sampling_session_id=t.sampler, seq_id=0),
        lambda t: sample(model_path=t.path),
    ],
    "get_sampler": [lambda t: ("GET", f"/samplers/{t.sampler}", None)],
    "retrieve_future": [
        lambda t: post("/retrieve_future", request_id=t.operation),
        lambda t: post("/retrieve_future", request_id=t.sample),
        lambda t: post("/retrieve_future", request_id=t.loss),
        # Never sent, but of a model and a sampler that the owner would be told were restarted.
        lambda t: post("/retrieve_future", request_id=f"{t.model}:999"),
        lambda t: post("/retrieve_future", request_id=f"{t.sampler}:999"),
    ],
    "retrieve_futures": [
        lambda t: post(
            "/retrieve_futures",
            target={
                "type": "sampling_session",
                "sampling_session_id": t.sampler,
                "cloned_sampler_id": 0,
            },
            prev_cursor=0,
            retrieved_request_ids=[t.sample],
        )
    ],
    "release_numbers": [
        lambda t: post("/tinkex/release_numbers", model_id=t.model, seq_ids=[9]),
    ],
    "attach_model": [
        lambda t: post("/tinkex/attach_model", model_id=t.model, session_id=t.mine),
        lambda t: post("/tinkex/attach_model", model_id=t.model, session_id=t.session),
    ],
    "cancel_future": [
        lambda t: post("/cancel_future", request_id=t.operation),
        lambda t: post("/cancel_future", request_id=t.sample),
    ],
    "list_run_checkpoints": [lambda t: ("GET", f"/training_runs/{t.model}/checkpoints", None)],
    "list_model_checkpoints": [lambda t: ("GET", f"/models/{t.model}/checkpoints", None)],
    "get_training_run": [
        lambda t: ("GET", f"/training_runs/{t.model}", None),
        lambda t: ("GET", f"/training_runs/{t.model}?access_scope=accessible", None),
    ],
    "publish_checkpoint": [lambda t: ("POST", f"{t.saved}/publish", None)],
    "unpublish_checkpoint": [lambda t: ("DELETE", f"{t.saved}/publish", None)],
    "set_checkpoint_ttl": [lambda t: ("PUT", f"{t.saved}/ttl", {"ttl_seconds": 3600})],
    "get_external_weights_urls": [
        lambda t: ("GET", f"{t.exported}/external_weights_urls", None),
        lambda t: ("GET", f"{t.saved}/external_weights_urls", None),
    ],
    "get_checkpoint_archive": [lambda t: ("GET", f"{t.saved}/archive", None)],
    "delete_checkpoint": [lambda t: ("DELETE", t.saved, None)],
    "unload_model": [lambda t: post("/unload_model", model_id=t.model)],
}

# Requests that are accepted and fail in their turn, as if there were no such thing.
IN_TURN: dict[str, list[Callable[[Things, str], tuple[str, str, Any]]]] = {
    "load_weights": [
        lambda t, own: post("/load_weights", model_id=own, seq_id=1, path=t.path, optimizer=False)
    ],
    "forward_backward": [
        lambda t, own: train(own, 1, loss_fn="custom", loss_fn_config={"loss_id": t.loss})
    ],
}

# Requests that list or sum up things. Somebody else's are not among them.
WEEK = "starting_on=2025-06-10T00:00:00Z&ending_before=2025-06-20T00:00:00Z"
LISTS: dict[str, list[Ask]] = {
    "list_sessions": [
        lambda t: ("GET", "/sessions", None),
        lambda t: ("GET", "/sessions?access_scope=accessible", None),
    ],
    "search_sessions": [
        lambda t: post("/sessions/search"),
        lambda t: post("/sessions/search", session_id=t.session),
        lambda t: post("/sessions/search", owner={"type": "accessible"}),
        lambda t: post("/sessions/search", owner={"type": "user", "owner_urns": ["alice"]}),
    ],
    "list_training_runs": [
        lambda t: ("GET", "/training_runs", None),
        lambda t: ("GET", "/training_runs?access_scope=accessible", None),
    ],
    "list_checkpoints": [lambda t: ("GET", "/checkpoints", None)],
    "get_audit_log": [lambda t: ("GET", "/audit", None)],
    "get_billing_usage": [lambda t: ("GET", f"/billing/usage/events?{WEEK}", None)],
    "get_checkpoint_storage_usage": [
        lambda t: ("GET", "/billing/usage/checkpoints/current", None),
        lambda t: ("GET", "/billing/usage/checkpoints/current?project_id=secret", None),
    ],
    "get_api_key": [lambda t: ("GET", "/auth/apikey/me", None)],
}

# Routes that know no things of tenants at all, but for the key they are called with.
NOTHING = {
    "client_config",
    "client_dynamic_config",
    "auth_token",
    "delete_api_key",
    "create_session",
    "telemetry",
    "get_server_capabilities",
    "healthz",
    "get_tokenizer",
    "import_weights",
}

# The same on the routes below /v1.
OPENAI: list[Ask] = [
    lambda t: ("GET", f"/models/{t.path}", None),
    lambda t: post("/completions", model=t.path, prompt=[1, 2, 3], max_tokens=1),
    lambda t: post("/chat/completions", model=t.path, messages=[{"role": "user", "content": "x"}]),
]


def of(things: Things, mine: str) -> Things:
    values = {f.name: getattr(things, f.name) for f in fields(things)}
    return Things(**{**values, "mine": mine})


def neutral(status: int, body: bytes, things: Things) -> tuple[int, str]:
    """A reply with the names of things replaced by what they are names of."""
    text = body.decode()
    names = [(getattr(things, f.name), f.name) for f in fields(things) if f.name != "mine"]
    # The longest first: the id of a session is a part of the others.
    for name, what in sorted(names, key=lambda pair: -len(pair[0])):
        text = text.replace(name, f"<{what}>") if len(name) > 1 else text
    return status, text.replace(f"/{things.state}", "/<state>").replace(
        f"/{things.export}", "/<export>"
    )
