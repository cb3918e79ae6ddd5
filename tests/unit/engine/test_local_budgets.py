"""How much memory the engine takes for what, when nobody says."""

from __future__ import annotations

import torch

import tinkex.engine.local.budgets as module
from tinkex.engine.local.budgets import Budgets, budgets, machine_bytes
from tinkex.engine.settings import LocalSettings

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
GIB = 1 << 30


def test_settings_decide_and_the_machine_decides_the_rest():
    wanted = LocalSettings(memory_bytes=7, adapter_bytes=8, host_bytes=9)
    assert budgets(wanted, CPU, 0) == Budgets(pass_bytes=7, adapter_bytes=8, host_bytes=9)
    found = budgets(LocalSettings(adapter_bytes=8), CPU, 0)
    assert found.adapter_bytes == 8
    assert 0.3 * machine_bytes() < found.pass_bytes < 0.5 * machine_bytes()


def test_on_a_cpu_nothing_is_parked_in_the_memory_that_it_came_from():
    assert budgets(LocalSettings(), CPU, 0).host_bytes == 0


def test_on_cuda_the_caches_to_come_are_left_out_and_something_stays_free(monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100 * GIB, 140 * GIB))
    found = budgets(LocalSettings(), CUDA, 20 * GIB)
    assert found.pass_bytes + found.adapter_bytes < 80 * GIB
    assert found.pass_bytes > 40 * GIB
    assert 0 < found.host_bytes < machine_bytes()
    full = budgets(LocalSettings(), CUDA, 200 * GIB)
    assert (full.pass_bytes, full.adapter_bytes) == (0, 0)


def test_a_container_that_may_use_less_than_the_machine_has_counts(tmp_path, monkeypatch):
    limit = tmp_path / "memory.max"
    monkeypatch.setattr(module, "_CGROUP_LIMITS", (tmp_path / "none", limit))
    limit.write_text("max\n")
    whole = machine_bytes()
    limit.write_text("1000000\n")
    assert machine_bytes() == 1_000_000 < whole
