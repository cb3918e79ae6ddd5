"""Exports encrypted with age: for whom, what is refused, and that decrypting gives the adapter."""

from __future__ import annotations

import io
import sys
import tarfile
from typing import TYPE_CHECKING, Any

import msgspec
import pyrage
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from tinkex.server.api.downloads import ARCHIVE, Exports
from tinkex.testing import FakeEngine

from .conftest import Api

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinkex.engine.protocol import Layout
    from tinkex.server.api.downloads import ExportKind

pytestmark = pytest.mark.anyio

FILES = {"adapter_config.json", "adapter_model.safetensors"}


@pytest.fixture
def identity() -> Any:
    return pyrage.x25519.Identity.generate()


def ssh_pair() -> tuple[str, Any]:
    """The line of an SSH public key as its file has it, and the private key."""
    key = Ed25519PrivateKey.generate()
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
    return f"{public} somebody@somewhere\n", pyrage.ssh.Identity.from_buffer(private)


async def export(api: Api, model: str, seq: int, recipients: Any, name: str = "out") -> Any:
    body = {"model_id": model, "seq_id": seq, "path": name, "age_encryption_recipients": recipients}
    return await api.outcome(await api.post("/save_weights_external", body))


async def fetch(api: Api, model: str, name: str = "out") -> dict[str, bytes]:
    """The files behind an export's links, which need no key."""
    url = f"/training_runs/{model}/checkpoints/external_weights/{name}/external_weights_urls"
    links = (await api.get(url))["urls"]
    stranger = Api(api.server, api.clock, key="")
    return {n: (await stranger.call("GET", _path(link))).body for n, link in links.items()}


def _path(link: str) -> str:
    return link.split("/api/v1", 1)[1]


def members(tar: tarfile.TarFile) -> dict[str, bytes]:
    return {member.name: (tar.extractfile(member) or io.BytesIO()).read() for member in tar}


def decrypted(files: dict[str, bytes], identity: Any) -> dict[str, bytes]:
    return {name: pyrage.decrypt(data, [identity]) for name, data in files.items()}


async def test_decrypting_an_export_gives_the_adapter_bit_by_bit(api: Api, identity: Any) -> None:
    model = await api.model()
    await export(api, model, 1, None, "plain")
    await export(api, model, 2, [str(identity.to_public())], "secret")
    plain, secret = await fetch(api, model, "plain"), await fetch(api, model, "secret")
    assert plain.keys() == FILES
    assert decrypted(secret, identity) == {f"{name}.age": data for name, data in plain.items()}


async def test_every_recipient_can_decrypt_and_nobody_else(api: Api, identity: Any) -> None:
    model = await api.model()
    public = str(identity.to_public())
    ssh_public, ssh = ssh_pair()
    # A key read from a file ends with a newline; naming one twice changes nothing.
    await export(api, model, 1, [f"{public}\n", ssh_public, public])
    files = await fetch(api, model)
    assert decrypted(files, identity) == decrypted(files, ssh)
    header, _, _ = files["adapter_config.json.age"].partition(b"\n---")
    assert [header.count(b"\n-> " + kind) for kind in (b"X25519", b"ssh-ed25519")] == [1, 1]
    with pytest.raises(pyrage.DecryptError):
        decrypted(files, pyrage.x25519.Identity.generate())


async def test_the_archive_of_an_encrypted_export_is_encrypted_too(api: Api, identity: Any) -> None:
    model = await api.model()
    await export(api, model, 1, [str(identity.to_public())])
    url = f"/training_runs/{model}/checkpoints/external_weights/out/archive"
    reply = await api.call("GET", _path((await api.get(url))["url"]))
    with tarfile.open(fileobj=io.BytesIO(reply.body)) as tar:
        files = members(tar)
    assert files.keys() == {f"{name}.age" for name in FILES}
    assert msgspec.json.decode(pyrage.decrypt(files["adapter_config.json.age"], [identity]))


