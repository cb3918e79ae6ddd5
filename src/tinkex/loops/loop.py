"""The loop: submits steps ahead of their results, evaluates, saves, stops.

A step is submitted before the last one's result is awaited, so that the server is never idle. What
it computes follows from the order in which things are submitted, never from when results arrive.
When the loop is interrupted, the step that is being computed is the last: the one that was
submitted behind it is withdrawn where the server can do that, and finished where it cannot.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

from tinkex.errors import InputError
from tinkex.loops.run_folder import Checkpoint
from tinkex.types import AdamParams

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from tinkex.clients.training import TrainingClient
    from tinkex.clock import Clock
    from tinkex.futures.future import APIFuture
    from tinkex.loops.early_stop import Patience
    from tinkex.loops.graceful_stop import Interruption


@dataclass(frozen=True, slots=True)
class Pending:
    """What was submitted: `values` waits for it and gives its numbers.

    `last` ends when all of it has; None where nothing had to be sent. `withdraw` takes it back
    and says whether that was possible.
    """

    values: Callable[[], dict[str, float]]
    last: APIFuture[Any] | None = None
    withdraw: Callable[[], bool] = lambda: False


@dataclass(frozen=True, slots=True)
class Begun:
    """A step whose preparation was submitted.

    `submit` submits the step itself: one forward and backward pass and one optimizer step. It may
    wait for the preparation, not for the step; `tokens` is among the numbers. `abandon` ends the
    preparation of a step that is not submitted.
    """

    submit: Callable[[AdamParams], Pending]
    abandon: Callable[[], None] = lambda: None


Ending = Literal["finished", "stopped early", "interrupted"]


class Recipe(Protocol):
    """What a step is."""

    @property
    def ahead(self) -> bool:
        """Whether a step can be submitted before the one before it has ended."""
        ...

    def begin(self, step: int) -> Begun:
        """Submit what a step must know first; that changes no weights."""
        ...

    def evaluate(self) -> Pending:
        """Submit an evaluation of the weights as they are after the steps submitted so far."""
        ...


class Diary(Protocol):
    """Who is told what happened, in order."""

    def stage(self, text: str) -> None: ...

    def step(self, step: int, values: Mapping[str, float]) -> None: ...

    def saved(self, checkpoint: Checkpoint) -> None: ...

    def note(self, text: str) -> None: ...


@dataclass(frozen=True, slots=True)
class Plan:
    """What is due when. `judged_by` is the number that patience looks at; None: no evaluation."""

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
    checkpoint: Checkpoint
    best: Checkpoint


@dataclass(frozen=True, slots=True)
class _InFlight:
    step: int
    measured: Callable[[], dict[str, float]] | None
    evaluated: Callable[[], dict[str, float]] | None
    saved: Callable[[], Checkpoint] | None
    pending: Pending | None = None

    def withdraw(self) -> bool:
        """Take the step back. One with an evaluation or a save behind it stays: those would run."""
        alone = self.evaluated is None and self.saved is None
        return alone and self.pending is not None and self.pending.withdraw()


class Loop:
    """Runs a recipe from the step after `checkpoints[-1]`, or from the first."""

    def __init__(
        self,
        recipe: Recipe,
        training: TrainingClient,
        plan: Plan,
        diary: Diary,
        patience: Patience,
        clock: Clock,
        *,
        checkpoints: list[Checkpoint],
        spent_s: float = 0.0,
    ) -> None:
        self._recipe = recipe
        self._training = training
        self._plan = plan
        self._diary = diary
        self._patience = patience
        self._clock = clock
        # Mutable state: what was submitted and not yet awaited, oldest first; the saves; the last
        # step that was finished, and when it was.
        self._in_flight: deque[_InFlight] = deque()
        self._checkpoints = {one.step: one for one in checkpoints}
        self._finished = max(self._checkpoints, default=0)
        self._begun_s = clock.now() - spent_s
        self._last_s = clock.now()

    def run(self, interruption: Interruption) -> Outcome:
        """Train until the last step, until patience ends, or until a signal comes."""
        step = self._finished
        if step == 0 and self._plan.judged_by is not None:
            self._diary.stage("evaluating the model before training")
            self._finish(_InFlight(0, None, self._recipe.evaluate().values, None))
            self._last_s = self._clock.now()
        self._diary.stage(f"computing step {step + 1}")
        while step < self._plan.total and not interruption.asked and not self._enough:
            step += 1
            begun = self._recipe.begin(step)
            if not self._recipe.ahead:
                self._settle(interruption, leave=0)
                if interruption.asked and self._finished:
                    begun.abandon()
                    break
            self._in_flight.append(self._submit(step, begun))
            self._settle(interruption, leave=0 if self._must_know(step) else 1)
        self._settle(interruption, leave=0)
        return self._outcome(self._finished)

    @property
    def _enough(self) -> bool:
        return self._patience.exhausted

    def _must_know(self, step: int) -> bool:
        """Whether an evaluation decides about what comes next."""
        return self._patience.limit is not None and self._plan.evaluates(step)

    def _submit(self, step: int, begun: Begun) -> _InFlight:
        rate = self._plan.rate(step)
        pending = begun.submit(AdamParams(learning_rate=rate))
        return _InFlight(
            step,
            self._timed(pending, rate),
            self._recipe.evaluate().values if self._plan.evaluates(step) else None,
            self._save(step) if self._plan.saves(step) else None,
            pending,
        )

    def _save(self, step: int) -> Callable[[], Checkpoint]:
        name = f"step-{step:06}"
        state = self._training.save_state(name)
        sampler = self._training.save_weights_for_sampler(name)
        return lambda: Checkpoint(step, state.result().path, sampler.result().path)

    # -- results ------------------------------------------------------------------------------

    def _settle(self, interruption: Interruption, *, leave: int) -> None:
        while len(self._in_flight) > leave:
            one = self._in_flight.popleft()
            last = None if one.pending is None else one.pending.last
            asked = interruption.asked if last is None else interruption.until(last)
            if asked and self._in_flight and self._in_flight[-1].withdraw():
                self._in_flight.pop()
            self._finish(one)

    def _finish(self, one: _InFlight) -> None:
        values = {} if one.measured is None else one.measured()
        if one.evaluated is not None:
            values |= one.evaluated()
        self._refuse_nonsense(one.step, values)
        self._diary.step(one.step, values)
        self._finished = one.step
        better = self._judge(one.step, values)
        if one.saved is not None:
            self._keep(one.saved())
        elif better and self._patience.limit is not None:
            # What is best so far must be there in the end; nothing is in flight now.
            self._keep(self._save(one.step)())

    def _timed(self, pending: Pending, rate: float) -> Callable[[], dict[str, float]]:
        """The numbers of a step and how fast it was, from the moment the one before it ended.

        Its own end is noted when it comes, which may be well before anybody asks.
        """
        ended: list[float] = [] if pending.last is not None else [self._clock.now()]
        if pending.last is not None:
            pending.last.add_done_callback(lambda _: ended.append(self._clock.now()))

        def values() -> dict[str, float]:
            found = pending.values()
            end = ended[0] if ended else self._clock.now()
            taken, self._last_s = end - self._last_s, end
            speed = found["tokens"] / taken if taken > 0 else 0.0
            about = {"time_s": round(end - self._begun_s, 3), "tokens_per_s": round(speed, 1)}
            return {**about, **found, "learning_rate": rate}

        return values

    def _refuse_nonsense(self, step: int, values: dict[str, float]) -> None:
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
        # The untrained model is looked at for comparison; patience begins with the first step.
        return step > 0 and self._patience.see(step, values[name])

    def _keep(self, checkpoint: Checkpoint) -> None:
        self._checkpoints[checkpoint.step] = checkpoint
        self._diary.saved(checkpoint)

    # -- the end ------------------------------------------------------------------------------

    def _outcome(self, step: int) -> Outcome:
        if step not in self._checkpoints:
            self._keep(self._save(step)())
        last = self._checkpoints[step]
        best = last
        if self._patience.limit is not None and self._patience.best_step is not None:
            best = self._checkpoints.get(self._patience.best_step, last)
        ending: Ending = "finished"
        if self._enough:
            ending = "stopped early"
        elif step < self._plan.total:
            ending = "interrupted"
        return Outcome(ending, step, last, best)
