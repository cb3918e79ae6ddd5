"""Figures of a run: curves as SVG or PNG, the same bytes for the same numbers.

Every metric has its own panel, together with its evaluation: a smoothed line over the faint
measured one, evaluations as points. Only this module imports matplotlib, when it draws.
"""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

from tinkex.errors import InputError, MissingPackageError
from tinkex.new_files import replacing
from tinkex.tracking.series import by_panel, finite, is_evaluation, label_of, metric_of, smoothed

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    Series = Mapping[str, Sequence[tuple[float, float]]]

FORMATS = (".svg", ".png")
# Distinguishable for colour-blind readers and in greyscale.
_COLOURS = ("#2f6db5", "#d9622b", "#2a9d6f", "#8b5fbf", "#b8860b", "#c2407a", "#4d4d4d", "#17a2b8")
_WIDTH_IN, _PANEL_IN, _TITLE_IN, _DPI = 7.2, 3.2, 0.5, 150
_STYLE: dict[str, Any] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so it is the same everywhere
    "font.size": 10.0,
    "svg.hashsalt": "tinkex",  # names inside the file; random by default
    "text.parse_math": False,  # a title may contain a dollar sign
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": "#888888",
    "axes.labelcolor": "#333333",
    "xtick.color": "#555555",
    "ytick.color": "#555555",
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "legend.frameon": False,
    "figure.facecolor": "white",
}


def write_picture(series: Series, path: Path, *, title: str = "", x_label: str = "step") -> None:
    """Draw to `path`, .svg or .png by its suffix, replacing it atomically.

    Values that are not finite are left out. Raises InputError for another suffix or without a
    finite value, MissingPackageError without matplotlib.
    """
    if path.suffix.lower() not in FORMATS:
        raise InputError(f"must end in .svg or .png, not {path.suffix or 'nothing'!r}", str(path))
    drawn = {name: points for name in series if (points := finite(series[name]))}
    if not drawn:
        raise InputError("there is no finite value to draw", str(path))
    try:
        import matplotlib
    except ImportError as error:
        raise MissingPackageError("Pictures need matplotlib", "'tinkex[plots]'") from error
    package: Any = matplotlib
    with package.rc_context(_STYLE):
        _save(_figure(drawn, title, x_label), path)


def _figure(series: Mapping[str, list[tuple[float, float]]], title: str, x_label: str) -> Any:
    from matplotlib.figure import Figure

    panels = by_panel(series)
    height = _PANEL_IN * len(panels) + (_TITLE_IN if title else 0.0)
    # Not pyplot, which keeps figures alive and may need a display.
    figure: Any = Figure(figsize=(_WIDTH_IN, height), layout="constrained")
    if title:
        figure.suptitle(title, fontsize=12, fontweight="bold", color="#222222")
    grid = figure.subplots(len(panels), 1, sharex=True, squeeze=False)
    colours = _colours(series)
    for axes, (panel, inside) in zip(grid[:, 0], panels.items(), strict=True):
        for name, points in inside.items():
            _draw(axes, name, points, colours[name])
        axes.set_ylabel(panel.replace("_", " "))
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.margins(x=0.02)
        if len(series) > 1:
            axes.legend()
    grid[-1, 0].set_xlabel(x_label)
    return figure


def _colours(series: Mapping[str, object]) -> dict[str, str]:
    """A colour for each run where there are several, else for each metric."""
    owners = {name: label_of(name) for name in series}
    if len(set(owners.values())) < 2:
        owners = {name: metric_of(name) for name in series}
    order = list(dict.fromkeys(owners.values()))
    return {name: _COLOURS[order.index(owner) % len(_COLOURS)] for name, owner in owners.items()}


def _draw(axes: Any, name: str, points: list[tuple[float, float]], colour: str) -> None:
    """One curve; an evaluation is on top, with its points marked."""
    label = name.replace("_", " ")
    if is_evaluation(name) or len(points) == 1:
        marks = {"marker": "o", "markersize": 5, "markeredgecolor": "white", "zorder": 3}
        axes.plot(*_columns(points), color=colour, linewidth=1.2, label=label, **marks)
        return
    axes.plot(*_columns(points), color=colour, linewidth=0.8, alpha=0.3)
    axes.plot(*_columns(smoothed(points)), color=colour, linewidth=1.8, label=label)


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _save(figure: Any, path: Path) -> None:
    suffix = path.suffix.lower()
    # Otherwise the file would contain its date and matplotlib's version.
    metadata = {"Date": None} if suffix == ".svg" else {"Software": None}
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file, warnings.catch_warnings():
        # Letters that the font lacks are drawn as boxes, which is acceptable.
        warnings.filterwarnings("ignore", "Glyph", UserWarning)
        figure.savefig(file, format=suffix[1:], dpi=_DPI, metadata=metadata)
