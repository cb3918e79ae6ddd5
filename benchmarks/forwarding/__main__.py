"""`python -m benchmarks.forwarding`: what it costs a node to pass a request on.

One node answers requests itself, or passes them on to another one; both are processes of their
own. Counted is the CPU time of the first. The rounds of the two alternate.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from benchmarks.client_cost.setting import commit, hardware, machine
from benchmarks.forwarding.node import HOLD_S, serving
from benchmarks.forwarding.report import Row, table
from tinkex.transport.base import HttpRequest, Pool
from tinkex.transport.http import HttpTransport

if TYPE_CHECKING:
    from benchmarks.serving import Server


@dataclass(frozen=True)
class Kind:
    """A kind of request, how many of them are one round, and how many are open at once."""

    title: str
    body: bytes | None
    count: int
    at_once: int
    small: bool = True
    media: str = "application/json"


def sample_body() -> bytes:
    """A sample with a prompt of 128 tokens."""
    prompt = {"chunks": [{"type": "encoded_text", "tokens": list(range(1000, 1128))}]}
    params = {"max_tokens": 64, "temperature": 1.0, "top_k": -1, "top_p": 1.0}
    body = {"prompt": prompt, "sampling_params": params, "sampling_session_id": "s:sample:0"}
    return json.dumps({**body, "num_samples": 1, "seq_id": 7}).encode()


KINDS = {
    "small": Kind("small GET", None, 3000, 16),
    "sample": Kind("sample, 128 tokens", sample_body(), 3000, 16),
    "train": Kind(
        "training body, 1 MiB", bytes(1 << 20), 200, 4, small=False, media="application/x-tensors"
    ),
    "poll": Kind(f"poll, held for {HOLD_S:g} s", b'{"request_id": "x"}', 3000, 256),
}


async def ask(url: str, path: str, kind: Kind, count: int) -> None:
    """Send `count` requests, `kind.at_once` at a time."""
    transport = HttpTransport(url)
    method = "GET" if kind.body is None else "POST"
    headers = {"x-api-key": "tml-x", "accept": "application/json", "content-type": kind.media}
    request = HttpRequest(method, path, Pool.REST, 60.0, headers=headers, body=kind.body)
    left = iter(range(count))

    async def one_after_another() -> None:
        for _ in left:
            reply = await transport.send(request)
            if reply.status != 200:
                raise SystemExit(f"{path} was answered with {reply.status}: {reply.body!r}")

    async with asyncio.TaskGroup() as group:
        for _ in range(kind.at_once):
            group.create_task(one_after_another())
    await transport.aclose()


def cpu_ms(node: Server, path: str, kind: Kind, count: int) -> float:
    """CPU of the node for each request."""
    before = node.cpu_s()
    asyncio.run(ask(node.url, path, kind, count))
    return (node.cpu_s() - before) / count * 1e3


def measure(node: Server, rounds: int, scale: float) -> list[Row]:
    """All rounds; the first is not counted."""
    rows = {name: Row(kind.title, kind.small) for name, kind in KINDS.items()}
    for number in range(rounds + 1):
        print(f"round {number}", file=sys.stderr)
        for name, kind in KINDS.items():
            count = max(kind.at_once, round(kind.count * scale))
            here = cpu_ms(node, f"/here/{name}", kind, count)
            there = cpu_ms(node, f"/there/{name}", kind, count)
            if number > 0:
                rows[name].here.append(here)
                rows[name].there.append(there)
    return list(rows.values())


def main() -> int:
    """Measure, print, and say by the exit status whether every bar is met."""
    parser = argparse.ArgumentParser(prog="benchmarks.forwarding", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="of the requests in a round")
    options = parser.parse_args()
    with serving() as owner, serving(owner.url) as node:
        rows = measure(node, options.rounds, options.scale)
    print(table(rows))
    print(f"measured on {machine()}")
    passed = all(row.passed for row in rows)
    about = {"benchmark": "forwarding", "commit": commit(), "hardware": hardware()}
    print(json.dumps({**about, "rows": [asdict(row) for row in rows], "passed": passed}))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
