"""`python -m benchmarks.public_api [--url URL --model NAME]`: any server, as its users see it.

Runs the official client from the registry in a virtual environment of its own (or ours, with
`--client tinkex`) and measures step latency, training and sampling. Without a URL it starts
`tinkex serve` on a model of a million parameters, the size at which a peer's figures are known.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.client_cost.setting import commit, hardware, official_python
from benchmarks.serving import ROOT, one_million, serving

PROGRAM = Path(__file__).with_name("program.py")
MODEL = "bench/llama-1m"
TIME_LIMIT_S = 1800.0


@dataclass(frozen=True)
class Row:
    """One figure; the peer's was measured elsewhere, on two cores and a model of this size."""

    name: str
    title: str
    peer: float
    bar: float

    def ratio(self, value: float) -> float:
        """How many times better than the peer."""
        return self.peer / value if self.name.endswith("_s") else value / self.peer


ROWS = (
    Row("step_latency_s", "step latency, s", 0.19, 5),
    Row("train_8x128", "train 8x128, tok/s", 2400, 3),
    Row("train_32x128", "train 32x128, tok/s", 3200, 3),
    Row("train_8x512", "train 8x512, tok/s", 2500, 3),
    Row("train_4_adapters", "4 adapters at once, tok/s", 3000, 3),
    Row("sample_1", "sample 1, tok/s", 400, 3),
    Row("sample_8", "sample 8, tok/s", 1900, 3),
    Row("sample_16x4", "sample 16x4, tok/s", 1770, 3),
)


def measure(options: argparse.Namespace, url: str, model: str) -> dict[str, float]:
    """Run the program against a server."""
    ours = options.client == "tinkex"
    python = sys.executable if ours else official_python(options.python)
    env = {
        "PATH": os.environ["PATH"],
        "HOME": tempfile.gettempdir(),
        "TINKER_BASE_URL": url,
        "TINKER_API_KEY": os.environ.get("TINKER_API_KEY", "tml-benchmark"),
        "TINKER_TELEMETRY": "0",
    }
    if ours:
        env["PYTHONPATH"] = str(ROOT / "src")
    argv = [python, str(PROGRAM), "tinkex" if ours else "tinker", model, str(options.seconds)]
    done = subprocess.run(argv, env=env, stdout=subprocess.PIPE, timeout=TIME_LIMIT_S, text=True)
    if done.returncode:
        raise SystemExit("the client failed; its complaints are above")
    return json.loads(done.stdout.splitlines()[-1])


def table(found: dict[str, float], *, compare: bool) -> str:
    """At most 80 columns; the peer's column only where the model has its size."""
    lines = [f"{'':28}{'this server':>14}" + (f"{'peer':>10}{'ratio':>8}{'bar':>7}" * compare)]
    for row in ROWS:
        value = found[row.name]
        line = f"{row.title:28}{value:>14.4g}"
        if compare:
            verdict = "pass" if row.ratio(value) >= row.bar else "MISS"
            line += f"{row.peer:>10g}{row.ratio(value):>8.1f}{f'>= {row.bar:g}':>7}  {verdict}"
        lines.append(line)
    gain = found["train_4_adapters"] / found["train_4_in_turn"]
    lines.append(f"{'4 adapters, at once/in turn':28}{gain:>14.2f}" + (f"{'> 1':>25}" * compare))
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", help="a running server (default: one of our own)")
    parser.add_argument("--model", help="a base model it serves")
    parser.add_argument("--client", choices=["official", "tinkex"], default="official")
    parser.add_argument("--python", help="an interpreter with the official client")
    parser.add_argument("--seconds", type=float, default=4.0, help="time for each figure")
    options = parser.parse_args()
    if bool(options.url) != bool(options.model):
        parser.error("give --url and --model together")
    if options.url:
        found = measure(options, options.url, options.model)
    else:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            source = one_million(folder / "model")
            with serving(folder, f"{MODEL}={source}") as server:
                found = measure(options, server.url, MODEL)
    print(table(found, compare=not options.url))
    about = {"benchmark": "public_api", "client": options.client, "commit": commit()}
    print(json.dumps({**about, "hardware": hardware(), "results": found}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
