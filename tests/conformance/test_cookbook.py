"""tinker-cookbook 0.5.8 runs on tinkex wherever it runs on the official client."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING
from xml.etree import ElementTree

import pytest
from interpreters import REPOSITORY, Interpreters, finish

from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path
    from subprocess import Popen

pytestmark = [pytest.mark.official]

IMPORTER = str(REPOSITORY / "tests" / "conformance" / "import_cookbook.py")
SDK_IN_A_TEST = re.compile(r"^\s*(import tinker\b(?!_)|from tinker(\.\w+)* import)", re.MULTILINE)


def test_every_module_that_imports_officially_imports_on_tinkex(
    interpreters: Interpreters, tmp_path: Path
) -> None:
    official = interpreters.start(interpreters.official, [IMPORTER], home=tmp_path)
    ours = interpreters.start(interpreters.cookbook, [IMPORTER, "--dropin"], home=tmp_path)
    expected = json.loads(finish(official))
    seen = json.loads(finish(ours))
    importable = [name for name, failure in expected.items() if failure is None]
    assert len(importable) > 270
    assert {name: seen[name] for name in importable if seen[name]} == {}


def test_cookbook_environment_has_no_official_client(
    interpreters: Interpreters, tmp_path: Path
) -> None:
    code = "import importlib.util; print(importlib.util.find_spec('tinker'))"
    assert finish(interpreters.start(interpreters.cookbook, ["-c", code], home=tmp_path)) == (
        "None\n"
    )


@pytest.mark.exhaustive
def test_unit_tests_that_pass_officially_pass_on_tinkex(
    interpreters: Interpreters, tmp_path: Path
) -> None:
    official = start_tests(interpreters, tmp_path, "official")
    ours = start_tests(interpreters, tmp_path, "tinkex")
    for program in (official, ours):
        program.communicate(timeout=PATIENCE_S)
    expected = passed(tmp_path / "official.xml")
    assert len(expected) > 1000
    assert sorted(expected - passed(tmp_path / "tinkex.xml")) == []


def start_tests(interpreters: Interpreters, folder: Path, side: str) -> Popen[str]:
    """The cookbook's own tests that use the SDK, and those of its public surface."""
    source = interpreters.cookbook_source
    files = [
        str(path.relative_to(source))
        for path in sorted((source / "tinker_cookbook").rglob("*_test.py"))
        if SDK_IN_A_TEST.search(path.read_text())
    ]
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=no", "--timeout=60"]
    arguments += ["-m", "not slow and not integration", "--continue-on-collection-errors"]
    arguments += [f"--junitxml={folder / side}.xml", *files, "tests/downstream_compat"]
    home = folder / f"home-{side}"
    home.mkdir()
    if side == "official":
        return interpreters.start(interpreters.official, arguments, home=home, cwd=source)
    arguments = ["-m", "tinkex.dropin", *arguments]
    return interpreters.start(interpreters.cookbook, arguments, home=home, cwd=source)


def passed(report: Path) -> set[str]:
    """The names of the tests that passed."""
    cases = ElementTree.parse(report).getroot().iter("testcase")
    return {f"{case.get('classname')}::{case.get('name')}" for case in cases if not len(case)}
