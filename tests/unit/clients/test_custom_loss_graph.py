"""Tracing: what can run elsewhere is written down exactly, and the rest is refused."""

from __future__ import annotations

import inspect
import math
import operator
import sys
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tinkex.clients.loss_graph import encode_argument, trace
from tinkex.errors import InputError, MissingPackageError
from tinkex.wire import json_codec

pytestmark = pytest.mark.req("S26")


def node_of(fn: Any, target: str, ranks: dict[str, int] | None = None) -> Any:
    """The first node of the traced `fn` with this target."""
    traced = trace(fn, ranks or {"logprobs": 1})
    return next(node for node in traced.graph.nodes if node.target == target)


def importance(logprobs: Any, old: Any, advantages: Any) -> Any:
    ratio = torch.exp(logprobs - old)
    return -(ratio * advantages).sum(), {"custom/ratio:mean": ratio.mean()}


RANKS = {"logprobs": 1, "old": 1, "advantages": 1}


def test_a_loss_becomes_nodes_in_the_order_of_execution() -> None:
    traced = trace(importance, RANKS)
    assert traced.name == "importance"
    assert [(one.name, one.rank) for one in traced.inputs] == list(RANKS.items())
    assert traced.graph.format == 1
    assert [(node.op, node.name, node.target) for node in traced.graph.nodes] == [
        ("placeholder", "logprobs", "logprobs"),
        ("placeholder", "old", "old"),
        ("placeholder", "advantages", "advantages"),
        ("call_function", "sub", "operator.sub"),
        ("call_function", "exp", "torch.exp"),
        ("call_function", "mul", "operator.mul"),
        ("call_method", "sum_1", "sum"),
        ("call_function", "neg", "operator.neg"),
        ("call_method", "mean", "mean"),
        ("output", "output", "output"),
    ]
    assert traced.graph.nodes[3].args == [{"ref": "logprobs"}, {"ref": "old"}]
    assert traced.graph.nodes[-1].args == [
        {"tuple": [{"ref": "neg"}, {"dict": {"custom/ratio:mean": {"ref": "mean"}}}]}
    ]


def test_what_was_traced_computes_what_was_written() -> None:
    inputs = [torch.tensor([-1.0, -2.0]), torch.tensor([-1.5, -1.5]), torch.tensor([1.0, -1.0])]
    loss, metrics = trace(importance, RANKS).module(*inputs)
    expected_loss, expected = importance(*inputs)
    assert torch.equal(loss, expected_loss)
    assert torch.equal(metrics["custom/ratio:mean"], expected["custom/ratio:mean"])


def test_a_graph_is_json_whose_nulls_stay() -> None:
    def loss(logprobs: Any) -> Any:
        return torch.clamp(logprobs, None, 2.0).sum(dim=None), {}

    body = json_codec.encode(trace(loss, {"logprobs": 1}).graph)
    assert b'"args":[{"ref":"logprobs"},null,2.0]' in body
    assert b'"kwargs":{"dim":null}' in body


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (None, None),
        (True, True),
        (3, 3),
        (-2.5, -2.5),
        ("reflect", "reflect"),
        ([1, [2.0]], [1, [2.0]]),
        ((1, (2,)), {"tuple": [1, {"tuple": [2]}]}),
        ({"a": {"b": (1,)}}, {"dict": {"a": {"dict": {"b": {"tuple": [1]}}}}}),
        (slice(None, 3, None), {"slice": [None, 3, None]}),
        (slice(1, (2,), -1), {"slice": [1, {"tuple": [2]}, -1]}),
        (..., {"ellipsis": True}),
        (float("inf"), {"float": "inf"}),
        (float("-inf"), {"float": "-inf"}),
        (float("nan"), {"float": "nan"}),
        (torch.float32, {"dtype": "float32"}),
        (torch.bfloat16, {"dtype": "bfloat16"}),
        (torch.device("cpu"), {"device": "cpu"}),
        (torch.device("cuda:1"), {"device": "cuda:1"}),
        (torch.strided, {"layout": "strided"}),
        (torch.contiguous_format, {"memory_format": "contiguous_format"}),
        (torch.Size([2, 3]), {"tuple": [2, 3]}),
    ],
)
def test_every_kind_of_argument_has_its_form(value: Any, encoded: Any) -> None:
    assert encode_argument(value) == encoded


