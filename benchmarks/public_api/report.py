"""The table of `public_api`; decides nothing about how numbers are taken."""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median, quantiles


@dataclass
class Row:
    """One figure of the server and, where one was measured beside it, of a peer."""

    name: str
    title: str
    values: dict[str, list[float]] = field(default_factory=dict)
    """Each round's value, by side: `server` and `peer`."""

    def middle(self, side: str) -> float:
        """The median of a side's rounds."""
        return median(self.values[side])

    @property
    def ratios(self) -> list[float]:
        """How many times better than the peer, round by round; none without a peer.

        The rounds of a pair follow each other, so that both had the same load on the machine.
        """
        pairs = zip(self.values["server"], self.values.get("peer", []), strict=False)
        latency = self.name.endswith("_s")
        return [peer / server if latency else server / peer for server, peer in pairs]

    @property
    def ratio(self) -> float | None:
        """The median of the rounds' ratios; None without a peer."""
        return median(self.ratios) if self.ratios else None

    @property
    def quartiles(self) -> tuple[float, float]:
        """Half of the rounds' ratios lie between these."""
        if len(self.ratios) < 2:
            return self.ratios[0], self.ratios[0]
        low, _, high = quantiles(self.ratios, n=4, method="inclusive")
        return low, high


def rows() -> list[Row]:
    """Every figure, in the order of the table."""
    return [
        Row("step_latency_s", "step latency, s"),
        Row("train_8x128", "train 8x128, tok/s"),
        Row("train_32x128", "train 32x128, tok/s"),
        Row("train_8x512", "train 8x512, tok/s"),
        Row("train_4_adapters", "4 adapters at once, tok/s"),
        Row("train_4_in_turn", "4 adapters in turn, tok/s"),
        Row("sample_1", "sample 1, tok/s"),
        Row("sample_8", "sample 8, tok/s"),
        Row("sample_16x4", "sample 16x4, tok/s"),
    ]


def table(found: list[Row], bar: float | None = None) -> str:
    """At most 80 columns. There is a ratio, and a verdict, only if a peer was measured, too."""
    compare = all(row.ratio is not None for row in found)
    lines = [
        f"{'':28}{'server':>12}" + (f"{'peer':>12}{'ratio':>8}{'quartiles':>14}" if compare else "")
    ]
    for row in found:
        line = f"{row.title:28}{row.middle('server'):>12.4g}"
        if row.ratio is not None:
            low, high = row.quartiles
            between = f"{low:.2f}-{high:.2f}"
            line += f"{row.middle('peer'):>12.4g}{row.ratio:>8.2f}{between:>14}"
            if bar is not None:
                line += "  pass" if row.ratio >= bar else "  MISS"
        lines.append(line)
    return "\n".join(lines)
