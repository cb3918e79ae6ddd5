"""The order of work on the engine's thread, counted in passes."""

from __future__ import annotations

import asyncio
import threading
from itertools import groupby

import pytest
from anyio.lowlevel import checkpoint

from tests.patience import PATIENCE_S
from tests.unit.engine.local_kit import (
    data,
    engine,
    noting_model,
    optim_op,
    sample_op,
    spec,
    train_op,
    trained,
)
from tinkex.engine.local.thread import COMMANDS, SAMPLER_STEPS, EngineTask, EngineThread, TaskQueue
from tinkex.errors import ClosedError, RequestFailedError


class HandClock:
    """A clock that advances only when an action takes time."""

    def __init__(self):
        self.time_s = 0.0

    def now(self):
        return self.time_s

    def wall(self):
        return self.time_s

    async def sleep(self, seconds):
        raise NotImplementedError


class Stage:
    """An engine thread with made-up work; `log` has one letter for each pass."""

    def __init__(self, sampler_steps=0, sampler_s=1.0):
        self.clock = HandClock()
        self.log: list[str] = []
        self.left = sampler_steps
        self.sampler_s = sampler_s
        self.ended = threading.Event()
        self.outcomes: list[object] = []
        self.thread = EngineThread([self], lambda: self.log.append("end"), self.clock)
        self._expected = 0

    @property
    def idle(self):
        return not self.left

    def step(self):
        self.log.append("S")
        self.left -= 1
        self.clock.time_s += self.sampler_s
        self._look()

    def task(self, letter, steps=1, seconds=0.0, keys=(), training=False, then=None, **options):
        def run():
            for number in range(steps):
                self.log.append(letter)
                self.clock.time_s += seconds
                if then is not None:
                    then(number)
                if number < steps - 1:
                    yield
            return letter

        self.post(run(), keys=keys, training=training, **options)

    def post(self, steps, keys=(), training=False, **options):
        self._expected += 1
        self.thread.post(
            EngineTask(
                steps=steps,
                settle=self._settled,
                keys=frozenset(keys),
                training=training,
                **options,
            )
        )

    def run(self):
        self.thread.start()
        assert self.ended.wait(PATIENCE_S)
        self.thread.close()
        return "".join(self.log).removesuffix("end")

    def _settled(self, outcome):
        self.outcomes.append(outcome)
        self._look()

    def _look(self):
        if self.left <= 0 and len(self.outcomes) == self._expected:
            self.ended.set()


def _longest(log, letter):
    return max((len(list(run)) for own, run in groupby(log) if own == letter), default=0)


def test_a_stream_waits_for_one_training_pass_at_most_and_both_get_equal_time():
    stage = Stage(sampler_steps=20)
    stage.task("T", steps=5, seconds=3, training=True)
    assert stage.run() == "TSSS" * 5 + "S" * 5


def test_a_flood_of_samples_lets_every_training_pass_through():
    stage = Stage(sampler_steps=10 * SAMPLER_STEPS, sampler_s=0.0)
    stage.task("T", steps=8, seconds=1, training=True)
    log = stage.run()
    assert log.startswith("T" + "S" * SAMPLER_STEPS + "T")
    assert _longest(log.rsplit("T", 1)[0], "S") == SAMPLER_STEPS
    assert _longest(log, "T") == 1


def test_slow_sampling_still_takes_turns():
    stage = Stage(sampler_steps=6, sampler_s=100)
    stage.task("T", steps=6, seconds=1, training=True)
    assert stage.run() == "TS" * 6


def test_without_samples_training_runs_through():
    stage = Stage()
    stage.task("T", steps=6, seconds=1, training=True)
    assert stage.run() == "TTTTTT"


def test_commands_for_other_models_run_between_passes_and_for_the_same_model_after():
    stage = Stage()

    def during(number):
        if number == 1:
            stage.task("a", keys={"model:a"})
            stage.task("b", keys={"model:b"})
            stage.task("A", steps=2, training=True, keys={"model:a"})
            stage.task("x", keys={"model:a"})

    stage.task("T", steps=4, training=True, keys={"model:a", "model:c"}, then=during)
    assert stage.run() == "TTbTTaAAx"


def test_many_commands_do_not_starve_a_stream():
    stage = Stage(sampler_steps=8)
    for _ in range(5 * COMMANDS):
        stage.task("c")
    log = stage.run()
    assert _longest(log, "c") == COMMANDS
    assert log.startswith("c" * COMMANDS + "S")


