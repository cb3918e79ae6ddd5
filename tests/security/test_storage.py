"""Attacks on what the server keeps: rows, bytes, files, and what refusals say about them."""

from __future__ import annotations

import stat
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from tests.security.world import MOST_BYTES, world_on

if TYPE_CHECKING:
    from pathlib import Path

    from tests.security.world import World


def test_large_metadata_is_refused_and_small_metadata_delays_nobody(world: World) -> None:
    with world.watching() as seen:
        body = {"tags": [], "user_metadata": {"k": "x" * 3_900_000}, "sdk_version": "x"}
        for _ in range(5):
            refused = world.attacker.post("create_session", body)
            assert (refused.status, len(refused.body) < 1500) == (400, True)
        body["user_metadata"] = {"k": "x" * 16_000}
        for _ in range(40):
            assert world.attacker.post("create_session", body).status == 200
        for path in ("sessions?limit=10000", "training_runs?limit=10000", "checkpoints"):
            assert world.attacker.get(path).status == 200
        assert world.attacker.post("sessions/search", {"limit": 200}).status == 200
    assert seen.peak_bytes < MOST_BYTES
    world.assert_well()


def test_custom_losses_count_towards_the_quota(tmp_path: Path) -> None:
    with world_on(tmp_path, "--set", "max_stored_bytes=1000000") as world:
        session = world.attacker.session()
        node = {"op": "call_function", "name": "n", "target": "sum", "args": [{"ref": "x" * 1000}]}
        answers = [
            world.attacker.post(
                "create_custom_loss",
                {
                    "session_id": session,
                    "custom_loss_seq_id": number,
                    "name": "loss",
                    "inputs": [{"name": "logprobs", "rank": 1}],
                    "graph": {"nodes": [{**node, "name": f"n{i}"} for i in range(200)]},
                },
            )
            for number in range(8)
        ]
        codes = [answer.status for answer in answers]
        kept = codes.count(200)
        assert 0 < kept < 8
        assert codes == [200] * kept + [429] * (8 - kept)
        assert "losses" in answers[-1].detail
        assert "max_stored_bytes" in answers[-1].detail
        world.assert_well()


def test_of_sessions_at_the_same_time_as_many_are_opened_as_fit(tmp_path: Path) -> None:
    with world_on(tmp_path, "--set", "max_sessions=7") as world:
        body = {"tags": [], "user_metadata": {}, "sdk_version": "x"}
        with ThreadPoolExecutor(16) as pool:
            answers = list(
                pool.map(lambda _: world.attacker.post("create_session", body), [0] * 40)
            )
        codes = [answer.status for answer in answers]
        assert (codes.count(200), codes.count(429)) == (7, 33)
        world.assert_well()


def test_what_is_kept_is_for_its_user_only(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    with world_on(tmp_path, "--set", f"audit_file={data / 'audit.log'}") as world:
        world.attacker.session()
        readable = [
            path.name for path in data.iterdir() if stat.S_IMODE(path.stat().st_mode) & 0o077
        ]
        assert readable == []
        assert b"server_started" in (data / "audit.log").read_bytes()
