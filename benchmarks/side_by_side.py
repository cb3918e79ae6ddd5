"""`python -m benchmarks.side_by_side OTHER`: what requests cost the servers of two checkouts.

OTHER is a folder with another commit of this repository (`git worktree add OTHER COMMIT`). Both
serve the same small model, and one client, of this checkout, sends both the same requests. Rounds
alternate, and every second one begins with the other side. What counts is CPU time of the API
process per request: wall time on a shared machine is that of its other programs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from http.client import HTTPConnection
from pathlib import Path
from statistics import quantiles
from typing import TYPE_CHECKING

from benchmarks.client_cost.setting import hardware, machine
from benchmarks.server_overhead.served import KEY, Served, opened
from benchmarks.server_overhead.work import MODEL, Size
from benchmarks.serving import ROOT, Server, serving

if TYPE_CHECKING:
    from collections.abc import Callable

BAR = 1.03
SIDES = ("other", "this")
_GET = "/api/v1/training_runs?limit=20"


@dataclass(frozen=True)
class Amount:
    """How much of everything one round does on each side; part of the JSON line."""

    rounds: int = 20
    """The first does not count."""
    samples: int = 256
    steps: int = 12
    gets: int = 400


@dataclass
class Costs:
    """CPU of the API process, in milliseconds per request, one value for each round and side."""

    values: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, kind: str, side: str, cpu_ms: float) -> None:
        """Take in what a round found."""
        self.values.setdefault(kind, {name: [] for name in SIDES})[side].append(cpu_ms)

    def mean(self, kind: str, side: str) -> float:
        """Of all rounds: the clock of a process counts in hundredths of a second."""
        values = self.values[kind][side]
        return sum(values) / len(values)

    def ratio(self, kind: str) -> float:
        """How many times as much this checkout takes."""
        return self.mean(kind, "this") / self.mean(kind, "other")

    def quartiles(self, kind: str) -> tuple[float, float]:
        """Half of the rounds have a ratio between these: how much of a difference is noise."""
        pairs = zip(self.values[kind]["this"], self.values[kind]["other"], strict=True)
        low, _, high = quantiles([mine / other for mine, other in pairs if other], n=4)
        return low, high


def main() -> int:
    """Measure, print, and say by the exit status whether every bar is met."""
    parser = argparse.ArgumentParser(prog="benchmarks.side_by_side", description=__doc__)
    parser.add_argument("other", type=Path, help="folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=Amount.rounds)
    parser.add_argument("--bar", type=float, default=BAR, help="most that a ratio may be")
    options = parser.parse_args()
    amount = Amount(rounds=options.rounds)
    roots = {"other": options.other.resolve(), "this": ROOT}
    costs = measure(roots, amount)
    print(table(costs, options.bar))
    print(f"measured on {machine()}")
    passed = all(costs.ratio(kind) <= options.bar for kind in costs.values)
    about = {"benchmark": "side_by_side", "hardware": hardware(), "amount": asdict(amount)}
    commits = {side: _commit(root) for side, root in roots.items()}
    print(json.dumps({**about, "commits": commits, "cpu_ms": costs.values, "passed": passed}))
    return 0 if passed else 1


def measure(roots: dict[str, Path], amount: Amount) -> Costs:
    """All rounds, with both servers up all the time."""
    costs = Costs()
    with ExitStack() as stack:
        sides: dict[str, tuple[Server, Served]] = {}
        for side, root in roots.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            server = stack.enter_context(serving(folder, MODEL, root=root))
            client = stack.enter_context(opened(server, Size(at_once=amount.samples)))
            sides[side] = server, client
        for number in range(amount.rounds + 1):
            print(f"round {number}", file=sys.stderr)
            order = SIDES if number % 2 else SIDES[::-1]
            for kind in ("sample", "step", "GET"):
                for side in order:
                    cpu_ms = _cost(kind, *sides[side], amount)
                    if number > 0:
                        costs.add(kind, side, cpu_ms)
    return costs


def _cost(kind: str, server: Server, client: Served, amount: Amount) -> float:
    works: dict[str, tuple[Callable[[], object], int]] = {
        "sample": (lambda: client.waves(1), amount.samples),
        "step": (lambda: client.steps(amount.steps), amount.steps),
        "GET": (lambda: _get(server, amount.gets), amount.gets),
    }
    work, count = works[kind]
    before = server.cpu_s()
    work()
    # What follows a reply, such as the end of a transaction, belongs to the request.
    time.sleep(0.05)
    return (server.cpu_s() - before) / count * 1e3


def _get(server: Server, count: int) -> None:
    """One after the other, on one connection."""
    with closing(HTTPConnection(server.url.removeprefix("http://"))) as connection:
        for _ in range(count):
            connection.request("GET", _GET, headers={"X-API-Key": KEY})
            reply = connection.getresponse()
            reply.read()
            if reply.status != 200:
                raise SystemExit(f"GET {_GET} was answered with {reply.status}")


def table(costs: Costs, bar: float) -> str:
    """For people; at most 80 columns."""
    lines = [
        f"{'CPU of the API, ms':20}{'other':>8}{'this':>8}{'ratio':>8}{'quartiles':>14}     bar"
    ]
    for kind in costs.values:
        low, high = costs.quartiles(kind)
        verdict = "pass" if costs.ratio(kind) <= bar else "MISS"
        lines.append(
            f"{kind:20}{costs.mean(kind, 'other'):8.3f}{costs.mean(kind, 'this'):8.3f}"
            f"{costs.ratio(kind):8.3f}{f'{low:.2f}-{high:.2f}':>14}  <= {bar:g}  {verdict}"
        )
    return "\n".join(lines)


def _commit(root: Path) -> str:
    argv = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    return subprocess.run(argv, cwd=root, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    sys.exit(main())