def test_a_long_command_gives_way_after_each_of_its_steps():
    stage = Stage(sampler_steps=4)
    stage.task("o", steps=3 * COMMANDS)
    log = stage.run()
    assert _longest(log, "o") == COMMANDS
    assert log.count("o") == 3 * COMMANDS


def test_files_do_not_hold_up_passes_but_what_shares_their_key_waits():
    stage = Stage()
    written = threading.Event()

    def save():
        stage.log.append("s")
        result = yield lambda: (written.wait(PATIENCE_S), threading.current_thread().name)
        stage.log.append("w")
        return result

    def during(number):
        if number == 4:
            written.set()

    stage.post(save(), keys={"model:a"})
    stage.task("x", keys={"model:a"})
    stage.task("T", steps=5, training=True, keys={"model:b"}, then=during)
    log = stage.run()
    assert log.startswith("sTTTT")
    assert log.index("w") < log.index("x")
    waited, name = next(o for o in stage.outcomes if isinstance(o, tuple))
    assert waited
    assert name.startswith("tinkex-files")


def test_a_file_that_fails_is_raised_where_the_task_continues():
    stage = Stage()

    def load():
        try:
            yield lambda: 1 // 0
        except ZeroDivisionError:
            stage.log.append("z")
        yield lambda: {}["nothing"]

    stage.post(load())
    assert stage.run() == "z"
    assert isinstance(stage.outcomes[0], RequestFailedError)
    assert isinstance(stage.outcomes[0].__cause__, KeyError)


def test_cancelled_work_ends_before_its_next_pass():
    stage = Stage()
    wanted = [True]
    stage.task(
        "T",
        steps=9,
        training=True,
        then=lambda number: wanted.__setitem__(0, number < 1),
        wanted=lambda: wanted[0],
        keys={"model:a"},
    )
    stage.task("a", keys={"model:a"})
    assert stage.run() == "TTa"


def test_a_thread_that_ends_by_an_internal_error_logs_it_and_takes_nothing_more(caplog):
    stage = Stage(sampler_steps=3)
    stage.step = lambda: 1 // 0
    stage.thread.start()
    stage.thread._thread.join(PATIENCE_S)
    assert stage.log == ["end"]
    assert "internal error" in caplog.text
    with pytest.raises(ClosedError):
        stage.task("c")
    stage.thread.close()


def test_only_the_first_of_those_that_share_a_key_may_run():
    queue = TaskQueue()
    tasks = [
        EngineTask(steps=iter(()), settle=print, keys=frozenset(keys), training=training)
        for keys, training in (("a", True), ("ab", False), ("b", False), ("", False), ("c", True))
    ]
    for task in tasks:
        queue.add(task)
    assert queue.next(training=True) is tasks[0]
    assert queue.next(training=False) is tasks[3]
    tasks[0].on_file_thread = True
    assert queue.next(training=True) is tasks[4]
    queue.remove(tasks[0])
    assert queue.next(training=False) is tasks[1]


def test_a_long_batch_and_a_stream_take_turns_in_the_engine(tmp_path):
    async def scenario():
        model, decoder = noting_model()
        async with engine(tmp_path, model, max_pass_tokens=32) as target:
            await target.create_adapter(spec("m"))
            heard = asyncio.Event()
            stream = asyncio.ensure_future(
                target.sample(sample_op(max_tokens=4000), lambda *_: heard.set())
            )
            await heard.wait()
            await trained(target, train_op("m", [data(32, n) for n in range(12)]))
            notes = list(decoder.notes)
            assert not stream.done()
            stream.cancel()
            return notes

    notes = asyncio.run(scenario())
    first, last = notes.index("train"), len(notes) - notes[::-1].index("train")
    assert notes.count("train") == 12
    assert _longest(notes[first:last], "train") == 1
    assert _longest(notes[first:last], "sample") <= SAMPLER_STEPS


