"""Run scenarios with one SDK in this interpreter and print what happened as JSON.

    python run_scenarios.py tinker [NAME ...]                     against the recorder
    python run_scenarios.py tinkex --base-url URL [NAME ...]      against a server that is up

Output: {scenario: {"result": ..., "requests": [...]}}; `requests` only with the recorder.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
from typing import Any

from recorder import Recorder, serve
from scenarios import SCENARIOS
from story import Connection, Scenario, environment


def run_recorded(sdk: Any, scenario: Scenario) -> dict[str, Any]:
    """One scenario against a recorder of its own."""
    recorder = Recorder(
        config=scenario.config,
        dynamic=scenario.dynamic,
        polls=scenario.polls,
        hold_samples=scenario.hold_samples,
    )
    telemetry = "1" if scenario.telemetry else "0"
    with environment(TINKER_TELEMETRY=telemetry), serve(recorder) as base_url:
        result = scenario.run(sdk, Connection(base_url, recorder.wait_for))
    return {"result": result, "requests": recorder.requests}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sdk", choices=["tinker", "tinkex"])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--base-url")
    options = parser.parse_args(arguments)
    for name in [name for name in os.environ if name.startswith(("TINKER_", "CLOUDFLARE_"))]:
        del os.environ[name]
    os.environ["TINKER_TELEMETRY"] = "0"
    os.environ["HOME"] = tempfile.gettempdir()
    sdk = importlib.import_module(options.sdk)
    chosen = [s for s in SCENARIOS if not options.names or s.name in options.names]
    seen = {}
    for scenario in chosen:
        if options.base_url:
            seen[scenario.name] = {"result": scenario.run(sdk, Connection(options.base_url))}
        else:
            seen[scenario.name] = run_recorded(sdk, scenario)
    json.dump(seen, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
