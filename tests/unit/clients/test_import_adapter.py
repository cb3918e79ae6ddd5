"""`RestClient.import_adapter`: what it sends, what it returns, and what it never sends."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest

from tests.unit.adapters import kit
from tinkex import BadRequestError, InputError, NotFoundError, RestClient, ServiceClient
from tinkex.adapters.archive import pack
from tinkex.testing import API_KEY, FakeServer, faults

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeServer]:
    with FakeServer().serve() as server:
        yield server


@pytest.fixture
def server(shared: FakeServer) -> Iterator[FakeServer]:
    yield shared
    shared.faults.clear()
    shared.requests.clear()


@pytest.fixture
def rest(server: FakeServer) -> Iterator[RestClient]:
    with RestClient(base_url=server.url, api_key=API_KEY) as client:
        yield client


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return kit.write(tmp_path / "adapter")


def test_a_folder_is_sent_as_a_tar_and_the_path_comes_back(
    rest: RestClient, server: FakeServer, folder: Path
):
    path = rest.import_adapter(folder).result()
    assert path.startswith("tinker://")
    assert path.endswith(":train:0/weights/imported")
    (sent,) = server.seen("import_weights")
    assert sent.headers["content-type"] == "application/x-tar"
    assert sent.query == "base_model=tinkex%2Ftiny&kind=weights"
    assert sent.raw_body == pack(kit.files())


def test_both_colours_take_the_same_arguments(rest: RestClient, server: FakeServer, folder: Path):
    given = {"name": "mine", "kind": "sampler_weights"}
    one = rest.import_adapter(str(folder), "tinkex/tiny-2", **given).result()  # type: ignore[arg-type]
    two = asyncio.run(rest.import_adapter_async(folder, "tinkex/tiny-2", **given))  # type: ignore[arg-type]
    assert one != two
    assert {path.rpartition("/")[0].rpartition("/")[2] for path in (one, two)} == {
        "sampler_weights"
    }
    assert "base_model=tinkex%2Ftiny-2&name=mine" in server.seen("import_weights")[0].query


def test_a_lost_answer_is_asked_for_again_and_one_checkpoint_is_made(
    rest: RestClient, server: FakeServer, folder: Path
):
    before = len(rest.list_user_checkpoints().result().checkpoints)
    server.faults.on("import_weights", faults.drop_midway())
    path = rest.import_adapter(folder).result()
    listed = rest.list_user_checkpoints().result().checkpoints
    assert len(listed) == before + 1
    assert listed[0].tinker_path == path
    assert len(server.seen("import_weights")) == 2


def test_what_was_imported_can_be_trained_on(server: FakeServer, folder: Path):
    with ServiceClient(base_url=server.url, api_key=API_KEY) as service:
        path = RestClient(service.holder).import_adapter(folder).result()
        training = service.create_training_client_from_state(path)
        assert training.get_info().model_data.model_name == "tinkex/tiny"
        assert training.save_state("next").result().path.endswith("/weights/next")


@pytest.mark.parametrize("name", ["truncated", "dora", "unknown tensors", "bias"])
def test_a_bad_adapter_is_refused_before_anything_is_sent(
    rest: RestClient, server: FakeServer, tmp_path: Path, name: str
):
    changes, message = kit.BAD[name]
    bad = rest.import_adapter(kit.write(tmp_path / "bad", **changes))
    with pytest.raises(InputError) as refused:
        bad.result()
    assert message in str(refused.value)
    assert server.seen("import_weights") == []


def test_bad_arguments_are_refused_by_name(rest: RestClient, server: FakeServer, tmp_path: Path):
    nameless = kit.write(tmp_path / "x", config=kit.config(base_model_name_or_path=None))
    with pytest.raises(InputError, match="base_model"):
        rest.import_adapter(nameless).result()
    with pytest.raises(InputError, match="kind: must be one of weights, sampler_weights"):
        rest.import_adapter(nameless, "tinkex/tiny", kind="external_weights").result()  # type: ignore[arg-type]
    with pytest.raises(InputError, match="name: must not be empty"):
        rest.import_adapter(nameless, "tinkex/tiny", name="").result()
    assert server.seen("import_weights") == []


def test_the_servers_refusal_says_what_is_served(rest: RestClient, folder: Path):
    with pytest.raises(BadRequestError, match="not served here; there is: tinkex/tiny"):
        rest.import_adapter(folder, "no/such").result()


def test_a_server_that_takes_no_adapters_is_named_in_the_error(
    rest: RestClient, server: FakeServer, folder: Path
):
    server.faults.on("import_weights", faults.reply(404, {"detail": "Not Found"}))
    with pytest.raises(NotFoundError) as refused:
        rest.import_adapter(folder).result()
    assert f"{server.url} is no server that takes adapters" in "\n".join(refused.value.__notes__)
