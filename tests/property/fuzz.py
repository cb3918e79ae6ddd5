"""Feeds bytes to the decoders; only InputError may come out, and soon.

    python -m tests.property.fuzz TARGET --runs 2000 --seed 1     mutations of good bodies
    python -m tests.property.fuzz TARGET --seconds 60             the same for a time
    python -m tests.property.fuzz TARGET --atheris -runs=20000    sought by coverage, for long runs
    python -m tests.property.fuzz TARGET --input FILE ...         these inputs

Ends with status 1 and the input in hexadecimal on the first input that breaks the rule. Run as a
process of its own, because the worst inputs end the process. `tests/property/crashers` keeps
what was found.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.property import decoders
from tinkex.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

# More than a decoder needs for a few kilobytes on a slow, busy machine.
LIMIT_S = 2.0


def protobuf(data: bytes) -> None:
    """A training batch, and the results that a client reads."""
    from tinkex.wire.proto_training import decode_forward_backward

    decode_forward_backward(data)


def protobuf_results(data: bytes) -> None:
    """What a client reads."""
    from tinkex.wire.proto_sampling import decode_sample_response
    from tinkex.wire.proto_training import decode_forward_backward_output

    for read in (decode_forward_backward_output, lambda d: decode_sample_response(d, ["a", "b"])):
        try:
            read(data)
        except InputError:
            continue


def json(data: bytes) -> None:
    """Every request in JSON: the first byte chooses which."""
    from tinkex.wire.json_requests import decode_request, decode_training_request

    kinds = [route.request for route in json_routes()]
    choice, body = data[0] if data else 0, data[1:]
    if choice < len(kinds):
        decode_request(kinds[choice], body)
    else:
        decode_training_request(body, forward_only=bool(choice % 2))


def json_routes() -> list[Any]:
    """Those whose JSON body is read as their request type."""
    from tinkex.wire.json_requests import TRAINING_BODIES
    from tinkex.wire.routes import ROUTES

    return [route for route in ROUTES if route.request and route.name not in TRAINING_BODIES]


def compression(data: bytes) -> None:
    """A zstd body."""
    from tinkex.wire.compression import decompress

    decompress(data, 1 << 20)


def custom_loss(data: bytes) -> None:
    """A graph in JSON, compiled; and a graph made of calls that exist, compiled and run."""
    from tests.property.loss_graphs import grow, run
    from tinkex.types import CreateCustomLossRequest
    from tinkex.wire.json_requests import decode_request

    if data[:1] == b"{":
        request = decode_request(CreateCustomLossRequest, data)
        run(request.inputs, request.graph)
    else:
        grow(data)


TARGETS: dict[str, Callable[[bytes], None]] = {
    target.__name__: target
    for target in (protobuf, protobuf_results, json, compression, custom_loss, *decoders.TARGETS)
}


def check(target: Callable[[bytes], None], data: bytes) -> str | None:
    """What is wrong with the answer to one input."""
    began = time.process_time()
    try:
        target(data)
    except InputError:
        pass
    except Exception as error:  # noqa: BLE001 - this is what is looked for
        return f"{type(error).__name__}: {error}"
    spent = time.process_time() - began
    return f"took {spent:.1f} s" if spent > LIMIT_S else None


def seeds(name: str) -> list[bytes]:
    """Good bodies to start from."""
    from tests.property import fuzz_seeds

    return decoders.SEEDS[name]() if name in decoders.SEEDS else getattr(fuzz_seeds, name)()


_ODD = [b"\x00", b"\xff", b"\x7f", b"\x80", b"\xff\xff\xff\xff\x0f", b"\xff" * 9 + b"\x01"]
_ODD += [
    b"null",
    b"[]",
    b"{}",
    b"-1",
    b"1e999",
    b"NaN",
    b"9" * 40,
    b'"\\ud800"',
    b"true",
    b"[" * 40,
]


def mutated(data: bytes, others: list[bytes], rng: random.Random) -> bytes:
    """A body with a few things changed."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4, 16))):
        at = rng.randrange(len(made) + 1)
        to = min(len(made), at + rng.choice((0, 1, 1, 2, 8, 64)))
        match rng.randrange(5):
            case 0 if at < len(made):
                made[at] ^= 1 << rng.randrange(8)
            case 1:
                made[at:to] = b""
            case 2:
                made[at:to] = rng.choice(_ODD)
            case 3:
                made[at:at] = bytes(made[at:to]) * rng.choice((1, 2, 200))
            case _:
                other = rng.choice(others)
                start = rng.randrange(len(other) + 1)
                made[at:to] = other[start : start + rng.choice((1, 4, 32, 400))]
    return bytes(made)


def search(
    name: str, runs: int, seed: int, seconds: float = float("inf")
) -> tuple[bytes, str] | None:
    """The first input that breaks the rule, within a number of inputs and of seconds."""
    end = time.monotonic() + seconds
    rng = random.Random(seed)
    pool = seeds(name)
    for data in pool[:8]:
        check(TARGETS[name], data)  # imports what it needs, which nobody times
    for data in pool:
        problem = check(TARGETS[name], data)
        if problem:
            return data, problem
    for _ in range(runs):
        if time.monotonic() > end:
            break
        data = mutated(rng.choice(pool), pool, rng)
        problem = check(TARGETS[name], data)
        if problem:
            return data, problem
    return None


def retry(name: str, files: list[Path]) -> tuple[bytes, str] | None:
    """Try some inputs, after the imports that nobody times."""
    for good in seeds(name)[:8]:
        check(TARGETS[name], good)
    for file in files:
        print(file.name, flush=True)  # noqa: T201 - the last one is where the process ended
        data = file.read_bytes()
        problem = check(TARGETS[name], data)
        if problem:
            return data, problem
    return None


def guided(name: str, options: list[str]) -> None:
    """Search with atheris, which mutates towards code that has not run yet."""
    import tempfile

    import atheris  # type: ignore[import-untyped]

    with atheris.instrument_imports(include=["tinkex"]):
        import tinkex.server.app
        import tinkex.wire.json_requests
        import tinkex.wire.proto_training  # noqa: F401

    def one(data: bytes) -> None:
        problem = check(TARGETS[name], data)
        if problem:
            raise AssertionError(problem)

    with tempfile.TemporaryDirectory() as folder:
        for number, data in enumerate(seeds(name)):
            Path(folder, str(number)).write_bytes(data)
        atheris.Setup([sys.argv[0], folder, *options], one)
        atheris.Fuzz()


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("target", choices=TARGETS)
    parser.add_argument("--runs", type=int, help="inputs (default: 1000, or --seconds)")
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--atheris", action="store_true")
    parser.add_argument("--input", type=Path, nargs="+", help="try these files and nothing else")
    known, others = parser.parse_known_args(arguments)
    if known.atheris:
        guided(known.target, others)
        return 0
    if known.input is not None:
        found = retry(known.target, known.input)
    else:
        runs = known.runs or (1000 if known.seconds is None else sys.maxsize)
        found = search(known.target, runs, known.seed, known.seconds or float("inf"))
    if found is not None:
        print(found[1][:500], found[0].hex(), sep="\n")  # noqa: T201 - for whoever ran it
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
