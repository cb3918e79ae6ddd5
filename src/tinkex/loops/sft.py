"""Supervised fine-tuning: the loss of a step is the mean over its trained tokens."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.chat.renderer import Renderer
from tinkex.data import render_all
from tinkex.loops.batches import fingerprint, loss_of, tokens_of, trained_weight, weighted
from tinkex.loops.dataset import FileJob
from tinkex.loops.schedule import batch
from tinkex.loops.training_loop import PreparedStep, Submission
from tinkex.tokenizers import tokenizer_for

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinkex.chat.examples import Rendered
    from tinkex.clients.service import ServiceClient
    from tinkex.clients.training import TrainingClient
    from tinkex.clock import Clock
    from tinkex.loops.run_settings import SftSettings
    from tinkex.loops.training_loop import RunContext
    from tinkex.types import AdamParams, Datum, LossFnType


class SftJob(FileJob["SftSettings", "Rendered"]):
    """Examples to train on. The constructor reads the files and raises DataError for bad ones."""

    kind = "sft"
    epochs = 3
    render = staticmethod(render_all)

    def prepare(self, service: ServiceClient, clock: Clock) -> SftRecipe:
        """Render all examples; raises DataError with every line that cannot be rendered."""
        tokenizer = tokenizer_for(service, self.settings.base_model)
        renderer = Renderer.of(tokenizer, train_on=self.settings.train_on, clock=clock)
        return SftRecipe(self.settings, *self.rendered(renderer))


class SftRecipe:
    """Cross-entropy over the trained tokens."""

    ahead = True
    higher_is_better = False

    def __init__(
        self, settings: SftSettings, train: list[Rendered], held_out: list[Rendered]
    ) -> None:
        self._settings = settings
        self._train = train
        self._held_out = [weighted(one, 1.0) for one in held_out]
        self._held_out_weight = trained_weight(held_out)
        self.judged_by = "eval_loss" if held_out else None
        self.rendered = fingerprint((train, held_out))

    def start(self, run: RunContext) -> None:
        """Set the model to train."""
        self._training = run.training

    def begin(self, step: int) -> PreparedStep:
        """A step needs no preparation."""
        return PreparedStep(lambda adam: self._submit(step, adam))

    def _submit(self, step: int, adam: AdamParams) -> Submission:
        """Submit a batch. Its weights sum to 1, so that gradients do not grow with its size."""
        size, seed = self._settings.batch_size, self._settings.seed
        examples = [self._train[i] for i in batch(step, size, len(self._train), seed)]
        factor = 1.0 / trained_weight(examples)
        data = [weighted(one, factor) for one in examples]
        sent = SubmittedStep(self._training, data, "cross_entropy", adam)

        def wait() -> dict[str, float]:
            loss = loss_of(sent.passed.result())
            sent.stepped.result()
            return {"loss": loss, "tokens": tokens_of(examples)}

        return Submission(wait, sent.stepped, sent.withdraw)

    def evaluate(self) -> Submission:
        """Submit the held-out examples."""
        passed = self._training.forward(self._held_out, "cross_entropy")
        return Submission(
            lambda: {"eval_loss": loss_of(passed.result()) / self._held_out_weight}, passed
        )


class SubmittedStep:
    """A forward-backward pass and the optimizer step behind it, both submitted."""

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
        # Mutable: submitted again when only the optimizer step could be withdrawn.
        self.stepped = training.optim_step(adam)

    def withdraw(self) -> bool:
        """Withdraw the step; False when the server has begun it, so that it must be finished."""
        # The optimizer step is withdrawn first: without its pass it would apply no gradients,
        # while a pass that runs without its optimizer step can still get one.
        if not self._training.withdraw(self.stepped):
            return False
        if self._training.withdraw(self.passed):
            return True
        self.stepped = self._training.optim_step(self._adam)
        return False
