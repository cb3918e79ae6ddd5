"""What a sample is drawn from: frozen, named, kept while used, gone afterwards."""

from __future__ import annotations

import asyncio

import pytest

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
from tinkex.errors import RequestFailedError


async def _learn(target, model_id="m", steps=1):
    for number in range(steps):
        await trained(target, train_op(model_id, [data(20, number)]))
        (found,) = await target.optim_step([optim_op(model_id, learning_rate=0.05)])
        assert not isinstance(found, Exception)


def _numbers(result):
    sequence = result.response.sequences[0]
    return sequence.tokens, sequence.logprobs, result.response.prompt_logprobs


def _held(target):
    (served,) = target._served.values()
    return len(served.versions)


def test_each_sample_names_its_version(tmp_path):
    async def scenario():
        async with engine(tmp_path) as target:
            await target.create_adapter(spec("m"))
            await target.publish("m", "first")
            await target.save_adapter("m", "run/saved", optimizer=False)
            base = await target.sample(sample_op())
            frozen = await target.sample(sample_op(snapshot="first"))
            loaded = await target.sample(sample_op(location="run/saved"))
            return [result.version for result in (base, frozen, loaded)]

    assert asyncio.run(scenario()) == ["base", "first", "run/saved"]


def test_a_snapshot_is_apart_from_what_is_trained(tmp_path):
    async def scenario():
        async with engine(tmp_path) as target:
            await target.create_adapter(spec("m"))
            await _learn(target)
            await target.publish("m", "old")
            before = _numbers(await target.sample(sample_op(snapshot="old")))
            await _learn(target, steps=2)
            await target.publish("m", "new")
            after = _numbers(await target.sample(sample_op(snapshot="new")))
            again = _numbers(await target.sample(sample_op(snapshot="old")))
            await target.drop_adapter("m")
            orphan = _numbers(await target.sample(sample_op(snapshot="old")))
            return before, after, again, orphan

    before, after, again, orphan = asyncio.run(scenario())
    assert before == again == orphan
    assert after != before


def test_a_name_that_is_published_again_means_the_new_weights_and_not_the_cached_ones(tmp_path):
    async def scenario():
        async with engine(tmp_path) as target:
            await target.create_adapter(spec("m"))
            await target.publish("m", "live")
            first = _numbers(await target.sample(sample_op(snapshot="live")))
            await _learn(target, steps=2)
            await target.publish("m", "live")
            second = _numbers(await target.sample(sample_op(snapshot="live")))
            await target.publish("m", "other")
            third = _numbers(await target.sample(sample_op(snapshot="other")))
            return first, second, third, _held(target)

    first, second, third, held = asyncio.run(scenario())
    assert first != second
    assert second == third
    assert held == 2  # the first one is gone


def test_a_location_that_is_written_again_means_what_was_written_last(tmp_path):
    async def scenario():
        async with engine(tmp_path) as target:
            await target.create_adapter(spec("m"))
            await target.save_adapter("m", "a", optimizer=False)
            first = _numbers(await target.sample(sample_op(location="a")))
            await _learn(target, steps=2)
            await target.save_adapter("m", "a", optimizer=True)
            second = _numbers(await target.sample(sample_op(location="a")))
            await target.save_adapter("m", "b", optimizer=False)
            await target.create_adapter(spec("n", seed=9))
            await target.save_adapter("n", "c", optimizer=False)
            await target.copy_saved("c", "a")
            third = _numbers(await target.sample(sample_op(location="a")))
            same = _numbers(await target.sample(sample_op(location="b")))
            return first, second, third, same

    first, second, third, same = asyncio.run(scenario())
    assert first == third  # both are adapters that have learned nothing
    assert second == same != first


