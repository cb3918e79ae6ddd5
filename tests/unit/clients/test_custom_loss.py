"""Custom losses: the gradient that is sent, what comes back, and what is refused."""

from __future__ import annotations

import asyncio
import pickle
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.unit.clients.world import MODEL, World, datum
from tinkex import Datum, ModelInput, ServiceClient
from tinkex.clients.custom_loss import LossHandle
from tinkex.clients.local_loss import LocalLoss
from tinkex.clients.session import Session
from tinkex.config import Config
from tinkex.errors import (
    InputError,
    InputTypeError,
    MissingPackageError,
    ResultError,
    UnprocessableEntityError,
)
from tinkex.testing import FakeServer, faults
from tinkex.types import ForwardBackwardOutput, SampledProvenanceSpan, TensorData

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinkex.clients.training import TrainingClient

pytestmark = pytest.mark.req("S26")


def scored(*advantages: float, weights: list[float] | None = None) -> Datum:
    ids = list(range(1, len(advantages) + 1))
    inputs: dict[str, Any] = {"target_tokens": ids, "advantages": list(advantages)}
    return Datum(ModelInput.from_ints(ids), inputs | ({"weights": weights} if weights else {}))


def quadratic(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
    """Σ a·p², whose gradient is 2·a·p."""
    parts = [
        (one.loss_fn_inputs["advantages"].to_torch() * p**2).sum()
        for one, p in zip(data, logprobs, strict=True)
    ]
    loss = torch.stack(parts).sum()
    return loss, {"first": parts[0], "count": len(data), "np": np.float64(0.5)}


def per_datum(logprobs: Any, advantages: Any) -> Any:
    loss = (advantages * logprobs**2).sum()
    return loss, {"custom/loss:sum": loss, "custom/p:mean": logprobs.mean()}


RANKS = {"logprobs": 1, "advantages": 1}


def in_world(
    scenario: Callable[[World, ServiceClient, TrainingClient], Any], **flags: Any
) -> World:
    world = World(flags)

    async def run(world: World) -> None:
        async with world.service() as service:
            training = await service.create_lora_training_client_async(MODEL, rank=4, seed=1)
            await scenario(world, service, training)

    world.run(run)
    return world


def passes(world: World) -> list[Any]:
    return [seen.body for seen in world.server.seen("forward_backward")]


def weights_of(batch: Any) -> list[np.ndarray[Any, Any]]:
    return [one.loss_fn_inputs["weights"].to_numpy() for one in batch.data]


# -- the gradient ---------------------------------------------------------------------------------


def test_the_weights_that_are_sent_are_the_negative_gradient() -> None:
    data = [scored(1.0, -2.0, 0.5), scored(3.0, 0.25)]
    seen: list[torch.Tensor] = []

    def loss_fn(batch: list[Datum], logprobs: list[torch.Tensor]) -> Any:
        seen.extend(logprobs)
        assert batch == data
        return quadratic(batch, logprobs)

    async def scenario(_: World, service: ServiceClient, training: TrainingClient) -> None:
        await (await training.forward_backward_custom_async(data, loss_fn))

    forward, backward = passes(in_world(scenario))
    assert (forward.forward_only, backward.forward_only) == (True, False)
    assert (forward.loss_fn, backward.loss_fn) == ("cross_entropy", "cross_entropy")
    for one, p, sent in zip(data, seen, weights_of(backward), strict=True):
        advantages = one.loss_fn_inputs["advantages"].to_numpy()
        np.testing.assert_allclose(sent, -2 * advantages * p.detach().numpy(), rtol=1e-6)
    assert backward.seq_id == forward.seq_id + 1


def test_both_passes_carry_targets_weights_and_spans_and_nothing_else() -> None:
    spans = [SampledProvenanceSpan(sequence_id="s", length=2)]
    data = [scored(1.0, 2.0).with_provenance(spans, spans), scored(1.0, 2.0, weights=[0.5, 1.0])]

    async def scenario(_: World, service: ServiceClient, training: TrainingClient) -> None:
        await (await training.forward_backward_custom_async(data, quadratic))

    forward, backward = passes(in_world(scenario))
    for batch in (forward, backward):
        for sent, given in zip(batch.data, data, strict=True):
            assert set(sent.loss_fn_inputs) == {"target_tokens", "weights"}
            targets = given.loss_fn_inputs["target_tokens"]
            assert sent.loss_fn_inputs["target_tokens"] == targets
            assert sent.model_input_spans == given.model_input_spans
    assert [list(w) for w in weights_of(forward)] == [[0.0, 0.0], [0.5, 1.0]]


def test_a_custom_cross_entropy_trains_like_the_built_in_one() -> None:
    data = [datum(4), datum(3, first=7)]

    def cross_entropy(batch: list[Datum], logprobs: list[torch.Tensor]) -> Any:
        return -torch.cat(logprobs).sum(), {}

    async def scenario(_: World, service: ServiceClient, training: TrainingClient) -> None:
        custom = await (await training.forward_backward_custom_async(data, cross_entropy))
        plain = await training.forward_backward(data, "cross_entropy")
        assert custom.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], rel=1e-6)
        assert custom.loss_fn_outputs == plain.loss_fn_outputs

    _, custom, plain = passes(in_world(scenario))
    assert [list(w) for w in weights_of(custom)] == [list(w) for w in weights_of(plain)]


