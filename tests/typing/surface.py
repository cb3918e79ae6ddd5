"""What a user's type checker sees: the whole public surface, blocking and async.

Never run; `make check` type-checks it with pyright and mypy in strict mode. `assert_type` fails
when a signature loses its exact type.
"""

from __future__ import annotations

import concurrent.futures
import datetime as dt
from typing import TYPE_CHECKING, assert_type

import tinkex
import tinkex as tinker
from tinkex import types
from tinkex.errors import ErrorCategory
from tinkex.futures.future import State

if TYPE_CHECKING:
    import torch


def build() -> list[tinker.Datum]:
    prompt = tinker.ModelInput.from_ints([1, 2, 3])
    assert_type(prompt.to_ints(), list[int])
    assert_type(prompt.length, int)
    longer = prompt.append(tinker.EncodedTextChunk(tokens=[4])).append_int(5)
    datum = tinker.Datum(
        model_input=longer,
        loss_fn_inputs={"target_tokens": [2, 3, 4, 5, 6], "weights": [1.0, 1.0, 1.0, 1.0, 0.0]},
    )
    return [datum]


def blocking(loss: tinker.PerDatumLossFn) -> None:
    with tinker.ServiceClient(
        user_metadata={"run": "1"}, project_id=None, display_name="x", base_url=None, api_key=None
    ) as service:
        assert_type(service.get_server_capabilities(), types.GetServerCapabilitiesResponse)
        training = service.create_lora_training_client(
            base_model="m", rank=8, seed=1, train_mlp=True, train_attn=True, train_unembed=False
        )
        assert_type(training, tinker.TrainingClient)
        train_blocking(training)
        resumed = service.create_training_client_from_state("tinker://r/weights/a")
        assert_type(resumed, tinker.TrainingClient)
        service.create_training_client_from_state_with_optimizer("tinker://r/weights/a")
        sampler = service.create_sampling_client(base_model="m", retry_config=tinkex.RetryConfig())
        assert_type(sampler, tinker.SamplingClient)
        sample_blocking(sampler)
        handle = service.create_custom_loss(loss, {"logprobs": 1, "weights": 1})
        assert_type(handle, tinker.APIFuture[tinker.LossHandle])
        assert_type(service.copy_weights("tinker://r/weights/a").result(), str)
        assert_type(service.usage(), tinkex.Usage)
        assert_type(service.get_console_url(), str)
    assert_type(service.close("errored", "detail").result(), None)


def train_blocking(training: tinker.TrainingClient) -> None:
    step = training.forward_backward(build(), "cross_entropy")
    assert_type(step, tinker.APIFuture[tinker.ForwardBackwardOutput])
    assert_type(step.result(timeout=5.0), tinker.ForwardBackwardOutput)
    assert_type(step.result().metrics, dict[str, float])
    assert_type(step.done(), bool)
    assert_type(step.status(), tinkex.FutureStatus)
    assert_type(step.status().state, State)
    assert_type(step.cancel(), bool)
    training.forward(build(), "ppo", {"clip_low_threshold": 0.8})
    update = training.optim_step(tinker.AdamParams(learning_rate=1e-4))
    assert_type(update.result(), tinker.OptimStepResponse)
    assert_type(training.save_state("a", ttl_seconds=3600).result().path, str)
    assert_type(training.save_weights_for_sampler("a").result().path, str)
    assert_type(training.save_weights_external("a").result().path, str)
    assert_type(training.save_weights_and_get_sampling_client(), tinker.SamplingClient)
    assert_type(
        training.create_sampling_client("tinker://r/sampler_weights/a"), tinker.SamplingClient
    )
    assert_type(training.get_info(), types.GetInfoResponse)
    assert_type(training.model_id, str)
    concurrent.futures.wait([step])


def sample_blocking(sampler: tinker.SamplingClient) -> None:
    params = tinker.SamplingParams(max_tokens=8, temperature=0.5, stop=["\n"], seed=1)
    future = sampler.sample(tinker.ModelInput.from_ints([1]), 2, params, topk_sample_logprobs=3)
    assert_type(future, tinker.APIFuture[tinker.SampleResponse])
    sequence = future.result().sequences[0]
    assert_type(sequence.tokens, list[int])
    assert_type(sequence.logprobs, list[float] | None)
    assert_type(sequence.stop_reason, tinker.StopReason)
    assert_type(future.usage, tinkex.Usage | None)
    scored = sampler.compute_logprobs(tinker.ModelInput.from_ints([1, 2]))
    assert_type(scored.result(), list[float | None])
    assert_type(sampler.get_base_model(), str)
    copy = tinker.SamplingClient.from_sampler_handle(sampler.get_sampler_handle())
    assert_type(copy, tinker.SamplingClient)


