"""`python -m benchmarks.soak`: three tenants' mixed work for a chosen time, with kills.

One line for each interval, then the latencies, the judged lines, a picture and one JSON line. The
exit status is 1 when a line grows, an operation does not end, or a number differs from its first.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.client_cost.setting import commit, hardware, machine
from benchmarks.soak.readings import LEDGER, Reader, Reading
from benchmarks.soak.report import (
    HEAD,
    WARM_UP_S,
    draw,
    flatness_table,
    judge,
    latency_table,
    line,
    resources,
)
from benchmarks.soak.supervised import Supervised
from benchmarks.soak.tenants import WAIT_S, Journal, tenants

if TYPE_CHECKING:
    from benchmarks.soak.supervised import Victim

# When somebody is killed, as shares of the time. The server in the first third and at the end, so
# that what is judged is one long life: bounded buffers of a new process fill up for minutes.
KILLS: list[tuple[float, Victim]] = [
    (0.06, "server"),
    (0.1, "engine"),
    (0.14, "server"),
    (0.2, "server"),
    (0.24, "engine"),
    (0.28, "server"),
    (0.5, "engine"),
    (0.75, "engine"),
    (0.97, "server"),
]
# Whatever the server keeps for its sessions is gone when they are over and pruned.
AT_REST = ("sessions", "operations", "bodies", "results", "samplers", "losses", "checkpoints")


def main() -> int:
    """Soak, print, and say by the exit status whether everything was as it must be."""
    parser = argparse.ArgumentParser(prog="benchmarks.soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--interval-s", type=float, help="between two lines (default: 120 lines)")
    parser.add_argument("--pace-s", type=float, default=0.75, help="a tenant's time for a round")
    parser.add_argument("--kills", action="store_true", help="kill the engine and the server")
    parser.add_argument("--database", metavar="URL", help="PostgreSQL instead of SQLite")
    parser.add_argument("--out", type=Path, help="keep the log, the readings and the picture here")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        out = args.out or Path(temporary)
        out.mkdir(parents=True, exist_ok=True)
        return Soak(args, Path(temporary), out).run()


class Soak:
    """One run."""

    def __init__(self, args: argparse.Namespace, folder: Path, out: Path) -> None:
        self.total_s = 60.0 * args.minutes
        self.interval_s = args.interval_s or max(2.0, self.total_s / 120)
        self.pace_s = args.pace_s
        self.out = out
        self.database = args.database
        # Short enough for the rows to reach their level in the first third.
        history_s = min(120.0, max(15.0, self.total_s / 30))
        self.settings = {
            "history_s": history_s,
            "result_ttl_s": history_s,
            "upkeep_interval_s": 5.0,
            "session_timeout_s": 30.0,
            # Full within the warm-up: until then the engine grows by it and by its index, which
            # would hide a leak, or look like one.
            "cache_bytes": 32 << 20,
        }
        self.server = Supervised(folder, args.database, self.settings)
        self.kills = [(share * self.total_s, who) for share, who in KILLS] if args.kills else []
        # Mutable state: what was read and timed in each interval.
        self.readings: list[Reading] = []
        self.latencies: list[list[tuple[str, float, float]]] = []

    def run(self) -> int:
        """The exit status."""
        with self.server:
            journal, reader = Journal(self.server), Reader(self.server, self.database)
            self._work(journal, reader)
            wrong = journal.wrong + self._rest(reader)
            (self.out / "serve.log").write_text(self.server.log)
        return self._report(journal, wrong)

    def _work(self, journal: Journal, reader: Reader) -> None:
        workers = tenants(journal, self.pace_s)
        for worker in workers:
            worker.start()
        began, kills = time.monotonic(), list(self.kills)
        print(HEAD, flush=True)
        while (at := time.monotonic() - began) < self.total_s:
            due = min(self.interval_s * (len(self.readings) + 1), self.total_s)
            if kills and kills[0][0] <= at:
                self.server.kill(kills.pop(0)[1])
            elif at < due:
                time.sleep(min(due - at, 0.5))
            else:
                self._read(journal, reader, at)
        for worker in workers:
            worker.stop()
        for worker in workers:
            if not worker.join(WAIT_S):
                journal.fail(f"{worker.name}: its last round does not end")
        self._read(journal, reader, time.monotonic() - began)

    def _read(self, journal: Journal, reader: Reader, at: float) -> None:
        self.readings.append(reader.read(at))
        self.latencies.append(journal.take())
        print(line(self.readings[-1], self.latencies[-1]), flush=True)
        with (self.out / "readings.jsonl").open("a") as file:
            file.write(json.dumps(asdict(self.readings[-1])) + "\n")

    def _rest(self, reader: Reader) -> list[str]:
        """What is left when all sessions are over and their history is pruned."""
        waits = [value for name, value in self.settings.items() if name.endswith("_s")]
        end = time.monotonic() + 2 * sum(waits) + 60
        while True:
            reading = reader.read(0.0)
            left = {name: reading.rows[name] for name in AT_REST if reading.rows[name]}
            busy = {
                name: value
                for name, value in reading.metrics.items()
                if name.endswith(("_resident", "_samples_running", "samples_in_flight")) and value
            }
            if not (left or busy or reading.unfinished) and reading.metrics:
                return []
            if time.monotonic() > end:
                return [f"not at rest: {left} {busy}, {reading.unfinished} unfinished"]
            time.sleep(1.0)

    def _report(self, journal: Journal, wrong: list[str]) -> int:
        calls = [call for interval in self.latencies for call in interval]
        tables = [name for name in self.readings[-1].rows if name not in LEDGER]
        warm_up_s = min(WARM_UP_S, self.total_s / 20)
        judged = [judge(resource, self.readings, warm_up_s) for resource in resources(tables)]
        found = [each for each in judged if each is not None]
        draw(self.readings, self.latencies, self.out / "soak.svg")
        print(f"\n{latency_table(calls, self.server.disturbed)}\n\n{flatness_table(found)}\n")
        for what in wrong[:20]:
            print(f"WRONG: {what}")
        passed = not wrong and all(each.flat for each in found)
        killed = [kill.victim for kill in self.server.kills]
        print(
            f"{len(calls)} calls, {journal.compared} results compared, {killed.count('engine')} "
            f"kills of the engine and {killed.count('server')} of the server: "
            f"{'passed' if passed else 'FAILED'}"
        )
        print(f"measured on {machine()}")
        about = {"benchmark": "soak", "commit": commit(), "hardware": hardware()}
        lines = [asdict(each) for each in found]
        print(json.dumps({**about, "minutes": self.total_s / 60, "lines": lines, "passed": passed}))
        return 0 if passed else 1


if __name__ == "__main__":
    raise SystemExit(main())
