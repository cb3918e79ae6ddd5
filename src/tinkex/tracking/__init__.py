"""Experiment tracking: live progress, terminal plots, figures, and where metrics are logged."""

from tinkex.tracking.figure import write_picture
from tinkex.tracking.history import follow, read_metrics
from tinkex.tracking.progress import Progress
from tinkex.tracking.series import series_of
from tinkex.tracking.sinks import Sink, open_sinks
from tinkex.tracking.terminal_plot import plot

__all__ = [
    "Progress",
    "Sink",
    "follow",
    "open_sinks",
    "plot",
    "read_metrics",
    "series_of",
    "write_picture",
]
