"""`python -m tinkex.dropin`: run a script or a module with `tinker` resolving to tinkex."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from tinkex.dropin import install

USAGE = """\
usage: python -m tinkex.dropin SCRIPT [ARGUMENT ...]
       python -m tinkex.dropin -m MODULE [ARGUMENT ...]
       python -m tinkex.dropin -c CODE [ARGUMENT ...]

Run a program written for the official package `tinker` on tinkex. The program sees the same
arguments and import path as under plain python; `import tinker` gives tinkex.
"""


def main(arguments: list[str]) -> int:
    """Run what the arguments name; returns an exit code unless the program exits itself."""
    if arguments[:1] in (["-h"], ["--help"]):
        sys.stdout.write(USAGE)
        return 0
    if not arguments or (arguments[0] in ("-m", "-c") and len(arguments) == 1):
        sys.stderr.write(USAGE)
        return 2
    if arguments[0].startswith("-") and arguments[0] not in ("-m", "-c"):
        sys.stderr.write(f"unknown option {arguments[0]}\n{USAGE}")
        return 2
    install()
    if arguments[0] == "-m":
        _run_module(arguments[1], arguments[2:])
    elif arguments[0] == "-c":
        _run_code(arguments[1], arguments[2:])
    else:
        return _run_script(arguments[0], arguments[1:])
    return 0


def _set_first_path(folder: str) -> None:
    # Under -P python puts neither the script's folder nor the working folder on the path.
    if not sys.flags.safe_path:
        sys.path[0] = folder


def _run_module(name: str, rest: list[str]) -> None:
    # runpy replaces argv[0] by the module's file.
    _set_first_path(str(Path.cwd()))
    sys.argv = [name, *rest]
    runpy.run_module(name, run_name="__main__", alter_sys=True)


def _run_code(code: str, rest: list[str]) -> None:
    _set_first_path("")
    sys.argv = ["-c", *rest]
    exec(compile(code, "<string>", "exec"), {"__name__": "__main__", "__builtins__": __builtins__})


def _run_script(script: str, rest: list[str]) -> int:
    if not Path(script).exists():
        sys.stderr.write(f"no such file: {script}\n")
        return 2
    _set_first_path(str(Path(script).resolve().parent))
    sys.argv = [script, *rest]
    runpy.run_path(script, run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
