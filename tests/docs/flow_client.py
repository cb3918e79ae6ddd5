"""The client's side of the flows, in a process of its own: nothing else there sets a profiler.

`python -m tests.docs.flow_client calls URL FOLDER` makes a sample and a training step on the server
of `flows.traced_server`; `... sft DATA OUTPUT` runs `tinkex train sft`. Prints the calls as JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import tinkex
from tests.docs.flows import Profile, Trace, TracedServer
from tinkex import Datum, ModelInput, SamplingParams
from tinkex.cli.main import main as command
from tinkex.testing import API_KEY

if TYPE_CHECKING:
    from collections.abc import Callable

RECORDINGS = 3


def record_calls(server: TracedServer) -> dict[str, dict[str, list[Trace]]]:
    """A sample and a training step, each recorded several times in all three processes."""
    profile = Profile()
    with (
        profile.installed(),
        tinkex.ServiceClient(base_url=server.url, api_key=API_KEY) as service,
    ):
        training = service.create_lora_training_client("tinkex/tiny", rank=8)
        sampler = training.save_weights_and_get_sampling_client()
        data = [Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [2, 3, 4]})]

        def sample() -> object:
            params = SamplingParams(max_tokens=4)
            return sampler.sample(ModelInput.from_ints([1, 2, 3]), 1, params).result()

        def train() -> object:
            return training.forward_backward(data, "cross_entropy").result()

        calls: dict[str, Callable[[], object]] = {"A sample": sample, "A training step": train}
        recorded: dict[str, dict[str, list[Trace]]] = {}
        for name, call in calls.items():
            call()  # the first one imports, connects and loads
            flow = recorded[name] = {"client": [], "server": [], "engine": []}
            for number in range(RECORDINGS):
                with server.recording(f"{name}-{number}".replace(" ", "-")) as others:
                    flow["client"].append(profile.record(call))
                for role, trace in others.items():
                    flow[role].append(trace)
        return recorded


def record_command(data: str, output: Path) -> dict[str, dict[str, list[Trace]]]:
    """`tinkex train sft` on the server that the environment names, after one run to warm up."""
    arguments = ["train", "sft", data, "--model", "tinkex/tiny", "--steps", "2", "--output"]
    profile = Profile()
    if command([*arguments, str(output / "warm-up")]):
        raise SystemExit("the first run failed")
    with profile.installed():
        traces = [
            profile.record(lambda name=str(output / f"{number}"): command([*arguments, name]))
            for number in range(RECORDINGS)
        ]
    return {"The command": {"client": traces}}


if __name__ == "__main__":
    kind, first, second = sys.argv[1:]
    if kind == "calls":
        found = record_calls(TracedServer(first, Path(second)))
    else:
        found = record_command(first, Path(second))
    plain = {
        flow: {role: [trace.calls for trace in traces] for role, traces in roles.items()}
        for flow, roles in found.items()
    }
    # The last line: a command prints, too.
    sys.stdout.write("\n" + json.dumps(plain) + "\n")
