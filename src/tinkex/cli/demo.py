"""`tinkex demo`: fine-tunes a small model to talk like a pirate, on this machine.

It is `tinkex train sft` on a data set that comes with the package, with the same questions asked
before and after training. An interrupted demo continues from its last save. A finished demo is
shown again without computing anything.
"""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from tinkex.cli.chat.text_columns import wrap
from tinkex.cli.commands import INTERRUPTED, Argument, whole_number
from tinkex.cli.connect import load_config, service_client
from tinkex.cli.export import export_adapter
from tinkex.cli.output import print_json, say
from tinkex.cli.train import ADAPTER, write_figures
from tinkex.clock import SystemClock
from tinkex.tracking.history import METRICS, read_metrics
from tinkex.tracking.layout import bar_line, cut, duration, number, plain_line
from tinkex.tracking.series import series_of
from tinkex.tracking.state import RunState
from tinkex.tracking.terminal_plot import plot
from tinkex.tracking.views import (
    BOLD,
    CYAN,
    DIM,
    GREEN,
    PLAIN_WIDTH,
    can_redraw,
    painted,
    shows_colour,
    speaks_unicode,
    terminal_size,
)

if TYPE_CHECKING:
    import argparse
    from collections.abc import Mapping
    from typing import TextIO

    from tinkex.cli.target import SamplingTarget
    from tinkex.clients.service import ServiceClient
    from tinkex.clock import Clock

ARGUMENTS = (
    Argument("-o --output DIR", "the folder of the run", default="runs/demo"),
    Argument("--steps N", "training steps", type=whole_number(1), default=32),
)

TRAINING = Path(__file__).with_name("pirate.jsonl")
HELD_OUT = Path(__file__).with_name("pirate_held_out.jsonl")
PROMPTS = (
    "Who are you?",
    "What is the capital of France?",
    "How do I make a cup of tea?",
    "What is the moon?",
)
"""What is asked before and after; none of it is in the data."""

_STORY = "demo.json"
_ANSWER_TOKENS = 48
_LEARNING_RATE = 1e-3
_SAVE_EVERY = 4
_LABEL = 10
_WIDEST, _PLOT_ROWS = 80, 14
# The number of steps with a line where lines cannot be redrawn.
_PLAIN_LINES = 4
_BAR_WIDTH = 50
_CLEAR_LINE = "\r\033[K"


def demo(args: argparse.Namespace) -> int | None:
    """Train and show the result, or show it again."""
    folder = Path(args.output)
    story = _told(folder, args.steps)
    if story is None:
        story = _made(folder, args.steps)
    if story is None:
        say(f"Interrupted. To continue, run:\n  {_again(args)}")
        return INTERRUPTED
    _show(args, folder, story)
    return None


def _told(folder: Path, steps: int) -> dict[str, Any] | None:
    """The story of a finished demo, if all of its files still exist."""
    try:
        story: dict[str, Any] = json.loads((folder / _STORY).read_text())
        files = [folder / name for name in (*story["pictures"], METRICS, ADAPTER)]
        whole = story["steps"] == steps and all(file.exists() for file in files)
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return story if whole else None


