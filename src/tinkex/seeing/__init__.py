"""Seeing a run: live progress, plots in the terminal, pictures, and where its numbers go."""

from tinkex.seeing.history import follow, read_metrics
from tinkex.seeing.picture import write_picture
from tinkex.seeing.progress import Progress
from tinkex.seeing.series import series_of
from tinkex.seeing.sinks import Sink, open_sinks
from tinkex.seeing.terminal_plot import plot

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
