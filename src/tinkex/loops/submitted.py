"""A step on its way: the pass and the optimizer step that were submitted, and taking them back."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinkex.clients.training import TrainingClient
    from tinkex.types import AdamParams, Datum, LossFnType


class Submitted:
    """A forward-backward pass and the optimizer step behind it."""

    def __init__(
        self,
        training: TrainingClient,
        data: Sequence[Datum],
        loss_fn: LossFnType,
        adam: AdamParams,
    ) -> None:
        self._training = training
        self._adam = adam
        self.passed = training.forward_backward(data, loss_fn)
        # Mutable: submitted again when only this half could be withdrawn.
        self.stepped = training.optim_step(adam)

    def withdraw(self) -> bool:
        """Take the step back; False when the server has begun it, so that it must be finished."""
        # The optimizer step goes first: without its pass it would apply gradients of nothing,
        # while a pass that runs without its optimizer step can still get one.
        if not self._training.withdraw(self.stepped):
            return False
        if self._training.withdraw(self.passed):
            return True
        self.stepped = self._training.optim_step(self._adam)
        return False
