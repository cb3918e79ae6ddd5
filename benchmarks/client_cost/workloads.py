"""What a measured process runs; started as a file by either SDK's interpreter.

`python workloads.py tinker sample_async http://127.0.0.1:1234 '{"calls": 4000, ...}'` runs one
workload through that SDK's public API and prints one JSON line. Only the standard library is
imported here, and the SDK by name, so that both SDKs run the very same lines.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import random
import resource
import sys
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

MODEL = "Qwen/Qwen3-8B"
VOCABULARY = 150_000
DISTINCT_PROMPTS = 64
# numpy's linear algebra threads spin for a while after loading; that is not the call's cost.
NUMPY_SETTLES_S = 0.5


def cpu_s() -> float:
    """User and system time of this process, all threads together."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def peak_mib() -> float:
    """The most resident memory this program has had."""
    # ru_maxrss starts at what the parent had when it forked; VmHWM starts anew at exec.
    try:
        with open("/proc/self/status") as status:
            line = next(line for line in status if line.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024
    except (OSError, StopIteration):
        scale = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * scale / 2**20


@contextmanager
def measured(out: dict[str, float], calls: int) -> Generator[None]:
    """Put the CPU and wall time per call of the block into `out`."""
    cpu, wall = cpu_s(), time.perf_counter()
    yield
    out["cpu_us"] = (cpu_s() - cpu) / calls * 1e6
    out["wall_us"] = (time.perf_counter() - wall) / calls * 1e6


class Sampling:
    """A sampling client and the prompts it is called with."""

    def __init__(self, sdk: Any, service: Any, options: dict[str, int]) -> None:
        rng = random.Random(0)
        self.sdk = sdk
        self.client = service.create_sampling_client(base_model=MODEL)
        self.params = sdk.SamplingParams(max_tokens=options["sample_tokens"], temperature=1.0)
        self.expected = options["sample_tokens"]
        self.prompts = [
            [rng.randrange(VOCABULARY) for _ in range(options["prompt_tokens"])]
            for _ in range(DISTINCT_PROMPTS)
        ]

    def prompt(self, i: int) -> Any:
        """A prompt object of its own for each call, as a training loop makes them."""
        return self.sdk.ModelInput.from_ints(self.prompts[i % DISTINCT_PROMPTS])

    def check(self, response: Any) -> None:
        """Read the answer as a caller would; an empty one would be cheap."""
        (sequence,) = response.sequences
        assert len(sequence.tokens) == len(sequence.logprobs) == self.expected

    async def one_after_another(self, first: int, calls: int) -> None:
        for i in range(first, first + calls):
            self.check(await self.client.sample_async(self.prompt(i), 1, self.params))

    async def run_async(self, calls: int, in_flight: int) -> None:
        """`calls` samples with `in_flight` of them open all the time."""
        each = calls // in_flight
        await asyncio.gather(*(self.one_after_another(i, each) for i in range(in_flight)))

    def run_blocking(self, calls: int, in_flight: int) -> None:
        """`calls` samples in waves of `in_flight`, through futures."""
        for _ in range(calls // in_flight):
            futures = [self.client.sample(self.prompt(i), 1, self.params) for i in range(in_flight)]
            for future in futures:
                self.check(future.result())


def sample_async(sdk: Any, service: Any, options: dict[str, int]) -> dict[str, float]:
    """Steady state of `sample_async`: the first wave, which opens connections, is not counted."""
    out: dict[str, float] = {}

    async def main() -> None:
        sampling = Sampling(sdk, service, options)
        await sampling.run_async(options["in_flight"], options["in_flight"])
        with measured(out, options["calls"]):
            await sampling.run_async(options["calls"], options["in_flight"])

    asyncio.run(main())
    return out


def sample_blocking(sdk: Any, service: Any, options: dict[str, int]) -> dict[str, float]:
    """The same through `sample(...).result()`."""
    out: dict[str, float] = {}
    sampling = Sampling(sdk, service, options)
    sampling.run_blocking(options["in_flight"], options["in_flight"])
    with measured(out, options["calls"]):
        sampling.run_blocking(options["calls"], options["in_flight"])
    return out


class Batches:
    """Training data as plain arrays, and the datums made from them."""

    def __init__(self, sdk: Any, options: dict[str, int]) -> None:
        numpy = importlib.import_module("numpy")
        time.sleep(NUMPY_SETTLES_S)
        rng = numpy.random.default_rng(0)
        shape = (options["datums"], options["datum_tokens"])
        self.sdk = sdk
        self.shape = shape
        self.tokens = rng.integers(0, VOCABULARY, shape).tolist()
        self.targets = rng.integers(0, VOCABULARY, shape, dtype=numpy.int64)
        self.weights = rng.random(shape, dtype=numpy.float32)

    def build(self) -> list[Any]:
        """A fresh batch of datums."""
        sdk = self.sdk
        return [
            sdk.Datum(
                model_input=sdk.ModelInput.from_ints(tokens),
                loss_fn_inputs={"target_tokens": targets, "weights": weights},
            )
            for tokens, targets, weights in zip(
                self.tokens, self.targets, self.weights, strict=True
            )
        ]

    def check(self, output: Any) -> None:
        """Look at every datum's log-probabilities, as a training loop does."""
        arrays = [each["logprobs"].to_numpy() for each in output.loss_fn_outputs]
        assert (len(arrays), arrays[0].shape[0]) == self.shape


def forward_backward(sdk: Any, service: Any, options: dict[str, int]) -> dict[str, float]:
    """`forward_backward(...).result()` on datums made beforehand."""
    out: dict[str, float] = {}
    training = service.create_lora_training_client(base_model=MODEL)
    batches = Batches(sdk, options)
    made = [batches.build() for _ in range(options["calls"])]
    batches.check(training.forward_backward(batches.build(), "cross_entropy").result())
    with measured(out, options["calls"]):
        for data in made:
            batches.check(training.forward_backward(data, "cross_entropy").result())
    return out


def build_datums(sdk: Any, service: Any, options: dict[str, int]) -> dict[str, float]:
    """Making the datums of one `forward_backward` call."""
    del service
    out: dict[str, float] = {}
    batches = Batches(sdk, options)
    batches.build()
    with measured(out, options["calls"]):
        for _ in range(options["calls"]):
            batches.build()
    return out


def whole_run(sdk: Any, service: Any, options: dict[str, int]) -> dict[str, float]:
    """Sampling, then training, in one process; its peak memory is what counts."""
    out: dict[str, float] = {}
    with measured(out, 1):
        sampling = Sampling(sdk, service, options)
        asyncio.run(sampling.run_async(options["samples"], options["in_flight"]))
        training = service.create_lora_training_client(base_model=MODEL)
        batches = Batches(sdk, options)
        for _ in range(options["calls"]):
            output = training.forward_backward(batches.build(), "cross_entropy").result()
            batches.check(output)
    return out


def many_in_flight(sdk: Any, service: Any, options: dict[str, int]) -> dict[str, float]:
    """Long waits with everything in flight; the stub notes when heartbeats arrive."""
    out: dict[str, float] = {}
    sampling = Sampling(sdk, service, options)
    with measured(out, options["calls"]):
        asyncio.run(sampling.run_async(options["calls"], options["in_flight"]))
    return out


WORKLOADS: dict[str, Callable[[Any, Any, dict[str, int]], dict[str, float]]] = {
    each.__name__: each
    for each in (
        sample_async,
        sample_blocking,
        forward_backward,
        build_datums,
        whole_run,
        many_in_flight,
    )
}


def main() -> None:
    """Run the workload named on the command line."""
    name, workload, base_url, options = sys.argv[1:5]
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    sdk = importlib.import_module(name)
    service = sdk.ServiceClient(base_url=base_url, api_key="tml-benchmark")
    out = WORKLOADS[workload](sdk, service, json.loads(options))
    out["peak_mib"] = peak_mib()
    print(json.dumps(out), flush=True)
    service.close("success").result()


if __name__ == "__main__":
    main()
