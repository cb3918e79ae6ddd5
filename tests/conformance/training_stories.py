"""Sessions, models, training steps, checkpoints and custom losses."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from story import (
    BASE,
    DMEL,
    OTHER_KEY,
    PNG,
    attempt,
    environment,
    ignoring_deprecations,
    plain,
    text_datum,
    trainer,
)

if TYPE_CHECKING:
    from story import Connection


def session_with_every_option(sdk: Any, to: Connection) -> Any:
    with environment(TINKER_TAGS="red"):
        service = to.service(
            sdk,
            user_metadata={"team": "a", "note": "é"},
            project_id="project-1",
            display_name="my run",
            default_headers_overrides={"x-scenario": "options"},
        )
        capabilities = service.get_server_capabilities()
        training = service.create_lora_training_client(base_model=BASE)
    service.close("success", detail="all done").result()
    return plain({"models": capabilities, "model_id": training.model_id})


def session_without_options(sdk: Any, to: Connection) -> Any:
    service, training = trainer(sdk, to)
    info = training.get_info()
    service.close("interrupted").result()
    return plain({"model_id": training.model_id, "info": info})


def session_left_by_an_exception(sdk: Any, to: Connection) -> Any:
    def leave() -> None:
        with to.service(sdk) as service:
            service.create_lora_training_client(base_model=BASE)
            raise LookupError("on purpose")

    return attempt(leave)


def models_with_every_option(sdk: Any, to: Connection) -> Any:
    service = to.service(sdk)
    first = service.create_lora_training_client(
        base_model=BASE,
        rank=4,
        seed=11,
        train_mlp=False,
        train_attn=True,
        train_unembed=False,
        user_metadata={"run": "first"},
        optimizer=sdk.DimuonOptimizerConfig(),
    )
    second = service.create_lora_training_client(
        BASE, 16, 0, optimizer=sdk.AdamOptimizerConfig(), user_metadata={}
    )
    service.close("success").result()
    return plain([first.model_id, second.model_id])


def training_bodies(sdk: Any, to: Connection) -> Any:
    import numpy as np

    service, training = trainer(sdk, to)
    policy = text_datum(sdk, [1], logprobs=[-0.5], advantages=[1.0])
    batches: list[tuple[str, list[Any], str, Any]] = [
        ("lists", [text_datum(sdk, [1, 2, 3], weights=[0, 1, 1])], "cross_entropy", None),
        (
            "arrays",
            [
                text_datum(
                    sdk,
                    [4, 5],
                    target_tokens=np.array([5, 6], dtype=np.int32),
                    weights=np.array([0.25, 0.75], dtype=np.float64),
                )
            ],
            "cross_entropy",
            None,
        ),
        (
            "policy",
            [
                text_datum(
                    sdk,
                    [7, 8],
                    logprobs=[-0.5, -1.5],
                    advantages=np.array([1.0, -1.0], dtype=np.float32),
                    clip_low_threshold=[0.8, 0.8],
                    clip_high_threshold=[1.2, 1.2],
                    sequence_ratio_mask=[1.0, 0.0],
                )
            ],
            "ppo",
            {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        ),
        (
            "two dimensions",
            [
                text_datum(
                    sdk, [1, 2], target_tokens=[[1, 2], [3, 4]], weights=[[0.5, 0.5], [1.0, 0.0]]
                )
            ],
            "cross_entropy",
            None,
        ),
        (
            "sparse",
            [
                text_datum(
                    sdk,
                    [1, 2],
                    target_tokens=sdk.TensorData(
                        data=[9],
                        dtype="int64",
                        shape=[2, 3],
                        sparse_crow_indices=[0, 0, 1],
                        sparse_col_indices=[2],
                    ),
                    weights=sdk.TensorData(
                        data=[0.5],
                        dtype="float32",
                        shape=[2, 3],
                        sparse_crow_indices=[0, 0, 1],
                        sparse_col_indices=[2],
                    ),
                )
            ],
            "cross_entropy",
            None,
        ),
        (
            "shape left out",
            [text_datum(sdk, [1], target_tokens=sdk.TensorData(data=[2], dtype="int64"))],
            "cross_entropy",
            None,
        ),
        (
            "pictures",
            [
                sdk.Datum(
                    model_input=sdk.ModelInput(
                        chunks=[
                            sdk.EncodedTextChunk(tokens=[1, 2]),
                            sdk.types.ImageChunk(data=PNG, format="png", expected_tokens=4),
                            sdk.types.ImageChunk(data=PNG, format="jpeg"),
                            sdk.DmelChunk(dmel=DMEL),
                        ]
                    ),
                    loss_fn_inputs={"target_tokens": list(range(12))},
                )
            ],
            "cross_entropy",
            None,
        ),
        ("text setting", [policy], "cispo", {"mode": "fast"}),
        ("one number", [policy], "dro", {"beta": 0.5}),
        ("mixed settings", [policy], "cispo", {"mode": "fast", "beta": 1, "c": 0.5}),
        ("empty settings", [policy], "importance_sampling", {}),
        ("two datums", [text_datum(sdk, [1, 2]), text_datum(sdk, [3])], "cross_entropy", None),
    ]
    seen = {}
    for title, data, loss_fn, config in batches:
        future = training.forward_backward(data, loss_fn, config)
        seen[title] = attempt(future.result)
    seen["forward"] = plain(training.forward([text_datum(sdk, [1, 2])], "cross_entropy").result())
    seen["empty"] = attempt(lambda: training.forward([], "cross_entropy").result())
    service.close("success").result()
    return seen


def training_with_provenance(sdk: Any, to: Connection) -> Any:
    service, training = trainer(sdk, to)
    prompt, sampled = sdk.PromptProvenanceSpan, sdk.SampledProvenanceSpan
    datum = sdk.Datum(
        model_input=sdk.ModelInput.from_ints([1, 2, 3]),
        loss_fn_inputs={"target_tokens": [2, 3, 4]},
        model_input_spans=[
            prompt(sequence_id="sequence-0-0", length=2),
            sampled(sequence_id="sequence-0-0", length=1),
        ],
        loss_fn_input_spans=[
            prompt(sequence_id="sequence-0-0", offset=1, length=1),
            sampled(sequence_id="sequence-0-0", offset=0, length=2),
        ],
    )
    result = training.forward_backward([datum], "cross_entropy").result()
    service.close("success").result()
    return plain(result)


def training_with_torch(sdk: Any, to: Connection) -> Any:
    import torch

    service, training = trainer(sdk, to)
    sparse = torch.zeros(4, 8, dtype=torch.float32)
    sparse[2, 3] = 0.5
    targets = torch.zeros(4, 8, dtype=torch.int64)
    targets[2, 3] = 17
    data = [
        text_datum(
            sdk,
            [1, 2],
            target_tokens=torch.tensor([1, 2]),
            weights=torch.tensor([0.5, 1.0], dtype=torch.bfloat16),
        ),
        text_datum(sdk, [1, 2, 3, 4], target_tokens=targets, weights=sparse),
        text_datum(sdk, [1, 2], target_tokens=torch.tensor([[1, 2], [3, 4]])),
        text_datum(sdk, [1], target_tokens=torch.tensor([1]), mask=torch.ones(1)),
    ]
    result = training.forward_backward(data, "cross_entropy").result()
    service.close("success").result()
    return plain(result)


def compressed_training(sdk: Any, to: Connection) -> Any:
    service, training = trainer(sdk, to)
    small = training.forward_backward([text_datum(sdk, [1])], "cross_entropy").result()
    large = training.forward([text_datum(sdk, list(range(500)))], "cross_entropy").result()
    service.close("success").result()
    return plain({"small": small.metrics, "large": large.metrics})


def _chunked(sdk: Any, to: Connection) -> Any:
    service, training = trainer(sdk, to)
    data = [text_datum(sdk, [number] * (number + 1)) for number in range(5)]
    first = training.forward_backward(data, "cross_entropy")
    step = training.optim_step(sdk.AdamParams())
    second = training.forward(data[:3], "cross_entropy")
    seen = [plain(first.result()), plain(step.result()), plain(second.result())]
    service.close("success").result()
    return seen


def parallel_chunks(sdk: Any, to: Connection) -> Any:
    return _chunked(sdk, to)


def serial_chunks(sdk: Any, to: Connection) -> Any:
    return _chunked(sdk, to)


def chunks_cut_by_bytes(sdk: Any, to: Connection) -> Any:
    service, training = trainer(sdk, to)
    data = [text_datum(sdk, [1] * size, weights=[1.0] * size) for size in (10, 4, 6, 40, 1, 1)]
    picture = sdk.types.ImageChunk(data=PNG, format="png", expected_tokens=3)
    data.append(
        sdk.Datum(
            model_input=sdk.ModelInput(chunks=[picture, picture]),
            loss_fn_inputs={"target_tokens": [1] * 6},
        )
    )
    result = training.forward_backward(data, "cross_entropy").result()
    service.close("success").result()
    return plain(result)


def optimizer_steps(sdk: Any, to: Connection) -> Any:
    service, training = trainer(sdk, to)
    steps = [
        training.optim_step(sdk.AdamParams()),
        training.optim_step(
            sdk.AdamParams(
                learning_rate=1, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.1, grad_clip_norm=2
            )
        ),
        training.optim_step(adam_params=sdk.AdamParams(learning_rate=3e-5)),
        training.optim_step(sdk.DimuonParams(learning_rate=0.02)),
        training.optim_step(sdk.DimuonParams(learning_rate=0, beta1=0, grad_clip_norm=1.5)),
    ]
    seen = [plain(step.result()) for step in steps]
    seen.append(attempt(lambda: training.optim_step().result()))
    service.close("success").result()
    return seen


def saves(sdk: Any, to: Connection) -> Any:
    service, training = trainer(sdk, to)
    weights = training.save_weights_for_sampler("a").result().path
    encrypted = training.save_weights_external(
        "b", ttl_seconds=3600, age_encryption_recipients=["age1x"]
    )
    metadata = {"k": "v"}
    seen = [
        weights,
        training.save_state("a").result().path,
        training.save_state("b", ttl_seconds=3600, overwrite=True, user_metadata=metadata)
        .result()
        .path,
        training.save_weights_for_sampler("b", ttl_seconds=7200, user_metadata=metadata)
        .result()
        .path,
        training.save_weights_external("a").result().path,
        attempt(lambda: encrypted.result().path),
        training.save_weights_and_get_sampling_client().get_base_model(),
        training.create_sampling_client(weights).get_base_model(),
    ]
    service.close("success").result()
    return plain(seen)


def _resumed(sdk: Any, to: Connection) -> Any:
    service, training = trainer(sdk, to)
    state = training.save_state("a").result().path
    weights = service.create_training_client_from_state(
        state,
        base_model=BASE,
        user_metadata={"from": "a"},
        optimizer=sdk.AdamOptimizerConfig(),
    )
    plainly = service.create_training_client_from_state(state)
    whole = service.create_training_client_from_state_with_optimizer(
        state, user_metadata={"from": "b"}
    )
    step = whole.optim_step(sdk.AdamParams()).result()
    service.close("success").result()
    return plain([weights.model_id, plainly.model_id, whole.model_id, step])


def resume_in_three_steps(sdk: Any, to: Connection) -> Any:
    return _resumed(sdk, to)


def resume_in_one_step(sdk: Any, to: Connection) -> Any:
    return _resumed(sdk, to)


def resume_from_foreign_weights(sdk: Any, to: Connection) -> Any:
    owner = sdk.ServiceClient(base_url=to.base_url, api_key=OTHER_KEY)
    training = owner.create_lora_training_client(base_model=BASE, rank=8)
    state = training.save_state("a").result().path
    owner.close("success").result()
    service = to.service(sdk)
    client = service.create_training_client_from_state_with_optimizer(
        state, weights_access_token=OTHER_KEY
    )
    service.close("success").result()
    return plain(client.model_id)


def loads_into_a_model(sdk: Any, to: Connection) -> Any:
    service, training = trainer(sdk, to)
    state = training.save_state("a").result().path
    with ignoring_deprecations():
        seen = [
            training.load_state(state).result(),
            training.load_state_with_optimizer(state, weights_access_token=OTHER_KEY).result(),
        ]
    service.close("success").result()
    return plain([item.path for item in seen])


def copies(sdk: Any, to: Connection) -> Any:
    service = to.service(sdk, project_id="project-1")
    training = service.create_lora_training_client(base_model=BASE, rank=8)
    state = training.save_state("a").result().path
    seen = [
        service.copy_weights(state).result(),
        service.copy_weights(state, ttl_seconds=3600, weights_access_token=OTHER_KEY).result(),
    ]
    service.close("success").result()
    return plain(seen)


def custom_loss_on_the_client(sdk: Any, to: Connection) -> Any:
    service, training = trainer(sdk, to)

    def loss(data: Any, logprobs: Any) -> Any:
        total = sum((0.5 * item**2).sum() for item in logprobs)
        return total, {"mine": float(total.detach())}

    data = [
        text_datum(sdk, [1, 2, 3], weights=[1.0, 0.0, 1.0]),
        text_datum(sdk, [4, 5], target_tokens=[5, 6]),
    ]
    result = training.forward_backward_custom(data, loss).result()
    service.close("success").result()
    return plain(result.metrics)


def surrogate(logprobs: Any, advantages: Any, scale: Any) -> Any:
    import torch

    loss = -(torch.exp(logprobs) * advantages).sum() * scale
    return loss, {"custom/size:mean": advantages.abs().mean(), "custom/top:sum": logprobs.max()}


def custom_loss_on_the_server(sdk: Any, to: Connection) -> Any:
    import torch

    service, training = trainer(sdk, to)
    handle = service.create_custom_loss(
        surrogate, {"logprobs": 1, "advantages": 1, "scale": 0}
    ).result()
    datum = text_datum(
        sdk,
        [1, 2],
        advantages=[1.0, -1.0],
        scale=sdk.TensorData.from_torch(torch.tensor(2.0)),
    )
    result = training.forward_backward_custom([datum], handle).result()
    service.close("success").result()
    return plain({"name": handle.name, "loss_id": handle.loss_id, "metrics": result.metrics})
