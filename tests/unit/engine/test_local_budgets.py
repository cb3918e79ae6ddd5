"""How much memory the engine takes for what, when nobody says."""

from __future__ import annotations

import torch

import tinkex.engine.local.budgets as module
from tinkex.engine.local.budgets import Budgets, budgets, machine_bytes, sizes
from tinkex.engine.local_settings import LocalSettings

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GIB = 1 << 30


def test_settings_decide_and_the_machine_decides_the_rest():
    wanted = LocalSettings(cache_bytes=6, memory_bytes=7, adapter_bytes=8, host_bytes=9)
    assert budgets(wanted, CPU, 1) == Budgets(
        cache_bytes=6, pass_bytes=7, adapter_bytes=8, host_bytes=9
    )
    found = budgets(LocalSettings(adapter_bytes=8), CPU, 1)
    assert found.adapter_bytes == 8
    assert found.cache_bytes == GIB
    assert 0.3 * machine_bytes() < found.pass_bytes < 0.5 * machine_bytes()


def test_on_a_cpu_nothing_is_parked_in_the_memory_that_it_came_from():
    assert budgets(LocalSettings(), CPU, 1).host_bytes == 0


def test_on_cuda_the_caches_to_come_are_left_out_and_something_stays_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * GIB, 140 * GIB))
    found = budgets(LocalSettings(cache_bytes=10 * GIB), CUDA, 2)
    assert found.cache_bytes == 10 * GIB
    assert found.pass_bytes + found.adapter_bytes < 80 * GIB
    assert found.pass_bytes > 40 * GIB
    assert 0 < found.host_bytes < machine_bytes()
    full = budgets(LocalSettings(cache_bytes=100 * GIB), CUDA, 2)
    assert (full.pass_bytes, full.adapter_bytes) == (0, 0)


def test_on_cuda_models_share_what_their_caches_may_take(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * GIB, 140 * GIB))
    one, three = (budgets(LocalSettings(), CUDA, models) for models in (1, 3))
    assert 20 * GIB < one.cache_bytes < 50 * GIB
    assert 3 * three.cache_bytes <= one.cache_bytes
    total = one.cache_bytes + one.pass_bytes + one.adapter_bytes
    assert 80 * GIB < total < 100 * GIB


def test_a_device_that_is_fast_does_more_at_a_time_unless_the_settings_say():
    assert sizes(LocalSettings(), CUDA).sequences > sizes(LocalSettings(), CPU).sequences
    assert sizes(LocalSettings(max_sequences=3), CUDA).sequences == 3


def test_a_container_that_may_use_less_than_the_machine_has_counts(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(module, "_CGROUP_LIMITS", (tmp_path / "none", limit))
    limit.write_text("max\n")
    whole = machine_bytes()
    limit.write_text("1000000\n")
    assert machine_bytes() == 1_000_000 < whole