@pytest.mark.parametrize(
    ("value", "named"),
    [({1: 2}, "the key 1"), (1j, "complex"), (b"x", "bytes"), (object(), "object"), ({3}, "set")],
)
def test_an_argument_without_a_form_is_refused(value: Any, named: str) -> None:
    with pytest.raises(InputError, match=named):
        encode_argument(value)


def _nested(logprobs: Any) -> Any:
    first = logprobs[..., 0]
    rows = logprobs[1:, :2]
    both = torch.cat([rows, rows], dim=0).to(torch.float32)
    return (first.sum() + both.sum()), {}


def test_arguments_of_real_graphs_are_encoded_in_place() -> None:
    index = node_of(_nested, "operator.getitem", {"logprobs": 2})
    assert index.args == [{"ref": "logprobs"}, {"tuple": [{"ellipsis": True}, 0]}]
    joined = node_of(_nested, "torch.cat", {"logprobs": 2})
    assert joined.args == [[{"ref": "getitem_1"}, {"ref": "getitem_1"}]]
    assert joined.kwargs == {"dim": 0}
    moved = node_of(_nested, "to", {"logprobs": 2})
    assert moved.args == [{"ref": "cat"}, {"dtype": "float32"}]


@pytest.mark.parametrize(
    ("expression", "target"),
    [
        (lambda x: torch.exp(x), "torch.exp"),
        (lambda x: torch.where(x > 0, x, -x), "torch.where"),
        (lambda x: torch.logsumexp(x, dim=0), "torch.logsumexp"),
        (lambda x: torch.minimum(x, x * 2), "torch.minimum"),
        (lambda x: torch.clamp(x, -1.0, 1.0), "torch.clamp"),
        (lambda x: F.relu(x), "torch.nn.functional.relu"),
        (lambda x: F.softplus(x), "torch._C._nn.softplus"),
        (lambda x: x * math.exp(1.0), "operator.mul"),
        (lambda x: operator.pow(x, 2), "operator.pow"),
        (lambda x: x[:-1] - x[1:], "operator.getitem"),
        (lambda x: x.sum() / x.shape[0], "getattr"),
        (lambda x: x.detach() * x, "detach"),
        (lambda x: x.cumsum(dim=0), "cumsum"),
        (lambda x: x @ x, "operator.matmul"),
        (lambda x: x.masked_fill(x > 0, float("-inf")), "masked_fill"),
    ],
)
def test_what_losses_are_made_of_can_be_traced(expression: Any, target: str) -> None:
    def loss(logprobs: Any) -> Any:
        return expression(logprobs).sum(), {}

    assert node_of(loss, target).target == target


def test_an_input_whose_name_torch_reserves_keeps_its_name_as_target() -> None:
    def loss(logprobs: Any, input: Any) -> Any:
        return (logprobs * input).sum(), {}

    placeholder = trace(loss, {"logprobs": 1, "input": 0}).graph.nodes[1]
    assert placeholder.target == "input"


# -- refusals -------------------------------------------------------------------------------------


def sixteen() -> Any:
    names = ", ".join(f"x{i}" for i in range(16))
    return eval(f"lambda logprobs, {names}: (logprobs.sum(), {{}})")


SIGNATURES: list[tuple[Any, dict[str, Any], str, str]] = [
    (lambda: None, {}, "fn", "first parameter must be `logprobs`"),
    (lambda x, logprobs: None, {}, "fn", "first parameter must be `logprobs`"),
    (sixteen(), {}, "fn", "has 17 parameters"),
    (lambda logprobs, *rest: None, {}, "fn(rest)", "positional"),
    (lambda logprobs, **rest: None, {}, "fn(rest)", "positional"),
    (lambda logprobs, *, scale: None, {}, "fn(scale)", "positional"),
    (lambda logprobs, scale=1.0: None, {}, "fn(scale)", "default"),
    (lambda logprobs, Scale: None, {}, "fn(Scale)", "lower-case"),
    (lambda logprobs, scale: None, {"logprobs": 1}, "input_ranks", "logprobs, scale"),
    (lambda logprobs: None, {"logprobs": 1, "x": 1}, "input_ranks", "logprobs"),
    (lambda logprobs: None, {"logprobs": 0}, 'input_ranks["logprobs"]', "1 or 2"),
    (lambda logprobs: None, {"logprobs": 3}, 'input_ranks["logprobs"]', "1 or 2"),
    (lambda logprobs: None, {"logprobs": True}, 'input_ranks["logprobs"]', "not True"),
    (lambda logprobs, a: None, {"logprobs": 1, "a": "1"}, 'input_ranks["a"]', "0 or 1 or 2"),
    ("not a function", {"logprobs": 1}, "fn", "must be a function"),
    (dict, {"logprobs": 1}, "fn", "fn"),
]


