"""Uploaded losses: what they compute, and everything they cannot do."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from tests.unit.engine.training.kit import Reference, add, column, datum, gradient, op, run, trainer
from tinkex.clients.loss_graph import trace
from tinkex.engine.protocol import CustomLoss
from tinkex.engine.training.custom_loss import MAX_ELEMENTS, MAX_NODES, compile_loss
from tinkex.errors import InputError, RequestFailedError
from tinkex.types import CustomLossGraph, CustomLossInput, CustomLossNode, Datum


def _uploaded(fn, **ranks) -> CustomLoss:
    traced = trace(fn, ranks)
    return CustomLoss(inputs=traced.inputs, graph=traced.graph)


def surrogate(logprobs, old, advantages, temperature):
    ratio = torch.exp(logprobs - old)
    bounded = torch.clamp(ratio, 1 - 0.2, 1 + 0.2)
    gain = torch.minimum(ratio * advantages, bounded * advantages)
    count = logprobs.shape[0]
    bonus = (logprobs.mean() ** 2) / math.sqrt(4.0)
    best = torch.where(advantages > 0, logprobs, torch.zeros_like(logprobs)).max()
    loss = -(gain[1:] / count).sum() + temperature * bonus + 0.1 * best
    return loss, {"custom/ratio:mean": ratio.mean(), "custom/tokens:sum": ratio.detach().sum()}


def _data() -> list[Datum]:
    rng = np.random.default_rng(4)
    return [
        Datum(
            datum(n, n).model_input,
            {
                "target_tokens": datum(n, n).loss_fn_inputs["target_tokens"],
                "old": (rng.normal(size=n) - 4.5).astype(np.float32),
                "advantages": rng.normal(size=n).astype(np.float32),
                "temperature": np.array([0.3], np.float32),
            },
        )
        for n in (5, 12)
    ]


def test_a_traced_loss_gives_the_gradient_of_the_function_itself():
    made = trainer()
    add(made, "m")
    custom = _uploaded(surrogate, logprobs=1, old=1, advantages=1, temperature=0)
    data = _data()
    (result,) = run(
        made, op("m", data, "custom", custom_loss=custom, loss_fn_config={"loss_id": "x"})
    )
    reference = Reference(made, "m")
    found = [
        surrogate(
            reference.logprobs(d),
            column(d, "old"),
            column(d, "advantages"),
            column(d, "temperature"),
        )
        for d in data
    ]
    total = sum(loss.sum() for loss, _ in found)
    total.backward()
    expected = reference.flat_P.grad
    assert float((gradient(made, "m") - expected).abs().max() / expected.abs().max()) < 1e-5
    metrics = result.output.metrics
    assert metrics["loss:sum"] == pytest.approx(float(total.detach()), rel=1e-5)
    ratios = [float(m["custom/ratio:mean"].detach()) for _, m in found]
    assert metrics["custom/ratio:mean"] == pytest.approx(sum(ratios) / 2, rel=1e-5)
    sums = [float(m["custom/tokens:sum"].detach()) for _, m in found]
    assert metrics["custom/tokens:sum"] == pytest.approx(sum(sums), rel=1e-5)
    assert result.output.loss_fn_outputs[1]["logprobs"].to_numpy().shape == (12,)


def test_matrices_of_targets_work_too():
    made = trainer()
    add(made, "m")

    def distil(logprobs, weights):
        picked = torch.softmax(weights, dim=-1)
        return torch.nn.functional.softplus(-(picked * logprobs)).sum(), {}

    example = datum(7, 1, 3)
    custom = _uploaded(distil, logprobs=2, weights=2)
    run(made, op("m", [example], "custom", custom_loss=custom))
    reference = Reference(made, "m")
    distil(reference.logprobs(example), column(example, "weights"))[0].backward()
    expected = reference.flat_P.grad
    assert float((gradient(made, "m") - expected).abs().max() / expected.abs().max()) < 1e-5


def test_a_loss_that_ignores_the_logprobs_has_a_zero_gradient():
    made = trainer()
    add(made, "m")
    custom = _uploaded(lambda logprobs, weights: (weights.sum(), {}), logprobs=1, weights=1)
    (result,) = run(made, op("m", [datum(5)], "custom", custom_loss=custom))
    assert not gradient(made, "m").any()
    expected = column(datum(5), "weights").sum()
    assert result.output.metrics["loss:sum"] == pytest.approx(float(expected), rel=1e-5)


def _nodes(*calls) -> CustomLossGraph:
    """A graph of `(op, target, args)` on `p`; the last one is the loss."""
    nodes = [CustomLossNode(op="placeholder", name="p", target="logprobs")]
    for number, (kind, target, args, *kwargs) in enumerate(calls):
        nodes.append(
            CustomLossNode(
                op=kind,
                name=f"n{number}",
                target=target,
                args=args,
                kwargs=kwargs[0] if kwargs else {},
            )
        )
    result = {"tuple": [{"ref": nodes[-1].name}, {"dict": {}}]}
    nodes.append(CustomLossNode(op="output", name="output", target="output", args=[result]))
    return CustomLossGraph(nodes=nodes)


INPUTS = [CustomLossInput(name="logprobs", rank=1)]
P = {"ref": "p"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (("call_function", "os.system", ["true"]), "the function 'os.system' is not offered"),
        (("call_function", "builtins.eval", ["1"]), "is not offered"),
        (("call_function", "eval", ["1"]), "is not offered"),
        (("call_function", "torch.load", ["/etc/passwd"]), "is not offered"),
        (("call_function", "torch.ops.load_library", ["x"]), "is not offered"),
        (("call_function", "torch.randn", [3]), "is not offered"),
        (("call_function", "torch.rand_like", [P]), "is not offered"),
        (("call_function", "torch.zeros", [{"tuple": [10**9]}]), "is not offered"),
        (("call_function", "operator.attrgetter", ["x"]), "is not offered"),
        (("call_function", "operator.methodcaller", ["x"]), "is not offered"),
        (("call_function", "operator.iadd", [P, 1]), "is not offered"),
        (("call_function", "math.factorial", [10**6]), "is not offered"),
        (("call_method", "backward", [P]), "the method 'backward' is not offered"),
        (("call_method", "numpy", [P]), "is not offered"),
        (("call_method", "item", [P]), "is not offered"),
        (("call_method", "add_", [P, 1]), "is not offered"),
        (("call_method", "register_hook", [P, 1]), "is not offered"),
        (("call_method", "__class__", [P]), "is not offered"),
        (("call_method", "share_memory_", [P]), "is not offered"),
        (("call_method", "repeat", [P, 10**9]), "is not offered"),
        (("get_attr", "weight", []), "get_attr nodes are refused"),
        (("call_module", "layer", [P]), "call_module nodes are refused"),
        (("call_function", "torch.exp", [{"ref": "later"}]), "which is no earlier node"),
        (("call_function", "torch.exp", [{"ref": ["x"]}]), "which is no earlier node"),
        (("call_function", "torch.exp", [{"pickle": "x"}]), "kind 'pickle' cannot be read"),
        (("call_function", "torch.exp", [{"dtype": "__class__"}]), "cannot be read"),
        (("call_function", "torch.exp", [{"a": 1, "b": 2}]), "an object with one member"),
        (("call_function", "torch.exp", [2**70]), "does not fit into 64 bits"),
        (("call_function", "torch.exp", [P], {"out": P}), "cannot be written"),
        (("placeholder", "secrets", []), "'secrets' is not a declared input"),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else None,
)
def test_what_is_not_in_the_tables_is_refused_before_anything_runs(call, message):
    with pytest.raises(InputError, match=r"graph\.nodes\[1\]") as refused:
        compile_loss(INPUTS, _nodes(call))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("calls", "message"),
    [
        ([("call_function", "getattr", [P, "__class__"])], "attribute '__class__' is not offered"),
        ([("call_function", "getattr", [P, "grad_fn"])], "is not offered"),
        ([("call_function", "getattr", [P, "data"])], "is not offered"),
        ([("call_function", "getattr", [P, "shape", 1])], "is not offered"),
        ([("call_function", "getattr", ["text", "shape"])], "is an attribute of tensors"),
        ([("call_function", "operator.mul", ["x", 10**9])], "does not take a str"),
        ([("call_function", "operator.mul", [[1], 10**9])], "does not take a list"),
        ([("call_function", "operator.pow", [10**9, 10**9])], "operator.pow failed"),
        ([("call_function", "operator.mul", [2**62, 4])], "the number is too large"),
        ([("call_function", "math.sqrt", [P])], "use torch's own function"),
        ([("call_method", "sum", ["text"])], "sum is a method of tensors"),
        ([("call_function", "torch.gather", [P, 7, P])], "torch.gather failed"),
        ([("call_function", "torch.exp", [P])], "the loss must be one number, got [8]; use .sum()"),
        ([("call_function", "getattr", [P, "shape"])], "the loss must be one number"),
    ],
)
def test_what_goes_wrong_in_a_graph_is_the_users_error(calls, message):
    compiled = compile_loss(INPUTS, _nodes(*calls))
    with pytest.raises(InputError) as refused:
        compiled.evaluate(torch.zeros(8), {})
    assert message in str(refused.value)


def test_a_value_that_would_be_too_large_is_refused_before_it_is_made():
    length = math.isqrt(MAX_ELEMENTS) + 1
    square = _nodes(
        ("call_method", "unsqueeze", [P, 0]),
        ("call_method", "unsqueeze", [P, 1]),
        ("call_function", "operator.mul", [{"ref": "n0"}, {"ref": "n1"}]),
        ("call_method", "sum", [{"ref": "n2"}]),
    )
    with pytest.raises(InputError, match=f"would make {length**2} numbers"):
        compile_loss(INPUTS, square).evaluate(torch.zeros(length), {})
    # Indexing multiplies as well.
    columns = [CustomLossInput(name="logprobs", rank=1), CustomLossInput(name="rows", rank=2)]
    picked = _nodes(
        ("placeholder", "rows", []),
        ("call_function", "operator.getitem", [{"ref": "n0"}, {"ref": "n0"}]),
        ("call_method", "sum", [{"ref": "n1"}]),
    )
    rows = np.zeros((300, 300), np.int64)
    with pytest.raises(InputError, match="would make 27000000 numbers"):
        compile_loss(columns, picked).evaluate(torch.zeros(300), {"rows": rows})


def test_masks_select():
    graph = _nodes(
        ("call_function", "operator.gt", [P, 1.5]),
        ("call_function", "operator.getitem", [P, {"ref": "n0"}]),
        ("call_method", "sum", [{"ref": "n1"}]),
    )
    loss, _ = compile_loss(INPUTS, graph).evaluate(torch.tensor([1.0, 2.0, 3.0]), {})
    assert float(loss) == 5.0


def test_endless_and_tangled_graphs_are_refused():
    many = _nodes(*[("call_function", "torch.exp", [P])] * (MAX_NODES + 1))
    with pytest.raises(InputError, match=f"{MAX_NODES} are allowed"):
        compile_loss(INPUTS, many)
    deep: list = [P]
    for _ in range(20):
        deep = [deep]
    with pytest.raises(InputError, match="nested too deeply"):
        compile_loss(INPUTS, _nodes(("call_function", "torch.cat", [deep])))
    twice = _nodes(("call_function", "torch.exp", [P]), ("call_function", "torch.exp", [P]))
    nodes = [*twice.nodes[:2], twice.nodes[2].model_copy(update={"name": "n0"}), twice.nodes[3]]
    with pytest.raises(InputError, match="'n0' is not a new name"):
        compile_loss(INPUTS, CustomLossGraph(nodes=nodes))
    with pytest.raises(InputError, match="must end with an output node"):
        compile_loss(INPUTS, CustomLossGraph(nodes=twice.nodes[:2]))


@pytest.mark.parametrize(
    "result",
    [
        [],
        [{"ref": "p"}],
        [{"tuple": [{"ref": "p"}]}],
        [{"tuple": [1.0, {"dict": {}}]}],
        [{"tuple": [{"ref": "p"}, {"dict": [1]}]}],
        [{"tuple": [{"ref": "p"}, {}]}],
        [{"tuple": [{"ref": "p"}, {"dict": {"loss": {"ref": "p"}}}]}],
        [{"tuple": [{"ref": "p"}, {"dict": {"custom/x:sum": 3}}]}],
    ],
)
def test_an_output_that_is_not_a_loss_and_metrics_is_refused(result):
    nodes = [
        CustomLossNode(op="placeholder", name="p", target="logprobs"),
        CustomLossNode(op="output", name="output", target="output", args=result),
    ]
    with pytest.raises(InputError, match=r"graph\.nodes\[1\]"):
        compile_loss(INPUTS, CustomLossGraph(nodes=nodes))


def test_a_failing_graph_names_its_datum_input_and_leaves_the_others_alone():
    made = trainer()
    add(made, "m")
    add(made, "other")
    custom = _uploaded(lambda logprobs, extra: ((logprobs * extra).sum(), {}), logprobs=1, extra=1)
    plain = datum(5)
    short = Datum(plain.model_input, {**plain.loss_fn_inputs, "extra": np.zeros(3)})
    endless = Datum(plain.model_input, {**plain.loss_fn_inputs, "extra": np.full(5, np.inf)})
    answers = made.train(
        [
            op("m", [plain], "custom", custom_loss=custom),
            op("m", [short], "custom", custom_loss=custom),
            op("m", [endless], "custom", custom_loss=custom),
            op("m", [datum(5, 1, 3)], "custom", custom_loss=custom),
            op("other", [plain]),
        ]
    )
    assert [isinstance(answer, RequestFailedError) for answer in answers] == [True] * 4 + [False]
    assert 'data[0].loss_fn_inputs["extra"]: is missing' in str(answers[0])
    assert 'data[0].loss_fn_inputs["extra"]: has shape [3]; expected [5]' in str(answers[1])
    assert "not finite" in str(answers[2])
    assert "made for logprobs of rank 1" in str(answers[3])
    assert made.adapters["m"].gradient_P is None
    assert made.adapters["other"].gradient_P is not None
