"""Keys that may do less than their tenant, against a real server."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.serving import START_S, environment
from tests.security.world import Tenant, world_on

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_limited_keys_do_what_they_may_and_the_log_says_who(
    database: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    place = ()
    if database == "postgresql":
        place = ("--database", request.getfixturevalue("postgres").new_place())

    def tinkex(*words: str) -> Any:
        command = [sys.executable, "-m", "tinkex.cli", *words, "--format", "json"]
        done = subprocess.run(
            [*command, "--data-dir", str(tmp_path / "data"), *place],
            env=environment(tmp_path),
            capture_output=True,
            text=True,
            timeout=START_S,
            check=True,
        )
        return json.loads(done.stdout)

    with world_on(tmp_path, database=place[1] if place else None) as world:
        session = world.attacker.session()

        def key(*limits: str) -> Tenant:
            made = tinkex("key", "create", "--owner", "attacker", *limits)
            return Tenant(world.port, made["key"], "attacker")

        reader, sampling = key("--read-only"), key("--routes", "sample")
        inside = key("--project", "p")
        assert session in reader.get("sessions").json["sessions"]
        refused = reader.post(
            "create_session", {"tags": [], "user_metadata": {}, "sdk_version": "x"}
        )
        assert (refused.status, "only read" in refused.detail) == (403, True)
        own = sampling.session()
        assert sampling.sample(sampling.sampler(own), 0)["sequences"]
        assert sampling.get("checkpoints").status == 403
        assert inside.get("sessions").json["sessions"] == []
        assert inside.get(f"sessions/{session}").status == 404
        world.attacker.finish(session)
        world.assert_well()
        world.server.end()  # refused attempts are written every minute, and at the end
    log = tinkex("audit", "--since", "1h")
    events = {line["event"]: line for line in log if line["owner"] in ("", "attacker")}
    assert events["session_finished"]["owner"] == "attacker"
    assert events["session_finished"]["address"] == "127.0.0.1"
    assert events["session_finished"]["request_id"]
    assert events["read_only_key:create_session"]["details"]["count"] == 1
    assert "server_started" in events
    used = {each["key_id"]: each["last_used_at"] for each in tinkex("key", "list")}
    assert sum(at is not None for at in used.values()) == 5
