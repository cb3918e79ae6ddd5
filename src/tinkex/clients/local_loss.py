"""Evaluates a custom loss in the caller's thread.

Turns a batch into log-probabilities, runs the loss on them, and turns its gradient into a batch: a
cross-entropy with the weights `-g` has the gradient `g` with respect to the log-probabilities.
Sends nothing itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from tinkex.errors import InputError, InputTypeError, ResultError
from tinkex.futures.call_results import given
from tinkex.spans import span
from tinkex.types.training import datum_list

if TYPE_CHECKING:
    import torch

    from tinkex.clients.custom_loss import CustomLossFnV1
    from tinkex.types import Datum, ForwardBackwardOutput

_LOSS = "loss:sum"
_SURROGATE_LOSS = "surrogate_loss:sum"


@dataclass(frozen=True, slots=True)
class Weighted:
    """A batch whose cross-entropy has the gradient of the loss; and what the loss was."""

    data: list[Datum]
    loss: float
    metrics: dict[str, float]
    forward: ForwardBackwardOutput

    def fold(self, backward: ForwardBackwardOutput) -> ForwardBackwardOutput:
        """The result of the whole call."""
        metrics = dict(backward.metrics)
        if _LOSS not in metrics:
            raise ResultError(f"the server's answer to forward_backward lacks the metric {_LOSS}")
        metrics[_SURROGATE_LOSS] = metrics.pop(_LOSS)
        usages = [one.usage for one in (self.forward, backward) if one.usage is not None]
        return replace(
            backward,
            metrics={**metrics, **self.metrics, _LOSS: self.loss},
            usage=sum(usages[1:], start=usages[0]) if usages else None,
        )


@dataclass(frozen=True, slots=True)
class LocalLoss:
    """A loss to be evaluated here, and its data."""

    data: list[Datum]
    loss_fn: CustomLossFnV1

    def forward_data(self) -> list[Datum]:
        """The data with nothing but targets and weights, which is all the forward pass reads."""
        import torch

        reduced: list[Datum] = []
        for datum in self.data:
            targets = datum.loss_fn_inputs["target_tokens"]
            weights = datum.loss_fn_inputs.get("weights")
            if weights is None:
                weights = torch.zeros(targets.to_numpy().shape)
            reduced.append(_with_weights(datum, weights))
        return reduced

    def evaluate(self, forward: ForwardBackwardOutput) -> Weighted:
        """Run the loss and turn its gradient into weights."""
        import torch

        # The caller may be inside a block that switches gradients off; the loss needs them.
        with (
            span("custom_loss.evaluate", datums=len(self.data)),
            torch.inference_mode(False),
            torch.enable_grad(),
        ):
            logprobs = _leaves(forward, self.data)
            loss, metrics = _pair(self.loss_fn(self.data, logprobs))
            gradients = _gradients(loss, logprobs)
        weighted = [
            _with_weights(datum, -gradient)
            for datum, gradient in zip(self.data, gradients, strict=True)
        ]
        return Weighted(weighted, float(loss.detach()), numbers(metrics), forward)


def _with_weights(datum: Datum, weights: Any) -> Datum:
    targets = datum.loss_fn_inputs["target_tokens"]
    return replace(
        datum, loss_fn_inputs=cast("Any", {"target_tokens": targets, "weights": weights})
    )


def _leaves(forward: ForwardBackwardOutput, data: list[Datum]) -> list[torch.Tensor]:
    """The log-probabilities of each datum, ready to be differentiated."""
    import torch

    outputs = forward.loss_fn_outputs
    if len(outputs) != len(data):
        raise ResultError(f"the server returned {len(outputs)} outputs for {len(data)} datums")
    leaves: list[torch.Tensor] = []
    for index, (output, datum) in enumerate(zip(outputs, data, strict=True)):
        logprobs = given(output.get("logprobs"), f"logprobs of data[{index}]", "forward")
        leaf = logprobs.to_torch().detach().clone().to(torch.float32)
        wanted = datum.loss_fn_inputs["target_tokens"].to_numpy().shape
        if leaf.shape != wanted:
            raise ResultError(
                f"the logprobs of data[{index}] have the shape {tuple(leaf.shape)}, its "
                f"target_tokens {wanted}"
            )
        leaves.append(leaf.requires_grad_())
    return leaves


def _pair(returned: Any) -> tuple[torch.Tensor, Mapping[Any, Any]]:
    import torch

    if not isinstance(returned, tuple | list) or len(cast("list[Any]", returned)) != 2:
        raise InputTypeError("must return a pair: the loss, and a dict of metrics", "loss_fn")
    loss, metrics = cast("list[Any]", returned)
    if not isinstance(loss, torch.Tensor):
        raise InputTypeError(
            f"must return its loss as a torch tensor, not {type(loss).__name__}", "loss_fn"
        )
    if loss.numel() != 1:
        raise InputError(
            f"must return one number as its loss, not the shape {tuple(loss.shape)}; sum it",
            "loss_fn",
        )
    if not isinstance(metrics, Mapping):
        raise InputTypeError(
            f"must return its metrics as a dict, not {type(metrics).__name__}", "loss_fn"
        )
    return loss, cast("Mapping[Any, Any]", metrics)


def _gradients(loss: torch.Tensor, logprobs: list[torch.Tensor]) -> list[torch.Tensor]:
    if not loss.requires_grad:
        raise InputError("its loss does not depend on the log-probabilities", "loss_fn")
    loss.backward()  # pyright: ignore[reportUnknownMemberType] -- torch's own stub
    gradients: list[torch.Tensor] = []
    for index, leaf in enumerate(logprobs):
        if leaf.grad is None:
            raise InputError(
                f"its loss does not depend on the log-probabilities of data[{index}]; leave that "
                f"datum out, or add 0 * logprobs[{index}].sum()",
                "loss_fn",
            )
        if not bool(leaf.grad.isfinite().all()):
            raise InputError(
                f"its gradient is not finite in data[{index}]; clamp what is exponentiated or "
                "divided by",
                "loss_fn",
            )
        gradients.append(leaf.grad)
    return gradients


def numbers(metrics: Mapping[Any, Any]) -> dict[str, float]:
    """Metrics as plain numbers."""
    plain: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            # Tensors of the autograd graph must be detached; numpy arrays have no `detach`.
            plain[str(name)] = float(value.detach() if hasattr(value, "detach") else value)
        except (TypeError, ValueError, RuntimeError) as error:
            raise InputTypeError(
                f"must be a number, not {type(value).__name__}", f"loss_fn metrics[{name!r}]"
            ) from error
    return plain


def datums_of(data: Any) -> list[Datum]:
    """`data` as a list of datums whose log-probabilities can be asked for."""
    datums = datum_list(data, "data")
    if not datums:
        raise InputError("No data provided; give at least one Datum", "data")
    for index, datum in enumerate(datums):
        if "target_tokens" not in datum.loss_fn_inputs:
            raise InputError(
                "is missing; log-probabilities are those of the target tokens",
                f'data[{index}].loss_fn_inputs["target_tokens"]',
            )
    return datums
