"""What the three tenants do all the time, each in a thread of its own.

Each round is a session, or a few calls without one. Rounds of the same variant compute the same
numbers, whatever was killed in between; the first one is the reference for the others.
"""

from __future__ import annotations

import http.client
import json
import random
import threading
import time
from concurrent.futures import CancelledError
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tests.e2e.serving import MODEL
from tinkex import AdamParams, Datum, ModelInput, SamplingParams, ServiceClient
from tinkex.config import Config

if TYPE_CHECKING:
    from collections.abc import Generator

    from benchmarks.soak.supervised import Supervised

TEXT = list(b"the quick brown fox jumps over the lazy dog and runs away from it again")
VARIANTS = 4
STEPS = 4
GROUPS, GROUP_SIZE = 3, 4
# Longer than any restart; an operation that takes this long has not ended.
WAIT_S = 280.0
_KEPT = 1000


@dataclass
class Journal:
    """What all tenants saw. Mutable state, behind one lock."""

    server: Supervised
    latencies: list[tuple[str, float, float]] = field(default_factory=list)
    """(kind, began, ended) since the last interval."""
    done: dict[str, int] = field(default_factory=dict)
    compared: int = 0
    wrong: list[str] = field(default_factory=list)
    _references: dict[object, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @contextmanager
    def timed(self, kind: str, began: float | None = None) -> Generator[None]:
        """Count the block as one call, which may have begun before."""
        began = time.monotonic() if began is None else began
        yield
        with self._lock:
            self.latencies.append((kind, began, time.monotonic()))
            self.done[kind] = self.done.get(kind, 0) + 1

    def take(self) -> list[tuple[str, float, float]]:
        """The latencies since the last call."""
        with self._lock:
            taken, self.latencies = self.latencies, []
        return taken

    def compare(self, name: object, value: Any) -> None:
        """Numbers that must be the same each time."""
        with self._lock:
            reference = self._references.setdefault(name, value)
            self.compared += 1
        if value != reference:
            self.fail(f"{name}: {str(value)[:200]} is not {str(reference)[:200]}")

    def fail(self, what: str) -> None:
        """Something that must not happen."""
        with self._lock:
            if len(self.wrong) < _KEPT:
                self.wrong.append(what)


class Tenant:
    """A key, and rounds of work until it is told to stop."""

    def __init__(self, name: str, journal: Journal, pace_s: float) -> None:
        self.name = name
        self.pace_s = pace_s
        self.journal = journal
        self.server = journal.server
        self.key = journal.server.keys[name]
        self.timed = journal.timed
        self.random = random.Random(name)
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._stop = threading.Event()

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Let the round under way end."""
        self._stop.set()

    def join(self, timeout_s: float) -> bool:
        """Whether it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def round(self, number: int) -> None:
        raise NotImplementedError

    def _run(self) -> None:
        number = 0
        while not self._stop.is_set():
            # At a steady pace, so that the level of the rows does not depend on the machine.
            next_at = time.monotonic() + self.pace_s
            try:
                self.round(number)
            except Exception as error:  # noqa: BLE001 - every failure is a finding
                self.journal.fail(f"{self.name}: round {number}: {type(error).__name__}: {error}")
            number += 1
            self._stop.wait(max(0.0, next_at - time.monotonic()))

    @contextmanager
    def session(self) -> Generator[ServiceClient]:
        config = Config.load(base_url=self.server.url, api_key=self.key)
        service = ServiceClient(config=config)
        try:
            yield service
        finally:
            with self.timed("end session"):
                service.close().result(WAIT_S)

    def request(
        self, method: str, path: str, body: bytes | None = None, **headers: str
    ) -> tuple[int, bytes]:
        """One raw request, sent again while the server starts, or when it is too early for it."""
        given = {"x-api-key": self.key, "content-type": "application/json"}
        given.update({name.replace("_", "-"): value for name, value in headers.items()})
        end = time.monotonic() + WAIT_S
        while True:
            connection = http.client.HTTPConnection(self.server.url[7:], timeout=WAIT_S)
            try:
                connection.request(method, path, body, given)
                reply = connection.getresponse()
                if reply.status not in (429, 503) or time.monotonic() > end:
                    return reply.status, reply.read()
            except (OSError, http.client.HTTPException):
                if time.monotonic() > end:
                    raise
            finally:
                connection.close()
            time.sleep(0.2)

    def expect(
        self, status: int, method: str, path: str, body: object = None, **headers: str
    ) -> Any:
        """One raw request that must be answered so; returns the decoded body."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        found, answer = self.request(method, path, data, **headers)
        # The server may have been killed after a first attempt at deleting something succeeded.
        deleted = method == "DELETE" and found == 404
        if found != status and not deleted:
            self.journal.fail(f"{method} {path[:80]}: {found}, not {status}: {answer[:200]!r}")
            return {}
        return json.loads(answer) if answer else {}


def datum(first: int, length: int) -> Datum:
    tokens = (TEXT + TEXT)[first : first + length + 1]
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * length},
    )


class Sft(Tenant):
    """Supervised training: passes and steps in flight together, a save, a resume, a deletion."""

    def round(self, number: int) -> None:
        variant = number % VARIANTS
        with self.session() as service:
            with self.timed("create model"):
                training = service.create_lora_training_client(
                    base_model=MODEL, rank=4 + variant, seed=variant
                )
            numbers = self._train(training, variant, range(STEPS))
            with self.timed("save"):
                saved = training.save_state(f"s{number}").result(WAIT_S).path
            numbers += self._train(training, variant, range(STEPS, STEPS + 2))
            with self.timed("resume"):
                resumed = service.create_training_client_from_state_with_optimizer(saved)
            # A resumed run computes what the first would have.
            again = self._train(resumed, variant, range(STEPS, STEPS + 2))
            self.journal.compare(("sft", variant), numbers)
            self.journal.compare(("sft resumed", variant), again)
            if numbers[-len(again) :] != again:
                self.journal.fail(f"sft {variant}: the resumed run differs")
            with self.timed("delete checkpoint"):
                self.request("DELETE", _checkpoint_route(saved))

    def _train(self, training: Any, variant: int, steps: range) -> list[Any]:
        pending: list[tuple[str, float, Any]] = []
        found: list[Any] = []
        for step in steps:
            data = [datum(step + variant + place, 12 + place) for place in range(3)]
            now = time.monotonic()
            backward = training.forward_backward(data, "cross_entropy")
            pending.append(("forward_backward", now, backward))
            stepped = training.optim_step(AdamParams(learning_rate=1e-3))
            pending.append(("optim_step", now, stepped))
        for kind, began, future in pending:
            with self.timed(kind, began):
                result = future.result(WAIT_S)
            found.append(dict(sorted((result.metrics or {}).items())))
            for output in getattr(result, "loss_fn_outputs", []):
                found.append(output["logprobs"].tolist())
        return found


class Rl(Tenant):
    """Groups of samples from the weights of the moment, then a step on them; some are cancelled."""

    def round(self, number: int) -> None:
        variant = number % VARIANTS
        with self.session() as service:
            with self.timed("create model"):
                training = service.create_lora_training_client(
                    base_model=MODEL, rank=8, seed=variant
                )
            for step in range(2):
                with self.timed("publish"):
                    sampler = training.save_weights_and_get_sampling_client()
                self._cancelled(sampler)
                groups = self._sample(sampler, variant, step)
                self.journal.compare(("rl", variant, step), groups)
                data = [self._datum(*sequence) for group in groups for sequence in group]
                began = time.monotonic()
                backward = training.forward_backward(data, "importance_sampling")
                stepped = training.optim_step(AdamParams(learning_rate=1e-3))
                with self.timed("forward_backward", began):
                    backward.result(WAIT_S)
                with self.timed("optim_step", began):
                    stepped.result(WAIT_S)

    def _sample(self, sampler: Any, variant: int, step: int) -> list[Any]:
        params = SamplingParams(max_tokens=12, temperature=1.0, seed=10 * variant + step)
        began = time.monotonic()
        futures = [
            sampler.sample(ModelInput.from_ints(TEXT[place : place + 9]), GROUP_SIZE, params)
            for place in range(GROUPS)
        ]
        groups: list[Any] = []
        for future in futures:
            with self.timed("sample", began):
                sequences = future.result(WAIT_S).sequences
            groups.append([(list(s.tokens), list(s.logprobs or ())) for s in sequences])
        return groups

    def _cancelled(self, sampler: Any) -> None:
        """A long sample that nobody waits for."""
        future = sampler.sample(
            ModelInput.from_ints(TEXT), 2, SamplingParams(max_tokens=400, temperature=1.0)
        )
        time.sleep(self.random.choice((0.0, 0.02, 0.1)))
        with self.timed("cancel"):
            future.cancel()
            with suppress(CancelledError):
                future.result(WAIT_S)

    def _datum(self, tokens: list[int], logprobs: list[float]) -> Datum:
        return Datum(
            model_input=ModelInput.from_ints([1, *tokens[:-1]]),
            loss_fn_inputs={
                "target_tokens": tokens,
                "logprobs": logprobs,
                "advantages": [float(place % 3) - 1.0 for place in range(len(tokens))],
            },
        )


class Rest(Tenant):
    """Lists, archives, copies, settings of checkpoints, text by /v1, bad input, short sessions."""

    def round(self, number: int) -> None:
        with self.session() as service:
            training = service.create_lora_training_client(base_model=MODEL, rank=4, seed=1)
            with self.timed("save"):
                saved = training.save_state("kept").result(WAIT_S).path
            self._lists(number)
            self._archive(saved)
            self._settings(saved)
            self._text(number)
            self._bad_input(training.model_id)
            with self.timed("delete checkpoint"):
                self.expect(200, "DELETE", _checkpoint_route(saved))
        for _ in range(3):
            self._short_session(number)

    def _lists(self, number: int) -> None:
        for path in (
            "training_runs?limit=20",
            "checkpoints?limit=20",
            "sessions?limit=20",
            "billing/usage/checkpoints/current",
            "get_server_capabilities",
        ):
            with self.timed("list"):
                self.expect(200, "GET", f"/api/v1/{path}")
        if number % 10 == 0:
            with self.timed("metrics"):
                self.request("GET", "/metrics")

    def _archive(self, saved: str) -> None:
        with self.timed("archive"):
            url = self.expect(200, "GET", _checkpoint_route(saved) + "/archive").get("url")
            if url is not None:
                status, body = self.request("GET", url.replace(self.server.url, ""))
                if status != 200 or len(body) < 1000:
                    self.journal.fail(f"archive: {status} with {len(body)} bytes")

    def _settings(self, saved: str) -> None:
        route = _checkpoint_route(saved)
        with self.timed("checkpoint settings"):
            self.expect(200, "PUT", f"{route}/ttl", {"ttl_seconds": 3600})
            self.expect(200, "GET", f"/api/v1/training_runs/{saved.split('/')[2]}/checkpoints")
            self.expect(200, "POST", "/api/v1/weights_info", {"tinker_path": saved})
        with self.timed("copy"):
            body = {"source_path": saved, "destination_project_id": "soak"}
            copied = self.expect(200, "POST", "/api/v1/copy_weights", body).get("tinker_path")
        if copied is not None:
            self.expect(200, "DELETE", _checkpoint_route(copied))

    def _text(self, number: int) -> None:
        with self.timed("completion"):
            body = {
                "model": MODEL,
                "prompt": "the quick",
                "max_tokens": 8,
                "seed": number % VARIANTS,
            }
            answer = self.expect(200, "POST", "/v1/completions", body)
        if answer:
            self.journal.compare(("text", number % VARIANTS), answer["choices"][0]["text"])

    def _bad_input(self, model_id: str) -> None:
        """Refusals must not cost anything that stays."""
        step = {"model_id": model_id, "adam_params": {}}
        for status, method, path, body in (
            (400, "POST", "/api/v1/create_session", b"{not json"),
            (404, "GET", f"/api/v1/sessions/{self.random.randrange(1 << 60):x}", None),
            (404, "POST", "/api/v1/retrieve_future", {"request_id": f"{self.random.random()}"}),
            (400, "POST", "/api/v1/optim_step", {**step, "seq_id": "one"}),
            (404, "POST", "/v1/completions", {"model": "none", "prompt": "x"}),
        ):
            with self.timed("refusal"):
                self.expect(status, method, path, body)
        with self.timed("refusal"):
            self.expect(401, "GET", "/api/v1/sessions", x_api_key="tml-not-a-key")

    def _short_session(self, number: int) -> None:
        """Sessions without a model; every fourth is left to the server to end."""
        body = {"tags": ["soak"], "user_metadata": {"n": str(number)}, "sdk_version": "0.36.0"}
        with self.timed("create session"):
            session = self.expect(200, "POST", "/api/v1/create_session", body).get("session_id")
        self.expect(200, "POST", "/api/v1/session_heartbeat", {"session_id": session})
        if self.random.random() < 0.75:
            end = {"reason": {"type": "success"}, "detail": None}
            with self.timed("end session"):
                self.expect(200, "POST", f"/api/v1/sessions/{session}/finish", end)


def _checkpoint_route(path: str) -> str:
    """tinker://RUN/KIND/NAME as a path of the API."""
    run, kind, name = path.removeprefix("tinker://").split("/", 2)
    return f"/api/v1/training_runs/{run}/checkpoints/{kind}/{name}"


def tenants(journal: Journal, pace_s: float) -> list[Tenant]:
    """All three; each begins a round every `pace_s` seconds, or when the last one has ended."""
    kinds: dict[str, type[Tenant]] = {"sft": Sft, "rl": Rl, "rest": Rest}
    return [kind(name, journal, pace_s) for name, kind in kinds.items()]
