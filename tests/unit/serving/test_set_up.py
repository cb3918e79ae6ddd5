"""What a server process is set up with: idle connections, open files, garbage collection."""

from __future__ import annotations

import gc
import resource

from tinkex.serving.host_settings import HostSettings
from tinkex.serving.process import raise_file_limit, settle
from tinkex.transport import pool


def test_the_server_keeps_idle_connections_longer_than_clients_and_load_balancers() -> None:
    kept_s = HostSettings().connection_limits().idle_s
    assert kept_s > pool._IDLE_S
    assert kept_s > 60


def test_a_server_may_open_as_many_connections_as_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (1024, hard))
        raise_file_limit()
        raised, still = resource.getrlimit(resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert still == hard
    assert raised == (65_536 if hard == resource.RLIM_INFINITY else min(hard, 65_536))


def test_what_is_loaded_is_not_looked_at_for_garbage_again() -> None:
    threshold = gc.get_threshold()
    try:
        settle()
        assert gc.get_freeze_count() > 10_000
        assert gc.get_threshold()[0] > threshold[0]
    finally:
        gc.unfreeze()
        gc.set_threshold(*threshold)
