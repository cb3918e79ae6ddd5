"""What installing and importing the client costs: few packages, little disk, no heavy imports."""

from __future__ import annotations

import importlib.metadata as metadata
import json
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet

from tests.installed import base_requirements, closure, extras
from tests.patience import PATIENCE_S

ROOT = Path(__file__).parents[2]
HEAVY = ("numpy", "torch", "transformers", "pydantic", "starlette", "uvicorn", "tokenizers", "ray")
MOST_PACKAGES = 15
MOST_BYTES = 100 * 1000 * 1000


def size_bytes(name: str) -> int:
    files = metadata.files(name)
    assert files, f"{name} does not say which files it installed"
    # Compiled caches are made by pip or at the first import, and are no part of the package.
    located = [Path(str(f.locate())) for f in files if not str(f).endswith(".pyc")]
    return sum(path.stat().st_size for path in located if path.is_file())


def own_size_bytes() -> int:
    files = (ROOT / "src" / "tinkex").rglob("*")
    return sum(p.stat().st_size for p in files if p.is_file() and p.suffix != ".pyc")


@pytest.mark.req("B21")
def test_the_client_installs_at_most_fifteen_packages():
    packages = closure(base_requirements())
    assert {"msgspec", "numpy", "anyio", "protobuf"} <= packages
    assert len(packages) + 1 <= MOST_PACKAGES, sorted(packages)


@pytest.mark.req("B21")
def test_the_client_takes_at_most_a_hundred_megabytes():
    sizes = {name: size_bytes(name) for name in closure(base_requirements())}
    sizes["tinkex"] = own_size_bytes()
    total = sum(sizes.values())
    assert sizes["numpy"] > 1e7, "the sizes are not those of the installed files"
    assert total <= MOST_BYTES, sorted(sizes.items(), key=lambda item: -item[1])


def test_no_extra_is_needed_by_the_client():
    base = closure(base_requirements())
    for heavy in ("torch", "transformers", "pydantic", "starlette", "uvicorn", "ray"):
        assert heavy not in base
    assert {"server", "engine", "otel", "cli"} <= set(extras())


def test_every_pinned_package_installs_on_the_first_python_that_is_claimed():
    """Debian 12 has 3.11.2: a package that wants 3.11.5 cannot be installed there."""
    oldest = "3.11.0"  # requires-python in pyproject.toml
    refused = {
        f"{package.name} {package.version} needs Python {needs}"
        for package in metadata.distributions()
        if (needs := package.metadata["Requires-Python"]) and oldest not in SpecifierSet(needs)
    }
    assert refused == set()


def loaded_after(program: str) -> set[str]:
    """The top-level packages a fresh interpreter has loaded after running `program`."""
    script = f"{program}\nimport sys, json\nprint(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PYTHONPATH": str(ROOT / "src"), "HOME": "/nonexistent"},
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_S,
    )
    return {name.split(".")[0] for name in json.loads(done.stdout)}


@pytest.mark.req("B21")
@pytest.mark.parametrize(
    "program",
    [
        "import tinkex",
        "import tinkex; tinkex.ServiceClient",
        "import tinkex; tinkex.TrainingClient; tinkex.SamplingClient; tinkex.RestClient",
        "import tinkex; tinkex.types.SamplingParams(max_tokens=3); tinkex.AdamParams()",
        "import tinkex; tinkex.ServiceClient(base_url='http://127.0.0.1:9', api_key='k').close()",
    ],
)
def test_importing_and_making_a_client_loads_nothing_heavy(program: str):
    assert loaded_after(program).isdisjoint(HEAVY)


def test_importing_the_package_loads_no_library_at_all():
    fresh = loaded_after("pass")
    new = loaded_after("import tinkex") - fresh
    ours = {name for name in new if name not in sys.stdlib_module_names}
    assert ours == {"tinkex"}


def test_the_pytest_plugin_costs_nothing_until_a_fixture_is_used():
    new = loaded_after("import tinkex.testing.plugin")
    assert "starlette" not in new
    assert "numpy" not in new
