"""One user program, told as numbers: every client version runs it against the same server.

    python matrix_program.py tinker|tinkex        (server and key come from the environment)

Prints a line of JSON for each scenario: its name and what it saw, or `{"absent": why}` where this
version of the client has no such call. The server computes the same bits for everybody, so
whatever is present must be equal between versions.
"""

from __future__ import annotations

import importlib
import inspect
import io
import json
import multiprocessing
import os
import pickle
import sys
import tarfile
import traceback
import urllib.request
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

TEXT = list(b"the quick brown fox jumps over the lazy dog")
WAIT_S = 120


class Absent(Exception):
    """This version of the client cannot do that by its own design."""


class World:
    """What the scenarios share, in the order in which they run."""

    def __init__(self, sdk: Any, base_model: str) -> None:
        self.sdk = sdk
        self.base_model = base_model
        self.service: Any = sdk.ServiceClient()
        self.training: Any = None
        self.sampler: Any = None
        self.state_path = ""
        self.sampler_path = ""

    @property
    def rest(self) -> Any:
        return self.service.create_rest_client()

    def datum(self, tokens: list[int], **inputs: Any) -> Any:
        """Predict each next token of `tokens`."""
        return self.sdk.Datum(
            model_input=self.sdk.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:], **inputs},
        )

    def supervised(self) -> list[Any]:
        """Three sequences of different lengths, with fractional and negative weights."""
        return [
            self.datum(TEXT, weights=[1.0] * (len(TEXT) - 1)),
            self.datum(TEXT[:9], weights=[0.5] * 8),
            self.datum(TEXT[4:20], weights=[-0.25] * 15),
        ]

    def prompt(self, length: int = 12) -> Any:
        return self.sdk.ModelInput.from_ints(TEXT[:length])


def require(owner: Any, name: str) -> Any:
    """A method that older versions may not have."""
    method = getattr(owner, name, None)
    if method is None:
        raise Absent(f"{type(owner).__name__} has no {name}")
    return method


def floats(values: Any) -> list[Any]:
    """Numbers as single precision holds them; JSON and protobuf then agree."""
    import struct

    return [None if v is None else struct.unpack("<f", struct.pack("<f", v))[0] for v in values]


def outputs(result: Any) -> dict[str, Any]:
    """The loss and the log-probabilities of a training result."""
    return {
        "loss": result.metrics["loss:sum"],
        "logprobs": [floats(out["logprobs"].data) for out in result.loss_fn_outputs],
    }


def sequences(response: Any) -> list[Any]:
    return [[s.stop_reason, list(s.tokens), floats(s.logprobs)] for s in response.sequences]


def bootstrap(world: World) -> Any:
    models = world.service.get_server_capabilities().supported_models
    world.training = world.service.create_lora_training_client(
        base_model=world.base_model, rank=8, seed=7, user_metadata={"purpose": "matrix"}
    )
    info = world.training.get_info()
    return {
        "served": world.base_model in [m.model_name for m in models],
        "rank": info.lora_rank,
        "model": info.model_data.model_name,
    }


def sft(world: World) -> Any:
    """Two steps, both submitted before the first is waited for."""
    pending = []
    for _ in range(2):
        step = world.training.forward_backward(world.supervised(), "cross_entropy")
        optim = world.training.optim_step(world.sdk.AdamParams(learning_rate=0.01))
        pending.append((step, optim))
    seen = [outputs(step.result(WAIT_S)) for step, _ in pending]
    for _, optim in pending:
        optim.result(WAIT_S)
    return seen


def forward_only(world: World) -> Any:
    return outputs(world.training.forward(world.supervised(), "cross_entropy").result(WAIT_S))


def reinforce(world: World) -> Any:
    """Sample, reward, and one importance-sampling step on what was sampled."""
    sampler = world.training.save_weights_and_get_sampling_client(name="policy")
    params = world.sdk.SamplingParams(max_tokens=8, seed=3, temperature=1.0)
    rollout = sampler.sample(world.prompt(6), 2, params).result(WAIT_S)
    data = []
    for index, sequence in enumerate(rollout.sequences):
        tokens = TEXT[:6] + list(sequence.tokens)
        before, sampled = [0.0] * 5, len(sequence.tokens)
        data.append(
            world.datum(
                tokens,
                logprobs=before + floats(sequence.logprobs),
                advantages=before + [1.0 - 2.0 * index] * sampled,
            )
        )
    result = world.training.forward_backward(data, "importance_sampling").result(WAIT_S)
    world.training.optim_step(world.sdk.AdamParams(learning_rate=0.01)).result(WAIT_S)
    return {"rollout": sequences(rollout), **outputs(result)}


