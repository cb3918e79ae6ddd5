"""Write `recorded/*.json` anew: what the official client 0.36.0 sends in every scenario.

Run it with an interpreter that has the official client and torch (`make_venvs.py official`):

    .venvs/official/bin/python tests/conformance/record_official.py [NAME ...]
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import sys
import tempfile
from pathlib import Path

from run_scenarios import run_recorded
from scenarios import SCENARIOS

RECORDED = Path(__file__).parent / "recorded"
VERSION = "0.36.0"


def main(names: list[str]) -> int:
    if importlib.metadata.version("tinker") != VERSION:
        raise SystemExit(f"this records tinker {VERSION} and no other version")
    for name in [name for name in os.environ if name.startswith(("TINKER_", "CLOUDFLARE_"))]:
        del os.environ[name]
    os.environ["HOME"] = tempfile.gettempdir()
    import tinker

    for scenario in SCENARIOS:
        if not scenario.recorded or (names and scenario.name not in names):
            continue
        seen = {"sdk": f"tinker {VERSION}", **run_recorded(tinker, scenario)}
        if not scenario.ordered:
            seen["requests"].sort(key=lambda request: json.dumps(request, sort_keys=True))
        path = RECORDED / f"{scenario.name}.json"
        path.write_text(json.dumps(seen, indent=1, sort_keys=True, ensure_ascii=False) + "\n")
        print(f"{scenario.name}: {len(seen['requests'])} requests", file=sys.stderr)  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