def test_dropped_versions_live_while_a_sample_uses_them_and_are_then_freed(tmp_path):
    async def scenario():
        async with engine(tmp_path) as target:
            await target.create_adapter(spec("m"))
            await _learn(target)
            await target.publish("m", "snap")
            await target.save_adapter("m", "saved", optimizer=False)
            tokens, logprobs, _ = _numbers(
                await target.sample(sample_op(snapshot="snap", max_tokens=40))
            )
            heard = [asyncio.Event(), asyncio.Event()]
            running = [
                asyncio.ensure_future(target.sample(op, lambda *_, own=own: own.set()))
                for op, own in zip(
                    (
                        sample_op(snapshot="snap", max_tokens=40),
                        sample_op(location="saved", max_tokens=40),
                    ),
                    heard,
                    strict=True,
                )
            ]
            for own in heard:
                await own.wait()
            await target.drop_snapshot("snap")
            await target.delete_saved("saved")
            for sample in running:
                found = _numbers(await sample)
                assert found[0] == tokens
                # They share passes, whose shapes decide the last bits.
                assert found[1] == pytest.approx(logprobs, abs=1e-5)
            for gone in ({"snapshot": "snap"}, {"location": "saved"}):
                with pytest.raises(RequestFailedError) as caught:
                    await target.sample(sample_op(**gone))
                assert caught.value.category == "user"
            await target.drop_snapshot("snap")  # unknown by now, and that is fine
            return _held(target)

    assert asyncio.run(scenario()) == 0


def test_a_cancelled_sample_lets_go_of_its_version(tmp_path):
    async def scenario():
        async with engine(tmp_path) as target:
            await target.create_adapter(spec("m"))
            await target.publish("m", "snap")
            heard = asyncio.Event()
            running = asyncio.ensure_future(
                target.sample(sample_op(snapshot="snap", max_tokens=4000), lambda *_: heard.set())
            )
            await heard.wait()
            await target.drop_snapshot("snap")
            assert _held(target) == 1
            running.cancel()
            with pytest.raises(asyncio.CancelledError):
                await running
            await target.publish("m", "next")  # by then the cancellation has been seen to
            return _held(target), target._thread.sampling

    assert asyncio.run(scenario()) == (1, False)


def test_a_saved_adapter_that_can_never_fit_is_refused_and_the_engine_continues(tmp_path):
    async def scenario():
        async with engine(tmp_path) as target:
            await target.create_adapter(spec("m", 8))
            await target.save_adapter("m", "large", optimizer=False)
        # 4,488 parameters per rank: room to train rank 1, or to sample from rank 4.
        async with engine(tmp_path, adapter_bytes=4 * 4 * 4488) as target:
            with pytest.raises(RequestFailedError, match=": a rank of 1 fits"):
                await target.create_adapter(spec("m", 8))
            large = f"'large' takes {4 * 4488 * 8} bytes; {4 * 4 * 4488} are set aside"
            with pytest.raises(RequestFailedError, match=large) as caught:
                await target.sample(sample_op(location="large"))
            await target.create_adapter(spec("m", 1))
            await target.save_adapter("m", "small", optimizer=False)
            return caught.value.category, await target.sample(sample_op(location="small"))

    category, sample = asyncio.run(scenario())
    assert category == "user"
    assert sample.version == "small"


def test_many_adapters_and_snapshots_on_little_room_give_the_same_numbers(tmp_path):
    async def scenario(folder, **settings):
        async with engine(folder, **settings) as target:
            names = [f"m{number}" for number in range(20)]
            for number, name in enumerate(names):
                await target.create_adapter(spec(name, 2 + number % 3, seed=number))
            outputs = []
            for turn in range(2):
                batch = [
                    train_op(name, [data(8, 20 * turn + number)])
                    for number, name in enumerate(names)
                ]
                outputs += [result.output for result in await trained(target, *batch)]
                steps = await target.optim_step([optim_op(name) for name in names])
                outputs += [found.metrics for found in steps]
                for name in names:
                    await target.publish(name, f"{name}-{turn}")
            samples = await asyncio.gather(
                *(
                    target.sample(sample_op(snapshot=f"{name}-{turn}", max_tokens=3))
                    for name in names
                    for turn in range(2)
                )
            )
            outputs += [sample.version for sample in samples]
            parked = sorted(path.name for path in folder.rglob(".parked-*/*.safetensors"))
            # Sampled one after another: the passes of samples that race are not the same ones.
            for name in names[::5]:
                outputs.append(_numbers(await target.sample(sample_op(snapshot=f"{name}-1"))))
        assert list(folder.rglob(".parked-*")) == []
        return outputs, parked

    free = asyncio.run(scenario(tmp_path / "free"))
    # Three adapters of 4,488 parameters per rank, with weights, two moments and a gradient.
    tight = asyncio.run(scenario(tmp_path / "tight", adapter_bytes=3 * 4 * 4 * 4488 * 4))
    assert free[1] == []
    assert len(tight[1]) > 20
    assert tight[0] == free[0]


