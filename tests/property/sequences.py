"""Sequences of faults, cancellations and deadlines, and a small model of what must happen.

    python -m tests.property.sequences                # without end; prints what it finds
    python -m tests.property.sequences --seconds 60

One sequence is a call (a sample, or a training step with another one behind it), up to four faults
that its requests meet in order, the deadlines of its client, and perhaps a moment at which it is
cancelled. On the virtual clock, so that hours pass in milliseconds. What was found is kept in
`test_sequences.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tests.unit.clients.world import MODEL, World, datum
from tinkex import AdamParams, ModelInput, RetryConfig, SamplingParams
from tinkex.clock import time_limit
from tinkex.errors import (
    APIConnectionError,
    APIStatusError,
    ConflictError,
    InternalServerError,
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

# What a submission may meet.
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
    "html 408": lambda: faults.reply(408, b"<html>late</html>", media_type="text/html"),
    "dropped": faults.drop,
    "503": lambda: faults.reply(503),
    "429": lambda: faults.rate_limit("retry-after", 3),
    "402": lambda: faults.reply(402),
    "lost": faults.lost,
    "failed user": lambda: faults.reply(200, {"error": "bad data", "category": "user"}),
    "failed server": lambda: faults.reply(200, {"error": "broken", "category": "server"}),
}
_CONNECTION = ("dropped", "reply lost", "empty 400")
_ERRORS: dict[str, type[Exception]] = {
    "503": InternalServerError,
    "408": APIStatusError,
    "409": ConflictError,
}
# Sends and polls take no time on the virtual clock, except for short pauses between polls.
_SLACK_S = 1.0
_LONGEST_S = 400.0

Span = tuple[float, float]


@dataclass(frozen=True)
class Sequence:
    """What one call goes through.

    It is cancelled after `cancel_after_s`: by its future, or with `by_timeout` because the task
    that awaits it runs out of time. `total_s` and `submit_s` are the deadlines of its client.
    """

    kind: str
    submission: tuple[str, ...]
    result: tuple[str, ...]
    cancel_after_s: float | None = None
    feed: bool = False
    by_timeout: bool = False
    total_s: float | None = None
    submit_s: float = 300.0

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
            draw.random() < 0.5,
            draw.choice((None, None, 0.3, 4.0, 15.0)),
            draw.choice((300.0, 300.0, 1.0, 3.0)),
        )


@dataclass(frozen=True)
class Expected:
    """How a call ends, and under which numbers it was sent, as offsets from its first.

    Waits are drawn at random, so the end lies between two times; `on_deadline` says that it is
    the total deadline, in which case the numbers may be fewer.
    """

    error: type[Exception] | None
    offsets: tuple[int, ...]
    between: Span = (0.0, 0.0)
    on_deadline: bool = False

    def allows(self, error: Exception | None, offsets: tuple[int, ...], at: float) -> bool:
        """Whether a call that ended so is as it should be."""
        if type(error) is not (self.error or type(None)):
            return False
        if self.on_deadline:
            sent = offsets == self.offsets[: len(offsets)]
        else:
            sent = offsets == self.offsets
        return sent and self.between[0] - 0.01 <= at <= self.between[1] + _SLACK_S


def expected(sequence: Sequence) -> list[Expected]:
    """The model: what may become of a call, whatever its random waits are."""
    found: list[Expected] = []
    untried: list[tuple[bool, ...]] = [()]
    while untried:
        walk = _Walk(sequence, untried.pop())
        error = walk.submit() or walk.ask()
        untried += walk.untried
        found += _within(sequence.total_s, Expected(error, tuple(walk.offsets), walk.time))
    return found


def _within(total_s: float | None, end: Expected) -> list[Expected]:
    """An end, or the total deadline before it, or both where it depends on the waits."""
    if total_s is None or end.between[1] + _SLACK_S < total_s:
        return [end]
    late = replace(end, error=ServerSilentError, between=(total_s, total_s), on_deadline=True)
    return [late] if end.between[0] > total_s else [end, late]


class _Walk:
    """How far a call has come; `submit` and `ask` say which error has ended it, if any."""

    def __init__(self, sequence: Sequence, choices: tuple[bool, ...]) -> None:
        self._is_sample = sequence.kind == "sample"
        self._submit_s = sequence.submit_s
        self._submission, self._result = list(sequence.submission), list(sequence.result)
        # How often each kind of failure was met: by the call as a whole, and by polls since the
        # last honest "pending".
        self._tries: Counter[str] = Counter()
        self._polls: Counter[str] = Counter()
        self._number = 0
        self.offsets: list[int] = []
        self.time: Span = (0.0, 0.0)
        # Questions whose answer depends on the waits: answered as chosen, else with no.
        self._choices, self._made = choices, 0
        self.untried: list[tuple[bool, ...]] = []

    def submit(self) -> type[Exception] | None:
        """Send until accepted, always under the same number."""
        trouble: Span = (0.0, 0.0)
        while True:
            self.offsets.append(self._number)
            met = self._submission.pop(0) if self._submission else "accepted"
            if met == "422":
                return UnprocessableEntityError
            if met in ("accepted", "slow"):
                self._wait((20.0, 20.0) if met == "slow" else (0.0, 0.0))
                return None
            if met in ("402", "429"):
                # Neither is trouble, and being told to slow down ends what there was.
                self._wait((5.0, 5.0) if met == "402" else (3.0, 3.0))
                if met == "429":
                    trouble = (0.0, 0.0)
                    self._tries[met] += not self._is_sample
                continue
            kind = "connection" if met in _CONNECTION else met
            if self._tries[kind] == 2 and kind == "409":
                return ConflictError
            if self._whether(trouble, self._submit_s):
                return self._gave_up(kind)
            left = (self._submit_s - trouble[1], self._submit_s - trouble[0])
            wait = self._backoff(kind)
            wait = (min(wait[0], left[0]), min(wait[1], left[1]))
            self._tries[kind] += 1
            self._wait(wait)
            trouble = (trouble[0] + wait[0], trouble[1] + wait[1])

    def _backoff(self, kind: str) -> Span:
        if self._is_sample:
            return self._policy_delay(kind)
        wait_s = min(0.5 * 2.0 ** self._tries.total(), 30.0)
        return (0.75 * wait_s, wait_s)

    def _policy_delay(self, kind: str) -> Span:
        wait_s = min(0.5 * 2.0 ** self._tries[kind], 10.0)
        return (0.75 * wait_s, 1.25 * wait_s)

    def _gave_up(self, kind: str) -> type[Exception]:
        if kind == "connection":
            return ServerSilentError if self._is_sample else APIConnectionError
        return _ERRORS[kind]

    def ask(self) -> type[Exception] | None:
        """Ask until there is a result, submitting again what was lost."""
        while self._result:
            met = self._result.pop(0)
            if met == "failed user" or (met == "failed server" and not self._is_sample):
                return RequestFailedError
            if met not in ("lost", "failed server"):
                self._wait(self._poll_wait(met))
                continue
            most = 3 if met == "failed server" else 10 if self._is_sample else 4
            if self._tries[met] + 1 == most:
                return RequestFailedError if met == "failed server" else PromiseLostError
            once = 0.5 * 2.0 ** self._tries[met]
            self._wait(self._policy_delay(met) if self._is_sample else (0.75 * once, once))
            self._tries[met] += 1
            # A sample that is drawn again is another one; training keeps its number.
            self._number += self._is_sample
            if (error := self.submit()) is not None:
                return error
        return None

    def _poll_wait(self, met: str) -> Span:
        if met in ("pending", "paused"):
            self._polls.clear()
            return (0.0, 1.0)
        if met == "402":
            return (5.0, 5.0)
        wait_s = min(0.5 * 2.0 ** self._polls.total(), 1.0 if met == "html 408" else 30.0)
        self._polls[met] += 1
        return (3.0, 3.0) if met == "429" else (0.75 * wait_s, wait_s)

    def _wait(self, span: Span) -> None:
        self.time = (self.time[0] + span[0], self.time[1] + span[1])

    def _whether(self, spent: Span, limit_s: float) -> bool:
        """Whether so much time is no less than the limit."""
        if spent[0] > limit_s - 0.001 or spent[1] < limit_s - 0.001:
            return spent[0] > limit_s - 0.001
        if self._made == len(self._choices):
            self._choices += (False,)
            self.untried.append((*self._choices[:-1], True))
        self._made += 1
        return self._choices[self._made - 1]


class Trial:
    """Runs sequences in one world and compares them with the model."""

    def __init__(self, *, feed: bool) -> None:
        self.world = World({"sample_use_retrieve_futures": feed})

    def run(self, sequences: list[Sequence]) -> None:
        async def main(world: World) -> None:
            for (total_s, submit_s), chosen in _by_deadlines(sequences).items():
                deadlines = {"total_deadline_s": total_s, "submit_deadline_s": submit_s}
                async with world.service(deadlines) as service:
                    client = await service.create_lora_training_client_async(MODEL, rank=2)
                    for sequence in chosen:
                        sampler = await service.create_sampling_client_async(
                            base_model=MODEL, retry_config=RetryConfig(progress_timeout=submit_s)
                        )
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
        ends: list[float] = []
        future.add_done_callback(lambda _: ends.append(world.clock.now()))
        error = await self._outcome(sequence, future)
        took_s = ends[0] - started
        assert took_s < _LONGEST_S, "the call took too long"
        sent = world.server.seen(route)[before:]
        self._compare(sequence, future.cancelled(), error, sent, took_s)
        # The server may have accepted what the client has given up without hearing of it.
        orphaned = "reply lost" in sequence.submission and (error or future.cancelled())
        await self._nothing_left(client, sampler, orphaned=bool(orphaned))

    async def _outcome(self, sequence: Sequence, future: Any) -> Exception | None:
        """The error that ended a call; None after a result or a cancellation."""
        clock, limit_s = self.world.clock, sequence.cancel_after_s
        if limit_s is not None and not sequence.by_timeout:
            await clock.sleep(limit_s)
            future.cancel()
        try:
            if limit_s is not None and sequence.by_timeout:
                async with time_limit(clock, limit_s):
                    await future
            else:
                await asyncio.shield(asyncio.wrap_future(future))
        except asyncio.CancelledError:
            return None
        except TinkerError as error:
            return error
        return None

    def _compare(
        self,
        sequence: Sequence,
        cancelled: bool,
        error: Exception | None,
        sent: list[Any],
        took_s: float,
    ) -> None:
        numbers = [seen.json["seq_id"] for seen in sent]
        by_number: dict[int, set[bytes]] = {}
        for seen in sent:
            by_number.setdefault(seen.json["seq_id"], set()).add(seen.raw_body)
        assert all(len(bodies) == 1 for bodies in by_number.values()), "one number, two contents"
        if cancelled:
            assert sequence.cancel_after_s is not None
            return
        offsets = tuple(number - numbers[0] for number in numbers)
        possible = expected(sequence)
        assert any(end.allows(error, offsets, took_s) for end in possible), (
            f"ended with {error!r} after {took_s:.2f} s under the numbers {numbers}, not with one "
            f"of {possible}"
        )

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
        assert session.context.response_bytes.left == flags.inflight_response_bytes_semaphore_size
        if sampler._feed is not None:  # pyright: ignore[reportPrivateUsage] - what may be left
            assert not sampler._feed._waiters  # pyright: ignore[reportPrivateUsage]
            assert orphaned or not sampler._feed._unclaimed  # pyright: ignore[reportPrivateUsage]


def _by_deadlines(sequences: list[Sequence]) -> dict[tuple[float | None, float], list[Sequence]]:
    found: dict[tuple[float | None, float], list[Sequence]] = {}
    for one in sequences:
        found.setdefault((one.total_s, one.submit_s), []).append(one)
    return found


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
