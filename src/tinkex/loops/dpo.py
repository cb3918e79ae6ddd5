"""Direct preference optimization: what is chosen must gain on what is rejected.

Of a pair, `margin` is beta times how much more the chosen answer has gained over the base model
than the rejected one, in log-probability; the loss is -log sigmoid(margin). Its slope is known, so
a step is a forward pass and a cross-entropy with that slope as its weights; no torch is needed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tinkex.chat.renderer import Renderer
from tinkex.data.rendering import render_pairs
from tinkex.loops.batches import (
    fingerprint,
    tokens_of,
    trained_logprobs,
    weighted,
)
from tinkex.loops.dataset import Source
from tinkex.loops.loop import Begun, Pending
from tinkex.loops.reference import reference
from tinkex.loops.schedule import batch
from tinkex.tokenizers import tokenizer_for

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tinkex.chat.examples import Rendered
    from tinkex.clients.service import ServiceClient
    from tinkex.clients.training import TrainingClient
    from tinkex.clock import Clock
    from tinkex.loops.settings import DpoSettings
    from tinkex.types import AdamParams, ForwardBackwardOutput

    Pair = tuple[Rendered, Rendered]
    Array = NDArray[np.float64]

_EPOCHS = 1


class DpoJob:
    """Pairs to train on; made, it has read its files. Raises DataError for bad ones."""

    def __init__(self, settings: DpoSettings, data: Path, eval_data: Path | None = None) -> None:
        self.settings = settings
        self._source = Source(settings, "preference", render_pairs, data, eval_data, epochs=_EPOCHS)
        self.files, self.steps = self._source.files, self._source.steps
        self.material, self.chat = self._source.material, self._source.chat

    def prepare(self, service: ServiceClient, clock: Clock) -> PreparedDpo:
        """Render everything; raises DataError with every line that cannot be."""
        renderer = Renderer.of(tokenizer_for(service, self.settings.base_model), clock=clock)
        return PreparedDpo(self.settings, *self._source.rendered(renderer))


@dataclass(frozen=True, slots=True)
class PreparedDpo:
    """Pairs as tokens."""

    settings: DpoSettings
    train: list[Pair]
    held_out: list[Pair]
    higher_is_better = False

    @property
    def judged_by(self) -> str | None:
        return "eval_loss" if self.held_out else None

    @property
    def rendered(self) -> str:
        return fingerprint((_flat(self.train), _flat(self.held_out)))

    def recipe(
        self,
        service: ServiceClient,
        training: TrainingClient,
        folder: Path,
        note: Callable[[str], None],
    ) -> DpoRecipe:
        both = _flat(self.train) + _flat(self.held_out)
        known = reference(service, self.settings.base_model, both, folder, self.rendered, note)
        return DpoRecipe(self, training, np.asarray(known, np.float64).reshape(-1, 2))


class DpoRecipe:
    """`reference` has the base model's log-probabilities of each pair, the held-out ones last."""

    ahead = False

    def __init__(self, prepared: PreparedDpo, training: TrainingClient, reference: Array) -> None:
        self._settings = prepared.settings
        self._training = training
        self._train, self._held_out = prepared.train, prepared.held_out
        self._reference = reference[: len(self._train)]
        self._held_out_reference = reference[len(self._train) :]

    def begin(self, step: int) -> Begun:
        """Submit a forward pass over a batch, from which the step follows."""
        size, seed = self._settings.batch_size, self._settings.seed
        chosen = batch(step, size, len(self._train), seed)
        pairs = [self._train[i] for i in chosen]
        looked = self._training.forward(_data(pairs), "cross_entropy")
        known = self._reference[chosen]
        return Begun(lambda adam: self._submit(pairs, known, looked.result(), adam))

    def _submit(
        self, pairs: Sequence[Pair], known: Array, looked: ForwardBackwardOutput, adam: AdamParams
    ) -> Pending:
        margins = self._margins(pairs, known, looked)
        data = _sloped(pairs, slopes(margins, self._settings.beta))
        passed = self._training.forward_backward(data, "cross_entropy")
        stepped = self._training.optim_step(adam)

        def wait() -> dict[str, float]:
            passed.result()
            stepped.result()
            return {**judged(margins), "tokens": tokens_of(_flat(pairs))}

        return Pending(wait, stepped)

    def evaluate(self) -> Pending:
        """Submit the held-out pairs."""
        passed = self._training.forward(_data(self._held_out), "cross_entropy")

        def wait() -> dict[str, float]:
            known = self._held_out_reference
            margins = self._margins(self._held_out, known, passed.result())
            return {f"eval_{name}": value for name, value in judged(margins).items()}

        return Pending(wait, passed)

    def _margins(self, pairs: Sequence[Pair], known: Array, output: ForwardBackwardOutput) -> Array:
        flat = _flat(pairs)
        found = map(trained_logprobs, flat, output.loss_fn_outputs)
        gained = np.fromiter(found, np.float64, len(flat)).reshape(-1, 2) - known
        return self._settings.beta * (gained[:, 0] - gained[:, 1])


def judged(margins: Array) -> dict[str, float]:
    """The loss of a batch by its margins, and how many pairs it gets right."""
    return {
        "loss": float(np.mean(np.logaddexp(0.0, -margins))),
        "accuracy": float(np.mean(margins > 0)),
        "margin": float(np.mean(margins)),
    }


def slopes(margins: Array, beta: float) -> Array:
    """How fast the mean loss falls with the log-probability of each pair's chosen answer."""
    return beta * np.exp(-np.logaddexp(0.0, margins)) / len(margins)


def _sloped(pairs: Sequence[Pair], slopes: Array) -> list[Any]:
    data: list[Any] = []
    for (chosen, rejected), slope in zip(pairs, slopes.tolist(), strict=True):
        data += [weighted(chosen, slope), weighted(rejected, -slope)]
    return data


def _data(pairs: Sequence[Pair]) -> list[Any]:
    return [weighted(one, 1.0) for one in _flat(pairs)]


def _flat(pairs: Sequence[Pair]) -> list[Rendered]:
    return list(itertools.chain.from_iterable(pairs))
