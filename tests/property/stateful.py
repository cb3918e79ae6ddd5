"""Sequences of requests made from the server's description: what is answered feeds later ones.

    python -m tests.property.stateful --seconds 60

Two tenants send in turn. A request is a good one, one that schemathesis makes up, or a mixture, and
names things that earlier answers named, sometimes the other tenant's. Rules: answers are as
described, no 5xx but 501 where the docs list it, and nothing of the other tenant. Hypothesis
shortens a sequence that breaks one and prints it; then the exit status is 1.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import time
from collections import Counter
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import anyio.from_thread
import msgspec
import schemathesis
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from tests.cross_tenant import LOSS, PROMPT
from tests.property.test_openapi import OPERATIONS, World, check, real
from tinkex.server.openai.requests import ChatRequest, CompletionRequest

if TYPE_CHECKING:
    from collections.abc import Callable

MODEL = "tinkex/tiny"
_JSON = "application/json"
MARKS = ("mark-of-one-7c1e", "mark-of-two-9b3d")
# The members of answers and requests that name things, by the kind of thing.
KINDS = {
    "session_id": "session",
    "session": "session",
    "model_id": "model",
    "run": "model",
    "training_run_id": "model",
    "sampling_session_id": "sampler",
    "sampler": "sampler",
    "request_id": "request",
    "path": "path",
    "tinker_path": "path",
    "model_path": "path",
    "source_path": "path",
    "checkpoint_id": "checkpoint",
}

_FIXED = {
    "base_model": MODEL,
    "model": MODEL,
    "starting_on": "2025-06-15T12:00:00Z",
    "ending_before": "2025-06-16T12:00:00Z",
}


def _openai_description() -> dict[str, Any]:
    """The routes below `/v1`, which the server's own description leaves out."""
    ref = "#/components/schemas/{name}"
    kinds = {"completions": CompletionRequest, "chat/completions": ChatRequest}
    schemas, components = msgspec.json.schema_components(kinds.values(), ref_template=ref)
    said = {"type": "object"}
    good = {"application/json": {"schema": said}, "text/event-stream": {"schema": {}}}
    bad = {"application/json": {"schema": {**said, "required": ["error"]}}}
    answers = {"200": {"description": "Done.", "content": good}} | {
        status: {"description": "Refused.", "content": bad}
        for status in ("400", "401", "404", "413", "415", "429", "503")
    }
    name = {"name": "model", "in": "path", "required": True, "schema": {"type": "string"}}
    paths: dict[str, Any] = {
        "/v1/models": {"get": {"operationId": "openai_models", "responses": answers}},
        "/v1/models/{model}": {
            "get": {"operationId": "openai_model", "parameters": [name], "responses": answers}
        },
    }
    for (path, kind), schema in zip(kinds.items(), schemas, strict=True):
        body = {"required": True, "content": {"application/json": {"schema": schema}}}
        operation = {"operationId": kind.__name__, "requestBody": body, "responses": answers}
        paths[f"/v1/{path}"] = {"post": operation}
    info = {"title": "openai", "version": "1"}
    return {
        "openapi": "3.1.0",
        "info": info,
        "paths": paths,
        "components": {"schemas": components},
    }


_OPENAI = schemathesis.openapi.from_dict(
    msgspec.json.decode(msgspec.json.encode(_openai_description()))
)
ROUTES = OPERATIONS | {
    operation.ok().definition.raw["operationId"]: operation.ok()
    for operation in _OPENAI.get_all_operations()
}
_TENSORS = {
    "target_tokens": {"data": [2, 3, 4], "dtype": "int64", "shape": [3]},
    "weights": {"data": [1.0, 1.0, 1.0], "dtype": "float32", "shape": [3]},
}
_BATCH = {
    "data": [{"model_input": PROMPT, "loss_fn_inputs": _TENSORS}],
    "loss_fn": "cross_entropy",
}


class Names:
    """The names for one request, and the numbers that are due. Mutable state."""

    def __init__(self, chosen: dict[str, str], numbers: Counter[str], mark: str) -> None:
        self.chosen = chosen
        self._numbers = numbers
        self.mark = mark

    def __getitem__(self, kind: str) -> str:
        return self.chosen.get(kind, "nothing")

    def next(self, kind: str, what: str = "") -> int:
        """The number that is due for one of the things."""
        owner = self[kind] + what
        self._numbers[owner] += 1
        # The creation of a model has the number 0.
        return self._numbers[owner] - (not (kind == "model" and not what))

    def text(self) -> str:
        """A text of the tenant's."""
        self._numbers["texts"] += 1
        return f"{self.mark}-{self._numbers['texts']}"


def _saved(n: Names) -> dict[str, Any]:
    return {"model_id": n["model"], "seq_id": n.next("model"), "path": n.text()}