# Room to train one adapter of rank 2, or for the weights of four.
ROOM = 4 * 4 * 4488 * 2


async def _published(target, count):
    await target.create_adapter(spec("m"))
    for number in range(count):
        await _learn(target)
        await target.publish("m", f"s{number}")
    await target.drop_adapter("m")
    return [f"s{number}" for number in range(count)]


def _parked(folder):
    return list(folder.rglob(".parked-*/*.safetensors"))


def test_samples_of_many_snapshots_at_once_stay_within_the_budget(tmp_path):
    async def scenario(folder, **settings):
        model, decoder = noting_model()
        async with engine(folder, model, **settings) as target:
            names = await _published(target, 10)
            taken = decoder.watch(lambda: target._parking.on_device_bytes)
            samples = await asyncio.gather(
                *(target.sample(sample_op(snapshot=name)) for name in names * 2)
            )
        return [_numbers(sample)[0] for sample in samples], max(taken)

    free, more = asyncio.run(scenario(tmp_path / "free"))
    tight, most = asyncio.run(scenario(tmp_path / "tight", adapter_bytes=ROOM))
    assert more > ROOM >= most
    assert tight == free


def test_dropping_a_parked_snapshot_removes_its_file_at_once(tmp_path):
    async def scenario():
        async with engine(tmp_path, adapter_bytes=ROOM) as target:
            names = await _published(target, 7)
            before, counts = len(_parked(tmp_path)), []
            for name in names:
                await target.drop_snapshot(name)
                counts.append((_held(target), len(_parked(tmp_path))))
            return before, counts, target._parking.on_device_bytes

    before, counts, left = asyncio.run(scenario())
    assert before >= 3
    assert [held for held, _ in counts] == [6, 5, 4, 3, 2, 1, 0]
    assert counts[0][1] == before - 1  # the oldest was in a file
    assert counts[-1][1] == left == 0


def test_saved_adapters_are_read_again_instead_of_parked(tmp_path):
    async def scenario():
        async with engine(tmp_path, adapter_bytes=ROOM) as target:
            await target.create_adapter(spec("m"))
            places = [f"run/{number}" for number in range(7)]
            for place in places:
                await _learn(target)
                await target.save_adapter("m", place, optimizer=False)
            await target.drop_adapter("m")
            found = []
            for _ in range(2):
                for place in places:
                    found.append(_numbers(await target.sample(sample_op(location=place))))
                    assert target._parking.on_device_bytes <= ROOM
            return found, _held(target), len(_parked(tmp_path))

    found, held, parked = asyncio.run(scenario())
    assert found[:7] == found[7:]
    assert len({tuple(scores) for _, _, scores in found}) == 7
    assert (held, parked) == (4, 0)


def test_a_saved_adapter_that_a_sample_uses_is_kept_until_it_ends(tmp_path):
    async def scenario():
        async with engine(tmp_path, adapter_bytes=ROOM) as target:
            await target.create_adapter(spec("m"))
            await target.save_adapter("m", "used", optimizer=False)
            expected = _numbers(await target.sample(sample_op(location="used", max_tokens=60)))
            heard = asyncio.Event()
            running = asyncio.ensure_future(
                target.sample(sample_op(location="used", max_tokens=60), lambda *_: heard.set())
            )
            await heard.wait()
            for number in range(6):  # more than fit beside it
                await target.publish("m", f"s{number}")
            assert _numbers(await running) == expected
            for number in range(6):
                await target.drop_snapshot(f"s{number}")
            return _numbers(await target.sample(sample_op(location="used", max_tokens=60)))

    tokens, _, _ = asyncio.run(scenario())
    assert len(tokens) == 60
