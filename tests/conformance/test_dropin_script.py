"""A script written for the official package runs unchanged, its process pool included."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import PATIENCE_S
from tinkex import dropin
from tinkex.testing import API_KEY, FakeServer

SCRIPT = """
import asyncio
import multiprocessing
from concurrent.futures import ProcessPoolExecutor

import tinker
from tinker import types
from tinker.lib.public_interfaces import APIFuture


def sample(client: tinker.SamplingClient, seed: int) -> list[int]:
    params = types.SamplingParams(max_tokens=4, seed=seed)
    answer = client.sample(types.ModelInput.from_ints([1, 2, 3]), 1, params).result()
    return answer.sequences[0].tokens


async def train(client: tinker.TrainingClient) -> float:
    datum = tinker.Datum(
        model_input=tinker.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]},
    )
    future = await client.forward_backward_async([datum], "cross_entropy")
    assert isinstance(future, APIFuture)
    step = await client.optim_step_async(tinker.AdamParams(learning_rate=0.1))
    result = await future
    await step.result_async()
    return result.metrics["loss:sum"]


def main() -> None:
    service = tinker.ServiceClient()
    training = service.create_lora_training_client("tinkex/tiny", rank=4)
    losses = [asyncio.run(train(training)) for _ in range(3)]
    assert losses[2] < losses[0], losses
    sampler = training.save_weights_and_get_sampling_client()
    here = [sample(sampler, seed) for seed in range(2)]
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        there = list(pool.map(sample, [sampler, sampler], range(2)))
    assert here == there, (here, there)
    try:
        service.create_sampling_client(model_path="tinker://nobody/weights/a")
    except tinker.NotFoundError as error:
        print("refused", error.status_code)
    service.close("success").result()


if __name__ == "__main__":
    main()
"""


@pytest.mark.req("B9")
def test_script_trains_samples_and_hands_its_sampler_to_a_pool(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    with FakeServer().serve() as server:
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(dropin.__file__).parents[2]),
            "TINKER_BASE_URL": server.url,
            "TINKER_API_KEY": API_KEY,
        }
        done = subprocess.run(
            [sys.executable, "-m", "tinkex.dropin", str(script)],
            capture_output=True,
            text=True,
            env=environment,
            timeout=PATIENCE_S,
        )
    assert (done.returncode, done.stdout) == (0, "refused 404\n"), done.stderr[-3000:]