GOOD: dict[str, Callable[[Names], dict[str, Any]]] = {
    "create_session": lambda n: {
        "tags": [n.text()],
        "user_metadata": {"about": n.text()},
        "sdk_version": "0.36.0",
        "display_name": n.text(),
    },
    "finish_session": lambda n: {"reason": {"type": "success"}, "detail": n.text()},
    "create_model": lambda n: {
        "session_id": n["session"],
        "model_seq_id": n.next("session", "models"),
        "base_model": MODEL,
        "lora_config": {"rank": 4},
        "user_metadata": {"about": n.text()},
    },
    "forward_backward": lambda n: {
        "model_id": n["model"],
        "seq_id": n.next("model"),
        "forward_backward_input": _BATCH,
    },
    "forward": lambda n: {
        "model_id": n["model"],
        "seq_id": n.next("model"),
        "forward_input": _BATCH,
    },
    "optim_step": lambda n: {
        "model_id": n["model"],
        "seq_id": n.next("model"),
        "adam_params": {"learning_rate": 0.1},
    },
    "save_weights": _saved,
    "save_weights_for_sampler": _saved,
    "save_weights_external": _saved,
    "load_weights": lambda n: {
        "model_id": n["model"],
        "seq_id": n.next("model"),
        "path": n["path"],
        "optimizer": False,
    },
    "create_custom_loss": lambda n: {
        **LOSS,
        "session_id": n["session"],
        "custom_loss_seq_id": n.next("session", "losses"),
        "name": n.text(),
    },
    "create_sampling_session": lambda n: {
        "session_id": n["session"],
        "sampling_session_seq_id": n.next("session", "samplers"),
        "base_model": MODEL,
    },
    "asample": lambda n: {
        "sampling_session_id": n["sampler"],
        "seq_id": n.next("sampler"),
        "num_samples": 1,
        "prompt": PROMPT,
        "sampling_params": {"max_tokens": 2},
    },
    "retrieve_future": lambda n: {"request_id": n["request"]},
    "CompletionRequest": lambda n: {
        "model": n.chosen.get("path", MODEL),
        "prompt": [1, 2],
        "max_tokens": 2,
    },
    "ChatRequest": lambda n: {
        "model": MODEL,
        "messages": [{"role": "user", "content": n.text()}],
        "max_tokens": 2,
    },
}
"""Bodies that are accepted, for the routes that hardly any made-up body gets past."""
_START = ("create_session", "create_model", "create_sampling_session", "save_weights")
# Checkpoints that others may read from then on.
_PUBLISH = "publish_checkpoint"


