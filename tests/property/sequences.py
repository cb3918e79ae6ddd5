"""Sequences of faults, cancellations and deadlines, and a small model of what must happen.

    python -m tests.property.sequences                # without end; prints what it finds
    python -m tests.property.sequences --seconds 60

One sequence is a call (a sample, or a training step with another one behind it), up to four faults
that its requests meet in order, and perhaps a moment at which it is cancelled. On the virtual
clock, so that hours pass in milliseconds. What was found is kept in `test_sequences.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tests.unit.clients.world import MODEL, World, datum
from tinkex import AdamParams, ModelInput, SamplingParams
from tinkex.errors import (
    ConflictError,
    PromiseLostError,
    RequestFailedError,
    ServerSilentError,
    TinkerError,
    UnprocessableEntityError,
)
from tinkex.testing import Delays, faults

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinkex import SamplingClient, TrainingClient

PROMPT = ModelInput.from_ints([1, 2, 3])
PARAMS = SamplingParams(max_tokens=2, seed=1)

# What a submission may meet. Those that are retried never end a call here: four of them take less
# time than any deadline.
SUBMISSION: dict[str, Callable[[], Any]] = {
    "dropped": faults.drop,
    "reply lost": lambda: faults.drop(handled=True),
    "503": lambda: faults.reply(503),
    "429": lambda: faults.rate_limit("retry-after", 3),
    "402": lambda: faults.reply(402),
    "408": lambda: faults.reply(408),
    "409": lambda: faults.reply(409),
    "422": lambda: faults.reply(422),
    "empty 400": lambda: faults.empty(400),
    "slow": lambda: faults.slow(20.0),
}
# What asking for the result may meet.
RESULT: dict[str, Callable[[], Any]] = {
    "pending": lambda: faults.try_again("active"),
    "paused": lambda: faults.try_again("paused_capacity", "full"),
    "html 408": lambda: faults.reply(408),
    "dropped": faults.drop,
    "503": lambda: faults.reply(503),
    "429": lambda: faults.rate_limit("retry-after", 3),
    "402": lambda: faults.reply(402),
    "lost": faults.lost,
    "failed user": lambda: faults.reply(200, {"error": "bad data", "category": "user"}),
    "failed server": lambda: faults.reply(200, {"error": "broken", "category": "server"}),
}
_LONGEST_S = 400.0


@dataclass(frozen=True)
class Sequence:
    """What one call goes through."""

    kind: str
    submission: tuple[str, ...]
    result: tuple[str, ...]
    cancel_after_s: float | None = None
    feed: bool = False

    @classmethod
    def drawn(cls, seed: int) -> Sequence:
        """The sequence of a number."""
        draw = random.Random(seed)
        length = draw.randint(2, 4)
        cut = draw.randint(0, length)
        cancelled = draw.random() < 0.25
        return cls(
            draw.choice(("sample", "training")),
            tuple(draw.choices(list(SUBMISSION), k=cut)),
            tuple(draw.choices(list(RESULT), k=length - cut)),
            draw.choice((0.0, 0.5, 2.0, 10.0, 25.0)) if cancelled else None,
            draw.random() < 0.5,
        )


@dataclass(frozen=True)
class Expected:
    """How a call ends, and under which numbers it was sent, as offsets from its first."""

    error: type[Exception] | None
    offsets: tuple[int, ...]


def expected(sequence: Sequence) -> Expected:
    """The model: walk through the faults in the order in which requests meet them."""
    walk = _Walk(sequence)
    error = walk.submit() or walk.ask()
    return Expected(error, tuple(walk.offsets))


class _Walk:
    """How far a call has come; both methods say which error has ended it, if any."""

    def __init__(self, sequence: Sequence) -> None:
        self._is_sample = sequence.kind == "sample"
        self._submission, self._result = list(sequence.submission), list(sequence.result)
        self._seen: Counter[str] = Counter()
        self._number = 0
        self.offsets: list[int] = []

    def submit(self) -> type[Exception] | None:
        """Send until accepted, always under the same number."""
        while True:
            self.offsets.append(self._number)
            met = self._submission.pop(0) if self._submission else "accepted"
            self._seen[f"submission {met}"] += 1
            if met == "422":
                return UnprocessableEntityError
            if self._seen["submission 409"] == 3:
                return ConflictError
            if met in ("accepted", "slow"):
                return None

    def ask(self) -> type[Exception] | None:
        """Ask until there is a result, submitting again what was lost."""
        while self._result:
            met = self._result.pop(0)
            self._seen[met] += 1
            if met == "failed user" or (met == "failed server" and not self._is_sample):
                return RequestFailedError
            if self._seen["failed server"] == 3:
                return RequestFailedError
            if self._seen["lost"] == (10 if self._is_sample else 4):
                return PromiseLostError
            if met in ("lost", "failed server"):
                # A sample that is drawn again is another one; training keeps its number.
                self._number += self._is_sample
                if (error := self.submit()) is not None:
                    return error
        return None


class Trial:
    """Runs sequences in one world and compares them with the model."""

    def __init__(self, *, feed: bool) -> None:
        self.world = World({"sample_use_retrieve_futures": feed})

    def run(self, sequences: list[Sequence]) -> None:
        async def main(world: World) -> None:
            async with world.service() as service:
                client = await service.create_lora_training_client_async(MODEL, rank=2)
                for sequence in sequences:
                    sampler = await service.create_sampling_client_async(base_model=MODEL)
                    try:
                        await self._one(sequence, client, sampler)
                    except (AssertionError, TinkerError) as error:
                        error.add_note(f"in {sequence}")
                        raise

        self.world.run(main)

    async def _one(
        self, sequence: Sequence, client: TrainingClient, sampler: SamplingClient
    ) -> None:
        world, route = self.world, "asample" if sequence.kind == "sample" else "optim_step"
        world.server.engine.delays = Delays()
        world.server.faults.clear()
        for place, name in enumerate(sequence.submission):
            world.server.faults.on(route, SUBMISSION[name](), nth=place)
        for place, name in enumerate(sequence.result):
            world.server.faults.on("retrieve_future", RESULT[name](), nth=place)
        before = len(world.server.seen(route))
        started = world.clock.now()
        if sequence.kind == "sample":
            future: Any = sampler.sample(PROMPT, 1, PARAMS)
        else:
            future = client.optim_step(AdamParams())
        if sequence.cancel_after_s is not None:
            await world.clock.sleep(sequence.cancel_after_s)
            future.cancel()
        error = await _outcome(future)
        assert world.clock.now() - started < _LONGEST_S, "the call took too long"
        sent = world.server.seen(route)[before:]
        self._compare(sequence, future.cancelled(), error, sent)
        # The server may have accepted what the client has given up without hearing of it.
        orphaned = "reply lost" in sequence.submission and (error or future.cancelled())
        await self._nothing_left(client, sampler, orphaned=bool(orphaned))

    def _compare(
        self, sequence: Sequence, cancelled: bool, error: Exception | None, sent: list[Any]
    ) -> None:
        wanted = expected(sequence)
        numbers = [seen.json["seq_id"] for seen in sent]
        by_number: dict[int, set[bytes]] = {}
        for seen in sent:
            by_number.setdefault(seen.json["seq_id"], set()).add(seen.raw_body)
        assert all(len(bodies) == 1 for bodies in by_number.values()), "one number, two contents"
        if cancelled:
            assert sequence.cancel_after_s is not None
            return
        assert type(error) is (type(None) if wanted.error is None else wanted.error), repr(error)
        offsets = tuple(number - numbers[0] for number in numbers)
        assert offsets == wanted.offsets, f"numbers {numbers}"

    async def _nothing_left(
        self, client: TrainingClient, sampler: SamplingClient, *, orphaned: bool
    ) -> None:
        """The next call works soon, and whatever was reserved is free again."""
        world = self.world
        # What was on the wire when its caller left gets its answer first.
        await world.clock.sleep(60.0)
        world.server.faults.clear()
        started = world.clock.now()
        await client.forward([datum()], "cross_entropy")
        await sampler.sample(PROMPT, 1, PARAMS)
        assert world.clock.now() - started < 50.0, "the next call had to wait"
        session = client.holder
        flags = session.api.client_config
        assert session.sampling_bytes.left == flags.sample_dispatch_bytes_semaphore_size
        assert session.training_bytes.left == flags.fwdbwd_dispatch_bytes_semaphore_size
        assert session.wire.response_bytes.left == flags.inflight_response_bytes_semaphore_size
        if sampler._feed is not None:  # pyright: ignore[reportPrivateUsage] - what may be left
            assert not sampler._feed._waiters  # pyright: ignore[reportPrivateUsage]
            assert orphaned or not sampler._feed._unclaimed  # pyright: ignore[reportPrivateUsage]


async def _outcome(future: Any) -> Exception | None:
    try:
        await asyncio.shield(asyncio.wrap_future(future))
    except asyncio.CancelledError:
        return None
    except ServerSilentError as error:
        raise AssertionError("nothing here is silent for so long") from error
    except TinkerError as error:
        return error
    return None


def run(first: int, count: int) -> None:
    """Run the sequences of some numbers; raises AssertionError with the first that is wrong."""
    drawn = [Sequence.drawn(seed) for seed in range(first, first + count)]
    for feed in (False, True):
        chosen = [one for one in drawn if one.feed == feed]
        if chosen:
            Trial(feed=feed).run(chosen)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--first", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=float("inf"))
    args = parser.parse_args(arguments)
    end, first = time.monotonic() + args.seconds, args.first
    while time.monotonic() < end:
        run(first, 100)
        first += 100
        sys.stderr.write(f"\r{first - args.first} sequences")
        sys.stderr.flush()
    sys.stderr.write("\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
