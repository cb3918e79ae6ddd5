"""`python -m benchmarks.hostile`: every attack of `tests/security`, one by one, with its times.

While an attack runs, another process asks for `/healthz` and for samples of one token with the
neighbour's key. The exit status is 1 when one takes too long, the API process takes too much
memory, or a request of the attack is answered otherwise than it must be. The bars are for a quiet
machine: a busy one delays the probes, too.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
import traceback
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.client_cost.setting import commit, hardware, machine
from tests.contracts.postgres import postgres_server
from tests.security.attacks import ATTACKS
from tests.security.world import MOST_BYTES, World, world_on

if TYPE_CHECKING:
    from tests.security.attacks import Attack

MOST_HEALTH_S = 0.1
MOST_SAMPLE_S = 0.5
_MIB = 1 << 20


@dataclass(frozen=True)
class Outcome:
    """What one attack did."""

    name: str
    health_s: float
    sample_s: float
    peak_mib: float
    problem: str = ""

    @property
    def passed(self) -> bool:
        quick = self.health_s <= MOST_HEALTH_S and self.sample_s <= MOST_SAMPLE_S
        return quick and self.peak_mib * _MIB < MOST_BYTES and not self.problem

    def __str__(self) -> str:
        verdict = "pass" if self.passed else f"MISS {self.problem}"
        return (
            f"{self.name:<48} {1e3 * self.health_s:9.0f} {1e3 * self.sample_s:9.0f} "
            f"{self.peak_mib:9.0f}  {verdict}"
        )


HEAD = f"{'attack':<48} {'health ms':>9} {'sample ms':>9} {'peak MiB':>9}"


def main() -> int:
    """Attack, print, and say by the exit status whether every bar is met."""
    parser = argparse.ArgumentParser(prog="benchmarks.hostile", description=__doc__)
    parser.add_argument("--only", action="append", help="attacks whose name contains this text")
    parser.add_argument("--database", choices=("sqlite", "postgresql"), default="sqlite")
    args = parser.parse_args()
    chosen = [
        (f"{kind.split()[0]} {attack.__name__}", attack)
        for kind, attacks in ATTACKS.items()
        for attack in attacks
        if not args.only or any(text in attack.__name__ for text in args.only)
    ]
    server = postgres_server() if args.database == "postgresql" else nullcontext()
    with tempfile.TemporaryDirectory() as folder, server as postgres:
        place = None if postgres is None else postgres.new_place()
        outcomes = _all(chosen, Path(folder), place)
    passed = all(outcome.passed for outcome in outcomes)
    print(f"measured on {machine()}")
    about = {"benchmark": "hostile", "commit": commit(), "hardware": hardware()}
    print(json.dumps({**about, "attacks": [asdict(each) for each in outcomes], "passed": passed}))
    return 0 if passed else 1


def _all(chosen: list[tuple[str, Attack]], folder: Path, database: str | None) -> list[Outcome]:
    outcomes: list[Outcome] = []
    with world_on(folder, database=database) as world:
        print(HEAD, flush=True)
        for name, attack in [("- no attack", _nothing), *chosen]:
            outcomes.append(_one(world, name, attack))
            print(outcomes[-1], flush=True)
            if world.server.popen.poll() is not None:
                print("the server has ended")
                break
    return outcomes


def _one(world: World, name: str, attack: Attack) -> Outcome:
    problem = ""
    try:
        with world.watching() as seen:
            try:
                attack(world)
            except Exception as error:  # noqa: BLE001 - printed; the other attacks follow
                problem = f"{type(error).__name__}: {str(error)[:100]}"
            time.sleep(0.3)  # for probes to end that an attack of a moment has delayed
        world.assert_well()
    except Exception as error:  # noqa: BLE001 - the neighbour noticed
        problem = problem or "".join(traceback.format_exception_only(error))[:100].strip()
        return Outcome(name, float("inf"), float("inf"), seen.peak_bytes / _MIB, problem)
    worst = max(seen.health_s), max(seen.sample_s)
    return Outcome(name, *worst, seen.peak_bytes / _MIB, problem)


def _nothing(world: World) -> None:
    """What the probes take on this machine while nobody attacks."""
    for _ in range(200):
        world.attacker.get("/healthz")


if __name__ == "__main__":
    raise SystemExit(main())
