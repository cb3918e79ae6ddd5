"""What a node asks of its database, as the page about clusters says."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

from benchmarks.cluster.database import counts
from tests.docs.blocks import DOCS

if TYPE_CHECKING:
    from tests.contracts.postgres import PostgresServer

pytestmark = pytest.mark.anyio

ROW = re.compile(r"^\| ([a-z][^|`]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)


async def test_nothing_costs_more_than_the_page_says(postgres: PostgresServer) -> None:
    page = (DOCS / "explanation" / "cluster.md").read_text()
    most = {what: (float(s), float(t)) for what, s, t in ROW.findall(page)}
    found = {
        each.what: (each.statements, each.transactions)
        for each in await counts(postgres.new_place())
    }
    assert set(found) == set(most)
    for what, (statements, transactions) in found.items():
        assert statements <= most[what][0], what
        assert transactions <= most[what][1], what