def test_targets_with_several_tokens_per_position_get_gradients_of_that_shape() -> None:
    targets = np.arange(1, 7).reshape(3, 2)
    data = [Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": targets})]
    output = ForwardBackwardOutput(
        "x", [{"logprobs": TensorData.from_numpy(np.full((3, 2), -1.5))}], {}
    )
    local = LocalLoss(data, lambda _, logprobs: (logprobs[0][:, 0].pow(2).sum(), {}))
    assert local.forward_data()[0].loss_fn_inputs["weights"].to_numpy().tolist() == [[0, 0]] * 3
    weights = local.evaluate(output).data[0].loss_fn_inputs["weights"]
    assert weights.to_numpy().tolist() == [[3.0, 0.0]] * 3


@pytest.mark.parametrize("block", [torch.no_grad, torch.inference_mode])
def test_the_loss_is_differentiated_even_where_gradients_are_off(block: Any) -> None:
    async def scenario(_: World, service: ServiceClient, training: TrainingClient) -> None:
        with block():
            future = await training.forward_backward_custom_async([scored(1.0)], quadratic)
        assert (await future).metrics["loss:sum"] > 0

    in_world(scenario)


# -- the result -----------------------------------------------------------------------------------


def test_metrics_tell_the_loss_the_surrogate_and_what_the_user_measured() -> None:
    async def scenario(_: World, service: ServiceClient, training: TrainingClient) -> None:
        result = await (await training.forward_backward_custom_async([scored(1.0, 2.0)], quadratic))
        p = result.loss_fn_outputs[0]["logprobs"].to_numpy()
        a = np.array([1.0, 2.0])
        assert result.metrics["loss:sum"] == pytest.approx((a * p**2).sum(), rel=1e-6)
        assert result.metrics["surrogate_loss:sum"] == pytest.approx((2 * a * p**2).sum(), rel=1e-6)
        assert result.metrics["first"] == pytest.approx(result.metrics["loss:sum"])
        assert (result.metrics["count"], result.metrics["np"]) == (1.0, 0.5)
        assert all(type(value) is float for value in result.metrics.values())
        assert result.usage is not None
        assert (result.usage.prompt_tokens, result.usage.trained_tokens) == (2, 2)

    in_world(scenario)


def test_an_answer_without_a_loss_is_an_error_that_names_it() -> None:
    data = [scored(1.0)]
    output = ForwardBackwardOutput("x", [{"logprobs": TensorData([-1.0], "float32", [1])}], {})
    weighted = LocalLoss(data, quadratic).evaluate(output)
    with pytest.raises(ResultError, match="loss:sum"):
        weighted.fold(output)


@pytest.mark.req("B4")
def test_blocking_code_runs_the_loss_once_on_its_own_thread_and_gets_one_result() -> None:
    calls: list[int] = []

    def loss_fn(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
        calls.append(threading.get_ident())
        return quadratic(data, logprobs)

    with FakeServer().serve() as server:
        config = Config(base_url=server.url, api_key="tml-test")
        with ServiceClient.over(Session(config)) as service:
            training = service.create_lora_training_client(MODEL, rank=4, seed=1)
            future = training.forward_backward_custom([scored(1.0, 2.0)], loss_fn)
            first, again = future.result(), future.result()
    assert first is again
    assert first.metrics["surrogate_loss:sum"] == pytest.approx(2 * first.metrics["loss:sum"])
    assert calls == [threading.get_ident()]


@pytest.mark.req("B4")
def test_awaiting_twice_gives_the_same_object() -> None:
    calls: list[int] = []

    def loss_fn(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
        calls.append(threading.get_ident())
        return quadratic(data, logprobs)

    async def scenario(_: World, service: ServiceClient, training: TrainingClient) -> None:
        future = await training.forward_backward_custom_async([scored(1.0)], loss_fn)
        first = await future
        assert first is await future
        assert first is future.result()

    in_world(scenario)
    assert calls == [threading.get_ident()]


def test_what_the_loss_raises_is_raised_and_later_calls_go_on() -> None:
    class Mine(Exception):
        pass

    def broken(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
        raise Mine

    async def scenario(_: World, service: ServiceClient, training: TrainingClient) -> None:
        with pytest.raises(Mine):
            await training.forward_backward_custom_async([scored(1.0)], broken)
        await training.forward_backward([datum()], "cross_entropy")

    assert len(passes(in_world(scenario))) == 2


def test_cancelling_the_call_cancels_its_forward_pass() -> None:
    def never(data: list[Datum], logprobs: list[torch.Tensor]) -> Any:
        raise AssertionError

    async def scenario(world: World, service: ServiceClient, training: TrainingClient) -> None:
        world.server.faults.on("retrieve_future", faults.hang())
        task = asyncio.create_task(training.forward_backward_custom_async([scored(1.0)], never))
        await world.clock.sleep(1.0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        world.server.faults.clear()
        await training.forward_backward([datum()], "cross_entropy")

    in_world(scenario)


# -- refusals -------------------------------------------------------------------------------------


def returning(value: Any) -> Any:
    return lambda data, logprobs: value


REFUSED: list[tuple[Any, Any, str, str]] = [
    ([], quadratic, "data", "No data"),
    ("text", quadratic, "data", "list of Datum"),
    ([1], quadratic, "data[0]", "expected Datum"),
    (
        [scored(1.0), Datum(ModelInput.from_ints([1]))],
        quadratic,
        'data[1].loss_fn_inputs["target_tokens"]',
        "is missing",
    ),
    ([scored(1.0)], "loss", "loss_fn", "must be a function"),
    ([scored(1.0)], returning(None), "loss_fn", "must return a pair"),
    ([scored(1.0)], returning((1.0, {})), "loss_fn", "torch tensor, not float"),
    ([scored(1.0)], returning((torch.zeros(2), {})), "loss_fn", "one number"),
    ([scored(1.0)], returning((torch.tensor(1.0), {})), "loss_fn", "does not depend"),
    ([scored(1.0)], lambda d, p: (p[0].sum(), [1]), "loss_fn", "metrics as a dict"),
    (
        [scored(1.0)],
        lambda d, p: (p[0].sum(), {"a": "x"}),
        "loss_fn metrics['a']",
        "must be a number",
    ),
    (
        [scored(1.0)],
        lambda d, p: (p[0].sum(), {"a": torch.zeros(2)}),
        "loss_fn metrics['a']",
        "must be a number",
    ),
    (
        [scored(1.0), scored(1.0)],
        lambda d, p: (p[0].sum(), {}),
        "loss_fn",
        "does not depend on the log-probabilities of data[1]",
    ),
    (
        [scored(1.0)],
        lambda d, p: ((p[0] * float("nan")).sum(), {}),
        "loss_fn",
        "not finite in data[0]",
    ),
]


def test_every_mistake_comes_out_of_the_future_with_its_place() -> None:
    async def scenario(_: World, service: ServiceClient, training: TrainingClient) -> None:
        for data, loss_fn, path, reason in REFUSED:
            future = await training.forward_backward_custom_async(data, loss_fn)
            error = future.exception()
            assert isinstance(error, InputError), (path, reason)
            assert error.path == path
            assert reason in str(error)

    world = in_world(scenario)
    assert all(batch.forward_only for batch in passes(world))


def test_the_old_argument_warns_and_takes_one_value_only() -> None:
    async def scenario(_: World, service: ServiceClient, training: TrainingClient) -> None:
        with pytest.warns(DeprecationWarning, match="loss_type_input") as caught:
            await training.forward_backward_custom_async(
                [scored(1.0)], quadratic, loss_type_input="logprobs"
            )
        assert caught[0].filename == __file__
        other: Any = "logits"
        with (
            pytest.warns(DeprecationWarning, match="leave it out"),
            pytest.raises(InputError, match="logprobs"),
        ):
            await training.forward_backward_custom_async(
                [scored(1.0)], quadratic, loss_type_input=other
            )

    in_world(scenario)


@pytest.mark.parametrize(
    ("outputs", "reason"),
    [
        ([], "0 outputs for 1"),
        ([{}], r"lacks logprobs of data\[0\]"),
        ([{"logprobs": TensorData([-1.0, -1.0], "float32", [2])}], r"shape \(2,\)"),
    ],
)
def test_a_forward_pass_that_breaks_the_protocol_is_named(outputs: Any, reason: str) -> None:
    local = LocalLoss([scored(1.0)], quadratic)
    with pytest.raises(ResultError, match=reason):
        local.evaluate(ForwardBackwardOutput("x", outputs, {}))


def test_without_torch_the_future_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    async def scenario(_: World, service: ServiceClient, training: TrainingClient) -> None:
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "torch", None)
            future = await training.forward_backward_custom_async([scored(1.0)], quadratic)
        error = future.exception()
        assert isinstance(error, ImportError)
        assert "pip install torch" in str(error)
        copy = pickle.loads(pickle.dumps(error))
        assert isinstance(copy, MissingPackageError)
        assert (str(copy), copy.package) == (str(error), "torch")

    in_world(scenario)


# -- handles --------------------------------------------------------------------------------------


def test_a_handle_is_evaluated_datum_by_datum_and_reduced_by_suffix() -> None:
    data = [scored(1.0, 2.0), scored(3.0)]

    async def scenario(_: World, service: ServiceClient, training: TrainingClient) -> None:
        handle = await service.create_custom_loss(per_datum, RANKS)
        assert (handle.name, handle.loss_id, handle.input_names) == (
            "per_datum",
            None,
            ("advantages",),
        )
        assert handle.session_id == service.holder.session_id
        by_handle = await (await training.forward_backward_custom_async(data, handle))
        by_function = await (await training.forward_backward_custom_async(data, quadratic))
        ps = [one["logprobs"].to_numpy() for one in by_handle.loss_fn_outputs]
        assert by_handle.metrics["loss:sum"] == pytest.approx(by_function.metrics["loss:sum"])
        assert by_handle.metrics["custom/loss:sum"] == pytest.approx(by_handle.metrics["loss:sum"])
        assert by_handle.metrics["custom/p:mean"] == pytest.approx(
            np.mean([p.mean() for p in ps]), rel=1e-6
        )

    world = in_world(scenario)
    by_handle, by_function = [weights_of(one) for one in passes(world) if not one.forward_only]
    for left, right in zip(by_handle, by_function, strict=True):
        np.testing.assert_allclose(left, right, rtol=1e-6)
    assert not world.server.seen("create_custom_loss")


def test_a_handle_shows_its_inputs_and_compares_without_its_graph() -> None:
    async def scenario(_: World, service: ServiceClient, training: TrainingClient) -> None:
        handle = await service.create_custom_loss(per_datum, RANKS)
        same = LossHandle(handle.name, handle.inputs, handle.session_id, torch.nn.Module())  # type: ignore[arg-type]
        assert handle == same
        assert "graph" not in repr(handle)
        assert len(handle.key) == 64
        other = await service.create_custom_loss(per_datum, {"logprobs": 1, "advantages": 0})
        assert handle.key != other.key

    in_world(scenario)


def test_the_same_loss_twice_fails_the_second_future() -> None:
    async def scenario(_: World, service: ServiceClient, training: TrainingClient) -> None:
        first, second = (service.create_custom_loss(per_datum, RANKS) for _ in range(2))
        await first
        with pytest.raises(InputError, match="already"):
            await second

    in_world(scenario)


def test_a_bad_loss_raises_at_the_call() -> None:
    async def scenario(_: World, service: ServiceClient, training: TrainingClient) -> None:
        with pytest.raises(InputError, match="input_ranks"):
            service.create_custom_loss(per_datum, {"logprobs": 1})

    in_world(scenario)


def test_a_handle_used_wrongly_is_refused_with_its_place() -> None:
    def vector(logprobs: Any) -> Any:
        return logprobs * 2, {}

    async def scenario(world: World, service: ServiceClient, training: TrainingClient) -> None:
        handle = await service.create_custom_loss(per_datum, RANKS)
        shapeless = await service.create_custom_loss(vector, {"logprobs": 1})
        async with world.service() as other:
            foreign = await other.create_custom_loss(per_datum, RANKS)
        wide = Datum(
            ModelInput.from_ints([1, 2]),
            {"target_tokens": [1, 2], "advantages": [[1.0, 2.0], [3.0, 4.0]]},
        )
        cases: list[tuple[Datum, LossHandle, str, str]] = [
            (scored(1.0), foreign, "loss_fn", "belongs to session session-1"),
            (datum(), handle, 'data[0].loss_fn_inputs["advantages"]', "is missing"),
            (wide, handle, 'data[0].loss_fn_inputs["advantages"]', "has rank 2"),
            (scored(1.0), shapeless, "loss_fn", "one number"),
        ]
        for bad, loss, path, reason in cases:
            error = (await training.forward_backward_custom_async([bad], loss)).exception()
            assert isinstance(error, InputError)
            assert error.path == path
            assert reason in str(error)

    in_world(scenario)


def test_where_the_server_runs_losses_the_graph_is_uploaded_once() -> None:
    data = [scored(1.0, 2.0, weights=[1.0, 1.0])]

    async def scenario(_: World, service: ServiceClient, training: TrainingClient) -> None:
        handle = await service.create_custom_loss(per_datum, RANKS)
        assert handle.loss_id
        await (await training.forward_backward_custom_async(data, handle))
        error = (await training.forward_backward_custom_async([datum()], handle)).exception()
        assert isinstance(error, InputError)

    world = in_world(scenario, custom_loss_server_side=True)
    (upload,) = [seen.json for seen in world.server.seen("create_custom_loss")]
    assert (upload["type"], upload["name"], upload["custom_loss_seq_id"]) == (
        "create_custom_loss",
        "per_datum",
        0,
    )
    assert upload["inputs"] == [{"name": "logprobs", "rank": 1}, {"name": "advantages", "rank": 1}]
    assert upload["graph"]["format"] == 1
    assert upload["graph"]["nodes"][-1]["op"] == "output"
    (only,) = passes(world)
    assert (only.loss_fn, only.forward_only) == ("custom", False)
    assert set(only.loss_fn_config) == {"loss_id"}
    assert set(only.data[0].loss_fn_inputs) == {"target_tokens", "weights", "advantages"}


def test_an_upload_the_server_lost_is_sent_again_under_the_same_number() -> None:
    async def scenario(world: World, service: ServiceClient, training: TrainingClient) -> None:
        world.server.faults.on("retrieve_future", faults.lost(), times=2)
        assert (await service.create_custom_loss(per_datum, RANKS)).loss_id

    world = in_world(scenario, custom_loss_server_side=True)
    uploads = [seen.json["custom_loss_seq_id"] for seen in world.server.seen("create_custom_loss")]
    assert uploads == [0, 0, 0]


def test_an_upload_that_failed_can_be_tried_again() -> None:
    async def scenario(world: World, service: ServiceClient, training: TrainingClient) -> None:
        world.server.faults.on("create_custom_loss", faults.reply(422), times=1)
        with pytest.raises(UnprocessableEntityError):
            await service.create_custom_loss(per_datum, RANKS)
        assert (await service.create_custom_loss(per_datum, RANKS)).loss_id

    in_world(scenario, custom_loss_server_side=True)


def test_a_list_of_tuples_is_a_type_error_too() -> None:
    async def scenario(_: World, service: ServiceClient, training: TrainingClient) -> None:
        bad: Any = [(1, 2)]
        error = (await training.forward_backward_custom_async(bad, quadratic)).exception()
        assert isinstance(error, InputTypeError)
        assert isinstance(error, TypeError)

    in_world(scenario)
