"""Uploading an adapter, against a stand-in for the hub's client."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tinkex.cli.commands import DONE, FAILED
from tinkex.testing import FakeServer, faults

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Ran, Saved

    Run = Callable[..., Ran]


class Hub:
    """What the command uses of `huggingface_hub`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.signed_in = True
        self.readme: str | None = None
        self.repos: list[dict[str, Any]] = []
        self.branches: list[str] = []
        self.uploads: list[dict[str, Any]] = []
        self.files: dict[str, str] = {}

    def module(self) -> types.ModuleType:
        module = types.ModuleType("huggingface_hub")
        vars(module).update(HfApi=lambda: self, hf_hub_download=self.hf_hub_download)
        return module

    def whoami(self) -> dict[str, str]:
        if not self.signed_in:
            raise OSError("no token")
        return {"name": "me"}

    def create_repo(self, **given: Any) -> Any:
        self.repos.append(given)
        return types.SimpleNamespace(repo_id=f"me/{given['repo_id']}")

    def create_branch(self, *, repo_id: str, branch: str, exist_ok: bool) -> None:
        self.branches.append(branch)

    def hf_hub_download(self, **given: Any) -> str:
        if self.readme is None:
            raise FileNotFoundError("README.md")
        (self.folder / "README.md").write_text(self.readme)
        return str(self.folder / "README.md")

    def upload_folder(self, *, folder_path: str, **given: Any) -> None:
        self.uploads.append(given)
        for path in Path(folder_path).iterdir():
            self.files[path.name] = path.read_text(errors="replace")


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    hub = Hub(tmp_path)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub.module())
    return hub


def test_an_adapter_is_uploaded_with_a_card_under_a_derived_name(run: Run, saved: Saved, hub: Hub):
    ran = run("checkpoint", "push-hf", saved.external, "-f", "json")
    assert ran.status == DONE
    name = f"tinker-tiny-{saved.run_id.replace(':', '-')}"
    assert ran.json == {
        "checkpoint_path": saved.external,
        "repo_id": name,
        "revision": "external_weights-export",
        "public": False,
    }
    assert hub.repos == [{"repo_id": name, "private": True, "exist_ok": True}]
    assert hub.branches == ["external_weights-export"]
    assert f"tinker_path: {saved.external}" in hub.files["README.md"]
    assert "base_model: tinkex/tiny" in hub.files["README.md"]
    assert json.loads(hub.files["adapter_config.json"])["base_model_name_or_path"]
    assert hub.uploads[0]["ignore_patterns"] == ["checkpoint_complete"]


def test_options_reach_the_hub(run: Run, saved: Saved, hub: Hub):
    words = "--repo org/mine --public --commit-message hello --create-pr --no-model-card"
    patterns = "--allow-pattern *.json --allow-pattern *.md --ignore-pattern x"
    ran = run("checkpoint", "push-hf", saved.training, *words.split(), *patterns.split())
    assert ran.status == DONE
    assert "org/mine" in ran.out
    assert hub.repos[0] == {"repo_id": "org/mine", "private": False, "exist_ok": True}
    assert "README.md" not in hub.files
    upload = hub.uploads[0]
    assert (upload["commit_message"], upload["create_pr"]) == ("hello", True)
    assert (upload["allow_patterns"], upload["ignore_patterns"]) == (["*.json", "*.md"], ["x"])
    assert upload["revision"] is None


def test_a_repository_with_another_checkpoint_is_left_alone(run: Run, saved: Saved, hub: Hub):
    hub.readme = "tinker_path: tinker://other/weights/a\n"
    ran = run("checkpoint", "push-hf", saved.external)
    assert ran.status == FAILED
    assert "tinker://other/weights/a" in ran.err
    assert hub.uploads == []
    hub.readme = f"`{saved.external}`"
    assert run("checkpoint", "push-hf", saved.external).status == DONE


def test_without_the_hubs_client_the_error_names_it(
    run: Run, saved: Saved, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    ran = run("checkpoint", "push-hf", saved.external)
    assert ran.status == FAILED
    assert "pip install huggingface_hub" in ran.err


def test_without_a_login_nothing_is_downloaded(
    run: Run, saved: Saved, hub: Hub, server: FakeServer
):
    hub.signed_in = False
    server.requests.clear()
    ran = run("checkpoint", "push-hf", saved.external)
    assert ran.status == FAILED
    assert "hf auth login" in ran.err
    assert server.requests == []


def test_files_that_are_no_adapter_are_refused(
    run: Run, saved: Saved, hub: Hub, server: FakeServer
):
    links = {
        "urls": {"weights.age": f"{server.url}/api/v1/healthz"},
        "expires": "2100-01-01T00:00:00Z",
    }
    server.faults.on("get_external_weights_urls", faults.reply(200, links))
    ran = run("checkpoint", "push-hf", saved.external)
    assert ran.status == FAILED
    assert "no PEFT adapter" in ran.err
    assert hub.uploads == []


def test_an_unknown_base_model_is_no_obstacle(run: Run, saved: Saved, hub: Hub, server: FakeServer):
    server.faults.on("weights_info", faults.reply(404))
    ran = run("checkpoint", "push-hf", saved.external, "-f", "json")
    assert ran.status == DONE
    assert ran.json["repo_id"].startswith("tinker-adapter-")
    assert "base_model:" not in hub.files["README.md"]
