"""Asks a server for its health and for samples until its input ends, and prints how long it took.

    python -m tests.security.probe PORT KEY

A process of its own: the test's may be busy making what it attacks with.
"""

from __future__ import annotations

import json
import sys
import threading
import time

from tests.security.world import Tenant

_PAUSE_S = 0.02


def _health(tenant: Tenant, stop: threading.Event, times: list[float]) -> None:
    while not stop.wait(_PAUSE_S):
        began = time.perf_counter()
        answer = tenant.get("/healthz")
        times.append(time.perf_counter() - began)
        assert answer.status == 200, answer


def _samples(tenant: Tenant, sampler: str, stop: threading.Event, times: list[float]) -> None:
    seq_id = 0
    while not stop.wait(_PAUSE_S):
        seq_id += 1
        began = time.perf_counter()
        result = tenant.sample(sampler, seq_id)
        times.append(time.perf_counter() - began)
        assert "sequences" in result, result


def main(port: str, key: str) -> int:
    tenant = Tenant(int(port), key, "neighbour")
    session = tenant.session()
    sampler = tenant.sampler(session)
    tenant.sample(sampler, 0)
    stop = threading.Event()
    health: list[float] = []
    sample: list[float] = []
    failed: list[BaseException] = []
    threading.excepthook = lambda args: failed.append(args.exc_value or SystemExit())
    threads = [
        threading.Thread(target=_health, args=(tenant, stop, health)),
        threading.Thread(target=_samples, args=(tenant, sampler, stop, sample)),
    ]
    for thread in threads:
        thread.start()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()
    stop.set()
    for thread in threads:
        thread.join()
    tenant.finish(session)
    sys.stdout.write(json.dumps({"health": health, "sample": sample}))
    if failed:
        sys.stderr.write(f"{failed}\n")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
