"""How many files a training request passes inside a server: `python -m benchmarks.server_hops`.

With `--list` it names them.

A `tinkex serve` of its own trains a tiny model; the functions that its process calls for one
`forward_backward().result()` are recorded by a profile hook. Counted are files in `server/` and
`serving/`; what only waits in the background (`serving/process.py`, whose loop ticks) is left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

SOURCE = Path(__file__).parents[1] / "src"
PACKAGE = f"{SOURCE / 'tinkex'}{os.sep}"
BACKGROUND = {"serving/process.py"}
# Loaded by the server's interpreter before anything else; records while the file `on` exists.
HOOK = """
import os, sys, threading, time
folder, package = os.environ.get("HOPS_FOLDER"), os.environ.get("HOPS_PACKAGE", "")
if folder and "serve" in sys.orig_argv:
    seen, recording = set(), [False]
    def watch(frame, event, argument):
        name = frame.f_code.co_filename
        if recording[0] and event == "call" and name.startswith(package):
            seen.add(name[len(package):])
    def switch():
        while True:
            time.sleep(0.02)
            on = os.path.exists(os.path.join(folder, "on"))
            if recording[0] and not on:
                with open(os.path.join(folder, "files"), "w") as out:
                    out.write("\\n".join(sorted(seen)))
            recording[0] = on
    threading.setprofile(watch)
    sys.setprofile(watch)
    threading.Thread(target=switch, daemon=True).start()
"""


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(HOOK)
        path = os.pathsep.join([str(folder), str(SOURCE)])
        environment = {**os.environ, "PYTHONPATH": path, "HOPS_FOLDER": name}
        environment["HOPS_PACKAGE"] = PACKAGE
        command = [sys.executable, "-m", "tinkex.cli", "serve", "--no-auth", "--port", "0"]
        command += ["--data-dir", str(folder / "data"), "--base-model", "tinkex/tiny"]
        server = subprocess.Popen(
            command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        try:
            files = record(folder, url_of(server))
        finally:
            server.terminate()
            server.wait()
    passed = [f for f in files if f.startswith(("server/", "serving/")) and f not in BACKGROUND]
    print(f"forward_backward().result(): {len(passed)} files in server/ and serving/")
    if "--list" in sys.argv:
        print("   " + "\n   ".join(passed))


def url_of(server: subprocess.Popen[str]) -> str:
    assert server.stdout is not None
    for line in server.stdout:
        for word in line.replace('"', " ").split():
            if word.startswith("http://127.0.0.1:"):
                return word.rstrip(".,")
    raise SystemExit("the server ended before it said where it listens")


def record(folder: Path, url: str) -> list[str]:
    """Train a few times, then once while it is recorded."""
    import tinkex
    from tinkex import types

    tokens = types.ModelInput.from_ints([1, 2, 3])
    datum = types.Datum(model_input=tokens, loss_fn_inputs={"target_tokens": [2, 3, 4]})
    with tinkex.ServiceClient(base_url=url, api_key="tml-hops") as service:
        training = service.create_lora_training_client("tinkex/tiny", rank=8)
        for _ in range(3):
            training.forward_backward([datum], "cross_entropy").result()
        (folder / "on").touch()
        time.sleep(0.2)
        training.forward_backward([datum], "cross_entropy").result()
        time.sleep(0.2)
        (folder / "on").unlink()
        time.sleep(0.5)
    return (folder / "files").read_text().split()


if __name__ == "__main__":
    main()
