"""Direct preference optimization: raise the chosen answer's probability over the rejected one's.

Of a pair, `margin` is beta times how much more log-probability the chosen answer has gained over
the base model than the rejected one; the loss is -log sigmoid(margin). Its gradient with respect to
each log-probability is known, so a step is a forward pass and a cross-entropy with that gradient as
its weights; no torch is needed.
"""

from __future__ import annotations

import itertools
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from tinkex.chat.renderer import Renderer
from tinkex.data import render_pairs
from tinkex.errors import ResultError
from tinkex.loops.batches import fingerprint, tokens_of, trained_logprobs, weighted
from tinkex.loops.dataset import FileJob
from tinkex.loops.schedule import batch
from tinkex.loops.training_loop import PreparedStep, Submission
from tinkex.new_files import replacing
from tinkex.tokenizers import tokenizer_for
from tinkex.types import ModelInput

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from tinkex.chat.examples import Rendered
    from tinkex.clients.service import ServiceClient
    from tinkex.clock import Clock
    from tinkex.loops.run_settings import DpoSettings
    from tinkex.loops.training_loop import RunContext
    from tinkex.types import AdamParams, Datum, ForwardBackwardOutput

    Pair = tuple[Rendered, Rendered]
    Array = NDArray[np.float64]

REFERENCE = "reference.json"


class DpoJob(FileJob["DpoSettings", "Pair"]):
    """Pairs to train on. The constructor reads the files and raises DataError for bad ones."""

    kind = "preference"
    epochs = 1
    render = staticmethod(render_pairs)

    def prepare(self, service: ServiceClient, clock: Clock) -> DpoRecipe:
        """Render all pairs; raises DataError with every line that cannot be rendered."""
        renderer = Renderer.of(tokenizer_for(service, self.settings.base_model), clock=clock)
        return DpoRecipe(self.settings, *self.rendered(renderer))


class DpoRecipe:
    """Cross-entropy whose weights are the gradient of the loss of each pair."""

    ahead = False
    higher_is_better = False

    def __init__(self, settings: DpoSettings, train: list[Pair], held_out: list[Pair]) -> None:
        self._settings = settings
        self._train, self._held_out = train, held_out
        self.judged_by = "eval_loss" if held_out else None
        self.rendered = fingerprint((_flat(train), _flat(held_out)))

    def start(self, run: RunContext) -> None:
        """Set the model to train, and get the base model's log-probabilities of each pair."""
        self._training = run.training
        both = _flat(self._train) + _flat(self._held_out)
        known = reference_logprobs(run, self._settings.base_model, both, self.rendered)
        pairs = np.asarray(known, np.float64).reshape(-1, 2)
        self._reference = pairs[: len(self._train)]
        self._held_out_reference = pairs[len(self._train) :]

    def begin(self, step: int) -> PreparedStep:
        """Submit a forward pass over a batch; the weights of the step follow from it."""
        size, seed = self._settings.batch_size, self._settings.seed
        chosen = batch(step, size, len(self._train), seed)
        pairs = [self._train[i] for i in chosen]
        looked = self._training.forward(_data(pairs), "cross_entropy")
        known = self._reference[chosen]
        return PreparedStep(lambda adam: self._submit(pairs, known, looked.result(), adam))

    def _submit(
        self, pairs: Sequence[Pair], known: Array, looked: ForwardBackwardOutput, adam: AdamParams
    ) -> Submission:
        margins = self._margins(pairs, known, looked)
        gradients = margin_gradients(margins, self._settings.beta)
        passed = self._training.forward_backward(_weighted(pairs, gradients), "cross_entropy")
        stepped = self._training.optim_step(adam)

        def wait() -> dict[str, float]:
            passed.result()
            stepped.result()
            return {**judged(margins), "tokens": tokens_of(_flat(pairs))}

        return Submission(wait, stepped)

    def evaluate(self) -> Submission:
        """Submit the held-out pairs."""
        passed = self._training.forward(_data(self._held_out), "cross_entropy")

        def wait() -> dict[str, float]:
            known = self._held_out_reference
            margins = self._margins(self._held_out, known, passed.result())
            return {f"eval_{name}": value for name, value in judged(margins).items()}

        return Submission(wait, passed)

    def _margins(self, pairs: Sequence[Pair], known: Array, output: ForwardBackwardOutput) -> Array:
        flat = _flat(pairs)
        found = map(trained_logprobs, flat, output.loss_fn_outputs)
        gained = np.fromiter(found, np.float64, len(flat)).reshape(-1, 2) - known
        return self._settings.beta * (gained[:, 0] - gained[:, 1])


def judged(margins: Array) -> dict[str, float]:
    """The loss of a batch by its margins, and the share of pairs that it ranks correctly."""
    return {
        "loss": float(np.mean(np.logaddexp(0.0, -margins))),
        "accuracy": float(np.mean(margins > 0)),
        "margin": float(np.mean(margins)),
    }


def margin_gradients(margins: Array, beta: float) -> Array:
    """The negative gradient of the mean loss by the log-probability of each chosen answer."""
    return beta * np.exp(-np.logaddexp(0.0, margins)) / len(margins)


def _weighted(pairs: Sequence[Pair], gradients: Array) -> list[Datum]:
    data: list[Datum] = []
    for (chosen, rejected), gradient in zip(pairs, gradients.tolist(), strict=True):
        data += [weighted(chosen, gradient), weighted(rejected, -gradient)]
    return data


def _data(pairs: Sequence[Pair]) -> list[Datum]:
    return [weighted(one, 1.0) for one in _flat(pairs)]


def _flat(pairs: Sequence[Pair]) -> list[Rendered]:
    return list(itertools.chain.from_iterable(pairs))


# -- the base model's log-probabilities --------------------------------------------------------


def reference_logprobs(
    run: RunContext, model: str, examples: Sequence[Rendered], rendered: str
) -> list[float]:
    """The base model's log-probability of the trained tokens of each example.

    Computed once per run and kept in its folder as JSON, which holds a float exactly: a resumed
    run continues with the same numbers.
    """
    file = run.folder / REFERENCE
    known = _read_reference(file, rendered)
    if known is not None and len(known) == len(examples):
        return known
    run.note(f"asking the base model about {len(examples)} answers, once")
    sampler = run.service.create_sampling_client(base_model=model)
    asked = [sampler.compute_logprobs(ModelInput.from_ints(one.tokens)) for one in examples]
    found = [_sum(one, future.result()) for one, future in zip(examples, asked, strict=True)]
    with replacing(file) as new:
        new.write(json.dumps({"rendered": rendered, "logprobs": found}).encode())
    return found


def _sum(example: Rendered, logprobs: Sequence[float | None]) -> float:
    # The first token has no log-probability: nothing predicts it.
    after = np.array(logprobs[1:], np.float64)
    if len(after) != len(example.tokens) - 1 or np.isnan(after).any():
        raise ResultError("the server did not give a log-probability for each token")
    return float(after @ np.asarray(example.weights[1:], np.float64))


def _read_reference(file: Path, rendered: str) -> list[float] | None:
    try:
        found: dict[str, Any] = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return found["logprobs"] if found.get("rendered") == rendered else None
