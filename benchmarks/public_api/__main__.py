"""`python -m benchmarks.public_api [--url URL --model NAME] [--peer-url URL]`.

Measures step latency, training and sampling of a server as its users see it, through the official
client in a virtual environment of its own (or through ours, with `--client tinkex`). Without
`--url` it starts `tinkex serve` on a model of 0.9 million random parameters. With `--peer-url` a
second server does the same work in the same run, the rounds of the two alternate, and the table has
their ratios. Keys come from TINKER_API_KEY and, for the peer, from PEER_API_KEY.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import subprocess
import sys
import tempfile
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from benchmarks.client_cost.setting import commit, hardware, machine, official_python
from benchmarks.public_api.report import Row, rows, table
from benchmarks.serving import ROOT, one_million, serving

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping
    from typing import Protocol

    class Measured(Protocol):
        """A server that can be asked for a figure."""

        def run(self, figure: str, seconds: float) -> float: ...


PROGRAM = Path(__file__).with_name("program.py")
MODEL = "bench/llama-1m"
ANSWER_S = 900.0


@dataclass(frozen=True)
class Address:
    """Where a server is, what it serves, and which client asks it."""

    url: str
    model: str
    key: str
    sdk: str
    python: str


class Side:
    """A process with a client of one server."""

    def __init__(self, name: str, address: Address) -> None:
        self._name = name
        env = {
            "PATH": os.environ["PATH"],
            "HOME": tempfile.gettempdir(),
            "TINKER_BASE_URL": address.url,
            "TINKER_API_KEY": address.key,
            "TINKER_TELEMETRY": "0",
        }
        if address.sdk == "tinkex":
            env["PYTHONPATH"] = str(ROOT / "src")
        self._process = subprocess.Popen(
            [address.python, str(PROGRAM), address.sdk, address.model],
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()

    def run(self, figure: str, seconds: float) -> float:
        """One round of one figure."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        asked = json.dumps({"figure": figure, "seconds": seconds})
        try:
            self._process.stdin.write(asked + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise SystemExit(f"the client of the {self._name} ended; its error is above") from None
        ready, _, _ = select.select([self._process.stdout], [], [], ANSWER_S)
        answer = self._process.stdout.readline() if ready else ""
        if not answer:
            raise SystemExit(f"the {self._name} did not finish {figure!r}; its error is above")
        return float(json.loads(answer))


def measure(
    found: list[Row], sides: Mapping[str, Measured], *, rounds: int, seconds: float
) -> None:
    """Every figure in rounds that alternate between the sides, so that a busy spell hits both."""
    for row in found:
        print(f"{row.title} ...", file=sys.stderr)
        for number in range(rounds):
            order = list(sides) if number % 2 == 0 else list(sides)[::-1]
            for name in order:
                value = sides[name].run(row.name, seconds)
                row.values.setdefault(name, []).append(value)


@contextmanager
def addressed(options: argparse.Namespace) -> Generator[dict[str, Address]]:
    """The servers to measure; one of our own is started where no address is given."""
    sdk = "tinkex" if options.client == "tinkex" else "tinker"
    python = sys.executable if sdk == "tinkex" else official_python(options.python)
    key = os.environ.get("TINKER_API_KEY", "tml-benchmark")
    with ExitStack() as stack:
        url, model = options.url, options.model
        if url is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            source = one_million(Path(options.keep_model or folder / "model"))
            url = stack.enter_context(serving(folder, f"{MODEL}={source}")).url
            model = MODEL
        found = {"server": Address(url, model, key, sdk, python)}
        if options.peer_url:
            found["peer"] = Address(
                options.peer_url,
                options.peer_model or model,
                os.environ.get("PEER_API_KEY", "tml-benchmark"),
                sdk,
                options.peer_python or python,
            )
        yield found


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="benchmarks.public_api", description=__doc__)
    parser.add_argument("--url", help="a running server (default: one of our own)")
    parser.add_argument("--model", help="a base model that it serves")
    parser.add_argument("--peer-url", help="a second server, measured in turn with the first")
    parser.add_argument("--peer-model", help="a base model of the peer (default: the same name)")
    parser.add_argument("--peer-python", help="an interpreter with a client that the peer takes")
    parser.add_argument("--client", choices=["official", "tinkex"], default="official")
    parser.add_argument("--python", help="an interpreter with the official client")
    parser.add_argument("--rounds", type=int, default=15, help="of each figure and side")
    parser.add_argument("--seconds", type=float, default=0.3, help="time of each round")
    parser.add_argument("--bar", type=float, help="exit with 1 if a ratio to the peer is lower")
    parser.add_argument(
        "--keep-model", metavar="DIR", help="write the model here, for the peer to serve"
    )
    options = parser.parse_args()
    if bool(options.url) != bool(options.model):
        parser.error("give --url and --model together")
    if options.bar is not None and not options.peer_url:
        parser.error("--bar is about the ratio to a peer: give --peer-url, too")
    return options


def main() -> int:
    """Measure and print; exit status 1 only when a bar was given and missed."""
    options = parsed()
    found = rows()
    with addressed(options) as addresses, ExitStack() as stack:
        sides = {
            name: stack.enter_context(Side(name, address)) for name, address in addresses.items()
        }
        measure(found, sides, rounds=options.rounds, seconds=options.seconds)
    print(table(found, options.bar))
    print(f"measured on {machine()}")
    about = {"benchmark": "public_api", "client": options.client, "commit": commit()}
    models = {name: address.model for name, address in addresses.items()}
    results = {
        row.name: {side: [float(f"{value:.4g}") for value in row.values[side]] for side in sides}
        | {"ratio": row.ratio}
        for row in found
    }
    print(json.dumps({**about, "hardware": hardware(), "models": models, "results": results}))
    ratios = [row.ratio for row in found if row.ratio is not None]
    return 1 if options.bar is not None and min(ratios) < options.bar else 0


if __name__ == "__main__":
    sys.exit(main())
