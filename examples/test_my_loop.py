"""How to test a training loop of your own, without a server.

    pytest examples/test_my_loop.py

The fixtures `tinkex_server` and `tinkex_service` come with tinkex; there is nothing to set up.
"""

from __future__ import annotations

import pytest

import tinkex
from tinkex import AdamParams, Datum, ModelInput, ServiceClient
from tinkex.testing import FakeServer, faults


def my_loop(service: ServiceClient, batches: list[list[Datum]], save_every: int = 2) -> list[str]:
    """The program under test: trains, and saves now and then."""
    training = service.create_lora_training_client("tinkex/tiny", rank=8)
    saved: list[str] = []
    for number, batch in enumerate(batches, start=1):
        training.forward_backward(batch, "cross_entropy").result()
        training.optim_step(AdamParams(learning_rate=0.1)).result()
        if number % save_every == 0:
            saved.append(training.save_state(f"step-{number}").result().path)
    return saved


def batch(text: str = "to be tested") -> list[Datum]:
    tokens = list(text.encode())
    return [
        Datum(
            model_input=ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={"target_tokens": tokens[1:]},
        )
    ]


def test_it_saves_every_second_step(tinkex_service: ServiceClient):
    saved = my_loop(tinkex_service, [batch()] * 5)
    assert [path.rsplit("/", 1)[-1] for path in saved] == ["step-2", "step-4"]


def test_it_steps_once_per_batch(tinkex_server: FakeServer, tinkex_service: ServiceClient):
    my_loop(tinkex_service, [batch()] * 3)
    assert len(tinkex_server.seen("forward_backward")) == 3
    rates = [seen.json["adam_params"]["learning_rate"] for seen in tinkex_server.seen("optim_step")]
    assert rates == [0.1, 0.1, 0.1]


def test_a_busy_server_does_not_cost_a_step(
    tinkex_server: FakeServer, tinkex_service: ServiceClient
):
    tinkex_server.faults.on("forward_backward", faults.rate_limit("retry-after-ms", 0.01), times=2)
    saved = my_loop(tinkex_service, [batch()] * 2)
    assert [fault.name for fault in tinkex_server.faults.fired] == ["rate_limit", "rate_limit"]
    assert len(saved) == 1


def test_a_bad_batch_ends_the_loop_before_anything_is_sent(
    tinkex_server: FakeServer, tinkex_service: ServiceClient
):
    bad = [Datum(ModelInput.from_ints([1, 2, 3]), {"target_tokens": [1, 2]})]
    with pytest.raises(tinkex.InputError) as caught:
        my_loop(tinkex_service, [bad])
    assert caught.value.path == 'data[0].loss_fn_inputs["target_tokens"]'
    assert tinkex_server.seen("forward_backward") == []
