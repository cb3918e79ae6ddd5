"""Whatever dies and whenever: every result, and what models end up as, are those of a calm run."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.server.conftest import Api, datum
from tests.unit.server.mortal import Fate, When, World

if TYPE_CHECKING:
    from tinkex.transport.base import Reply

KINDS = ("train", "train", "forward", "step", "save", "publish")


@dataclass
class Program:
    """What the clients of some models do, and in which order their requests arrive."""

    models: list[list[str]]
    order: list[tuple[int, int]]
    repeated: set[int]


class Stubborn(Api):
    """Sends again what the server could not accept."""

    async def call(self, method: str, path: str, body: Any = None, **options: Any) -> Reply:
        while (reply := await super().call(method, path, body, **options)).status >= 500:
            await self.clock.sleep(1)
        return reply


@dataclass
class Clients:
    """Clients that never give up: they send again what nobody has acknowledged."""

    program: Program
    ids: list[str] = field(default_factory=list)
    accepted: dict[tuple[int, int], Any] = field(default_factory=dict)
    answers: dict[tuple[int, int], bytes] = field(default_factory=dict)
    sampled: dict[str, Any] = field(default_factory=dict)

    async def story(self, api: Api) -> None:
        api = Stubborn(api.server, api.clock, api.key)
        if not self.ids:
            session = await api.session()
            self.ids = [f"{session}:train:{number}" for number in range(len(self.program.models))]
        for number, model in enumerate(self.ids):
            if (number, 0) not in self.accepted:
                await self._create(api, model, number)
        for place, (number, seq) in enumerate(self.program.order):
            if (number, seq) not in self.accepted or place in self.program.repeated:
                future = await self._send(api, number, seq)
                assert self.accepted.setdefault((number, seq), future) == future
        for key, future in self.accepted.items():
            if key not in self.answers:
                self.answers[key] = await _answer(api, future)
        await self._sample(api)

    async def _create(self, api: Api, model: str, number: int) -> None:
        session = model.partition(":")[0]
        body = {"session_id": session, "model_seq_id": number, "base_model": "tinkex/tiny"}
        body["lora_config"] = {"rank": 4}
        self.accepted[number, 0] = await api.post("/create_model", body)

    async def _send(self, api: Api, number: int, seq: int) -> Any:
        model, kind = self.ids[number], self.program.models[number][seq - 1]
        tokens = [number + 1, seq % 7 + 1, 3]
        body = {"model_id": model, "seq_id": seq}
        match kind:
            case "train" | "forward":
                forward = kind == "forward"
                return await api.train(model, seq, datum(tokens), forward_only=forward)
            case "step":
                return await api.step(model, seq)
            case "save":
                return await api.post("/save_weights", {**body, "path": f"s{seq}"})
            case _:
                sampler = 100 * number + seq
                body["sampling_session_seq_id"] = sampler
                return await api.post("/save_weights_for_sampler", body)

    async def _sample(self, api: Api) -> None:
        """What every published sampler gives now, at the end of everything."""
        for (number, seq), _ in self.accepted.items():
            if seq and self.program.models[number][seq - 1] == "publish":
                sampler = f"{self.ids[number].partition(':')[0]}:sample:{100 * number + seq}"
                if sampler not in self.sampled:
                    again = len(api.server.requests)  # a number that no earlier life used
                    params = {"max_tokens": 3, "seed": 5}
                    future = await api.sample(
                        sampler, again, prompt_logprobs=True, sampling_params=params
                    )
                    found = await api.sampled(future)
                    tokens = [s.tokens for s in found.sequences]
                    self.sampled[sampler] = (found.prompt_logprobs, tokens)


async def _answer(api: Api, future: Any) -> bytes:
    while True:
        reply = await api.poll(future)
        assert reply.status == 200, reply
        if b"try_again" not in reply.body:
            return reply.body


def outcome(program: Program, fate: Fate, snapshot_ops: int) -> tuple[Any, Any, Any]:
    """The answers, the samples and the final states of a program under some fate."""

    async def run() -> tuple[Any, Any, Any]:
        world = World(fate, snapshot_ops=snapshot_ops, max_engine_deaths=1000)
        clients = Clients(program)
        await world.live(clients.story)
        fate.engine_dies, fate.server_dies, fate.storage_fails = {}, {}, set()
        async with world.server() as api:
            for model, kinds in zip(clients.ids, program.models, strict=True):
                body = {"model_id": model, "seq_id": len(kinds) + 1, "path": "end"}
                await api.result(await api.post("/save_weights", body))
        states = {
            location.partition("@")[0]: _bytes(state)
            for location, (state, _) in world.disk.items()
            if "/weights/" in location
        }
        # A session may be opened twice: one that was opened and not answered is nobody's.
        name = clients.ids[0].partition(":")[0]
        plain = {key: body.replace(name.encode(), b"s") for key, body in clients.answers.items()}
        samples = {key.replace(name, "s"): found for key, found in clients.sampled.items()}
        return plain, samples, {key.replace(name, "s"): found for key, found in states.items()}

    return asyncio.run(run())


def _bytes(state: Any) -> list[bytes]:
    fields = ("bias", "first", "second", "step", "gradient")
    return [np.asarray(getattr(state, name), float).tobytes() for name in fields]


@st.composite
def programs(draw: st.DrawFn) -> Program:
    models = draw(
        st.lists(st.lists(st.sampled_from(KINDS), min_size=1, max_size=9), min_size=1, max_size=3)
    )
    turns = [
        (number, seq) for number, kinds in enumerate(models) for seq in range(1, len(kinds) + 1)
    ]
    order = draw(st.permutations(turns))
    repeated = draw(st.sets(st.integers(0, len(turns) - 1), max_size=3))
    return Program(models, list(order), repeated)


when: st.SearchStrategy[When] = st.sampled_from(["before", "after"])
deaths = st.dictionaries(st.integers(1, 150), when, max_size=5)


@settings(
    max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True
)
@given(
    program=programs(),
    engine_dies=deaths,
    server_dies=deaths,
    storage_fails=st.sets(st.integers(1, 150), max_size=3),
    snapshot_ops=st.sampled_from([1, 3, 1000]),
)
def test_deaths_and_full_disks_change_no_result_and_no_bit(
    program: Program,
    engine_dies: dict[int, When],
    server_dies: dict[int, When],
    storage_fails: set[int],
    snapshot_ops: int,
) -> None:
    calm = outcome(program, Fate(), snapshot_ops=1000)
    fate = Fate(engine_dies=engine_dies, server_dies=server_dies, storage_fails=storage_fails)
    assert outcome(program, fate, snapshot_ops) == calm
