"""Save, end the process, restore in a new one, go on: equal to the unbroken run, bit for bit."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.engine.local_kit import data, engine, optim_op, sample_op, spec, train_op, trained
from tinkex.errors import RequestFailedError

ROOT = Path(__file__).parents[3]
STEP = {"weight_decay": 0.1, "grad_clip_norm": 1.0, "learning_rate": 0.02}


async def go_on(target, middle: bool) -> str:
    """Three more steps after the save; every number of them, and the final weights, as text."""
    found = []
    for number in range(3):
        if number or not middle:
            (first,) = await trained(target, train_op("m", [data(9, 40 + number)]))
            found.append(first.output.metrics)
        (second,) = await trained(target, train_op("m", [data(17, 50 + number), data(5, 60)]))
        found.append(second.output.metrics)
        (step,) = await target.optim_step([optim_op("m", **STEP)])
        found.append(step.metrics)
    await target.publish("m", "end")
    sample = await target.sample(sample_op(snapshot="end", temperature=1.0, seed=3))
    found.append([sample.response.sequences[0].tokens, sample.response.sequences[0].logprobs])
    await target.save_adapter("m", "end", optimizer=True)
    files = await target.export_saved("end")
    # repr keeps every bit of a float.
    return repr(found) + repr({name: hash_of(content) for name, content in files.items()})


def hash_of(content: bytes) -> str:
    import hashlib

    return hashlib.sha256(content).hexdigest()


async def resumed(folder: Path, middle: bool) -> str:
    async with engine(folder) as target:
        await target.create_adapter(spec("m", 5, seed=99))  # another seed: nothing of it stays
        await target.load_adapter("m", "half", optimizer=True)
        return await go_on(target, middle)


SCRIPT = """
import asyncio, json, sys
from pathlib import Path
from tests.unit.engine.test_local_resume import resumed
print(json.dumps(asyncio.run(resumed(Path(sys.argv[1]), sys.argv[2] == "True"))))
"""


@pytest.mark.req("B16")
@pytest.mark.parametrize("middle", [False, True], ids=["between steps", "within an accumulation"])
def test_a_run_that_continues_in_a_new_process_equals_the_unbroken_one(tmp_path, middle):
    async def unbroken() -> str:
        async with engine(tmp_path) as target:
            await target.create_adapter(spec("m", 5, seed=4))
            for number in range(2):
                await trained(target, train_op("m", [data(11, number), data(6, 30 + number)]))
                await target.optim_step([optim_op("m", **STEP)])
            if middle:
                await trained(target, train_op("m", [data(9, 40)]))
            await target.save_adapter("m", "half", optimizer=True)
            return await go_on(target, middle)

    expected = asyncio.run(unbroken())
    (tmp_path / "saved" / "end.safetensors").unlink()
    answer = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), str(middle)],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        # The same number of threads, as sums are split by it.
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"},
    )
    assert json.loads(answer.stdout) == expected


def test_weights_alone_or_a_wrong_shape_are_refused_and_the_adapter_stays(tmp_path):
    async def scenario():
        async with engine(tmp_path) as target:
            await target.create_adapter(spec("m", 2))
            await target.create_adapter(spec("wide", 3))
            await target.save_adapter("m", "weights", optimizer=False)
            await target.publish("m", "before")
            for model_id, optimizer, message in (
                ("m", True, "has no optimizer state"),
                ("wide", False, "rank=2, the model rank=3"),
                ("nobody", False, "'nobody' is not loaded"),
            ):
                with pytest.raises(RequestFailedError, match=message) as caught:
                    await target.load_adapter(model_id, "weights", optimizer=optimizer)
                assert caught.value.category == "user"
            await target.publish("m", "after")
            left = await target.sample(sample_op(snapshot="before"))
            right = await target.sample(sample_op(snapshot="after"))
            assert left.response.sequences[0].logprobs == right.response.sequences[0].logprobs

    asyncio.run(scenario())
