"""The site builds without a warning, and its reference has every public name."""

from __future__ import annotations

import importlib
import inspect
import os
import subprocess
import sys
import zlib
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from tests.docs.blocks import PAGES, ROOT
from tests.patience import PATIENCE_S

if TYPE_CHECKING:
    from pathlib import Path

PUBLIC = [
    "tinkex",
    "tinkex.auth",
    "tinkex.chat",
    "tinkex.data",
    "tinkex.dropin",
    "tinkex.loops",
    "tinkex.tracking",
    "tinkex.server",
    "tinkex.testing",
    "tinkex.types",
]
# Building is not counted: it is done once, for all of them.
# Read at the top of the package; `auth` and `types` are packages of the list above.
NOT_OBJECTS = {"__title__", "__version__", "auth", "types", "faults"}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `make docs` does, into another folder."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def described(site: Path) -> set[str]:
    """The full names of everything that the reference describes."""
    _, _, body = (site / "objects.inv").read_bytes().partition(b"zlib.\n")
    return {line.split(" ")[0] for line in zlib.decompress(body).decode().splitlines()}


def test_every_page_is_in_the_site_and_fetches_nothing_from_elsewhere(site: Path):
    for page in PAGES[1:]:
        built = site / page.relative_to(ROOT / "docs").with_suffix(".html")
        text = built.read_text()
        assert '<link rel="preconnect"' not in text
        assert 'src="http' not in text


@pytest.mark.parametrize("package", PUBLIC)
def test_the_reference_describes_every_public_name(site: Path, package: str):
    known = described(site)
    names = set(importlib.import_module(package).__all__) - NOT_OBJECTS
    missing = {n for n in names if not known & {f"{package}.{n}", *_homes(package, n)}}
    assert not missing


def _homes(package: str, name: str) -> set[str]:
    """Where else an object may be described: in its own module, or among the types."""
    thing = getattr(importlib.import_module(package), name)
    home = getattr(thing, "__module__", None)
    return {f"{home}.{getattr(thing, '__qualname__', name)}", f"tinkex.types.{name}"}


def test_the_reference_describes_every_method_of_the_clients(site: Path):
    known = described(site)
    for client in ("ServiceClient", "TrainingClient", "SamplingClient", "RestClient"):
        kind = getattr(importlib.import_module("tinkex"), client)
        own = {name for name, value in vars(kind).items() if inspect.isfunction(value)}
        public = {name for name in own if not name.startswith("_")}
        assert public
        assert not {name for name in public if f"tinkex.{client}.{name}" not in known}


def test_page_names_are_used_once_in_a_folder_and_rarely_in_two():
    names = Counter(page.name for page in PAGES)
    assert {name for name, count in names.items() if count > 1} == {"cluster.md"}
