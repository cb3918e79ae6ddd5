"""`tinkex demo`: a small model learns to talk like a pirate, on this machine.

It is `tinkex train sft` on a data set that comes with the package, with the same questions asked
before and after. An interrupted demo continues from its last save. A finished one is shown again
and nothing is computed.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.chat.renderer import Renderer
from tinkex.cli.connect import load_config, service_client
from tinkex.cli.demo_progress import DemoProgress
from tinkex.cli.export import export_adapter
from tinkex.cli.main import INTERRUPTED
from tinkex.cli.output import print_json, say
from tinkex.cli.talking.columns import wrap
from tinkex.cli.target import Target
from tinkex.config import DEFAULT_MODEL
from tinkex.demo import HELD_OUT, PROMPTS, TRAINING
from tinkex.errors import MissingPackageError
from tinkex.loops import SftJob, SftSettings, run
from tinkex.loops.run_folder import RunFolder
from tinkex.loops.runner import ended
from tinkex.tracking.figure import write_picture
from tinkex.tracking.history import METRICS, read_metrics
from tinkex.tracking.series import series_of
from tinkex.tracking.terminal_plot import plot
from tinkex.tracking.views import shows_colour, speaks_unicode, terminal_size
from tinkex.types import ModelInput, SamplingParams

if TYPE_CHECKING:
    import argparse

    from tinkex.clients.service import ServiceClient

_STORY = "demo.json"
_ADAPTER = "adapter"
_PICTURES = ("curve.svg", "curve.png")
_ANSWER_TOKENS = 48
_LEARNING_RATE = 1e-3
_SAVE_EVERY = 4
_LABEL = 10
_WIDEST, _PLOT_ROWS = 80, 14
_BOLD, _DIM, _GREEN, _CYAN, _NORMAL = "\033[1m", "\033[2m", "\033[32m", "\033[36m", "\033[0m"


def demo(args: argparse.Namespace) -> int | None:
    """Train and show what came of it, or show it again."""
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
    """The story of a demonstration that was carried through, if all of it is still there."""
    try:
        story: dict[str, Any] = json.loads((folder / _STORY).read_text())
        files = [folder / name for name in (*story["pictures"], METRICS, _ADAPTER)]
        whole = story["steps"] == steps and all(file.exists() for file in files)
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return story if whole else None


def _made(folder: Path, steps: int) -> dict[str, Any] | None:
    """Do it all; None when training was interrupted."""
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
    ended(job, place, place.read() if place.begun else None)
    say(f"{DEFAULT_MODEL} learns to talk like a pirate, on a server")
    say(f"of its own on this machine, from the questions and answers in {data}.")
    with DemoProgress(steps) as progress, service_client(DEFAULT_MODEL, embedded=True) as service:
        before = _answers(service, Target(base_model=DEFAULT_MODEL), "before training", progress)
        progress.phase("Training …")
        outcome = run(service, job, folder, resume=place.begun, display=progress)
        if outcome.ending == "interrupted":
            return None
        best = outcome.best
        after = _answers(service, Target(model_path=best.sampler_path), "after training", progress)
        progress.phase("Exporting the adapter …")
        export_adapter(service, best.state_path, folder / _ADAPTER)
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
        "pictures": _draw(folder),
    }
    # Last of all: whoever finds it finds everything.
    (folder / _STORY).write_text(json.dumps(story, indent=2) + "\n")
    return story


def _data(folder: Path) -> Path:
    """A copy of the data to look at and to train on; nothing is written over."""
    path = folder / TRAINING.name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(TRAINING, path)
    return path


def _answers(
    service: ServiceClient, target: Target, when: str, progress: DemoProgress
) -> list[str]:
    """What the model answers to each prompt."""
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


def _draw(folder: Path) -> list[str]:
    """The curve as pictures; returns their names."""
    series = series_of(read_metrics(folder))
    try:
        for name in _PICTURES:
            write_picture(series, folder / name, title="A model learns to talk like a pirate")
    except MissingPackageError as error:
        say(f"No picture of the curve: {error}")
        return []
    return list(_PICTURES)


# -- showing it --------------------------------------------------------------------------------


def _show(args: argparse.Namespace, folder: Path, story: dict[str, Any]) -> None:
    commands = _next_commands(folder, story)
    if args.format == "json":
        print_json({"folder": str(folder), **story, "next": [command for _, command in commands]})
        return
    width = min(terminal_size(sys.stdout)[0], _WIDEST)
    _print_curve(folder, width)
    _print_answers(story, width)
    loss = story["held_out_loss"]
    print(f"\nLoss on questions it has never seen: {loss['before']:.2f} -> {loss['after']:.2f}")
    places = [
        ("Picture", ", ".join(str(folder / name) for name in story["pictures"]) or "none"),
        ("Adapter", f"{folder / _ADAPTER} (a PEFT folder)"),
        ("Data", story["data"]),
    ]
    for name, place in places:
        print(f"{name:{_LABEL}}{place}")
    print(f"\n{_painted('Try next:', _BOLD)}")
    for why, command in commands:
        print(f"  {_painted(command, _CYAN)}\n      {why}")


def _print_curve(folder: Path, width: int) -> None:
    """The loss of each step and of the evaluations."""
    series = series_of(read_metrics(folder))
    unicode, colour = speaks_unicode(sys.stdout), shows_colour(sys.stdout)
    print(f"\n{plot(series, width, _PLOT_ROWS, unicode, colour=colour)}")


def _print_answers(story: dict[str, Any], width: int) -> None:
    """Each question with the answer before and after training."""
    for answer in story["answers"]:
        print(f"\n{_painted(answer['prompt'], _BOLD)}")
        for when, style in (("before", _DIM), ("after", _GREEN)):
            for at, row in enumerate(wrap(answer[when], max(width - _LABEL, 20))):
                label = f"  {when}" if at == 0 else ""
                print(_painted(f"{label:{_LABEL}}{row}".rstrip(), style))


def _painted(text: str, style: str) -> str:
    """The text in a style, where standard output shows colours."""
    return f"{style}{text}{_NORMAL}" if shows_colour(sys.stdout) else text


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
    """How this program is called from where we are, on the same server."""
    called = Path(sys.argv[0])
    on_path = shutil.which("tinkex")
    if called.name != "tinkex":
        program = f"{sys.executable} -m tinkex.cli"
    elif on_path is not None and Path(on_path).resolve() == called.resolve():
        program = "tinkex"
    else:
        program = str(called)
    return program if load_config().embedded else f"TINKER_BASE_URL=embedded {program}"
