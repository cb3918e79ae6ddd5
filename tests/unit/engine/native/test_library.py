"""On which machines there is machine code, and the switch that imitates another processor."""

from __future__ import annotations

import pytest

from tests.unit.engine.native.processor import has_machine_code
from tinkex.config import cpu_isa, server_environment
from tinkex.engine.native import library
from tinkex.errors import InputError


def test_there_is_code_exactly_where_the_processor_has_avx512() -> None:
    assert (library.library() is not None) == has_machine_code()


@pytest.mark.parametrize("isa", ["portable", "avx2", " AVX2 "])
def test_an_older_processor_can_be_imitated(isa: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TINKEX_CPU_ISA", isa)
    assert library.library.__wrapped__() is None


def test_an_unknown_instruction_set_is_named_with_those_there_are() -> None:
    with pytest.raises(InputError, match=r"TINKEX_CPU_ISA.*portable, avx2, avx512"):
        cpu_isa({"TINKEX_CPU_ISA": "sse9"})


def test_the_switch_is_no_setting_of_a_server() -> None:
    assert server_environment({"TINKEX_CPU_ISA": "avx2", "TINKEX_PORT": "1"}) == {"port": "1"}


def test_without_llvmlite_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "find_spec", lambda name: None)
    assert library.library.__wrapped__() is None


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_are_not_searched_for_openmp(
    system: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library.sys, "platform", system)
    assert library._openmp() is None
