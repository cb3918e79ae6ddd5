"""The loop: submits steps ahead of their results, evaluates, saves, stops.

A step is submitted before the previous one's result is awaited, so that the server is never idle.
Results depend on the order of submission only, never on when results arrive. When the loop is
interrupted, the step that is being computed is the last: the step submitted after it is withdrawn
where the server supports that, and finished otherwise.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tinkex.errors import InputError
from tinkex.loops.run_folder import RunCheckpoint
from tinkex.types import AdamParams

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from tinkex.clients.service import ServiceClient
    from tinkex.clients.training import TrainingClient
    from tinkex.clock import Clock
    from tinkex.futures.future import APIFuture
    from tinkex.loops.graceful_stop import GracefulStop


@dataclass(frozen=True, slots=True)
class Submission:
    """Submitted work: `values` waits for it and returns its numbers.

    `last` is the future that completes last; None where nothing had to be sent. `withdraw` tries
    to withdraw the work and returns whether that succeeded.
    """

    values: Callable[[], dict[str, float]]
    last: APIFuture[Any] | None = None
    withdraw: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class PreparedStep:
    """A step whose preparation was submitted.

    `submit` submits the step itself: one forward-backward pass and one optimizer step. It may wait
    for the preparation, not for the step; `tokens` is among its numbers. `abandon` cancels the
    preparation of a step that is not submitted.
    """

    submit: Callable[[AdamParams], Submission]
    abandon: Callable[[], None] = lambda: None


Ending = Literal["finished", "stopped early", "interrupted"]


@dataclass(frozen=True, slots=True)
class RunContext:
    """What a recipe gets when its model exists; `note` shows a line to the user."""

    service: ServiceClient
    training: TrainingClient
    folder: Path
    note: Callable[[str], None]


class Recipe(Protocol):
    """What a step computes, over data that is already rendered to tokens."""

    @property
    def ahead(self) -> bool:
        """Whether a step can be submitted before the previous one has completed."""
        ...

    @property
    def judged_by(self) -> str | None:
        """The evaluation metric that decides which step is best; None: nothing to evaluate."""
        ...

    @property
    def higher_is_better(self) -> bool: ...

    @property
    def rendered(self) -> str:
        """A fingerprint of the tokens; a resumed run must have the same."""
        ...

    def start(self, run: RunContext) -> None:
        """Take the model to train; called once, before the first step."""
        ...

    def begin(self, step: int) -> PreparedStep:
        """Submit what a step needs to know first; that changes no weights."""
        ...

    def evaluate(self) -> Submission:
        """Submit an evaluation of the weights after the steps submitted so far."""
        ...


class LoopRecorder(Protocol):
    """Receives what happens, in order."""

    def stage(self, text: str) -> None: ...

    def step(self, step: int, values: Mapping[str, float]) -> None: ...

    def saved(self, checkpoint: RunCheckpoint) -> None: ...

    def note(self, text: str) -> None: ...


class Patience:
    """Follows one metric over the evaluations; without a limit it only knows which was best."""

    def __init__(self, limit: int | None, *, higher_is_better: bool) -> None:
        self.limit = limit
        self._sign = -1.0 if higher_is_better else 1.0
        # Mutable state: the best evaluation, and how many have followed it.
        self.best_step: int | None = None
        self._best = math.inf
        self._since = 0

    def see(self, step: int, value: float) -> bool:
        """Take in an evaluation; returns whether it is the best so far."""
        if self._sign * value < self._best:
            self._best, self.best_step, self._since = self._sign * value, step, 0
            return True
        self._since += 1
        return False

    @property
    def exhausted(self) -> bool:
        """Whether `limit` evaluations in a row were no better than the best."""
        return self.limit is not None and self._since >= self.limit


@dataclass(frozen=True, slots=True)
class LoopPlan:
    """When to save and evaluate. `judged_by`: the metric for patience; None: no evaluation."""

    total: int
    rate: Callable[[int], float]
    save_every: int
    eval_every: int
    judged_by: str | None

    def saves(self, step: int) -> bool:
        return step % self.save_every == 0 or step == self.total

    def evaluates(self, step: int) -> bool:
        return self.judged_by is not None and (step % self.eval_every == 0 or step == self.total)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a run ended. `checkpoint` is the last save, `best` the one to use."""

    ending: Ending
    step: int
    checkpoint: RunCheckpoint
    best: RunCheckpoint


@dataclass(frozen=True, slots=True)
class _InFlight:
    step: int
    measured: Callable[[], dict[str, float]] | None
    evaluated: Callable[[], dict[str, float]] | None
    saved: Callable[[], RunCheckpoint] | None
    submission: Submission | None = None

    def withdraw(self) -> bool:
        """Withdraw the step, unless an evaluation or a save follows it: those would still run."""
        alone = self.evaluated is None and self.saved is None
        return alone and self.submission is not None and self.submission.withdraw()