def _squares(data: Any, logprobs: Any) -> Any:
    loss = sum((values**2).sum() for values in logprobs)
    return loss, {"mean_square": float(loss.detach()) / len(data)}


def custom_loss(world: World) -> Any:
    data = [world.datum(TEXT[:9]), world.datum(TEXT[4:20])]
    result = world.training.forward_backward_custom(data, _squares).result(WAIT_S)
    world.training.optim_step(world.sdk.AdamParams(learning_rate=0.01)).result(WAIT_S)
    # What the client computes itself differs in the last digits; the steps that follow show that
    # the gradient was the same.
    return round(result.metrics["mean_square"], 3)


def _clipped(logprobs: Any, scale: Any) -> Any:
    import torch

    loss = -(torch.clamp(logprobs, -3.0) * scale).sum()
    return loss, {"custom/mean:mean": logprobs.mean()}


def uploaded_loss(world: World) -> Any:
    """A traced loss is sent once and then runs on the server."""
    upload = require(world.service, "create_custom_loss")
    handle = upload(_clipped, {"logprobs": 1, "scale": 1}).result(WAIT_S)
    data = [
        world.datum(TEXT[:9], scale=numpy_floats(8)),
        world.datum(TEXT[4:20], scale=numpy_floats(15)),
    ]
    result = world.training.forward_backward_custom(data, handle).result(WAIT_S)
    # Not a step: older versions have no such call, and what follows must be the same for all.
    return {
        "server_side": handle.loss_id is not None,
        "metrics": dict(sorted(result.metrics.items())),
    }


def numpy_floats(count: int) -> Any:
    import numpy as np

    return np.linspace(0.5, 1.5, count, dtype=np.float32)


def save(world: World) -> Any:
    """Steps that follow a save are submitted before it is waited for."""
    saved = world.training.save_state("resume")
    step = world.training.forward_backward(world.supervised(), "cross_entropy")
    optim = world.training.optim_step(world.sdk.AdamParams(learning_rate=0.02))
    world.state_path = saved.result(WAIT_S).path
    optim.result(WAIT_S)
    return outputs(step.result(WAIT_S))


def resume(world: World) -> Any:
    """The run goes on from the save as it did before; weights alone take another way."""
    again = world.service.create_training_client_from_state_with_optimizer(world.state_path)
    step = again.forward_backward(world.supervised(), "cross_entropy")
    again.optim_step(world.sdk.AdamParams(learning_rate=0.02)).result(WAIT_S)
    after = again.forward(world.supervised(), "cross_entropy")
    here = world.training.forward(world.supervised(), "cross_entropy")
    weights = world.service.create_training_client_from_state(world.state_path)
    fresh = weights.forward(world.supervised(), "cross_entropy")
    seen = [outputs(each.result(WAIT_S)) for each in (step, after, here, fresh)]
    assert seen[1] == seen[2], "the resumed run went another way"
    assert seen[0] == seen[3], "weights alone were not what was saved"
    return {"step": seen[0], "after": seen[1], "rank": again.get_info().lora_rank}


def sampling(world: World) -> Any:
    """Every option that all versions have."""
    path = world.training.save_weights_for_sampler("served").result(WAIT_S).path
    world.sampler_path = path
    world.sampler = world.service.create_sampling_client(model_path=path)
    params = world.sdk.SamplingParams
    asked = {
        "seeded": params(max_tokens=12, seed=11),
        "greedy": params(max_tokens=12, temperature=0.0),
        "narrow": params(max_tokens=12, seed=5, temperature=0.7, top_k=5, top_p=0.8),
        "stop_text": params(max_tokens=40, seed=2, stop=["e"]),
        "stop_token": params(max_tokens=40, seed=2, stop=[101]),
        "never_stop": params(max_tokens=6, seed=2, stop=[]),
    }
    futures = {name: world.sampler.sample(world.prompt(), 2, p) for name, p in asked.items()}
    return {name: sequences(future.result(WAIT_S)) for name, future in futures.items()}


def prompt_logprobs(world: World) -> Any:
    params = world.sdk.SamplingParams(max_tokens=1, seed=1)
    response = world.sampler.sample(
        world.prompt(), 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=3
    ).result(WAIT_S)
    top = [
        None if row is None else [[token, *floats([value])] for token, value in row]
        for row in response.topk_prompt_logprobs
    ]
    return {"prompt": floats(response.prompt_logprobs), "top": top}


