"""One server for the attacks of a module, on each database."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.contracts.conftest import postgres as postgres  # a fixture
from tests.security.world import world_on

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tests.security.world import World


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    """A server with keys; an attack that changes its settings starts its own with `world_on`."""
    database = None
    if request.param == "postgresql":
        database = request.getfixturevalue("postgres").new_place()
    # Polls of an attack that asks for the longest ones end soon.
    flags = ("--set", "long_poll_s=3")
    folder = tmp_path_factory.mktemp("world")
    # Its temporary files, apart from those of other servers.
    (folder / "tmp").mkdir()
    with world_on(folder, *flags, database=database, TMPDIR=str(folder / "tmp")) as made:
        yield made
