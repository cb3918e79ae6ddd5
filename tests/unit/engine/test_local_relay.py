"""Tokens reach their callers in order, before the answer, with one wake-up per sampler step."""

from __future__ import annotations

import asyncio
import logging

from tests.unit.engine.local_kit import engine, sample_op
from tinkex.engine.local.relay import TokenRelay, call_on_loop


def test_a_loop_is_woken_once_for_all_tokens_of_a_step(monkeypatch):
    async def scenario():
        loop = asyncio.get_running_loop()
        hops = []
        wake = loop.call_soon_threadsafe
        monkeypatch.setattr(
            loop, "call_soon_threadsafe", lambda action: (hops.append(1), wake(action))
        )
        heard = []
        relay = TokenRelay()
        first = relay.to(loop, lambda *token: heard.append(("first", *token)))
        second = relay.to(loop, lambda *token: heard.append(("second", *token)))
        for number in range(3):
            first(0, number, -1.0, None)
            second(1, number, -2.0, ([number], [-2.0]))
        relay.flush()
        relay.flush()
        call_on_loop(loop, lambda: heard.append("answer"))
        assert heard == []
        ready = asyncio.Event()
        call_on_loop(loop, ready.set)
        await ready.wait()
        assert len(hops) == 3
        return heard

    heard = asyncio.run(scenario())
    assert heard[:2] == [("first", 0, 0, -1.0, None), ("second", 1, 0, -2.0, ([0], [-2.0]))]
    assert [token[2] for token in heard[:-1]] == [0, 0, 1, 1, 2, 2]
    assert heard[-1] == "answer"


def test_a_callback_that_fails_costs_no_other_caller_a_token(caplog):
    async def scenario():
        loop = asyncio.get_running_loop()
        heard = []
        relay = TokenRelay()
        broken = relay.to(loop, lambda *_: 1 // 0)
        sound = relay.to(loop, lambda _, token, *__: heard.append(token))
        for number in range(2):
            broken(0, number, -1.0, None)
            sound(0, number, -1.0, None)
        relay.flush()
        ready = asyncio.Event()
        call_on_loop(loop, ready.set)
        await ready.wait()
        return heard

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(scenario()) == [0, 1]
    assert caplog.text.count("ZeroDivisionError") == 2


def test_tokens_for_a_loop_that_has_closed_go_nowhere():
    loop = asyncio.new_event_loop()
    relay = TokenRelay()
    relay.to(loop, lambda *_: None)(0, 1, -1.0, None)
    loop.close()
    relay.flush()


def test_every_token_of_a_sample_has_come_when_its_answer_does(tmp_path):
    async def scenario():
        async with engine(tmp_path) as target:
            heard: dict[int, list[int]] = {}

            async def one(seed: int) -> list[int]:
                def on_token(_: int, token: int, *__: object) -> None:
                    heard.setdefault(seed, []).append(token)

                op = sample_op(max_tokens=5 + seed, temperature=1.0, seed=seed)
                result = await target.sample(op, on_token)
                assert heard[seed] == result.response.sequences[0].tokens
                return heard[seed]

            found = await asyncio.gather(*(one(seed) for seed in range(6)))
            assert [len(tokens) for tokens in found] == [5, 6, 7, 8, 9, 10]

    asyncio.run(scenario())