class TrainingLoop:
    """Runs a recipe from the step after `checkpoints[-1]`, or from the first."""

    def __init__(
        self,
        recipe: Recipe,
        training: TrainingClient,
        plan: LoopPlan,
        recorder: LoopRecorder,
        patience: Patience,
        clock: Clock,
        *,
        checkpoints: list[RunCheckpoint],
        spent_s: float = 0.0,
    ) -> None:
        self._recipe = recipe
        self._training = training
        self._plan = plan
        self._recorder = recorder
        self._patience = patience
        self._clock = clock
        # Mutable state: submitted and not yet awaited steps, oldest first; the saves; the last
        # finished step, and when it finished.
        self._in_flight: deque[_InFlight] = deque()
        self._checkpoints = {one.step: one for one in checkpoints}
        self._finished = max(self._checkpoints, default=0)
        self._begun_s = clock.now() - spent_s
        self._last_s = clock.now()

    def run(self, stop: GracefulStop) -> Outcome:
        """Train until the last step, until patience is exhausted, or until a signal comes."""
        step = self._finished
        if step == 0 and self._plan.judged_by is not None:
            self._recorder.stage("evaluating the model before training")
            self._finish(_InFlight(0, None, self._recipe.evaluate().values, None))
            self._last_s = self._clock.now()
        self._recorder.stage(f"computing step {step + 1}")
        while step < self._plan.total and not stop.asked and not self._patience.exhausted:
            step += 1
            prepared = self._recipe.begin(step)
            if not self._recipe.ahead:
                self._settle(stop, leave=0)
                if stop.asked and self._finished:
                    prepared.abandon()
                    break
            self._in_flight.append(self._submit(step, prepared))
            self._settle(stop, leave=0 if self._must_know(step) else 1)
        self._settle(stop, leave=0)
        return self._outcome(self._finished)

    def _must_know(self, step: int) -> bool:
        """Whether the evaluation after this step may end the run, so that no step can be ahead."""
        return self._patience.limit is not None and self._plan.evaluates(step)

    def _submit(self, step: int, prepared: PreparedStep) -> _InFlight:
        rate = self._plan.rate(step)
        submission = prepared.submit(AdamParams(learning_rate=rate))
        return _InFlight(
            step,
            self._timed(submission, rate),
            self._recipe.evaluate().values if self._plan.evaluates(step) else None,
            self._save(step) if self._plan.saves(step) else None,
            submission,
        )

    def _save(self, step: int) -> Callable[[], RunCheckpoint]:
        name = f"step-{step:06}"
        state = self._training.save_state(name)
        sampler = self._training.save_weights_for_sampler(name)
        return lambda: RunCheckpoint(step, state.result().path, sampler.result().path)

    # -- results ------------------------------------------------------------------------------

    def _settle(self, stop: GracefulStop, *, leave: int) -> None:
        """Await the oldest steps until only `leave` are in flight."""
        while len(self._in_flight) > leave:
            one = self._in_flight.popleft()
            last = None if one.submission is None else one.submission.last
            asked = stop.asked if last is None else stop.until(last)
            if asked and self._in_flight and self._in_flight[-1].withdraw():
                self._in_flight.pop()
            self._finish(one)

    def _finish(self, one: _InFlight) -> None:
        values = {} if one.measured is None else one.measured()
        if one.evaluated is not None:
            values |= one.evaluated()
        self._refuse_diverged(one.step, values)
        self._recorder.step(one.step, values)
        self._finished = one.step
        better = self._judge(one.step, values)
        if one.saved is not None:
            self._keep(one.saved())
        elif better and self._patience.limit is not None:
            # The best step must have a checkpoint in the end; nothing is in flight now, so the
            # weights are still those of this step.
            self._keep(self._save(one.step)())

    def _timed(self, submission: Submission, rate: float) -> Callable[[], dict[str, float]]:
        """The numbers of a step and its speed, measured from the end of the previous step.

        A callback notes when the step ends, which may be well before its result is awaited.
        """
        ended: list[float] = [] if submission.last is not None else [self._clock.now()]
        if submission.last is not None:
            submission.last.add_done_callback(lambda _: ended.append(self._clock.now()))

        def values() -> dict[str, float]:
            found = submission.values()
            end = ended[0] if ended else self._clock.now()
            taken, self._last_s = end - self._last_s, end
            speed = found["tokens"] / taken if taken > 0 else 0.0
            about = {"time_s": round(end - self._begun_s, 3), "tokens_per_s": round(speed, 1)}
            return {**about, **found, "learning_rate": rate}

        return values

    def _refuse_diverged(self, step: int, values: dict[str, float]) -> None:
        loss = values.get("loss", 0.0)
        if not math.isfinite(loss):
            raise InputError(
                f"the loss of step {step} is {loss}: training has diverged. Begin again in another "
                "folder with a lower rate, or with a longer warmup.",
                "learning_rate",
            )

    def _judge(self, step: int, values: dict[str, float]) -> bool:
        name = self._plan.judged_by
        if name is None or name not in values:
            return False
        # The untrained model is evaluated for comparison only; patience begins with the first step.
        return step > 0 and self._patience.see(step, values[name])

    def _keep(self, checkpoint: RunCheckpoint) -> None:
        self._checkpoints[checkpoint.step] = checkpoint
        self._recorder.saved(checkpoint)

    # -- the end ------------------------------------------------------------------------------

    def _outcome(self, step: int) -> Outcome:
        if step not in self._checkpoints:
            self._keep(self._save(step)())
        last = self._checkpoints[step]
        best = last
        if self._patience.limit is not None and self._patience.best_step is not None:
            best = self._checkpoints.get(self._patience.best_step, last)
        ending: Ending = "finished"
        if self._patience.exhausted:
            ending = "stopped early"
        elif step < self._plan.total:
            ending = "interrupted"
        return Outcome(ending, step, last, best)