class Sequences(RuleBasedStateMachine):
    """Two tenants and a server, in a loop of its own."""

    def __init__(self) -> None:
        super().__init__()
        self._life = ExitStack()
        portal = self._life.enter_context(anyio.from_thread.start_blocking_portal())
        self.world = World(portal)
        self._life.enter_context(portal.wrap_async_context_manager(self.world.running()))
        # Mutable state: for each tenant the names that it was given, by kind, the numbers that are
        # due, and all that it has sent or may read, which an answer may repeat.
        self.names: tuple[dict[str, list[str]], ...] = ({}, {})
        self.numbers: tuple[Counter[str], ...] = (Counter(), Counter())
        self.said = ["", ""]

    def teardown(self) -> None:
        self._life.close()

    @initialize()
    def start(self) -> None:
        """Something of everything for both, so that most requests have something to name."""
        for tenant in (0, 1):
            for name in _START:
                chosen = {kind: known[-1] for kind, known in self.names[tenant].items()}
                body = GOOD[name](Names(chosen, self.numbers[tenant], MARKS[tenant]))
                response = self._exchange(
                    tenant, name, ROUTES[name].Case(body=body, media_type=_JSON)
                )
                assert response.status_code == 200, response.content

    @rule(
        tenant=st.integers(0, 1),
        name=st.sampled_from(sorted(ROUTES)),
        how=st.sampled_from(["good", "good", "good", "mixed", "random"]),
        pick=st.integers(0, 2**32 - 1),
        data=st.data(),
    )
    def request(self, tenant: int, name: str, how: str, pick: int, data: st.DataObject) -> None:
        """One request, whose names are of earlier answers."""
        # Hypothesis wants the same draws each time, while answers depend on what is done when.
        rng = random.Random(pick)
        chosen = self._choose(tenant, rng)
        good = (
            GOOD[name](Names(chosen, self.numbers[tenant], MARKS[tenant])) if name in GOOD else {}
        )
        ids = {member: chosen[kind] for member, kind in KINDS.items() if kind in chosen} | _FIXED
        if how == "good" and good:
            case = ROUTES[name].Case(body=good, media_type=_JSON)
            case.path_parameters = {each: ids.get(each, "x") for each in _parameters(name)}
        else:
            case = data.draw(_made_up(name, negative=how == "random"))
            case.body = real(case.body, ids)
            case.query = real(case.query or {}, ids)
            case.path_parameters = real(case.path_parameters or {}, ids)
            if how == "mixed" and isinstance(case.body, dict):
                case.body |= {member: value for member, value in good.items() if rng.random() < 0.8}
        if {"kind", "name"} <= _parameters(name) and "path" in chosen:
            _, _, rest = chosen["path"].removeprefix("tinker://").partition("/")
            kind, _, last = rest.partition("/")
            case.path_parameters |= {"kind": kind, "name": last}
        self._exchange(tenant, name, case)

    def _choose(self, tenant: int, rng: random.Random) -> dict[str, str]:
        """A name of every kind: mostly the tenant's own, and of the latest ones."""
        owner = 1 - tenant if rng.random() < 0.12 else tenant
        return {kind: rng.choice(known[-4:]) for kind, known in self.names[owner].items() if known}

    def _exchange(self, tenant: int, name: str, case: schemathesis.Case) -> Any:
        response = check(self.world, case, f"tml-{tenant}")
        if response is None:
            return None
        sent = response.request.body or b""
        sent = sent.decode(errors="replace") if isinstance(sent, bytes) else sent
        self.said[tenant] += unquote(response.request.url) + sent
        self._check_secrets(tenant, name, response)
        if response.status_code == 200:
            self._learn(tenant, response.content)
            if name == _PUBLISH:
                self.said[1 - tenant] += unquote(response.request.url)
        return response

    def _check_secrets(self, tenant: int, name: str, response: Any) -> None:
        """Nothing of the other's, but what this one has sent itself, or what was published."""
        heads = str(response.headers)
        text = response.content.decode(errors="replace") + heads
        known = [each for kind in self.names[1 - tenant].values() for each in kind]
        for secret in known:
            # A fake server counts its names: `session-1` is no part of `session-10`.
            told = secret in text and re.search(rf"{re.escape(secret)}(?!\w)", text)
            parts = secret.removeprefix("tinker://").split("/")  # a path may be sent in parts
            if told and not all(part in self.said[tenant] for part in parts):
                raise AssertionError(f"{name} tells of the other's {secret}: {text[:500]}")
        mark = MARKS[1 - tenant]
        for piece in text.split(mark)[1:]:
            # Every text with a mark goes on with a number.
            whole = mark + piece[: len(piece) - len(piece.lstrip("-0123456789"))]
            if whole not in self.said[tenant]:
                raise AssertionError(f"{name} tells of the other's {whole}: {text[:500]}")

    def _learn(self, tenant: int, body: bytes) -> None:
        try:
            answer = msgspec.json.decode(body)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            return
        for member, value in _members(answer):
            kind = KINDS.get(member)
            mine = self.names[tenant].setdefault(kind, []) if kind else []
            others = self.names[1 - tenant].get(kind or "", [])  # published ones
            if kind and isinstance(value, str) and value not in mine and value not in others:
                mine.append(value)


def _members(value: Any) -> list[tuple[str, Any]]:
    """Every member of an answer, at any depth."""
    if isinstance(value, dict):
        return [pair for k, v in value.items() for pair in ((k, v), *_members(v))]
    return [pair for each in value for pair in _members(each)] if isinstance(value, list) else []


def _parameters(name: str) -> set[str]:
    return {each.name for each in ROUTES[name].path_parameters}


# Making a strategy takes longer than drawing from it.
_STRATEGIES: dict[tuple[str, bool], st.SearchStrategy[schemathesis.Case]] = {}


def _made_up(name: str, *, negative: bool) -> st.SearchStrategy[schemathesis.Case]:
    if (name, negative) not in _STRATEGIES:
        modes = [schemathesis.GenerationMode.POSITIVE]
        modes += [schemathesis.GenerationMode.NEGATIVE] if negative else []
        _STRATEGIES[name, negative] = st.one_of(
            [ROUTES[name].as_strategy(generation_mode=mode) for mode in modes]
        )
    return _STRATEGIES[name, negative]


def run(examples: int, steps: int, *, fixed: bool, machine: type[Sequences] = Sequences) -> None:
    """Run sequences; raises on the first that breaks a rule. Fixed ones are the same each time."""
    phases = [Phase.generate] if fixed else [Phase.generate, Phase.shrink]
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=steps,
            derandomize=fixed,
            phases=phases,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    end = time.monotonic() + parser.parse_args(arguments).seconds
    while time.monotonic() < end:
        run(10, 50, fixed=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