def compute_logprobs(world: World) -> Any:
    return floats(world.sampler.compute_logprobs(world.prompt()).result(WAIT_S))


def newer_sampling(world: World) -> Any:
    """Options that came later."""
    names = inspect.signature(world.sampler.sample).parameters
    missing = [
        name
        for name in ("topk_sample_logprobs", "prompt_logprobs_last_n", "prompt_alt_tokens_k")
        if name not in names
    ]
    if missing:
        raise Absent(f"sample() has no {', '.join(missing)}")
    params = world.sdk.SamplingParams(max_tokens=4, seed=1)
    response = world.sampler.sample(
        world.prompt(),
        1,
        params,
        include_prompt_logprobs=True,
        prompt_logprobs_last_n=4,
        topk_sample_logprobs=2,
        prompt_alt_tokens_k=2,
    ).result(WAIT_S)
    return {"sequences": sequences(response), "prompt": floats(response.prompt_logprobs)}


def base_model_sampling(world: World) -> Any:
    sampler = world.service.create_sampling_client(base_model=world.base_model)
    params = world.sdk.SamplingParams(max_tokens=5, seed=4)
    return sequences(sampler.sample(world.prompt(), 1, params).result(WAIT_S))


def listing(world: World) -> Any:
    rest = world.rest
    run_id = world.training.model_id
    run = rest.get_training_run(run_id).result(WAIT_S)
    found = rest.list_checkpoints(run_id).result(WAIT_S).checkpoints
    everything = rest.list_user_checkpoints(limit=100).result(WAIT_S)
    runs = rest.list_training_runs(limit=100).result(WAIT_S).training_runs
    sessions = rest.list_sessions(limit=100).result(WAIT_S).sessions
    info = rest.get_weights_info_by_tinker_path(world.state_path).result(WAIT_S)
    return {
        "metadata": run.user_metadata,
        "checkpoints": sorted([c.checkpoint_id, c.checkpoint_type] for c in found),
        "all_listed": all(c in everything.checkpoints for c in found),
        "run_listed": run_id in [r.training_run_id for r in runs],
        "session_listed": run_id.split(":")[0] in sessions,
        "weights": [info.base_model, info.is_lora, info.lora_rank],
    }


def metadata(world: World) -> Any:
    """What a checkpoint was saved with comes back with it."""
    if "user_metadata" not in inspect.signature(world.training.save_state).parameters:
        raise Absent("save_state() has no user_metadata")
    saved = world.training.save_state("tagged", user_metadata={"epoch": "2"}).result(WAIT_S)
    found = world.rest.list_checkpoints(world.training.model_id).result(WAIT_S).checkpoints
    return [c.user_metadata for c in found if c.tinker_path == saved.path]


def publish(world: World) -> Any:
    rest = world.rest

    def public() -> bool:
        found = rest.list_checkpoints(world.training.model_id).result(WAIT_S).checkpoints
        return next(c.public for c in found if c.tinker_path == world.sampler_path)

    before = public()
    rest.publish_checkpoint_from_tinker_path(world.sampler_path).result(WAIT_S)
    between = public()
    rest.unpublish_checkpoint_from_tinker_path(world.sampler_path).result(WAIT_S)
    return [before, between, public()]


def expiry(world: World) -> Any:
    """A lifetime can be set and removed; one below an hour is refused."""
    set_ttl = world.rest.set_checkpoint_ttl_from_tinker_path
    set_ttl(world.sampler_path, 7200).result(WAIT_S)
    set_ttl(world.sampler_path, None).result(WAIT_S)
    try:
        set_ttl(world.sampler_path, 60).result(WAIT_S)
    except world.sdk.BadRequestError as error:
        return "ttl_seconds" in str(error)
    return "not refused"


def archive(world: World) -> Any:
    """The older download: one tar with the files side by side."""
    ask = require(world.rest, "get_checkpoint_archive_url_from_tinker_path")
    url = ask(world.sampler_path).result(WAIT_S).url
    with urllib.request.urlopen(url, timeout=WAIT_S) as reply:
        data = reply.read()
    with tarfile.open(fileobj=io.BytesIO(data), mode="r:") as tar:
        files = {member.name: tar.extractfile(member) for member in tar.getmembers()}
        config = json.load(files["adapter_config.json"])  # type: ignore[arg-type]
        tensors = header(files["adapter_model.safetensors"].read())  # type: ignore[union-attr]
        return {
            "files": sorted(files),
            "config": [config["r"], config["lora_alpha"]],
            "unembed": [name for name in tensors if "unembed" in name],
            "odd": [n for n in tensors if not n.startswith("base_model.model.")],
        }


