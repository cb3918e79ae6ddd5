"""A whole run in its folder: begin or resume, train, and record the results."""

from __future__ import annotations

import os
import platform
from contextlib import ExitStack, closing, suppress
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Protocol

from tinkex._version import __version__
from tinkex.clock import FixedDate, SystemClock
from tinkex.config import DATA_DIR
from tinkex.errors import InputError, NotFoundError, TinkerError
from tinkex.loops.graceful_stop import GracefulStop
from tinkex.loops.run_folder import (
    CHECKPOINTS,
    Record,
    RunFolder,
    hashes,
    record_of,
    refuse_other_run,
    refuse_other_tokens,
)
from tinkex.loops.schedule import learning_rate
from tinkex.loops.training_loop import LoopPlan, Outcome, Patience, RunContext, TrainingLoop
from tinkex.tracking.progress import Progress
from tinkex.tracking.sinks import open_sinks
from tinkex.tracking.views import doing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from tinkex.clients.service import ServiceClient
    from tinkex.clients.training import TrainingClient
    from tinkex.clock import Clock
    from tinkex.loops.run_folder import RunCheckpoint
    from tinkex.loops.run_settings import Settings
    from tinkex.loops.training_loop import Recipe
    from tinkex.tracking.sinks import Sink

# The default number of saves and evaluations of a run, and the least steps between two of them.
_SHARES, _LEAST_STEPS = 10, 10


class Job(Protocol):
    """What to train on; its constructor has read and checked the files."""

    @property
    def settings(self) -> Settings: ...

    @property
    def files(self) -> Mapping[str, Path]: ...

    @property
    def steps(self) -> int: ...

    @property
    def material(self) -> str:
        """What is rendered to tokens, such as "120 examples"."""
        ...

    @property
    def chat(self) -> bool:
        """Whether the data has messages, which the model's chat template renders."""
        ...

    def prepare(self, service: ServiceClient, clock: Clock) -> Recipe:
        """Render everything to tokens; raises InputError for bad data. Creates no model."""
        ...


class Display(Protocol):
    """Shows a run to a person; `tinkex.tracking.progress.Progress` is the usual one."""

    def stage(self, text: str) -> None: ...

    def step(self, step: int, values: Mapping[str, float]) -> None: ...

    def note(self, text: str) -> None: ...


class RunRecorder:
    """Passes what the loop does to the run's folder, its sinks and the display."""

    def __init__(self, place: RunFolder, sinks: Sink, display: Display) -> None:
        self._place = place
        self._sinks = sinks
        self._display = display
        self.stage = display.stage
        self.note = display.note

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """A step's numbers; step 0 is the evaluation of the untrained model."""
        self._sinks.record(step, values)
        if step > 0:
            self._display.step(step, values)
        else:
            told = ", ".join(f"{name} {value:.4g}" for name, value in values.items())
            self.note(f"before training: {told}")

    def saved(self, checkpoint: RunCheckpoint) -> None:
        """A save; the steps before it are recorded already."""
        self._place.add(checkpoint)
        self.note(f"saved after step {checkpoint.step}")


def run(
    service: ServiceClient,
    job: Job,
    folder: Path,
    *,
    resume: bool = False,
    report: Sequence[str] = (),
    clock: Clock | None = None,
    display: Display | None = None,
) -> Outcome:
    """Run a job in a folder, from its beginning or from its last save.

    Everything is checked before a model is created. During training the first SIGINT or SIGTERM
    finishes the step in flight, saves and returns. A finished run returns at once. `display`
    shows the run instead of a `Progress` on standard error.
    """
    clock = clock or SystemClock()
    place = RunFolder(folder)
    record = record_of(place, resume=resume)
    done = ended(job, place, record)
    if done is not None:
        return done
    began = clock.wall() if record is None else record.began
    # A template that writes the date must write the same one when the run is resumed.
    with doing(f"Tokenizing {job.material} for {job.settings.base_model}"):
        recipe = job.prepare(service, FixedDate(clock, began))
    if record is not None:
        refuse_other_tokens(record, recipe.rendered)
    plan = _plan(job.settings, job.steps, recipe.judged_by)
    place.make()
    with place.claimed():
        record = record or _new_record(job, recipe, began)
        place.write(replace(record, status="running", pid=os.getpid(), host=platform.node()))
        return _Run(service, job, recipe, plan, place, clock, display).kept(report)


