"""Downloads: every file or none, nowhere but in their folder."""

from __future__ import annotations

import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.forward_proxy import ForwardProxy
from tinkex.cli.commands import DONE, FAILED
from tinkex.testing import FakeServer, faults

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Ran, Saved

    Run = Callable[..., Ran]

LATER = "2100-01-01T00:00:00Z"


def files_in(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def folder_of(path: str) -> Path:
    return Path(path.removeprefix("tinker://").replace("/", "_"))


def is_download(seen: Any) -> bool:
    return "/files/" in seen.path


def test_an_export_is_downloaded_into_a_folder_of_its_own(run: Run, saved: Saved):
    ran = run("checkpoint", "download", saved.external)
    assert ran.status == DONE
    found = files_in(folder_of(saved.external))
    assert {"adapter_config.json", "adapter_model.safetensors"} <= set(found)
    assert {path.name for path in Path().iterdir()} == {folder_of(saved.external).name}
    data = run("checkpoint", "download", saved.external, "-o", "deep/er", "-f", "json").json
    assert data == {
        "checkpoint_path": saved.external,
        "destination": str(Path("deep/er") / folder_of(saved.external)),
        "file_size_bytes": sum(map(len, found.values())),
    }


def test_a_training_checkpoint_is_exported_for_the_download_only(
    run: Run, saved: Saved, server: FakeServer
):
    before = run("checkpoint", "list", "--limit", "0", "-f", "json").json
    ran = run("checkpoint", "download", saved.training)
    assert ran.status == DONE
    assert "adapter_model.safetensors" in files_in(folder_of(saved.training))
    assert run("checkpoint", "list", "--limit", "0", "-f", "json").json == before
    assert server.seen("finish_session")[-1].json["reason"]["type"] == "success"


class Terminal(io.StringIO):
    """Standard error that is a terminal."""

    def isatty(self) -> bool:
        return True


def test_a_terminal_sees_the_progress_and_keeps_no_trace_of_it(
    run: Run, saved: Saved, monkeypatch: pytest.MonkeyPatch
):
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    assert run("checkpoint", "download", saved.external).status == DONE
    shown = terminal.getvalue()
    assert "adapter_model.safetensors: " in shown
    assert "100 % of" in shown
    assert shown.endswith("\r\033[K")


def test_sampler_weights_are_refused_with_the_way_out(run: Run, saved: Saved):
    ran = run("checkpoint", "download", saved.sampler)
    assert ran.status == FAILED
    assert "save_weights_external" in ran.err
    assert list(Path().iterdir()) == []


def test_an_existing_folder_is_replaced_only_by_force(run: Run, saved: Saved):
    folder = folder_of(saved.external)
    folder.mkdir()
    (folder / "mine.txt").write_text("precious")
    refused = run("checkpoint", "download", saved.external)
    assert refused.status == FAILED
    assert "--force" in refused.err
    assert files_in(folder) == {"mine.txt": b"precious"}
    assert run("checkpoint", "download", saved.external, "--force").status == DONE
    assert "mine.txt" not in files_in(folder)
    assert [path.name for path in Path().iterdir()] == [folder.name]


@pytest.mark.parametrize("effect", [faults.drop(), faults.drop_midway(), faults.reply(403)])
def test_a_broken_download_leaves_nothing_new_and_keeps_the_old(
    run: Run, saved: Saved, server: FakeServer, effect: Any
):
    folder = folder_of(saved.external)
    folder.mkdir()
    (folder / "old.txt").write_text("old")
    server.faults.on(None, effect, nth=1, when=is_download)
    ran = run("checkpoint", "download", saved.external, "--force")
    assert (ran.status, ran.out) == (FAILED, "")
    assert "download" in ran.err
    assert [path.name for path in Path().iterdir()] == [folder.name]
    assert files_in(folder) == {"old.txt": b"old"}


@pytest.mark.parametrize("name", ["../out", "/tmp/out", "a/../../out", "a\\..\\out", ""])
def test_a_file_cannot_leave_its_folder(run: Run, saved: Saved, server: FakeServer, name: str):
    links = {"urls": {name: f"{server.url}/api/v1/healthz"}, "expires": LATER}
    server.faults.on("get_external_weights_urls", faults.reply(200, links))
    ran = run("checkpoint", "download", saved.external)
    assert ran.status == FAILED
    assert "unsafe name" in ran.err
    assert list(Path().iterdir()) == []


def test_a_link_that_is_no_web_address_is_refused(run: Run, saved: Saved, server: FakeServer):
    Path("secret").write_text("mine")
    links = {"urls": {"a": Path("secret").absolute().as_uri()}, "expires": LATER}
    server.faults.on("get_external_weights_urls", faults.reply(200, links))
    ran = run("checkpoint", "download", saved.external)
    assert ran.status == FAILED
    assert "no web address" in ran.err


def test_links_about_to_expire_are_signed_again(run: Run, saved: Saved, server: FakeServer):
    real = run("checkpoint", "download", saved.external, "-o", "first")
    assert real.status == DONE
    server.requests.clear()
    names = files_in(Path("first"))
    stale = {
        "urls": {name.split("/")[-1]: "http://127.0.0.1:9/gone" for name in names},
        "expires": "2020-01-01T00:00:00Z",
    }
    server.faults.on("get_external_weights_urls", faults.reply(200, stale))
    assert run("checkpoint", "download", saved.external).status == DONE
    assert len(server.seen("get_external_weights_urls")) == 2


def test_an_export_without_files_fails(run: Run, saved: Saved, server: FakeServer):
    links: dict[str, Any] = {"urls": {}, "expires": LATER}
    server.faults.on("get_external_weights_urls", faults.reply(200, links))
    ran = run("checkpoint", "download", saved.external)
    assert ran.status == FAILED
    assert "no files" in ran.err


# -- where a link leads ----------------------------------------------------------------------------


def give_links(server: FakeServer, **links: str) -> None:
    answer = faults.reply(200, {"urls": links, "expires": LATER})
    server.faults.on("get_external_weights_urls", answer)


def test_redirects_are_followed_but_not_for_ever(run: Run, saved: Saved, server: FakeServer):
    def hop(path: str, location: str) -> None:
        effect = faults.reply(302, headers={"Location": location})
        server.faults.on(None, effect, times=None, when=lambda seen: seen.path == path)

    hop("/hop", "/api/v1/healthz")
    give_links(server, a=f"{server.url}/hop")
    assert run("checkpoint", "download", saved.external, "-o", "there").status == DONE
    (folder,) = Path("there").iterdir()
    assert b"ok" in files_in(folder)["a"]
    hop("/round", "/round")
    give_links(server, a=f"{server.url}/round")
    ran = run("checkpoint", "download", saved.external)
    assert ran.status == FAILED
    assert "redirects more than 5 times" in ran.err


def test_a_server_of_files_that_is_not_there_is_said_with_its_address(
    run: Run, saved: Saved, server: FakeServer
):
    give_links(server, a="http://127.0.0.1:9/gone")
    ran = run("checkpoint", "download", saved.external)
    assert ran.status == FAILED
    assert "Could not download a: Nothing listens at http://127.0.0.1:9" in ran.err
    assert "TINKER_BASE_URL" not in ran.err


def test_commands_and_downloads_go_through_the_proxy_of_the_environment(
    run: Run, saved: Saved, server: FakeServer, monkeypatch: pytest.MonkeyPatch
):
    with ForwardProxy(upstream=server.url.removeprefix("http://")) as proxy:
        monkeypatch.setenv("TINKER_BASE_URL", "http://tinker.invalid")
        monkeypatch.setenv("http_proxy", proxy.url())
        assert run("checkpoint", "download", saved.external).status == DONE
    downloads = [line for line in proxy.request_lines if "/files/" in line]
    assert downloads
    assert all(line.startswith("GET http://tinker.invalid/") for line in downloads)


def test_a_download_that_the_proxy_refuses_names_the_proxy_and_loopback_needs_none(
    run: Run, saved: Saved, server: FakeServer, monkeypatch: pytest.MonkeyPatch
):
    with ForwardProxy(answer=b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n") as proxy:
        monkeypatch.setenv("ALL_PROXY", proxy.url("me:canary"))
        assert run("checkpoint", "download", saved.external).status == DONE
        assert proxy.request_lines == []
        give_links(server, a="http://files.invalid/a")
        ran = run("checkpoint", "download", saved.external, "-o", "elsewhere")
    assert ran.status == FAILED
    assert f"The proxy {proxy.url()} refused to connect to http://files.invalid" in ran.err
    assert "NO_PROXY" in ran.err
    assert "canary" not in ran.err
    assert proxy.request_lines == ["GET http://files.invalid/a HTTP/1.1"]
