"""When a node that has exited is started again."""

from __future__ import annotations

import pytest

from tinkex.ray_cluster.restarts import LOST_LEASE, MISUSED, NodeExit, RestartPolicy, after_exit

POLICY = RestartPolicy(first_delay_s=1.0, longest_delay_s=5.0, quick_s=60.0, most_failures=5)


def ended(status: int = 1, *, was_ready: bool = False, lasted_s: float = 1.0) -> NodeExit:
    return NodeExit(status=status, was_ready=was_ready, lasted_s=lasted_s)


def test_quick_failures_wait_longer_each_time_and_end():
    delays: list[float | None] = []
    failures = 0
    for _ in range(5):
        then = after_exit(POLICY, failures, ended())
        failures = then.failures
        delays.append(then.delay_s)
    assert delays == [1.0, 2.0, 4.0, 5.0, None]


def test_a_node_that_lost_its_lease_starts_again_at_once():
    then = after_exit(POLICY, 4, ended(LOST_LEASE, was_ready=True))
    assert (then.delay_s, then.failures) == (0.0, 0)


def test_a_node_that_loses_its_lease_before_it_is_ready_backs_off():
    assert after_exit(POLICY, 4, ended(LOST_LEASE)).delay_s is None


def test_a_refused_setting_is_given_up_at_once():
    assert after_exit(POLICY, 0, ended(MISUSED)).delay_s is None


@pytest.mark.parametrize("status", [0, 1, -9])
def test_failures_are_forgotten_after_a_long_run(status: int):
    then = after_exit(POLICY, 4, ended(status, was_ready=True, lasted_s=61.0))
    assert (then.delay_s, then.failures) == (1.0, 0)


def test_a_node_that_is_ready_for_a_moment_only_is_a_failure():
    assert after_exit(POLICY, 4, ended(was_ready=True)).delay_s is None
