"""Nothing public is undocumented: settings, errors, commands, the test kit, futures.

What a page lists is compared with the program, in both directions where it can be.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
from typing import TYPE_CHECKING, Any

import pytest

import tinkex
from tests.docs.blocks import PAGES, ROOT, page_named
from tests.docs.reference import PRINTED, printed_part
from tests.installed import extras
from tinkex import Config, errors, testing
from tinkex.clients.sampling_checks import RetryConfig
from tinkex.futures.future import APIFuture, FutureStatus
from tinkex.server import Settings
from tinkex.serving.host_settings import HostSettings, known
from tinkex.testing import faults, plugin
from tinkex.wire.routes import ROUTES

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.req("B22")


def _text(page: str) -> str:
    return page_named(page).read_text()


def _rows(page: str) -> dict[str, list[str]]:
    """The table rows of a page by the name in code marks in their first cell."""
    rows = [line.strip("| ").split(" | ") for line in _text(page).splitlines() if line[:1] == "|"]
    named = ((re.match("`([^`]+)`", row[0]), row[1:]) for row in rows)
    return {name[1]: cells for name, cells in named if name is not None}


@pytest.mark.parametrize("name", PRINTED)
def test_what_is_printed_from_the_program_is_current(name: str):
    page, make = PRINTED[name]
    fix = "run PYTHONPATH=src python -m tests.docs.reference"
    assert printed_part(page.read_text(), name) == make(), fix


# -- settings --------------------------------------------------------------------------------------


def _variables() -> set[str]:
    source = (ROOT / "src" / "tinkex" / "config.py").read_text()
    names = r'"((?:TINKER|TINKEX|CLOUDFLARE)_[A-Z_]*[A-Z]|[A-Z]+_PROXY)"'
    return set(re.findall(names, source))


def test_the_settings_page_lists_exactly_the_variables_that_are_read():
    listed = {name for name in _rows("settings.md") if name.isupper()}
    assert listed == _variables()


@pytest.mark.parametrize("kind", [Config, RetryConfig, Settings], ids=lambda kind: kind.__name__)
def test_the_settings_page_lists_every_field(kind: Any):
    missing = {field.name for field in dataclasses.fields(kind)} - _rows("settings.md").keys()
    assert not missing


def test_the_settings_page_gives_the_true_defaults():
    rows = _rows("settings.md")
    for field in (*dataclasses.fields(Config), *dataclasses.fields(RetryConfig)):
        if isinstance(field.default, bool | int | float) or field.default is None:
            assert rows[field.name][0] == f"`{field.default}`", field.name


def test_the_serving_page_lists_every_setting_of_a_host_with_its_true_default():
    rows = _rows("serving.md")
    names = [field.name for field in dataclasses.fields(HostSettings) if field.name != "server"]
    assert {name: rows[name][0] for name in names} == {
        name: f"`{', '.join(value) if isinstance(value, tuple) else value}`"
        for name in names
        for value in [getattr(HostSettings(), name)]
    }


def test_everything_that_can_be_set_by_name_is_documented():
    listed = _rows("serving.md").keys() | _rows("settings.md").keys()
    assert not known().keys() - listed


def test_the_settings_page_lists_what_a_service_client_takes():
    names = {
        parameter.name
        for parameter in inspect.signature(tinkex.ServiceClient).parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    assert not names - _rows("settings.md").keys()


# -- errors ----------------------------------------------------------------------------------------


def _error_classes() -> list[type[errors.TinkerError]]:
    for module in pkgutil.walk_packages(tinkex.__path__, "tinkex."):
        if "dropin" not in module.name and "__main__" not in module.name:
            importlib.import_module(module.name)
    found: list[type[errors.TinkerError]] = []
    waiting = [errors.TinkerError]
    while waiting:
        kind = waiting.pop()
        found.append(kind)
        waiting += [sub for sub in kind.__subclasses__() if sub.__module__.startswith("tinkex.")]
    # Those of the server's own packages stay in its process: a client gets an HTTP status.
    return [kind for kind in found if not kind.__module__.startswith("tinkex.server.")]


def test_the_errors_page_lists_every_error_with_its_code():
    rows = {name: row for name, row in _rows("errors.md").items() if name[0].isupper()}
    codes = {kind.__name__: f"`{kind.code}`" for kind in _error_classes()}
    assert {name: row[0] for name, row in rows.items()} == codes


def test_the_errors_page_is_right_about_what_is_worth_trying_again():
    rows = _rows("errors.md")
    for kind in _error_classes():
        expected = {True: "yes", False: "no"}[kind.retryable]
        if kind is errors.RequestFailedError:
            expected = "unless `user`"
        assert rows[kind.__name__][1] == expected, kind.__name__


# -- the test kit, futures -------------------------------------------------------------------------


def test_the_testing_page_names_everything_in_the_test_kit():
    text = _text("testing.md")
    missing = [name for name in testing.__all__ if not re.search(rf"[`.]{name}\b", text)]
    assert not missing


def test_the_testing_page_lists_exactly_the_faults_there_are():
    effects = {
        name
        for name, value in vars(faults).items()
        if inspect.isfunction(value) and value.__module__ == faults.__name__
    }
    assert {name.split("(")[0] for name in _rows("testing.md") if "(" in name} == effects


def test_the_testing_page_names_the_fixtures():
    fixtures = [name for name in vars(plugin) if name.startswith("tinkex_")]
    assert fixtures
    assert not [name for name in fixtures if f"`{name}`" not in _text("testing.md")]


def test_the_futures_page_names_every_method_and_status_field():
    methods = [name for name in vars(APIFuture) if not name.startswith("_")]
    fields = [field.name for field in dataclasses.fields(FutureStatus)]
    text = _text("futures.md")
    assert not [name for name in methods + fields if not re.search(rf"[`.]{name}\b", text)]


@pytest.mark.req("S32")
def test_the_docs_say_that_pictures_need_no_upload():
    assert "travel inside the request" in _text("images.md")
    assert "no multipart form" in _text("images.md")
    assert not [route for route in ROUTES if "multipart" in route.request_encoding]


# -- the pages themselves --------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(page: Path):
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text())
    local = [target for target in targets if "://" not in target]
    assert not [target for target in local if not (page.parent / target).exists()]


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_links_name_pages_by_title_and_not_by_file(page: Path):
    assert not re.findall(r"\[[\w/-]+\.md\]\(", page.read_text())


def _linked(page: Path) -> set[Path]:
    """The pages that a page links to."""
    targets = re.findall(r"\]\(([^)#]+\.md)(?:#[^)]*)?\)", page.read_text())
    return {(page.parent / target).resolve() for target in targets if "://" not in target}


def test_every_page_can_be_reached_from_the_readme():
    found = {ROOT / "README.md"}
    waiting = list(found)
    while waiting:
        new = _linked(waiting.pop()) - found
        found |= new
        waiting += new
    assert not set(PAGES) - found


def test_the_readme_lists_every_extra_for_users():
    text = (ROOT / "README.md").read_text()
    assert not [name for name in extras().keys() - {"dev", "docs"} if f"`{name}`" not in text]


def test_the_readmes_tree_lists_exactly_the_folders_there_are():
    text = (ROOT / "README.md").read_text()
    packages = {p.name for p in (ROOT / "src" / "tinkex").iterdir() if (p / "__init__.py").exists()}
    listed = set(re.findall(r"^  (\w+)/ ", text, re.MULTILINE))
    assert listed == packages
