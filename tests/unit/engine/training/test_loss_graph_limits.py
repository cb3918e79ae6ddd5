"""Uploaded losses are bounded: in values, in memory, in work, and in what they can break."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch

from tests.patience import PATIENCE_S
from tinkex.engine.training.custom_loss import MAX_ELEMENTS, MAX_TOTAL, STEP_WORK, compile_loss
from tinkex.errors import InputError
from tinkex.types import CustomLossGraph, CustomLossInput, CustomLossNode

INPUTS = [CustomLossInput(name="logprobs", rank=1)]
P = {"ref": "p"}


def ref(number: int) -> dict[str, str]:
    return {"ref": f"n{number}"}


def graph(*calls: tuple) -> CustomLossGraph:
    """`(target, args, kwargs?)` on `p`; the last one is the loss."""
    nodes = [CustomLossNode(op="placeholder", name="p", target="logprobs")]
    for number, (target, args, *kwargs) in enumerate(calls):
        kind = "call_function" if "." in target or target == "getattr" else "call_method"
        options = kwargs[0] if kwargs else {}
        nodes.append(
            CustomLossNode(op=kind, name=f"n{number}", target=target, args=args, kwargs=options)
        )
    result = {"tuple": [{"ref": nodes[-1].name}, {"dict": {}}]}
    nodes.append(CustomLossNode(op="output", name="output", target="output", args=[result]))
    return CustomLossGraph(nodes=nodes)


def refusal(made: CustomLossGraph, length: int = 8) -> str:
    with pytest.raises(InputError) as refused:
        compile_loss(INPUTS, made).evaluate(torch.zeros(length), {})
    return str(refused.value)


def outer(first: int) -> list[tuple]:
    """Two calls that make rows and columns of `p`; together they are its square."""
    return [("unsqueeze", [P, 0]), ("unsqueeze", [P, 1])]


@pytest.mark.parametrize(
    "name", ["torch.ones", "torch.outer", "torch.einsum", "torch.matmul", "torch.full", "torch.eye"]
)
def test_what_only_makes_large_values_is_not_offered(name: str):
    with pytest.raises(InputError, match="is not offered"):
        compile_loss(INPUTS, graph((name, [{"tuple": [10**9]}])))


def test_doubling_by_cat_ends_at_the_largest_value():
    doubled = [("torch.cat", [[P, P]])]
    doubled += [("torch.cat", [[ref(i), ref(i)]]) for i in range(40)]
    assert f"a value of a loss may have {MAX_ELEMENTS}" in refusal(graph(*doubled))


def test_stacking_a_list_of_many_references_ends_there_too():
    assert "would make" in refusal(graph(("torch.stack", [[P] * 5000])), 4000)


def test_a_selection_by_a_broadcast_mask_is_sized_before_it_is_made():
    # masked_select has no size before it runs; its arguments broadcast to 2**26 places.
    length = 2**13
    calls = [
        *outer(0),
        ("torch.gt", [ref(1), -1.0]),
        ("torch.masked_select", [ref(0), ref(2)]),
        ("sum", [ref(3)]),
    ]
    assert f"would make {2 * length**2} numbers" in refusal(graph(*calls), length)


def test_the_places_of_many_dimensions_are_counted_for_each_dimension():
    shape = [2] * 12 + [1] * 40
    calls = [("view", [P, *shape]), ("torch.eq", [ref(0), 0.0]), ("torch.nonzero", [ref(1)])]
    assert "must be one number" in refusal(graph(*calls), 2**12)
    large = [("view", [P, *([2] * 20), *([1] * 40)]), ("torch.nonzero", [ref(0)])]
    assert f"would make {2**20 * 60} numbers" in refusal(graph(*large), 2**20)


def test_many_values_that_fit_one_by_one_do_not_fit_together():
    square = [*outer(0), ("operator.add", [ref(0), ref(1)])]
    square += [("torch.exp", [ref(2)])] * 20
    assert f"more than {MAX_TOTAL} numbers" in refusal(graph(*square), 2**12 - 1)


def test_work_that_leaves_nothing_large_behind_is_counted():
    # Every sum is one number; reading its argument a thousand times is not free.
    square = [*outer(0), ("operator.add", [ref(0), ref(1)])]
    square += [("sum", [ref(2)])] * 900
    assert "is too much work" in refusal(graph(*square), 2**12 - 1)


def test_work_is_counted_over_all_data_of_an_operation_and_sorting_costs_more():
    compiled = compile_loss(INPUTS, graph(("torch.exp", [P]), ("sum", [ref(0)])))
    for _ in range(3):
        compiled.evaluate(torch.zeros(1000), {})
    assert compiled.work.spent == 3 * (4 * STEP_WORK + 3 * 1000 + 1)
    again = compile_loss(INPUTS, graph(("sort", [P]), ("operator.getitem", [ref(0), 0])))
    with pytest.raises(InputError):
        again.evaluate(torch.zeros(1000), {})
    assert again.work.spent == 4 * STEP_WORK + 16 * 3000 + 3000


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("torch.diff", [P, 10**6]), "n may be 8 at most"),
        (("norm", [P, "nuc"]), "norm p='nuc' is not offered"),
        (("torch.norm", [P], {"p": "nuc"}), "norm p='nuc' is not offered"),
        (("torch.nn.functional.relu", [P, True]), "cannot be changed in place"),
        (("torch.nn.functional.elu", [P], {"inplace": True}), "cannot be changed in place"),
        (("torch.nn.functional.hardtanh", [P, 0, 1, True]), "cannot be changed in place"),
    ],
)
def test_options_that_take_for_ever_or_change_their_argument_are_refused(call: tuple, message: str):
    assert message in refusal(graph(call))


def test_ordinary_options_still_work():
    calls = [
        ("torch.nn.functional.relu", [P], {"inplace": False}),
        ("torch.diff", [ref(0), 1]),
        ("norm", [ref(1)]),
        ("torch.div", [ref(2), 2], {"rounding_mode": "trunc"}),
        ("torch.norm", [ref(3), 2, 0]),
    ]
    loss, _ = compile_loss(INPUTS, graph(*calls)).evaluate(torch.arange(8.0), {})
    assert float(loss) == 1.0


def test_an_argument_of_a_million_values_is_refused_before_it_is_read():
    with pytest.raises(InputError, match="arguments may have 20000 values"):
        compile_loss(INPUTS, graph(("torch.cat", [[0] * 10**6])))
    with pytest.raises(InputError, match="arguments may have 20000 values"):
        compile_loss(INPUTS, graph(*[("torch.cat", [[P] * 200])] * 150))


def test_dividing_the_smallest_number_by_minus_one_does_not_end_the_process():
    """Truncating division of whole numbers stops the processor; run where only a child dies."""
    script = (
        "import numpy as np, torch\n"
        "from tests.unit.engine.training.test_loss_graph_limits import smallest_by_minus_one\n"
        "smallest_by_minus_one()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "rounding_mode='trunc' needs floats" in done.stdout


def smallest_by_minus_one() -> None:
    inputs = [*INPUTS, CustomLossInput(name="n", rank=1)]
    made = graph(("torch.div", [{"ref": "n"}, -1], {"rounding_mode": "trunc"}), ("sum", [ref(0)]))
    nodes = [CustomLossNode(op="placeholder", name="n", target="n"), *made.nodes]
    compiled = compile_loss(inputs, CustomLossGraph(nodes=nodes))
    try:
        compiled.evaluate(torch.zeros(8), {"n": np.full(8, -(2**63))})
    except InputError as error:
        print(error)  # noqa: T201 - read by the test