def ended(job: Job, place: RunFolder, record: Record | None) -> Outcome | None:
    """The outcome of a finished run, else None; raises InputError for another job's record."""
    if record is None:
        return None
    refuse_other_run(record, job.settings, job.files)
    if record.status != "finished":
        return None
    saves = place.checkpoints()
    best = next((one for one in saves if one.sampler_path == record.adapter_path), None)
    if best is None:
        raise InputError(
            f"{CHECKPOINTS} does not have the save that the run ended with", str(place.path)
        )
    early = saves[-1].step < record.steps
    return Outcome("stopped early" if early else "finished", saves[-1].step, saves[-1], best)


@dataclass(frozen=True, slots=True)
class _Run:
    """A run whose folder exists and whose job has been checked."""

    service: ServiceClient
    job: Job
    recipe: Recipe
    plan: LoopPlan
    place: RunFolder
    clock: Clock
    display: Display | None

    def kept(self, report: Sequence[str]) -> Outcome:
        """Train, and record how it ended."""
        try:
            outcome = self.train(report)
        except BaseException as error:
            gone = isinstance(error, KeyboardInterrupt)
            with suppress(TinkerError):  # such as a full disk, which `error` reports already
                self.place.change(status="interrupted" if gone else "failed")
            raise
        over = outcome.ending != "interrupted"
        self.place.change(
            status="finished" if over else "interrupted",
            adapter_path=outcome.best.sampler_path if over else None,
        )
        return outcome

    def train(self, report: Sequence[str]) -> Outcome:
        """Continue from the last save; without one, start from the beginning."""
        settings = self.job.settings
        start = next((one for one in reversed(self.place.checkpoints()) if one.step > 0), None)
        past = self.place.rewind(start.step if start else -1)
        with ExitStack() as stack:
            recorder = self._recorder(stack, report, start.step if start else 0)
            recorder.stage(
                f"loading {settings.base_model}" if start is None else "loading the save"
            )
            training = _model(self.service, settings, start)
            known = self.place.change()
            self.place.change(model_ids=[*known.model_ids, training.model_id])
            self.recipe.start(RunContext(self.service, training, self.place.path, recorder.note))
            loop = TrainingLoop(
                self.recipe,
                training,
                self.plan,
                recorder,
                self._patience(past),
                self.clock,
                checkpoints=self.place.checkpoints(),
                spent_s=max((row.get("time_s", 0.0) for row in past), default=0.0),
            )
            return loop.run(stack.enter_context(GracefulStop()))

    def _recorder(self, stack: ExitStack, report: Sequence[str], done: int) -> RunRecorder:
        settings, folder = self.job.settings, self.place.path
        sinks = open_sinks(report, folder, folder.name, asdict(settings))
        stack.enter_context(closing(sinks))
        display = self.display or stack.enter_context(
            Progress(self.job.steps, _title(settings), done=done, clock=self.clock)
        )
        for sentence in sinks.places:
            display.note(sentence)
        return RunRecorder(self.place, sinks, display)

    def _patience(self, past: Sequence[Mapping[str, float]]) -> Patience:
        """Patience that knows the evaluations so far."""
        limit = self.job.settings.patience
        patience = Patience(limit, higher_is_better=self.recipe.higher_is_better)
        for row in past:
            value = row.get(self.plan.judged_by or "")
            if value is not None and row["step"] > 0:
                patience.see(int(row["step"]), value)
        return patience


def _model(
    service: ServiceClient, settings: Settings, start: RunCheckpoint | None
) -> TrainingClient:
    if start is None:
        return service.create_lora_training_client(
            settings.base_model, rank=settings.rank, seed=settings.seed
        )
    try:
        return service.create_training_client_from_state_with_optimizer(start.state_path)
    except NotFoundError as error:
        raise InputError(
            f"this server does not have {start.state_path}, from which the run would continue. Use "
            "the server and the key that it was started with; an embedded server keeps its "
            f"checkpoints in {DATA_DIR} of the folder it was started in.",
        ) from error


def _plan(settings: Settings, total: int, judged_by: str | None) -> LoopPlan:
    if settings.patience is not None and judged_by is None:
        raise InputError("needs something to evaluate with", "patience")
    share = max(total // _SHARES, _LEAST_STEPS)
    return LoopPlan(
        total=total,
        rate=lambda step: learning_rate(
            step, total, settings.learning_rate, settings.lr_schedule, settings.warmup
        ),
        save_every=settings.save_every or share,
        eval_every=settings.eval_every or share,
        judged_by=judged_by,
    )


def _new_record(job: Job, recipe: Recipe, began: float) -> Record:
    settings = job.settings
    return Record(
        kind=settings.kind,
        model=settings.model,
        title=_title(settings),
        settings=asdict(settings),
        files=hashes(job.files),
        rendered=recipe.rendered,
        steps=job.steps,
        version=__version__,
        began=began,
        chat=job.chat,
    )


def _title(settings: Settings) -> str:
    return f"{settings.kind} {settings.base_model}"