def header(data: bytes) -> list[str]:
    """The names of the tensors in a safetensors file."""
    size = int.from_bytes(data[:8], "little")
    return sorted(name for name in json.loads(data[8 : 8 + size]) if name != "__metadata__")


def external(world: World) -> Any:
    """The newer download: an export with a link for each file."""
    export = require(world.training, "save_weights_external")
    path = export("export").result(WAIT_S).path
    urls = world.rest.get_external_weights_urls(path).result(WAIT_S).urls
    sizes = {}
    for name, url in urls.items():
        with urllib.request.urlopen(url, timeout=WAIT_S) as reply:
            sizes[name] = [len(reply.read()) == int(reply.headers["content-length"])]
    return sizes


def _elsewhere(sdk_name: str, pickled: bytes, prompt: list[int], answer: Any) -> None:
    sdk = importlib.import_module(sdk_name)
    sampler = pickle.loads(pickled)
    params = sdk.SamplingParams(max_tokens=6, seed=9)
    response = sampler.sample(sdk.ModelInput.from_ints(prompt), 1, params).result(WAIT_S)
    answer.put(sequences(response))


def other_process(world: World) -> Any:
    """A pickled sampling client works in another process."""
    context = multiprocessing.get_context("spawn")
    answer = context.Queue()
    task = (world.sdk.__name__, pickle.dumps(world.sampler), TEXT[:12], answer)
    child = context.Process(target=_elsewhere, args=task)
    child.start()
    child.join(WAIT_S)
    assert child.exitcode == 0, "the other process failed"
    there = answer.get(timeout=WAIT_S)
    params = world.sdk.SamplingParams(max_tokens=6, seed=9)
    here = sequences(world.sampler.sample(world.prompt(), 1, params).result(WAIT_S))
    assert here == there, "the copy sampled something else"
    return there


def bad_input(world: World) -> Any:
    """A bad datum fails its own call, named, and the next one works."""
    bad = [world.datum([1, 2, 3, 9_999_999])]
    try:
        world.training.forward_backward(bad, "cross_entropy").result(WAIT_S)
    except Exception as error:  # noqa: BLE001 - each version has its own class for it
        named = "target_tokens" in str(error)
    else:
        named = False
    return {"named": named, **forward_only(world)}


def delete(world: World) -> Any:
    world.rest.delete_checkpoint_from_tinker_path(world.sampler_path).result(WAIT_S)
    found = world.rest.list_checkpoints(world.training.model_id).result(WAIT_S).checkpoints
    # The sampler was made before and keeps what it has.
    params = world.sdk.SamplingParams(max_tokens=4, seed=6)
    still = sequences(world.sampler.sample(world.prompt(), 1, params).result(WAIT_S))
    return {"gone": world.sampler_path not in [c.tinker_path for c in found], "still": still}


def close(world: World) -> Any:
    require(world.service, "close")
    world.service.__exit__(None, None, None)
    try:
        world.service.create_lora_training_client(base_model=world.base_model, rank=8)
    except Exception:  # noqa: BLE001 - each version has its own class for it
        return "refused"
    return "went on"


SCENARIOS: list[Callable[[World], Any]] = [
    bootstrap,
    sft,
    forward_only,
    reinforce,
    custom_loss,
    save,
    resume,
    sampling,
    prompt_logprobs,
    compute_logprobs,
    newer_sampling,
    base_model_sampling,
    listing,
    metadata,
    publish,
    expiry,
    archive,
    external,
    other_process,
    bad_input,
    delete,
    uploaded_loss,
    close,
]


def main(sdk_name: str, base_model: str) -> int:
    world = World(importlib.import_module(sdk_name), base_model)
    for scenario in SCENARIOS:
        try:
            seen = scenario(world)
        except Absent as why:
            seen = {"absent": str(why)}
        except Exception:  # noqa: BLE001 - told to whoever compares
            seen = {"failed": traceback.format_exc()[-3000:]}
        print(json.dumps([scenario.__name__, seen]), flush=True)  # noqa: T201
        if world.training is None:
            return 1
    return 0


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    # Not sys.exit: the Rust half of official clients sometimes aborts while Python shuts down.
    os._exit(status)