def _made(folder: Path, steps: int) -> dict[str, Any] | None:
    """Train and compare; None when training was interrupted."""
    from tinkex.cli.target import SamplingTarget
    from tinkex.config import DEFAULT_MODEL
    from tinkex.loops.run_folder import RunFolder
    from tinkex.loops.run_job import ended, run
    from tinkex.loops.run_settings import SftSettings
    from tinkex.loops.sft import SftJob

    settings = SftSettings(
        model=DEFAULT_MODEL,
        steps=steps,
        learning_rate=_LEARNING_RATE,
        rank=8,
        save_every=_SAVE_EVERY,
    )
    data = _data(folder.parent)
    job = SftJob(settings, data, HELD_OUT)
    place = RunFolder(folder)
    # Raises for a run with other settings, before a server is started.
    ended(job, place, place.read() if place.started else None)
    say(f"{DEFAULT_MODEL} learns to talk like a pirate, on a server")
    say(f"of its own on this machine, from the questions and answers in {data}.")
    with DemoProgress(steps) as progress, service_client(DEFAULT_MODEL, embedded=True) as service:
        untuned = SamplingTarget(base_model=DEFAULT_MODEL)
        before = _answers(service, untuned, "before training", progress)
        progress.phase("Training …")
        outcome = run(service, job, folder, resume=place.started, display=progress)
        if outcome.ending == "interrupted":
            return None
        best = outcome.best
        tuned = SamplingTarget(model_path=best.sampler_path)
        after = _answers(service, tuned, "after training", progress)
        progress.phase("Exporting the adapter …")
        export_adapter(service, best.state_path, folder / ADAPTER)
    losses = [row["eval_loss"] for row in read_metrics(folder) if "eval_loss" in row]
    story: dict[str, Any] = {
        "steps": steps,
        "model": DEFAULT_MODEL,
        "path": best.sampler_path,
        "data": str(data),
        "held_out_loss": {"before": losses[0], "after": losses[-1]},
        "answers": [
            {"prompt": prompt, "before": old, "after": new}
            for prompt, old, new in zip(PROMPTS, before, after, strict=True)
        ],
        "pictures": write_figures(folder, "A model learns to talk like a pirate"),
    }
    # Written last, so that a folder with this file is complete.
    (folder / _STORY).write_text(json.dumps(story, indent=2) + "\n")
    return story


def _data(folder: Path) -> Path:
    """A copy of the data to view and train on; an existing file is kept."""
    path = folder / TRAINING.name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(TRAINING, path)
    return path


def _answers(
    service: ServiceClient, target: SamplingTarget, when: str, progress: DemoProgress
) -> list[str]:
    """The model's answer to each prompt."""
    from tinkex.chat.renderer import Renderer
    from tinkex.types import ModelInput, SamplingParams

    sampler = target.open(service)
    renderer = Renderer.of(sampler.get_tokenizer())
    greedy = SamplingParams(max_tokens=_ANSWER_TOKENS, temperature=0.0, stop=renderer.stop)
    asking = f"Asking {len(PROMPTS)} questions {when}"
    progress.phase(f"{asking} …")
    waiting = [
        sampler.sample(
            ModelInput.from_ints(renderer.prompt([{"role": "user", "content": prompt}])), 1, greedy
        )
        for prompt in PROMPTS
    ]
    answers: list[str] = []
    for future in waiting:
        one = future.result().sequences[0]
        cut_off = " …" if one.stop_reason == "length" else ""
        answers.append(renderer.text(one.tokens).strip() + cut_off)
        progress.stage(f"{asking}: {len(answers)} answered")
    return answers


# -- showing it --------------------------------------------------------------------------------


def _show(args: argparse.Namespace, folder: Path, story: dict[str, Any]) -> None:
    commands = _next_commands(folder, story)
    if args.format == "json":
        print_json({"folder": str(folder), **story, "next": [command for _, command in commands]})
        return
    width, colour = min(terminal_size(sys.stdout)[0], _WIDEST), shows_colour(sys.stdout)
    series, unicode = series_of(read_metrics(folder)), speaks_unicode(sys.stdout)
    print(f"\n{plot(series, width, _PLOT_ROWS, unicode, colour=colour)}")
    _print_answers(story, width, colour=colour)
    loss = story["held_out_loss"]
    print(f"\nLoss on questions it has never seen: {loss['before']:.2f} -> {loss['after']:.2f}")
    places = [
        ("Picture", ", ".join(str(folder / name) for name in story["pictures"]) or "none"),
        ("Adapter", f"{folder / ADAPTER} (a PEFT folder)"),
        ("Data", story["data"]),
    ]
    for name, place in places:
        print(f"{name:{_LABEL}}{place}")
    print(f"\n{painted('Try next:', BOLD, colour=colour)}")
    for why, command in commands:
        print(f"  {painted(command, CYAN, colour=colour)}\n      {why}")


