"""Import every module of tinker-cookbook and print, as JSON, why each one failed (or null).

python import_cookbook.py            with the official package
python import_cookbook.py --dropin   with tinkex under its name
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import json
import os
import sys
import tempfile
import warnings
from pathlib import Path


def module_names() -> list[str]:
    """Every module below `tinker_cookbook` but the programs, without importing any."""
    spec = importlib.util.find_spec("tinker_cookbook")
    if spec is None or spec.origin is None:
        raise SystemExit("tinker-cookbook is not installed here")
    root = Path(spec.origin).parent
    names: list[str] = []
    for path in sorted(root.rglob("*.py")):
        parts = ("tinker_cookbook", *path.relative_to(root).with_suffix("").parts)
        if parts[-1] != "__main__":
            names.append(".".join(part for part in parts if part != "__init__"))
    return names


def failure_of(name: str) -> str | None:
    try:
        importlib.import_module(name)
    except BaseException as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return None


def main(arguments: list[str]) -> int:
    if arguments == ["--dropin"]:
        from tinkex import dropin

        dropin.install()
    warnings.simplefilter("ignore")
    # Nothing but the package itself is looked at: no hub, and a home of its own.
    os.environ.update(HF_HUB_OFFLINE="1", HOME=tempfile.mkdtemp())
    with contextlib.redirect_stdout(sys.stderr):
        seen = {name: failure_of(name) for name in module_names()}
    json.dump(seen, sys.stdout, indent=1)
    sys.stdout.flush()
    # Some modules leave threads behind that have nothing to wait for.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
