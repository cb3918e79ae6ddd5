"""`python -m benchmarks.sft_parity`: does `tinkex train` learn as much as the usual tools?

`train sft` on SmolLM2-135M against `transformers` and `peft` with the same tokens, order, steps and
rates, and the same adapter to begin with: held-out losses must be within 2 %. The peer also begins
with an adapter of its own, which shows how much that matters and is not judged. Then `train rl`
must lift its reward. Each side is a process of its own, one at a time.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

import tinkex
from benchmarks.client_cost.processes import ROOT
from benchmarks.client_cost.setting import commit, hardware
from benchmarks.sft_parity.work import MODEL, QUICK, Recipe, write_data
from tinkex.chat import Renderer, tokenizer_for
from tinkex.cli.export import export_adapter
from tinkex.data import read_examples, render_all

WITHIN = 0.02
LAST, GOAL = 3, 0.8  # rounds of reinforcement learning that are judged, and their mean reward
TASK = Path(__file__).with_name("yes_or_no.py")
PACKAGES = ("torch", "transformers", "peft", "numpy")


def environment() -> dict[str, str]:
    """This checkout, the embedded server, and the weights of the package, not of the hub."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TINKER_", "TINKEX_"))}
    path = os.pathsep.join((str(ROOT), str(ROOT / "src")))
    return {**kept, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}


def python(folder: Path, *words: str) -> str:
    """What a program prints; its talk is shown."""
    done = subprocess.run(
        [sys.executable, "-m", *words],
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}")
    return done.stdout


def train(folder: Path, kind: str, source: Path, *more: str) -> list[dict[str, float]]:
    """What `tinkex train` measures, step by step."""
    python(folder, "tinkex.cli", "train", kind, str(source), "--output", kind, *more)
    lines = (folder / kind / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def ours(folder: Path, recipe: Recipe, files: tuple[Path, Path]) -> dict[int, float]:
    """The held-out loss by step."""
    settings = {k: v for k, v in asdict(recipe).items() if k != "rounds"}
    options = [w for k, v in settings.items() for w in (f"--{k.replace('_', '-')}", str(v))]
    rows = train(folder, "sft", files[0], "--eval", str(files[1]), *options)
    return {int(row["step"]): row["eval_loss"] for row in rows if "eval_loss" in row}


def peer(folder: Path, *words: str) -> dict[int, float]:
    """The same of the other side."""
    said = json.loads(python(folder, "benchmarks.sft_parity.peer", "work.json", *words))
    losses = {int(step): loss for step, loss in said.items()}
    print(f"peer: held-out loss {losses}", file=sys.stderr)
    return losses


def prepare(folder: Path, recipe: Recipe, files: tuple[Path, Path], steps: list[int]) -> None:
    """Tokens for the peer, and the adapter that ours began with."""
    with tinkex.ServiceClient("embedded") as service:
        renderer = Renderer.of(tokenizer_for(service, MODEL))
        parts = [
            [(one.tokens, one.weights) for one in render_all(renderer, found, max_tokens=2048)]
            for found in (read_examples(file, "sft") for file in files)
        ]
        training = service.create_lora_training_client(MODEL, rank=recipe.rank, seed=recipe.seed)
        start = training.save_weights_for_sampler("start").result().path
        export_adapter(service, start, folder / "start")
    work = {
        "recipe": asdict(recipe),
        "train": parts[0],
        "held_out": parts[1],
        "evaluate_at": steps,
    }
    (folder / "work.json").write_text(json.dumps(work))


def supervised(folder: Path, recipe: Recipe) -> dict[str, dict[int, float]]:
    """Held-out losses by side and step."""
    files = write_data(folder)
    found = ours(folder, recipe, files)
    prepare(folder, recipe, files, sorted(found))
    return {
        "tinkex train sft": found,
        "peft, same start": peer(folder, "start"),
        "peft, own start": peer(folder),
    }


def rewards(folder: Path, recipe: Recipe) -> tuple[float, float]:
    """The mean reward of the first round and of the last ones."""
    options = {"steps": recipe.rounds, "max-tokens": 6, "learning-rate": 4e-4, "rank": 8, "seed": 1}
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    found = [row["reward"] for row in train(folder, "rl", TASK, *words)]
    return found[0], mean(found[-LAST:])


def table(losses: dict[str, dict[int, float]]) -> str:
    """Held-out losses by step, and how far each side ends from ours."""
    sides = list(losses)
    ends = [list(found.values())[-1] for found in losses.values()]
    lines = ["  ".join(["step", *(side.rjust(18) for side in sides)])]
    for step in losses[sides[0]]:
        lines.append("  ".join([f"{step:4}", *(f"{losses[side][step]:18.4f}" for side in sides)]))
    away = [f"{100 * (ends[0] / end - 1):+17.2f}%" for end in ends]
    return "\n".join([*lines, "  ".join(["ours", *away])])


def main() -> int:
    """Measure, print, and say by the exit status whether every bar is met."""
    parser = argparse.ArgumentParser(prog="benchmarks.sft_parity", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few steps")
    parser.add_argument("--only", choices=("sft", "rl"))
    args = parser.parse_args()
    recipe = QUICK if args.quick else Recipe()
    results: dict[str, Any] = {}
    passed = True
    with TemporaryDirectory() as place:
        folder = Path(place)
        if args.only != "rl":
            losses = supervised(folder, recipe)
            print(table(losses))
            end, same, _ = (list(found.values())[-1] for found in losses.values())
            passed &= abs(end / same - 1) <= WITHIN
            results["held_out_loss"] = losses
        if args.only != "sft":
            first, last = rewards(folder, recipe)
            print(f"tinkex train rl: mean reward {first:.2f} -> {last:.2f}")
            passed &= last > (2 * first if args.quick else GOAL)
            results["reward"] = {"first": first, "last": last}
    about = {
        "benchmark": "sft_parity",
        "commit": commit(),
        "versions": {name: version(name) for name in PACKAGES},
        "hardware": hardware(),
        "recipe": asdict(recipe),
        "results": results,
        "passed": passed,
    }
    print(json.dumps(about))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
