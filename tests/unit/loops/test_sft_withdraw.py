"""A step that the server has not begun is taken back whole; one that it has begun is finished."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import anyio.to_thread
import pytest

from tests.patience import PATIENCE_S
from tinkex.clients.service import ServiceClient
from tinkex.errors import RequestFailedError
from tinkex.loops.sft import SubmittedStep
from tinkex.testing import API_KEY, FakeServer, faults
from tinkex.testing.fake_engine import FakeEngine
from tinkex.types import AdamParams, Datum, ModelInput

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tinkex.clients.training import TrainingClient

ADAM = AdamParams(learning_rate=0.1)


class Gated(FakeEngine):
    """Says when a pass begins, and holds it until it may end."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Semaphore(0)

    async def train(self, batch: Sequence[Any]) -> Sequence[Any]:
        self.begun.release()
        await anyio.to_thread.run_sync(self.may_end.acquire)
        return await super().train(batch)


class World:
    """A server with such an engine, and a model on it."""

    def __init__(self, server: FakeServer, engine: Gated, training: TrainingClient) -> None:
        self.server, self.engine, self.training = server, engine, training
        # An operation that the client asks about has been accepted, and the client knows.
        self.accepted = threading.Semaphore(0)
        known: set[str] = set()

        def note(seen: Any) -> bool:
            if seen.json["request_id"] not in known:
                known.add(seen.json["request_id"])
                self.accepted.release()
            return False

        server.faults.on("retrieve_future", faults.drop(), when=note, times=None)

    def step(self, token: int) -> SubmittedStep:
        data = [Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, token]})]
        return SubmittedStep(self.training, data, "cross_entropy", ADAM)

    def loss(self) -> float:
        """What the weights make of some text."""
        self.engine.may_end.release()
        data = [Datum(ModelInput.from_ints([1, 2]), {"target_tokens": [2, 3]})]
        return self.training.forward(data, "cross_entropy").result(PATIENCE_S).metrics["loss:sum"]


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    engine = Gated()
    with FakeServer(engine=engine).serve() as server:
        monkeypatch.setenv("TINKER_BASE_URL", server.url)
        monkeypatch.setenv("TINKER_API_KEY", API_KEY)
        with ServiceClient() as service:
            training = service.create_lora_training_client("tinkex/tiny", rank=4)
            yield World(server, engine, training)
            engine.may_end.release(9)  # a test that failed leaves nothing that waits


def begin(world: World) -> tuple[SubmittedStep, SubmittedStep]:
    """A step that is being computed, and one behind it."""
    first, second = world.step(3), world.step(4)
    assert world.engine.begun.acquire(timeout=PATIENCE_S)
    for _ in (first.passed, first.stepped, second.passed, second.stepped):
        assert world.accepted.acquire(timeout=PATIENCE_S)
    return first, second


def test_a_step_that_has_not_begun_is_withdrawn_and_leaves_no_trace(world: World):
    first, second = begin(world)
    assert second.withdraw()
    world.engine.may_end.release()
    first.stepped.result(PATIENCE_S)
    with pytest.raises(RequestFailedError):
        second.passed.result(PATIENCE_S)
    with_one = world.loss()
    world.engine.may_end.release()
    world.step(4).stepped.result(PATIENCE_S)
    assert world.loss() != with_one
    steps = [call for call in world.engine.calls if call.name == "optim_step"]
    assert len(steps) == 2


def test_a_step_that_has_begun_is_finished_by_another_optimizer_step(world: World):
    first, second = begin(world)
    world.engine.may_end.release()
    first.stepped.result(PATIENCE_S)
    assert world.engine.begun.acquire(timeout=PATIENCE_S)
    assert not second.withdraw()
    world.engine.may_end.release()
    second.passed.result(PATIENCE_S)
    second.stepped.result(PATIENCE_S)
    steps = [call for call in world.engine.calls if call.name == "optim_step"]
    assert len(steps) == 2


def test_a_server_that_cannot_withdraw_is_not_asked(world: World):
    first, second = begin(world)
    api = world.training.holder.api
    api.dynamic_config = api.dynamic_config.model_copy(update={"sample_cancel_enabled": False})
    assert not second.withdraw()
    assert not world.server.seen("cancel_future")
    for _ in range(2):
        world.engine.may_end.release()
    first.stepped.result(PATIENCE_S)
    second.stepped.result(PATIENCE_S)


def test_a_server_that_does_not_say_is_taken_to_have_kept_the_step(world: World):
    first, second = begin(world)
    world.server.faults.on("cancel_future", faults.reply(200, b""), times=None)
    assert not second.withdraw()
    for _ in range(2):
        world.engine.may_end.release()
    first.stepped.result(PATIENCE_S)
    second.stepped.result(PATIENCE_S)