@pytest.mark.parametrize(
    ("recipients", "said"),
    [
        (["{good}", "age1x"], "age_encryption_recipients[1]: 'age1x' is not a usable recipient"),
        (["ssh-rsa AAAA"], "age_encryption_recipients[0]: 'ssh-rsa AAAA'"),
        (["age1yubikey1qwe"], "age_encryption_recipients[0]: 'age1yubikey1qwe'"),
        ([""], "age_encryption_recipients[0]: ''"),
        ([], "age_encryption_recipients: is empty"),
        (["{good}"] * 11, "at most 10"),
        (["x" * 5000], "at most 4096"),
    ],
)
async def test_bad_recipients_are_refused_and_nothing_is_saved(
    api: Api, identity: Any, recipients: list[str], said: str
) -> None:
    model = await api.model()
    public = str(identity.to_public())
    failed = await export(api, model, 1, [text.replace("{good}", public) for text in recipients])
    assert failed["category"] == "user"
    assert said in failed["error"]
    assert (await api.get("/checkpoints"))["checkpoints"] == []
    assert not any(call.name == "save_adapter" for call in api.server.engine.calls)
    # The model goes on: the refusal took its turn.
    assert "path" in await export(api, model, 2, [public])


async def test_a_private_key_given_as_a_recipient_is_not_repeated(api: Api, identity: Any) -> None:
    model = await api.model()
    failed = await export(api, model, 1, [str(identity)])
    assert "is a private key" in failed["error"]
    assert str(identity) not in failed["error"]


async def test_a_copy_of_an_encrypted_export_is_encrypted(api: Api, identity: Any) -> None:
    model = await api.model()
    saved = await export(api, model, 1, [str(identity.to_public())])
    copied = (await api.post("/copy_weights", {"source_path": saved["path"]}))["tinker_path"]
    run = copied.removeprefix("tinker://").partition("/")[0]
    assert decrypted(await fetch(api, run), identity) == decrypted(
        await fetch(api, model), identity
    )


async def test_an_encrypted_export_is_not_sampled_from(api: Api, identity: Any) -> None:
    session = await api.session()
    model = await api.model(session)
    path = (await export(api, model, 1, [str(identity.to_public())]))["path"]
    body = {"session_id": session, "sampling_session_seq_id": 0, "model_path": path}
    reply = await api.call("POST", "/create_sampling_session", body)
    assert reply.status == 400
    assert b"encrypted export" in reply.body


async def test_a_part_is_sent_only_of_the_file_that_the_client_has(api: Api, identity: Any) -> None:
    model = await api.model()
    await export(api, model, 1, [str(identity.to_public())])
    url = f"/training_runs/{model}/checkpoints/external_weights/out/external_weights_urls"
    path = _path((await api.get(url))["urls"]["adapter_model.safetensors.age"])
    first = await api.call("GET", path)
    for asked in ({}, {"if-range": first.headers["etag"]}):
        again = await api.call("GET", path, headers={"range": "bytes=100-", **asked})
        assert again.status == 200
        assert pyrage.decrypt(again.body, [identity]) == pyrage.decrypt(first.body, [identity])


class Exporting(FakeEngine):
    """Has one export."""

    async def export_saved(self, location: str, layout: Layout = "peft") -> Mapping[str, bytes]:
        return {"adapter_config.json": b"{}"}


@pytest.mark.parametrize("kind", ["file", "archive"])
async def test_large_exports_of_one_place_are_kept_apart_by_their_recipients(
    kind: ExportKind,
) -> None:
    exports = Exports(Exporting(), in_memory_bytes=0)
    for identity in (pyrage.x25519.Identity.generate(), pyrage.x25519.Identity.generate()):
        recipients = (str(identity.to_public()),)
        name = ARCHIVE if kind == "archive" else "adapter_config.json.age"
        source = await exports.open("here", kind, name, recipients)
        assert source is not None
        data = await source.read(0, source.size_bytes)
        source.close()
        if kind == "archive":
            with tarfile.open(fileobj=io.BytesIO(data)) as tar:
                data = members(tar)["adapter_config.json.age"]
        assert pyrage.decrypt(data, [identity]) == b"{}"
        assert await exports.open("here", kind, "adapter_config.json", recipients) is None
    exports.close()


async def test_a_server_without_the_library_says_so(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyrage", None)
    failed = await export(api, await api.model(), 1, ["age1x"])
    assert "pyrage is not installed" in failed["error"]
    assert failed["category"] == "server"
