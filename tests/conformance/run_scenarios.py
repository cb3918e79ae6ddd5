"""Run scenarios with one SDK in this interpreter and print what happened as JSON.

python run_scenarios.py tinker [NAME ...]    all against a recorder of their own
python run_scenarios.py tinkex --on-demand   each line on standard input names a scenario
                                             and a server; each line printed is a result
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import traceback
from typing import TYPE_CHECKING, Any

from recorder import Recorder, serve
from scenarios import SCENARIOS
from story import Connection, Scenario, environment

if TYPE_CHECKING:
    from collections.abc import Iterable


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


def run_on_demand(sdk: Any, orders: Iterable[str]) -> None:
    """For each line `{"name", "base_url"}` run that scenario there and print its result."""
    stories = {scenario.name: scenario for scenario in SCENARIOS}
    for order in orders:
        wanted = json.loads(order)
        try:
            answer = {"result": stories[wanted["name"]].run(sdk, Connection(wanted["base_url"]))}
        except Exception:  # noqa: BLE001
            answer = {"failure": traceback.format_exc()}
        print(json.dumps(answer), flush=True)  # noqa: T201


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sdk", choices=["tinker", "tinkex"])
    parser.add_argument("names", nargs="*")
    parser.add_argument("--on-demand", action="store_true")
    options = parser.parse_args(arguments)
    for name in [name for name in os.environ if name.startswith(("TINKER_", "CLOUDFLARE_"))]:
        del os.environ[name]
    os.environ["TINKER_TELEMETRY"] = "0"
    os.environ["HOME"] = tempfile.gettempdir()
    sdk = importlib.import_module(options.sdk)
    if options.on_demand:
        run_on_demand(sdk, sys.stdin)
        return 0
    chosen = [
        scenario
        for scenario in SCENARIOS
        if scenario.recorded and (not options.names or scenario.name in options.names)
    ]
    json.dump({scenario.name: run_recorded(sdk, scenario) for scenario in chosen}, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