def _print_answers(story: dict[str, Any], width: int, *, colour: bool) -> None:
    """Each question with the answer before and after training."""
    for answer in story["answers"]:
        print(f"\n{painted(answer['prompt'], BOLD, colour=colour)}")
        for when, style in (("before", DIM), ("after", GREEN)):
            for at, row in enumerate(wrap(answer[when], max(width - _LABEL, 20))):
                label = f"  {when}" if at == 0 else ""
                print(painted(f"{label:{_LABEL}}{row}".rstrip(), style, colour=colour))


def _next_commands(folder: Path, story: dict[str, Any]) -> list[tuple[str, str]]:
    mine = folder.parent / "mine"
    return [
        ("talk to it; type /compare base to see both at once", f"{_program()} chat {folder}"),
        (
            "train on a file of your own; this one shows the format",
            f"{_program()} train sft {story['data']} --output {mine} --steps 20",
        ),
        ("serve it to OpenAI clients: docs/how-to/openai.md", f"{_program()} serve --no-auth"),
    ]


def _again(args: argparse.Namespace) -> str:
    return f"{_program()} demo --output {args.output} --steps {args.steps}"


def _program() -> str:
    """The command line that calls this program, with the embedded server."""
    called = Path(sys.argv[0])
    on_path = shutil.which("tinkex")
    if called.name != "tinkex":
        program = f"{sys.executable} -m tinkex.cli"
    elif on_path is not None and Path(on_path).resolve() == called.resolve():
        program = "tinkex"
    else:
        program = str(called)
    return program if load_config().embedded else f"TINKER_BASE_URL=embedded {program}"


# -- progress ------------------------------------------------------------------------------------


class DemoProgress:
    """Shows the phases of the demo and the steps of its training on standard error.

    Errors of the stream are ignored: they must not end the training.
    """

    def __init__(
        self, steps: int, *, stream: TextIO | None = None, clock: Clock | None = None
    ) -> None:
        self._steps = steps
        self._stream = stream or sys.stderr
        self._clock = clock or SystemClock()
        self._live = can_redraw(self._stream)
        # Mutable: when the phase began, and the state of the training after the first step.
        self._began = self._clock.now()
        self._state: RunState | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._write(_CLEAR_LINE)

    def phase(self, text: str) -> None:
        """Show the next part of the demo."""
        self._began = self._clock.now()
        self._write(self._live_line(text) if self._live else f"{text}\n")

    def stage(self, text: str) -> None:
        """Redraw the line on a terminal; plain output does not have stages."""
        if self._live:
            self._write(self._live_line(text))

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Show the numbers of a training step."""
        now = self._clock.now()
        if self._state is None:
            self._state = RunState(self._steps, "Training", step - 1, self._began)
        self._state.add(step, values, now)
        if self._live:
            self._write(self._live_line(self._bar(self._state)))
        elif step % -(-self._steps // _PLAIN_LINES) == 0 or self._state.is_last:
            self._write(plain_line(self._state, PLAIN_WIDTH) + "\n")

    def note(self, text: str) -> None:
        """Ignore a note of the run, such as a save: the demo shows the result only."""

    def _bar(self, state: RunState) -> str:
        pieces = [bar_line(state, _BAR_WIDTH, unicode=speaks_unicode(self._stream))]
        loss = state.value("loss")
        if loss is not None:
            pieces.append(f"loss {number(loss)}")
        if state.left_s is not None and not state.is_last:
            pieces.append(f"{duration(state.left_s)} left")
        return "  ".join(pieces)

    def _live_line(self, text: str) -> str:
        # A line that wraps could not be redrawn.
        columns, _ = terminal_size(self._stream)
        return f"{_CLEAR_LINE}{cut(text, columns - 1)}"

    def _write(self, text: str) -> None:
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        with suppress(OSError, ValueError):
            self._stream.write(text.encode(encoding, "replace").decode(encoding))
            self._stream.flush()
