"""`python -m benchmarks.learning --plot docs/img/lora.svg`: curves, a table, a JSON line.

Two statements of "LoRA without regret", on SmolLM2-135M: adapters on the MLP alone learn better
than adapters on attention alone with as many parameters, and for policy gradients rank 1 is enough.
Each adapter gets the learning rate that suits it best, and that one is repeated with other seeds.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import tinkex
from benchmarks.client_cost.setting import commit, hardware
from benchmarks.learning.plot import Line, Panel, svg
from benchmarks.learning.runs import RL, SFT, Adapter, Curve, Task, example, values
from tinkex.engine.lora import parameter_count
from tinkex.engine.models.loader import load_model

TASKS = (SFT, RL)


def sweep(task: Task, service: Any, tokenizer: Any, sizes: dict[str, int]) -> list[Curve]:
    """Every adapter at every rate, then the best rate of each with the other seeds."""
    curves: list[Curve] = []

    def once(adapter: Adapter, rate: float, seed: int) -> Curve:
        curve = Curve(task.name, adapter.label, sizes[adapter.label], rate, seed)
        run_values = values(task, service, tokenizer, adapter, rate, seed)
        curve.values += [round(value, 4) for value in run_values]
        print(f"{adapter.label}, rate {rate:g}, seed {seed}: {curve.result:.3f}", file=sys.stderr)
        curves.append(curve)
        return curve

    for adapter in task.adapters:
        best = task.best([once(adapter, rate, seed=1) for rate in task.rates])
        for seed in range(2, task.seeds + 1):
            once(adapter, best.learning_rate, seed)
    return curves


def chosen(task: Task, curves: list[Curve]) -> dict[str, list[Curve]]:
    """Per adapter the curves of its best rate, the first seed first."""
    found: dict[str, list[Curve]] = {}
    for adapter in task.adapters:
        own = [curve for curve in curves if curve.adapter == adapter.label]
        best = task.best([curve for curve in own if curve.seed == 1])
        found[adapter.label] = [one for one in own if one.learning_rate == best.learning_rate]
    return found


def panel(task: Task, curves: list[Curve]) -> Panel:
    """How a task is drawn."""
    lines = [
        Line(label, curve.values) for label, own in chosen(task, curves).items() for curve in own
    ]
    if task is SFT:
        return Panel(task.title, "step", (0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 4), lines, log=True)
    ticks = (0, 0.2, 0.4, 0.6, 0.8, 1)
    return Panel(task.title, "round", ticks, lines, first=1, marked=task.reached)


def table(task: Task, curves: list[Curve]) -> str:
    """Each adapter at its best rate; results are means over seeds."""
    heads = ("", "parameters", "rate", "begin", "end", "range", f"first at {task.reached:g}")
    rows: list[tuple[str, ...]] = [heads]
    for label, own in chosen(task, curves).items():
        ends = [curve.result for curve in own]
        when = [task.first_reached(curve) for curve in own]
        # Rounds are counted from 1: the first reward is that of the untrained model.
        first = [str(w + (task is RL)) if w is not None else "never" for w in when]
        rows.append(
            (
                label,
                f"{own[0].parameters:,}",
                f"{own[0].learning_rate:g}",
                f"{own[0].values[0]:.2f}",
                f"{mean(ends):.3f}",
                f"{min(ends):.3f}-{max(ends):.3f}",
                ", ".join(first),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = [
        "  ".join(
            cell.ljust(width) if column == 0 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]
    return "\n".join([task.title, *lines])


def verdicts(by_task: dict[Task, list[Curve]]) -> dict[str, bool]:
    """What was found for either statement; only of the tasks that were run."""
    found: dict[str, bool] = {}
    if SFT in by_task:
        mlp, attention = chosen(SFT, by_task[SFT]).values()
        worst, best = max(c.result for c in mlp), min(c.result for c in attention)
        found["every MLP run ends below every attention run"] = worst < best
    if RL in by_task:
        small, _ = chosen(RL, by_task[RL]).values()
        found["every rank 1 run ends above a reward of 0.8"] = min(c.result for c in small) > 0.8
    return found


def kept(store: Path | None, only: str | None) -> list[Curve]:
    """The curves of the last time, of the task that is not run now."""
    if store is None or only is None or not store.exists():
        return []
    found = [Curve(**one) for one in json.loads(store.read_text())]
    return [curve for curve in found if curve.task != only]


def run(only: str | None) -> list[Curve]:
    """New curves of one task, or of all."""
    sft = example("sft_smollm2")
    config = load_model(sft.MODEL).decoder.config
    sizes = {a.label: parameter_count(config, a.lora) for task in TASKS for a in task.adapters}
    with tinkex.ServiceClient("embedded") as service:
        tokenizer = service.create_sampling_client(base_model=sft.MODEL).get_tokenizer()
        wanted = [task for task in TASKS if only in (None, task.name)]
        return [curve for task in wanted for curve in sweep(task, service, tokenizer, sizes)]


def as_json(curves: list[Curve], found: dict[str, bool]) -> dict[str, object]:
    """The line for machines."""
    return {
        "benchmark": "learning",
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "hardware": hardware(),
        "threads": torch.get_num_threads(),
        "curves": [asdict(curve) for curve in curves],
        "found": found,
    }


def main() -> int:
    """Run what was asked for, draw and print all there is."""
    parser = argparse.ArgumentParser(prog="benchmarks.learning", description=__doc__)
    parser.add_argument("--plot", type=Path, help="write the picture here, its curves beside it")
    parser.add_argument("--only", choices=[task.name for task in TASKS], help="keep the others")
    options = parser.parse_args()
    store = options.plot.with_suffix(".json") if options.plot else None
    curves = kept(store, options.only) + run(options.only)
    by_task = {task: [c for c in curves if c.task == task.name] for task in TASKS}
    by_task = {task: own for task, own in by_task.items() if own}
    if store:
        lines = ",\n".join(json.dumps(asdict(curve)) for curve in curves)
        store.write_text(f"[\n{lines}\n]\n")
        options.plot.write_text(svg([panel(task, own) for task, own in by_task.items()]))
    print("\n\n".join(table(task, own) for task, own in by_task.items()))
    found = verdicts(by_task)
    for claim, holds in found.items():
        print(f"{'yes' if holds else 'NO '} {claim}")
    print(json.dumps(as_json(curves, found)))
    return 0 if all(found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
