"""A program that accepts operations as fast as it can and says which; tests kill it."""

from __future__ import annotations

import asyncio
import sys

from tests.contracts.store_suite import step
from tinkex.server.store.sql import SqlStore


async def main(place: str) -> None:
    async with SqlStore.open(place) as store:
        await store.lock()
        for first in range(0, 1_000_000, 50):
            burst = [step(seq, body=b"body %d" % seq) for seq in range(first, first + 50)]
            for accepted in asyncio.as_completed([store.submit(op) for op in burst]):
                operation, new = await accepted
                assert new
                print(operation.seq_id, flush=True)  # noqa: T201 - its answer to the test


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