@pytest.mark.parametrize(("fn", "ranks", "path", "reason"), SIGNATURES)
def test_a_bad_signature_is_refused_with_its_place(
    fn: Any, ranks: dict[str, Any], path: str, reason: str
) -> None:
    with pytest.raises(InputError) as caught:
        trace(fn, ranks)
    assert caught.value.path == path
    assert reason in str(caught.value)


def branching(logprobs: Any) -> Any:
    if logprobs.sum() > 0:
        return logprobs.sum(), {}
    return -logprobs.sum(), {}


def looping(logprobs: Any) -> Any:
    return sum(value for value in logprobs), {}


def backward(logprobs: Any) -> Any:
    loss = logprobs.sum()
    loss.backward()
    return loss, {}


def leaving(name: str) -> Any:
    def loss(logprobs: Any) -> Any:
        return logprobs.sum() + getattr(logprobs, name)(), {}

    return loss


def unknown_method(logprobs: Any) -> Any:
    return logprobs.summarize(), {}


def module(logprobs: Any) -> Any:
    return torch.nn.Softplus()(logprobs).sum(), {}


CAPTURED = torch.tensor([1.0, 2.0])


def captured(logprobs: Any) -> Any:
    return (logprobs * CAPTURED).sum(), {}


def foreign(logprobs: Any) -> Any:
    return np.exp(logprobs).sum(), {}


BODIES: list[tuple[Any, str]] = [
    (branching, "torch.where"),
    (looping, "must not branch or loop"),
    (lambda logprobs: (float(logprobs.sum()), {}), "cannot trace"),
    (backward, "calls backward"),
    (leaving("item"), r"calls item\(\)"),
    (leaving("numpy"), r"calls numpy\(\)"),
    (leaving("tolist"), r"calls tolist\(\)"),
    (unknown_method, "torch.Tensor does not have"),
    (module, "cannot trace"),
    (captured, "captures a tensor"),
    (foreign, "fn"),
    (lambda logprobs: 1 / 0, "division by zero"),
    (lambda logprobs: logprobs.sum(), "must return a pair"),
    (lambda logprobs: (logprobs.sum(), {}, {}), "must return a pair"),
    (lambda logprobs: (1.0, {}), "computed from its inputs"),
    (lambda logprobs: (logprobs.sum(), [logprobs.sum()]), "metrics as a dict"),
    (lambda logprobs: (logprobs.sum(), {"custom/x:sum": 1.0}), "must be a tensor"),
]


@pytest.mark.parametrize(("fn", "reason"), BODIES)
def test_a_body_that_cannot_run_elsewhere_is_refused(fn: Any, reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        trace(fn, {"logprobs": 1})


@pytest.mark.parametrize(
    "name",
    [
        "x",
        "loss:sum",
        "custom/x",
        "custom/x:max",
        "custom/X:sum",
        "custom/:sum",
        "custom/" + "x" * 65 + ":sum",
    ],
)
def test_a_metric_with_a_bad_name_is_refused(name: str) -> None:
    with pytest.raises(InputError, match="must be named custom/"):
        trace(lambda logprobs: (logprobs.sum(), {name: logprobs.sum()}), {"logprobs": 1})


@pytest.mark.parametrize(
    "name", ["custom/x:sum", "custom/a_b.c/d-9:mean", f"custom/{'x' * 64}:sum"]
)
def test_a_metric_with_a_good_name_is_taken(name: str) -> None:
    trace(lambda logprobs: (logprobs.sum(), {name: logprobs.sum()}), {"logprobs": 1})


def test_a_module_inside_a_module_is_refused() -> None:
    class Loss(torch.nn.Module):
        __signature__ = inspect.signature(lambda logprobs: None)

        def __init__(self) -> None:
            super().__init__()
            self.soft = torch.nn.Softplus()

        def forward(self, logprobs: Any) -> Any:
            return self.soft(logprobs).sum(), {}

    with pytest.raises(InputError, match=r"torch\.nn\.functional"):
        trace(Loss(), {"logprobs": 1})


def test_without_torch_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match="pip install torch") as caught:
        trace(importance, RANKS)
    assert isinstance(caught.value, MissingPackageError)
