"""`tinkex run plot`: the curves of runs, in the terminal or as a figure."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.cli.command_errors import CommandError, misuse
from tinkex.cli.commands import Argument, Command
from tinkex.cli.output import print_json, say
from tinkex.tracking.figure import write_picture
from tinkex.tracking.history import read_metrics
from tinkex.tracking.run_info import read_run
from tinkex.tracking.series import by_panel, series_of
from tinkex.tracking.terminal_plot import plot as plot_text
from tinkex.tracking.views import shows_colour, speaks_unicode, terminal_size

if TYPE_CHECKING:
    import argparse

    from tinkex.tracking.series import Points

_WIDEST, _HIGHEST = 100, 20


def plot(args: argparse.Namespace) -> None:
    """Plot metrics in the terminal, or write a figure."""
    folders = [Path(each).expanduser() for each in args.folders]
    series = _series(folders, args.metrics or [])
    if args.output:
        write_picture(series, Path(args.output), title=_title(folders))
    if args.format == "json":
        print_json({"series": {name: _plain(points) for name, points in series.items()}})
    elif args.output:
        say(f"Drew {args.output}.")
    else:
        _print(series)


def _series(folders: list[Path], metrics: list[str]) -> dict[str, Points]:
    labels = _labels(folders)
    found: dict[str, Points] = {}
    for folder, label in zip(folders, labels, strict=True):
        if not folder.is_dir():
            raise misuse(
                f"There is no folder {folder}",
                "Give the folder of a run, such as those that `tinkex train` makes in runs/.",
            )
        rows = read_metrics(folder)
        if not rows:
            raise CommandError(
                f"{folder} has no step to plot yet", f"Follow it with `tinkex run watch {folder}`."
            )
        found |= series_of(rows, metrics, label if len(folders) > 1 else "")
    return found


def _labels(folders: list[Path]) -> list[str]:
    """The names of the folders where they differ, else their paths."""
    names = [folder.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(folder) for folder in folders]


def _print(series: dict[str, Points]) -> None:
    """A plot for each value axis."""
    columns, rows = terminal_size(sys.stdout)
    for inside in by_panel(series).values():
        drawn = plot_text(
            inside,
            min(columns, _WIDEST),
            min(rows - 2, _HIGHEST),
            speaks_unicode(sys.stdout),
            colour=shows_colour(sys.stdout),
        )
        print(drawn)


def _title(folders: list[Path]) -> str:
    if len(folders) == 1:
        return read_run(folders[0]).title
    return " and ".join(_labels(folders)) if len(folders) == 2 else f"{len(folders)} runs"


def _plain(points: Points) -> list[tuple[float, float | None]]:
    return [(x, y if math.isfinite(y) else None) for x, y in points]


PLOT = Command(
    plot,
    Argument("folders FOLDER", "a run's folder; several overlay", nargs="+"),
    Argument(
        "-m --metric NAME",
        "such as loss or reward; may be repeated (default: the run's main metric)",
        dest="metrics",
        action="append",
    ),
    Argument("-o --output FILE", "write a figure: FILE.svg or FILE.png"),
)