async def train_async(training: tinker.TrainingClient) -> None:
    step = await training.forward_backward_async(build(), "cross_entropy")
    assert_type(step, tinker.APIFuture[tinker.ForwardBackwardOutput])
    assert_type(await step, tinker.ForwardBackwardOutput)
    assert_type(await step.result_async(timeout=1.0), tinker.ForwardBackwardOutput)
    async for part in training.forward_backward(build(), "cross_entropy"):
        assert part is not None
    assert_type(
        await (await training.forward_async(build(), "cross_entropy")), tinker.ForwardBackwardOutput
    )
    assert_type(
        await (await training.optim_step_async(tinker.AdamParams())), tinker.OptimStepResponse
    )
    assert_type((await (await training.save_state_async("a"))).path, str)
    assert_type((await (await training.save_weights_for_sampler_async("a"))).path, str)
    assert_type((await (await training.save_weights_external_async("a"))).path, str)
    assert_type(await training.save_weights_and_get_sampling_client_async(), tinker.SamplingClient)
    assert_type(await training.get_info_async(), types.GetInfoResponse)


async def whole_async() -> None:
    async with tinker.ServiceClient() as service:
        assert_type(
            await service.get_server_capabilities_async(), types.GetServerCapabilitiesResponse
        )
        training = await service.create_lora_training_client_async("m", rank=4)
        assert_type(training, tinker.TrainingClient)
        await train_async(training)
        sampler = await service.create_sampling_client_async(
            model_path="tinker://r/sampler_weights/a"
        )
        answer = await sampler.sample_async(
            prompt=tinker.ModelInput.from_ints([1]),
            num_samples=1,
            sampling_params=tinker.SamplingParams(max_tokens=1),
        )
        assert_type(answer, tinker.SampleResponse)
        assert_type(
            await sampler.compute_logprobs_async(tinker.ModelInput.from_ints([1])),
            list[float | None],
        )
        assert_type(await sampler.get_base_model_async(), str)
    assert_type(await service.close_async(), None)


def rest() -> None:
    client = tinker.RestClient()
    assert_type(client.get_training_run("r").result(), tinker.TrainingRun)
    assert_type(client.list_training_runs(limit=5).result(), types.TrainingRunsResponse)
    assert_type(client.list_checkpoints("r").result().checkpoints, list[tinker.Checkpoint])
    assert_type(client.list_user_checkpoints().result(), types.CheckpointsListResponse)
    assert_type(client.delete_checkpoint("r", "weights/a").result(), None)
    assert_type(
        client.set_checkpoint_ttl_from_tinker_path("tinker://r/weights/a", None).result(), None
    )
    assert_type(client.get_session("s").result(), types.GetSessionResponse)
    assert_type(client.list_sessions().result().sessions, list[str])
    admin = tinker.AdminClient()
    assert_type(admin.get_audit_log("all", dt.date(2026, 1, 1)).result(), types.AuditLogResponse)


async def rest_async() -> None:
    client = tinker.RestClient()
    assert_type(await client.get_training_run_async("r"), tinker.TrainingRun)
    assert_type(await client.list_training_runs_async(), types.TrainingRunsResponse)
    assert_type(await client.list_checkpoints_async("r"), types.CheckpointsListResponse)
    assert_type(await client.delete_checkpoint_async("r", "weights/a"), None)
    assert_type(await client.list_sessions_async(), types.ListSessionsResponse)


def custom(training: tinker.TrainingClient, handle: tinker.LossHandle) -> None:
    def loss(
        data: list[tinker.Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        total = -logprobs[0].sum()
        return total, {"n": float(len(data))}

    future = training.forward_backward_custom(build(), loss)
    assert_type(future, tinker.APIFuture[tinker.ForwardBackwardOutput])
    training.forward_backward_custom(build(), handle)


def errors() -> None:
    try:
        blocking_noop()
    except tinker.RateLimitError as error:
        assert_type(error.status_code, int)
        assert_type(error.retryable, bool)
    except tinker.RequestFailedError as error:
        assert_type(error.request_id, str | None)
        assert_type(error.category, ErrorCategory)
    except (tinker.TinkerError, ValueError):
        raise


def blocking_noop() -> None: ...


chunks: list[int | tinker.ModelInputChunk] = [1, tinker.EncodedTextChunk(tokens=[1])]
loss_name: types.LossFnType = "importance_sampling"
