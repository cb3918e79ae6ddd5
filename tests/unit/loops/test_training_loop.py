"""The loop: what is submitted when, what is told to whom, and how it ends."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from tinkex.errors import InputError
from tinkex.loops.graceful_stop import GracefulStop
from tinkex.loops.run_folder import RunCheckpoint
from tinkex.loops.training_loop import (
    LoopPlan,
    Outcome,
    Patience,
    PreparedStep,
    Submission,
    TrainingLoop,
)
from tinkex.testing import FakeClock

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@dataclass
class Saved:
    """A future of a save."""

    path: str

    def result(self) -> Saved:
        return self


@dataclass
class World:
    """A recipe, a training client and a recorder in one; `events` has what happened, in order."""

    evaluations: list[float] = field(default_factory=list[float])
    on_step: Callable[[int], None] = lambda step: None
    loss: Callable[[int], float] = lambda step: 1.0
    events: list[str] = field(default_factory=list[str])
    rows: list[tuple[int, dict[str, float]]] = field(default_factory=list[Any])
    ahead: bool = True
    can_withdraw: bool = True
    on_begin: Callable[[int], None] = lambda step: None
    _now: int = 0

    # -- the recipe

    def begin(self, step: int) -> PreparedStep:
        self.events.append(f"begin {step}")
        self.on_begin(step)
        return PreparedStep(
            lambda adam: self._submit(step), lambda: self.events.append(f"abandon {step}")
        )

    def _submit(self, step: int) -> Submission:
        self._now = step
        self.events.append(f"submit {step}")
        self.on_step(step)

        def values() -> dict[str, float]:
            self.events.append(f"await {step}")
            return {"loss": self.loss(step), "tokens": 10.0}

        def withdraw() -> bool:
            self.events.append(f"withdraw {step}")
            return self.can_withdraw

        return Submission(values, withdraw=withdraw)

    def evaluate(self) -> Submission:
        step = self._now
        self.events.append(f"look {step}")
        return Submission(lambda: {"eval_loss": self.evaluations[step]})

    # -- the training client

    def save_state(self, name: str) -> Saved:
        self.events.append(f"save {int(name[5:])}")
        return Saved(f"tinker://run/weights/{name}")

    def save_weights_for_sampler(self, name: str) -> Saved:
        return Saved(f"tinker://run/sampler_weights/{name}")


@dataclass
class Recording:
    world: World
    stages: list[str] = field(default_factory=list[str])

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        self.world.events.append(f"tell {step}")
        self.world.rows.append((step, dict(values)))

    def saved(self, checkpoint: RunCheckpoint) -> None:
        self.world.events.append(f"kept {checkpoint.step}")

    def note(self, text: str) -> None:
        self.world.events.append(text)


def run(
    world: World,
    total: int,
    *,
    save_every: int = 100,
    eval_every: int = 100,
    judged_by: str | None = None,
    patience: int | None = None,
    done: int = 0,
    interruption: GracefulStop | None = None,
    diary: Recording | None = None,
) -> Outcome:
    plan = LoopPlan(total, lambda step: 0.1 * step, save_every, eval_every, judged_by)
    saves = [checkpoint(done)] if done else []
    world._now = done
    client: Any = world
    judge = Patience(patience, higher_is_better=False)
    diary = diary or Recording(world)
    loop = TrainingLoop(world, client, plan, diary, judge, FakeClock(), checkpoints=saves)
    return loop.run(interruption or GracefulStop())


def checkpoint(step: int) -> RunCheckpoint:
    name = f"step-{step:06}"
    return RunCheckpoint(
        step, f"tinker://run/weights/{name}", f"tinker://run/sampler_weights/{name}"
    )


def test_a_step_is_submitted_before_the_one_before_it_is_awaited():
    world = World()
    outcome = run(world, 3)
    order = [event for event in world.events if event.startswith(("submit", "await"))]
    assert order == ["submit 1", "submit 2", "await 1", "submit 3", "await 2", "await 3"]
    assert outcome == Outcome("finished", 3, checkpoint(3), checkpoint(3))


def test_each_step_is_told_once_in_order_with_its_rate():
    world = World()
    run(world, 4)
    assert [step for step, _ in world.rows] == [1, 2, 3, 4]
    assert [values["learning_rate"] for _, values in world.rows] == [0.1, 0.2, 0.1 * 3, 0.4]
    assert all({"loss", "tokens", "time_s", "tokens_per_s"} <= v.keys() for _, v in world.rows)


def test_an_evaluation_and_a_save_come_right_after_their_step():
    world = World(evaluations=[3.0] * 5)
    run(world, 4, save_every=2, eval_every=2, judged_by="eval_loss")
    done = ("await", "begin", "kept", "tell")
    submitted = [event for event in world.events if not event.startswith(done)]
    assert submitted == [
        *("look 0", "submit 1", "submit 2", "look 2", "save 2"),
        *("submit 3", "submit 4", "look 4", "save 4"),
    ]
    assert [step for step, values in world.rows if "eval_loss" in values] == [0, 2, 4]


def test_a_save_is_kept_only_after_its_step_was_told():
    world = World()
    run(world, 4, save_every=2)
    order = [event for event in world.events if event.startswith(("tell", "kept"))]
    assert order == ["tell 1", "tell 2", "kept 2", "tell 3", "tell 4", "kept 4"]


def test_without_anything_to_evaluate_nothing_is_looked_at():
    world = World()
    run(world, 3, eval_every=1)
    assert not [event for event in world.events if event.startswith("look")]


def test_a_resumed_run_does_only_the_steps_that_are_left():
    world = World(evaluations=[1.0] * 9)
    outcome = run(world, 6, done=4, judged_by="eval_loss")
    assert [step for step, _ in world.rows] == [5, 6]
    assert "look 0" not in world.events
    assert outcome.checkpoint == checkpoint(6)


def asked_in(world: World, step: int) -> GracefulStop:
    """Ctrl-C when a step has just been submitted; the one before it is being computed."""
    interruption = GracefulStop()

    def on_step(submitted: int) -> None:
        interruption.asked = submitted == step

    world.on_step = on_step
    return interruption


def test_an_interruption_finishes_the_step_that_is_computed_and_withdraws_the_one_behind_it():
    world = World()
    outcome = run(world, 10, interruption=asked_in(world, 3))
    assert outcome == Outcome("interrupted", 2, checkpoint(2), checkpoint(2))
    assert [step for step, _ in world.rows] == [1, 2]
    assert world.events[-5:] == ["withdraw 3", "await 2", "tell 2", "save 2", "kept 2"]


def test_a_step_that_cannot_be_withdrawn_is_finished():
    world = World(can_withdraw=False)
    outcome = run(world, 10, interruption=asked_in(world, 3))
    assert outcome == Outcome("interrupted", 3, checkpoint(3), checkpoint(3))
    assert [step for step, _ in world.rows] == [1, 2, 3]
    assert world.events.count("withdraw 3") == 1


def test_a_step_with_a_save_behind_it_is_finished():
    world = World()
    outcome = run(world, 10, save_every=3, interruption=asked_in(world, 3))
    assert outcome.step == 3
    assert not [event for event in world.events if event.startswith("withdraw")]


def test_the_first_step_is_finished_when_it_is_the_one_that_is_computed():
    world = World()
    assert run(world, 10, interruption=asked_in(world, 1)).step == 1


def test_where_steps_follow_from_each_other_an_interrupted_one_ends_before_the_next():
    interruption = GracefulStop()

    def on_begin(step: int) -> None:
        interruption.asked = step == 3

    world = World(ahead=False, on_begin=on_begin)
    outcome = run(world, 10, interruption=interruption)
    assert outcome.step == 2
    assert world.events[-5:] == ["await 2", "tell 2", "abandon 3", "save 2", "kept 2"]


def test_where_steps_follow_from_each_other_each_is_told_before_the_next_is_submitted():
    world = World(ahead=False)
    run(world, 2)
    assert world.events[:6] == ["begin 1", "submit 1", "begin 2", "await 1", "tell 1", "submit 2"]


def test_what_is_done_before_the_first_step_is_told():
    world = World(evaluations=[1.0] * 9)
    diary = Recording(world)
    run(world, 2, judged_by="eval_loss", diary=diary)
    assert diary.stages == ["evaluating the model before training", "computing step 1"]
    run(World(), 6, done=4, diary=diary)
    assert diary.stages[-1] == "computing step 5"


def test_an_interruption_at_the_last_step_is_none():
    interruption = GracefulStop()

    def on_step(step: int) -> None:
        interruption.asked = step == 4

    world = World(on_step=on_step, can_withdraw=False)
    assert run(world, 4, interruption=interruption).ending == "finished"


def test_a_save_that_was_due_is_not_made_again_by_an_interruption():
    interruption = GracefulStop()

    def on_step(step: int) -> None:
        interruption.asked = step == 2

    world = World(on_step=on_step)
    run(world, 10, save_every=2, interruption=interruption)
    assert world.events.count("save 2") == 1


def test_patience_ends_a_run_that_gets_no_better_and_the_best_save_is_the_one_to_use():
    world = World(evaluations=[9.0, 4.0, 3.0, 3.5, 3.0, 9.0, 9.0])
    outcome = run(world, 6, eval_every=1, judged_by="eval_loss", patience=2)
    assert outcome == Outcome("stopped early", 4, checkpoint(4), checkpoint(2))


def test_with_patience_no_step_is_submitted_before_its_evaluation_is_known():
    world = World(evaluations=[9.0, 4.0, 3.0, 2.0])
    run(world, 3, eval_every=1, judged_by="eval_loss", patience=1)
    assert world.events.index("await 1") < world.events.index("submit 2")


def test_what_is_best_so_far_is_saved_at_once():
    world = World(evaluations=[9.0, 4.0, 5.0, 3.0])
    run(world, 3, eval_every=1, judged_by="eval_loss", patience=5)
    assert [event for event in world.events if event.startswith("kept")] == ["kept 1", "kept 3"]


def test_the_untrained_model_does_not_count_as_the_best():
    world = World(evaluations=[0.1, 4.0, 5.0])
    outcome = run(world, 2, eval_every=1, judged_by="eval_loss", patience=3)
    assert outcome.best == checkpoint(1)


@pytest.mark.parametrize("loss", [float("nan"), float("inf")])
def test_a_loss_that_is_no_number_ends_the_run_and_names_the_rate(loss: float):
    world = World(loss=lambda step: loss if step == 2 else 1.0)
    with pytest.raises(InputError, match=r"learning_rate: the loss of step 2 is .* diverged"):
        run(world, 5)
    assert [step for step, _ in world.rows] == [1]


def test_where_higher_is_better_patience_waits_for_higher():
    patience = Patience(2, higher_is_better=True)
    assert [patience.see(step, value) for step, value in enumerate((0.2, 0.5, 0.5, 0.4), 1)] == [
        *(True, True, False, False)
    ]
    assert patience.best_step == 2
    assert patience.exhausted


def test_an_evaluation_that_is_no_number_is_never_the_best():
    patience = Patience(1, higher_is_better=False)
    assert not patience.see(1, float("nan"))
    assert patience.exhausted
