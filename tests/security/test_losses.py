"""Uploaded losses that ask for too much: each fails in its turn, and only for whoever sent it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from tests.contracts.conftest import postgres as postgres  # a fixture
from tests.security.world import MOST_BYTES, world_on
from tinkex.types import Datum, ModelInput
from tinkex.wire.proto_training import encode_forward_backward

if TYPE_CHECKING:
    from pathlib import Path

    from tests.security.world import Answer, Tenant, World

Node = dict[str, Any]
_DATUM = Datum(
    model_input=ModelInput.from_ints([1, 2, 3]), loss_fn_inputs={"target_tokens": [2, 3, 4]}
)
_INPUT = {"name": "logprobs", "rank": 1}
_P: Node = {"op": "placeholder", "name": "p", "target": "logprobs"}
_MIB = 1 << 20


def call(name: str, target: str, *args: Any, **kwargs: Any) -> Node:
    kind = "call_function" if "." in target or target == "getattr" else "call_method"
    return {"op": kind, "name": name, "target": target, "args": list(args), "kwargs": kwargs}


def ref(name: str) -> dict[str, str]:
    return {"ref": name}


def finished(*nodes: Node, loss: str = "loss") -> list[Node]:
    """A graph whose loss is the sum of its last node, or a node that is named `loss`."""
    result = {"tuple": [ref(loss), {"dict": {}}]}
    last = [] if nodes[-1]["name"] == loss else [call(loss, "sum", ref(nodes[-1]["name"]))]
    return [*nodes, *last, {"op": "output", "name": "o", "target": "output", "args": [result]}]


def chain(count: int, target: str, *, twice: bool = False) -> list[Node]:
    """The logprobs, and calls of which each works on the one before."""
    nodes = [_P]
    for number in range(count):
        last = ref(nodes[-1]["name"])
        nodes.append(call(f"n{number}", target, [last, last] if twice else last))
    return nodes


def doubled(count: int) -> list[Node]:
    """A tensor that is twice as long after every call."""
    return chain(count, "torch.cat", twice=True)


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


# A graph and a part of the refusal, which may come at once or in its turn.
HOSTILE: dict[str, tuple[list[Node], str]] = {
    "more nodes than a body may have": (finished(*chain(5_000, "neg")), "4096 are the most"),
    "more nodes than a graph may have": (finished(*chain(3_000, "neg")), "1000 are allowed"),
    "an integer of 400 digits": (
        finished(_P, call("a", "torch.add", ref("p"), 10**400)),
        "64 bits",
    ),
    "constants that overflow": (finished(_P, call("a", "torch.add", ref("p"), 2**63)), "64 bits"),
    "a number squared again and again": (
        finished(
            _P,
            call("n0", "operator.mul", 2**31, 2),
            *(call(f"n{i + 1}", "operator.mul", ref(f"n{i}"), ref(f"n{i}")) for i in range(60)),
            call("loss", "sum", ref("p")),
        ),
        "too large",
    ),
    "a tensor doubled again and again": (finished(*doubled(60)), "would make"),
    "a tensor of terabytes": (
        finished(
            *doubled(19),
            call("row", "unsqueeze", ref("n18"), 0),
            call("column", "unsqueeze", ref("n18"), 1),
            call("a", "torch.mul", ref("row"), ref("column")),
        ),
        "would make",
    ),
    "very much work": (
        finished(
            *doubled(20), *(call(f"m{i}", "median", ref("n19")) for i in range(200)), loss="m199"
        ),
        "too much work",
    ),
    "arguments in a deep list": (finished(_P, call("a", "torch.cat", deep(500))), "nested"),
    "very many arguments": (finished(_P, call("a", "torch.cat", [1] * 30_000)), "values"),
    "a function that is not offered": (
        finished(_P, call("a", "os.system", "true")),
        "is not offered",
    ),
    "a method that is not offered": (
        finished(_P, call("a", "__reduce__", ref("p"))),
        "not offered",
    ),
    "an attribute that is not offered": (
        finished(_P, call("a", "getattr", ref("p"), "__class__")),
        "is not offered",
    ),
    "a shape that lies": (finished(_P, call("a", "reshape", ref("p"), 7, 11)), "reshape failed"),
    "a name that is not there": (finished(_P, call("a", "neg", ref("nobody"))), "nobody"),
    "a division of numbers by zero": (
        finished(_P, call("a", "operator.truediv", 1, 0), call("loss", "sum", ref("p"))),
        "zero",
    ),
    "a loss that is not a number": (
        finished(
            _P,
            call("z", "torch.sub", ref("p"), ref("p")),
            call("a", "torch.div", ref("z"), ref("z")),
        ),
        "not finite",
    ),
    "no output": ([_P], "output"),
}

QUOTA = 24 * _MIB


def upload(tenant: Tenant, session: str, number: int, nodes: list[Node]) -> Answer:
    return tenant.post(
        "create_custom_loss",
        {
            "session_id": session,
            "custom_loss_seq_id": number,
            "name": "hostile",
            "inputs": [_INPUT],
            "graph": {"nodes": nodes},
        },
    )


def train(tenant: Tenant, model: str, seq_id: int, loss_id: str) -> Any:
    body = encode_forward_backward(
        model_id=model,
        seq_id=seq_id,
        data=[_DATUM],
        loss_fn="custom",
        loss_fn_config={"loss_id": loss_id},
    )
    media = {"content-type": "application/x-protobuf"}
    answer = tenant.request("POST", "forward_backward", body, media)
    assert answer.status == 200, answer
    return tenant.result(answer.json["request_id"])


def test_hostile_graphs_fail_in_their_turn(world: World) -> None:
    attacker = world.attacker
    session = attacker.session()
    model, seq_id = attacker.model(session), 1
    with world.watching() as seen:
        for number, (name, (nodes, part)) in enumerate(HOSTILE.items()):
            answer = upload(attacker, session, number, nodes)
            if answer.status == 200:
                result = train(attacker, model, seq_id, answer.json["request_id"])
                seq_id += 1
                assert result["category"] == "user", (name, result)
                said = result["error"]
            else:
                assert answer.status == 400, (name, answer)
                said = answer.detail
            assert part in said, (name, said)
            assert len(said) < 500, (name, said)
        # The model goes on with a loss that is good.
        good = upload(attacker, session, len(HOSTILE), finished(_P))
        assert "error" not in train(attacker, model, seq_id, good.json["request_id"])
    assert len(seen.sample_s) > 0
    assert seen.peak_bytes < MOST_BYTES
    world.assert_well()


@pytest.mark.parametrize("store", ["sqlite", "postgresql"])
def test_graphs_of_megabytes_end_at_the_quota(
    store: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    place = request.getfixturevalue("postgres").new_place() if store == "postgresql" else None
    text = "x" * 3_900
    large = finished(*(call(f"n{i}", "neg", text) for i in range(960)))
    with world_on(tmp_path, "--set", f"max_stored_bytes={QUOTA}", database=place) as world:
        attacker, neighbour = world.attacker, world.neighbour
        session = attacker.session()
        with world.watching() as seen:
            answers = [upload(attacker, session, number, large) for number in range(12)]
        statuses = [answer.status for answer in answers]
        assert 3 <= statuses.count(200) <= 7, answers[0].body[:300]
        refused = [answer for answer in answers if answer.status != 200]
        for answer in refused:
            assert answer.status == 429, answer
            assert "max_stored_bytes" in answer.detail
            assert len(answer.detail) < 1_000
        assert upload(neighbour, neighbour.session(), 0, large).status == 200
        assert len(seen.sample_s) > 0
        assert seen.peak_bytes < MOST_BYTES
        world.assert_well()
