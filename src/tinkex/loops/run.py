"""A whole run in its folder: begin or resume, train, keep what comes of it."""

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
from tinkex.loops.early_stop import Patience
from tinkex.loops.graceful_stop import Interruption
from tinkex.loops.loop import Loop, Outcome, Plan
from tinkex.loops.recorder import Writer
from tinkex.loops.resume import hashes, record_of, refuse_other_run, refuse_other_tokens
from tinkex.loops.run_folder import CHECKPOINTS, Record, RunFolder
from tinkex.loops.schedule import learning_rate
from tinkex.tracking.progress import Progress
from tinkex.tracking.sinks import open_sinks
from tinkex.tracking.views import doing

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from tinkex.clients.service import ServiceClient
    from tinkex.clients.training import TrainingClient
    from tinkex.clock import Clock
    from tinkex.loops.loop import Recipe
    from tinkex.loops.recorder import Display
    from tinkex.loops.run_folder import Checkpoint
    from tinkex.loops.settings import Settings

# Saves and evaluations of a run for which nothing else is said: so many, and so far apart.
_SHARES, _NOT_WITHIN = 10, 10


class Job(Protocol):
    """What is to be trained on; making one has read and checked its files."""

    @property
    def settings(self) -> Settings: ...

    @property
    def files(self) -> Mapping[str, Path]: ...

    @property
    def steps(self) -> int: ...

    @property
    def material(self) -> str:
        """What is turned to tokens, such as "120 examples"."""
        ...

    @property
    def chat(self) -> bool:
        """Whether it has messages, which the model's chat template renders."""
        ...

    def prepare(self, service: ServiceClient, clock: Clock) -> Prepared:
        """Turn everything to tokens; raises for what cannot be. Makes no model."""
        ...


class Prepared(Protocol):
    """A job as tokens."""

    @property
    def judged_by(self) -> str | None: ...

    @property
    def higher_is_better(self) -> bool: ...

    @property
    def rendered(self) -> str: ...

    def recipe(
        self,
        service: ServiceClient,
        training: TrainingClient,
        folder: Path,
        note: Callable[[str], None],
    ) -> Recipe: ...


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
    """Do a job in a folder, from its beginning or from its last save.

    Everything is checked before a model is made. While it trains, the first SIGINT or SIGTERM
    makes it finish the step in flight, save and return. A run that is finished already returns
    at once. `display` shows the run instead of a `Progress` on standard error.
    """
    clock = clock or SystemClock()
    place = RunFolder(folder)
    record = record_of(place, resume=resume)
    done = ended(job, place, record)
    if done is not None:
        return done
    began = clock.wall() if record is None else record.began
    # A template that writes the date always writes the one on which the run began.
    with doing(f"Tokenizing {job.material} for {job.settings.base_model}"):
        prepared = job.prepare(service, FixedDate(clock, began))
    if record is not None:
        refuse_other_tokens(record, prepared.rendered)
    plan = _plan(job.settings, job.steps, prepared.judged_by)
    place.make()
    with place.claimed():
        record = record or _new_record(job, prepared, began)
        place.write(replace(record, status="running", pid=os.getpid(), host=platform.node()))
        return _Run(service, job, prepared, plan, place, clock, display).kept(report)


def ended(job: Job, place: RunFolder, record: Record | None) -> Outcome | None:
    """How a run ended that is over; None for one that is not. Raises if it is another job's."""
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
    """A run whose folder is there and whose job is fit to be trained on."""

    service: ServiceClient
    job: Job
    prepared: Prepared
    plan: Plan
    place: RunFolder
    clock: Clock
    display: Display | None

    def kept(self, report: Sequence[str]) -> Outcome:
        """Train, and write down how it ended."""
        try:
            outcome = self.train(report)
        except BaseException as error:
            gone = isinstance(error, KeyboardInterrupt)
            with suppress(TinkerError):  # a full disk, say, which is what `error` is about
                self.place.change(status="interrupted" if gone else "failed")
            raise
        over = outcome.ending != "interrupted"
        self.place.change(
            status="finished" if over else "interrupted",
            adapter_path=outcome.best.sampler_path if over else None,
        )
        return outcome

    def train(self, report: Sequence[str]) -> Outcome:
        """Go on from the last save; without one, from the beginning."""
        settings = self.job.settings
        start = next((one for one in reversed(self.place.checkpoints()) if one.step > 0), None)
        past = self.place.rewind(start.step if start else -1)
        with ExitStack() as stack:
            diary = self._diary(stack, report, start.step if start else 0)
            diary.stage(f"loading {settings.base_model}" if start is None else "loading the save")
            training = _model(self.service, settings, start)
            known = self.place.change()
            self.place.change(model_ids=[*known.model_ids, training.model_id])
            loop = Loop(
                self.prepared.recipe(self.service, training, self.place.path, diary.note),
                training,
                self.plan,
                diary,
                self._patience(past),
                self.clock,
                checkpoints=self.place.checkpoints(),
                spent_s=max((row.get("time_s", 0.0) for row in past), default=0.0),
            )
            return loop.run(stack.enter_context(Interruption()))

    def _diary(self, stack: ExitStack, report: Sequence[str], done: int) -> Writer:
        settings, folder = self.job.settings, self.place.path
        sinks = open_sinks(report, folder, folder.name, asdict(settings))
        stack.enter_context(closing(sinks))
        display = self.display or stack.enter_context(
            Progress(self.job.steps, _title(settings), done=done, clock=self.clock)
        )
        diary = Writer(self.place, sinks, display)
        for sentence in sinks.places:
            diary.note(sentence)
        return diary

    def _patience(self, past: Sequence[Mapping[str, float]]) -> Patience:
        """With what the evaluations so far have shown."""
        limit = self.job.settings.patience
        patience = Patience(limit, higher_is_better=self.prepared.higher_is_better)
        for row in past:
            value = row.get(self.plan.judged_by or "")
            if value is not None and row["step"] > 0:
                patience.see(int(row["step"]), value)
        return patience


def _model(service: ServiceClient, settings: Settings, start: Checkpoint | None) -> TrainingClient:
    if start is None:
        return service.create_lora_training_client(
            settings.base_model, rank=settings.rank, seed=settings.seed
        )
    try:
        return service.create_training_client_from_state_with_optimizer(start.state_path)
    except NotFoundError as error:
        raise InputError(
            f"this server does not have {start.state_path}, from which the run would go on. Use "
            "the server and the key that it was begun with; an embedded server keeps its "
            f"checkpoints in {DATA_DIR} of the folder it was started in.",
        ) from error


def _plan(settings: Settings, total: int, judged_by: str | None) -> Plan:
    if settings.patience is not None and judged_by is None:
        raise InputError("needs something to evaluate with", "patience")
    share = max(total // _SHARES, _NOT_WITHIN)
    return Plan(
        total=total,
        rate=lambda step: learning_rate(
            step, total, settings.learning_rate, settings.lr_schedule, settings.warmup
        ),
        save_every=settings.save_every or share,
        eval_every=settings.eval_every or share,
        judged_by=judged_by,
    )


def _new_record(job: Job, prepared: Prepared, began: float) -> Record:
    settings = job.settings
    return Record(
        kind=settings.kind,
        model=settings.model,
        title=_title(settings),
        settings=asdict(settings),
        files=hashes(job.files),
        rendered=prepared.rendered,
        steps=job.steps,
        version=__version__,
        began=began,
        chat=job.chat,
    )


def _title(settings: Settings) -> str:
    return f"{settings.kind} {settings.base_model}"