def test_passes_are_smaller_while_samples_run_and_the_numbers_are_the_same(tmp_path):
    async def scenario(folder, *, stream):
        model, decoder = noting_model()
        async with engine(folder, model, max_pass_tokens=64, shared_pass_tokens=16) as target:
            for name in "abcd":
                await target.create_adapter(spec(name))
            running = None
            if stream:
                heard = asyncio.Event()
                running = asyncio.ensure_future(
                    target.sample(sample_op(max_tokens=4000), lambda *_: heard.set())
                )
                await heard.wait()
            found = await trained(target, *(train_op(name, [data(16, 5)]) for name in "abcd"))
            if running is not None:
                assert not running.done()
                running.cancel()
            return decoder.tokens, [result.output for result in found]

    quiet = asyncio.run(scenario(tmp_path / "quiet", stream=False))
    busy = asyncio.run(scenario(tmp_path / "busy", stream=True))
    assert quiet[0] == [64]
    assert busy[0] == [16] * 4
    assert busy[1] == quiet[1]


def test_other_models_are_served_in_the_middle_of_a_batch(tmp_path):
    async def scenario():
        model, decoder = noting_model()
        async with engine(tmp_path, model, max_pass_tokens=16) as target:
            await target.create_adapter(spec("m"))
            await target.create_adapter(spec("other"))
            came, go = decoder.gate(2)
            last_came, last_go = decoder.gate(4)
            batch = asyncio.ensure_future(
                trained(target, train_op("m", [data(16, n) for n in range(4)]))
            )
            await asyncio.to_thread(came.wait, PATIENCE_S)
            others = [
                asyncio.ensure_future(call)
                for call in (
                    target.create_adapter(spec("fresh")),
                    target.publish("other", "snap"),
                    target.optim_step([optim_op("other")]),
                    target.drop_adapter("nobody"),
                )
            ]
            same = asyncio.ensure_future(target.publish("m", "after"))
            await checkpoint()
            go.set()
            # All of them come back although the last pass has not begun to run.
            await asyncio.gather(*others)
            await asyncio.to_thread(last_came.wait, PATIENCE_S)
            assert not batch.done()
            assert not same.done()
            last_go.set()
            await batch
            await same

    asyncio.run(scenario())


def test_stats_are_available_in_the_middle_of_a_pass(tmp_path):
    async def scenario():
        model, decoder = noting_model()
        async with engine(tmp_path, model, adapter_bytes=1 << 20) as target:
            for name in ("m", "n", "o"):
                await target.create_adapter(spec(name, 12))
            came, go = decoder.gate(1)
            batch = asyncio.ensure_future(trained(target, train_op("m", [data(16)])))
            await asyncio.to_thread(came.wait, PATIENCE_S)
            during = await target.stats()
            assert not batch.done()
            go.set()
            await batch
            return during, await target.stats()

    during, after = asyncio.run(scenario())
    # No two of them fit.
    assert (during["adapters_resident"], during["adapters_parked"]) == (1, 2)
    assert (during["tokens_trained_total"], after["tokens_trained_total"]) == (0, 16)


def test_a_cancelled_batch_ends_after_its_pass(tmp_path):
    async def scenario():
        model, decoder = noting_model()
        async with engine(tmp_path, model, max_pass_tokens=16) as target:
            await target.create_adapter(spec("m"))
            came, go = decoder.gate(2)
            batch = asyncio.ensure_future(
                target.train([train_op("m", [data(16, n) for n in range(9)])])
            )
            await asyncio.to_thread(came.wait, PATIENCE_S)
            batch.cancel()
            await checkpoint()
            go.set()
            await target.publish("m", "snap")  # waits for its turn behind the batch
            assert decoder.notes == ["train", "train"]
            (step,) = await target.optim_step([optim_op("m")])
            assert step.metrics["grad_norm"] == 0.0

    asyncio.run(scenario())


def test_a_sample_cancelled_before_it_was_submitted_takes_no_place(tmp_path):
    async def scenario():
        model, decoder = noting_model()
        async with engine(tmp_path, model, max_pass_tokens=16) as target:
            await target.create_adapter(spec("m"))
            came, go = decoder.gate(1)
            batch = asyncio.ensure_future(trained(target, train_op("m", [data(16)])))
            await asyncio.to_thread(came.wait, PATIENCE_S)
            lost = asyncio.ensure_future(target.sample(sample_op(max_tokens=4000)))
            await checkpoint()
            lost.cancel()
            await checkpoint()
            go.set()
            await batch
            await target.publish("m", "snap")
            assert not target._thread.sampling
            assert "sample" not in decoder.notes

    asyncio.run(scenario())
