"""One side in a process of its own: `python -m benchmarks.engine_cpu.side tinkex|strict|peer`.

Reads one JSON object per line (`work`, `seed`, `count`), does that work and answers with the
seconds it took. The parent lets only one side work at a time.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.engine_cpu.workload import Workload, prompts, sequences

if TYPE_CHECKING:
    from collections.abc import Callable

VOCABULARY = 49_152


class Peer:
    """`transformers` and `peft`."""

    def training(self, adapters: int) -> Callable[..., object]:
        from benchmarks.engine_cpu import peer

        return peer.Training(adapters)

    def sampling(self) -> Callable[..., object]:
        from benchmarks.engine_cpu import peer

        return peer.Sampling()


class Ours:
    """The engine, in a process set up as its own is."""

    def __init__(self, *, strict: bool) -> None:
        from tinkex.config import DEFAULT_MODEL
        from tinkex.engine.heap import keep_freed_memory
        from tinkex.engine.models.loader import load_model

        keep_freed_memory()
        self._strict = strict
        self._decoder = load_model(DEFAULT_MODEL).decoder

    def training(self, adapters: int) -> Callable[..., object]:
        from benchmarks.engine_cpu import ours

        return ours.Training(self._decoder, adapters, strict=self._strict)

    def sampling(self) -> Callable[..., object]:
        from benchmarks.engine_cpu import ours

        return ours.Sampling(self._decoder, strict=self._strict)


class Worker:
    """Makes what a kind of work needs when it is first asked for."""

    def __init__(self, side: str, work: Workload) -> None:
        self._side: Any = Peer() if side == "peer" else Ours(strict=side == "strict")
        self._work = work
        self._made: dict[object, Callable[..., object]] = {}

    def run(self, kind: str, seed: int) -> dict[str, float]:
        """Do one round and return its seconds."""
        work = self._work
        if kind == "train":
            data = [sequences(work.train_sequences, work.train_tokens, VOCABULARY, seed)]
            return self._timed(self._training(1), data)
        if kind == "adapters":
            length, rounds = work.adapter_tokens, range(work.adapters)
            data = [sequences(1, length, VOCABULARY, 100 * seed + number) for number in rounds]
            return self._timed(self._training(work.adapters), data)
        sampling = self._once("sampling", self._side.sampling)
        asked = prompts(work, work.prompts, VOCABULARY, seed)
        if kind == "batch":
            return self._timed(sampling, asked, work.new_tokens)
        chosen = asked[:: work.prompts // work.alone_prompts] if kind == "alone" else asked[8:9]
        parts = [self._timed(sampling, [prompt], work.new_tokens) for prompt in chosen]
        return {name: sum(part[name] for part in parts) for name in parts[0]}

    def _training(self, adapters: int) -> Callable[..., object]:
        return self._once(adapters, lambda: self._side.training(adapters))

    def _once(self, name: object, make: Callable[[], Callable[..., object]]) -> Any:
        if name not in self._made:
            self._made.clear()  # one at a time: what lies around must not cost the next one
            self._made[name] = make()
        return self._made[name]

    @staticmethod
    def _timed(call: Callable[..., object], *args: object) -> dict[str, float]:
        wall, cpu = time.perf_counter(), time.process_time()
        call(*args)
        return {"wall_s": time.perf_counter() - wall, "cpu_s": time.process_time() - cpu}


def main() -> None:
    """Answer until there is nothing more to read."""
    side, settings = sys.argv[1], json.loads(sys.argv[2])
    known = {field.name for field in fields(Workload)}
    work = Workload(**{name: value for name, value in settings.items() if name in known})
    torch.set_num_threads(work.threads)
    worker = Worker(side, work)
    for line in sys.stdin:
        asked = json.loads(line)
        print(json.dumps(worker.run(asked["kind"], asked["seed"])), flush=True)


if __name__ == "__main__":
    main()
