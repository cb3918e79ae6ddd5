"""Measure the engine on one GPU: `python -m benchmarks.engine_gpu [--only ROW] [--no-peer]`."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import subprocess
import sys
from dataclasses import asdict, dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch

from benchmarks.engine_gpu import ours
from benchmarks.engine_gpu.shapes import SHAPES, random_decoder

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinkex.engine.models.families import StoredDecoder

WARM_UP, ROUNDS = 2, 5
REQUESTS, PROMPT, GENERATED = 256, 128, 128
TRAIN = {"0.6b": (16, 1024), "8b": (8, 1024)}
SAMPLES = REQUESTS * GENERATED
# Tokens per second that an H200's bandwidth and arithmetic allow; not shown on other devices.
H200_LIMITS = {"train-0.6b": 270e3, "train-8b": 25e3, "sample-0.6b": 130e3, "sample-8b": 23e3}
# How many times as fast as the peer in the same run. An H200 gave 3.6, 1.9, 6.0 and 5.5; the bars
# are about a third below, because the peer depends more on the CPU that launches its kernels.
BARS = {"train-0.6b": 2.5, "train-8b": 1.4, "sample-0.6b": 4.0, "sample-8b": 3.5}
# How many times as long strict mode may take as the row before it.
STRICT_BAR = 1.6
# The peer holds its whole cache in one piece: 256 requests of the large shape do not fit.
PEER_REQUESTS = {"0.6b": 256, "8b": 64}


@dataclass
class Row:
    """One line of the table: tokens per second, or what `unit` says.

    `ratio` is what the bar is about: ours by the peer's, or for `at_most` how many times as long
    ours takes as the row it is compared with.
    """

    name: str
    unit: str
    ours: float | None = None
    peer: float | None = None
    ratio: float | None = None
    bar: float | None = None
    limit: float | None = None
    peak_gib: float | None = None
    spread: float | None = None
    at_most: bool = False

    @property
    def passed(self) -> bool | None:
        """Whether the bar is reached; None without one, or with nothing to compare with."""
        if self.bar is None or self.ratio is None:
            return None
        return self.ratio <= self.bar if self.at_most else self.ratio >= self.bar


def limit_of(name: str) -> float | None:
    """What the device allows, where that is known."""
    return H200_LIMITS.get(name) if "H200" in torch.cuda.get_device_name() else None


def compare(row: Row, found: list[Row]) -> None:
    """Set the ratio: to the peer, or for strict mode to the default in the same run."""
    assert row.ours is not None
    default = next((one for one in found if f"{one.name}-strict" == row.name), None)
    if row.peer is not None:
        row.ratio = row.ours / row.peer
    elif default is not None and default.ours is not None:
        row.ratio, row.bar, row.at_most = default.ours / row.ours, STRICT_BAR, True


def settle() -> None:
    """As the engine's process does once its models are loaded."""
    gc.collect()
    gc.freeze()


def random_model(shape: str) -> StoredDecoder:
    """A model of ours; like the engine's process beside a GPU, this one then has one CPU thread."""
    torch.set_num_threads(1)
    return random_decoder(SHAPES[shape])


def timed(once: Callable[[], float], rounds: int = ROUNDS) -> tuple[float, float]:
    """Median seconds of some rounds after a warm-up, and their half spread."""
    for _ in range(WARM_UP):
        once()
    settle()
    torch.cuda.reset_peak_memory_stats()
    values = [once() for _ in range(rounds)]
    middle = median(values)
    return middle, (max(values) - min(values)) / 2 / middle


def peak_gib() -> float:
    """The most memory that tensors took since the last reset."""
    return torch.cuda.max_memory_allocated() / 2**30


def free() -> None:
    """Give memory back between rows."""
    gc.collect()
    torch.cuda.empty_cache()


def train_row(shape: str, *, peer: bool, strict: bool, unembed: bool) -> Row:
    """LoRA r32, one adapter: forward_backward and optim_step."""
    rows, length = TRAIN[shape]
    name = f"train-{shape}" + ("-strict" if strict else "") + ("-unembed" if unembed else "")
    row = Row(name, "tok/s", bar=BARS.get(name), limit=limit_of(f"train-{shape}"))
    if peer and name in BARS:
        from benchmarks.engine_gpu.peer import Training

        row.peer = rows * length / timed(Training(SHAPES[shape], rows, length), 3)[0]
        free()
    decoder = random_model(shape)
    once = ours.Training(decoder, rows, length, strict=strict, unembed=unembed)
    seconds, row.spread = timed(once)
    row.ours, row.peak_gib = rows * length / seconds, peak_gib()
    return row


