"""Supervised fine-tuning: the loss of a step is the mean over its trained tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinkex.chat.renderer import Renderer
from tinkex.data.rendering import render_all
from tinkex.loops.batches import (
    fingerprint,
    loss_of,
    tokens_of,
    trained_weight,
    weighted,
)
from tinkex.loops.dataset import Source
from tinkex.loops.loop import Begun, Pending
from tinkex.loops.schedule import batch
from tinkex.loops.submitted import Submitted
from tinkex.tokenizers import tokenizer_for

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tinkex.chat.examples import Rendered
    from tinkex.clients.service import ServiceClient
    from tinkex.clients.training import TrainingClient
    from tinkex.clock import Clock
    from tinkex.loops.settings import SftSettings
    from tinkex.types import AdamParams

_EPOCHS = 3


class SftJob:
    """Examples to train on; made, it has read its files. Raises DataError for bad ones."""

    def __init__(self, settings: SftSettings, data: Path, eval_data: Path | None = None) -> None:
        self.settings = settings
        self._source = Source(settings, "sft", render_all, data, eval_data, epochs=_EPOCHS)
        self.files, self.steps = self._source.files, self._source.steps
        self.material, self.chat = self._source.material, self._source.chat

    def prepare(self, service: ServiceClient, clock: Clock) -> PreparedSft:
        """Render everything; raises DataError with every line that cannot be."""
        tokenizer = tokenizer_for(service, self.settings.base_model)
        renderer = Renderer.of(tokenizer, train_on=self.settings.train_on, clock=clock)
        return PreparedSft(self.settings, *self._source.rendered(renderer))


@dataclass(frozen=True, slots=True)
class PreparedSft:
    """Examples as tokens."""

    settings: SftSettings
    train: list[Rendered]
    held_out: list[Rendered]
    higher_is_better = False

    @property
    def judged_by(self) -> str | None:
        return "eval_loss" if self.held_out else None

    @property
    def rendered(self) -> str:
        return fingerprint((self.train, self.held_out))

    def recipe(
        self,
        service: ServiceClient,
        training: TrainingClient,
        folder: Path,
        note: Callable[[str], None],
    ) -> SftRecipe:
        return SftRecipe(self, training)


class SftRecipe:
    """Cross-entropy over the tokens that are trained."""

    ahead = True

    def __init__(self, prepared: PreparedSft, training: TrainingClient) -> None:
        self._train = prepared.train
        self._settings = prepared.settings
        self._training = training
        self._held_out = [weighted(one, 1.0) for one in prepared.held_out]
        self._held_out_weight = trained_weight(prepared.held_out)

    def begin(self, step: int) -> Begun:
        """There is nothing to know before a step."""
        return Begun(lambda adam: self._submit(step, adam))

    def _submit(self, step: int, adam: AdamParams) -> Pending:
        """Submit a batch. Its weights add up to 1, so that gradients do not grow with it."""
        size, seed = self._settings.batch_size, self._settings.seed
        examples = [self._train[i] for i in batch(step, size, len(self._train), seed)]
        factor = 1.0 / trained_weight(examples)
        data = [weighted(one, factor) for one in examples]
        sent = Submitted(self._training, data, "cross_entropy", adam)

        def wait() -> dict[str, float]:
            loss = loss_of(sent.passed.result())
            sent.stepped.result()
            return {"loss": loss, "tokens": tokens_of(examples)}

        return Pending(wait, sent.stepped, sent.withdraw)

    def evaluate(self) -> Pending:
        """Submit the held-out examples."""
        passed = self._training.forward(self._held_out, "cross_entropy")
        return Pending(
            lambda: {"eval_loss": loss_of(passed.result()) / self._held_out_weight}, passed
        )