def sample_row(shape: str, *, peer: bool, strict: bool) -> Row:
    """256 requests, 128 tokens in and 128 out, from the base model."""
    name = f"sample-{shape}" + ("-strict" if strict else "")
    row = Row(name, "tok/s", bar=BARS.get(name), limit=limit_of(f"sample-{shape}"))
    if peer and name in BARS:
        from benchmarks.engine_gpu.peer import Sampling

        count = PEER_REQUESTS[shape]
        once = Sampling(SHAPES[shape], requests=count, prompt=PROMPT, generated=GENERATED)
        once()
        row.peer = count * GENERATED / once()
        del once
        free()
    decoder = random_model(shape)
    once = ours.Sampling(
        decoder, requests=REQUESTS, prompt=PROMPT, generated=GENERATED, strict=strict
    )
    seconds, row.spread = timed(once, 3)
    row.ours, row.peak_gib = SAMPLES / seconds, peak_gib()
    return row


def adapters_row(shape: str) -> Row:
    """How much longer the sampling takes with 32 adapters in the batch than with one."""
    decoder = random_model(shape)

    def seconds(count: int) -> float:
        versions = [f"adapter{i}" for i in range(count)]
        once = ours.Sampling(
            decoder, requests=REQUESTS, prompt=PROMPT, generated=GENERATED, versions=versions
        )
        return timed(once, 3)[0]

    one, many = seconds(1), seconds(32)
    row = Row(f"adapters-32-{shape}", "tok/s", SAMPLES / many, bar=1.3, at_most=True)
    row.ratio = many / one
    row.peak_gib = peak_gib()
    print(f"  one adapter {SAMPLES / one:,.0f} tok/s, 32 adapters {SAMPLES / many:,.0f} tok/s")
    return row


def publish_row(shape: str) -> Row:
    """From a trained adapter to sampling with it."""
    seconds, spread = timed(ours.publish(random_model(shape)), 10)
    row = Row(f"publish-{shape}", "ms", 1e3 * seconds)
    row.spread, row.peak_gib = spread, peak_gib()
    return row


def rows(peer: bool) -> dict[str, Callable[[], Row]]:
    """Every row by name, in order."""
    made: dict[str, Callable[[], Row]] = {}
    for shape in SHAPES:
        made[f"train-{shape}"] = lambda s=shape: train_row(
            s, peer=peer, strict=False, unembed=False
        )
        made[f"train-{shape}-unembed"] = lambda s=shape: train_row(
            s, peer=peer, strict=False, unembed=True
        )
        made[f"train-{shape}-strict"] = lambda s=shape: train_row(
            s, peer=peer, strict=True, unembed=False
        )
        made[f"sample-{shape}"] = lambda s=shape: sample_row(s, peer=peer, strict=False)
        made[f"sample-{shape}-strict"] = lambda s=shape: sample_row(s, peer=peer, strict=True)
    made["adapters-32-0.6b"] = lambda: adapters_row("0.6b")
    made["publish-0.6b"] = lambda: publish_row("0.6b")
    return made


def table(found: list[Row]) -> str:
    """For people: at most 80 columns."""

    def number(value: float | None) -> str:
        if value is None:
            return ""
        return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"

    def bar(row: Row) -> str:
        return "" if row.bar is None else f"{'<=' if row.at_most else '>='} {row.bar:g}"

    head = ("", "ours", "peer", "ratio", "bar", "limit", "GiB", "")
    lines = [head] + [
        (
            f"{row.name} ({row.unit})",
            number(row.ours),
            number(row.peer),
            number(row.ratio),
            bar(row),
            number(row.limit),
            "" if row.peak_gib is None else f"{row.peak_gib:.1f}",
            {True: "pass", False: "MISS", None: ""}[row.passed],
        )
        for row in found
    ]
    return "\n".join(
        (line[0].ljust(28) + "".join(cell.rjust(8) for cell in line[1:])).rstrip() for line in lines
    )


def about() -> dict[str, object]:
    """Commit, versions and hardware, for the JSON line."""
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return {
        "commit": described.stdout.strip(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
    }


def main() -> int:
    """Run the chosen rows; exit status 1 when a bar is missed."""
    parser = argparse.ArgumentParser(prog="benchmarks.engine_gpu", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="rows that begin with this")
    parser.add_argument("--no-peer", action="store_true")
    chosen = parser.parse_args()
    if not torch.cuda.is_available():
        print("this benchmark needs a CUDA GPU", file=sys.stderr)
        return 2
    torch.set_num_threads(1)  # as the engine's process does where a device computes
    found: list[Row] = []
    for name, make in rows(not chosen.no_peer).items():
        if chosen.only and not name.startswith(tuple(chosen.only)):
            continue
        print(f"{name} ...", flush=True)
        row = make()
        compare(row, found)
        found.append(row)
        free()
        print(table(found[-1:]), flush=True)
    print(table(found))
    print(f"measured on one {torch.cuda.get_device_name()}")
    results = [asdict(row) | {"passed": row.passed} for row in found]
    print(json.dumps({"benchmark": "engine_gpu", **about(), "results": results}))
    return 1 if any(row.passed is False for row in found) else 0


if __name__ == "__main__":
    sys.exit(main())
