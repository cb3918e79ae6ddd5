"""A PEFT folder is read without torch, and refused by what is wrong with it."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from typing import TYPE_CHECKING

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.unit.adapters import kit
from tinkex.adapters.archive import pack, pack_folder, unpack
from tinkex.adapters.folder import make_peft, read_adapter
from tinkex.adapters.peft_layout import LoraKey, read_config
from tinkex.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path


def test_an_adapter_says_its_rank_scale_and_matrices(tmp_path: Path):
    adapter = read_adapter(kit.write(tmp_path))
    assert (adapter.config.r, adapter.config.scale) == (2, 4.0)
    assert adapter.tensors.keys() == {LoraKey(None, "unembed", "A"), LoraKey(None, "unembed", "B")}
    assert adapter.parameters == 2 * (1 + kit.VOCAB)


def test_the_scale_of_rslora_grows_with_the_root_of_the_rank():
    assert read_config(kit.config(r=4, lora_alpha=6, use_rslora=True)).scale == 3.0


@pytest.mark.parametrize("name", kit.BAD)
def test_what_is_no_adapter_of_ours_is_refused_by_what_is_wrong(tmp_path: Path, name: str):
    changes, message = kit.BAD[name]
    with pytest.raises(InputError) as refused:
        read_adapter(kit.write(tmp_path, **changes))
    assert message in str(refused.value)


def test_a_pickle_is_never_read_and_the_way_out_is_said(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_bytes(kit.config())
    (tmp_path / "adapter_model.bin").write_bytes(b"cos\nsystem\n(S'touch /tmp/bad'\ntR.")
    with pytest.raises(InputError, match=r"adapter_model\.bin: is a pickle.*safe_serialization"):
        read_adapter(tmp_path)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "has no adapter_config.json"),
        (["adapter_config.json"], "has no adapter_model.safetensors"),
        (["adapter_config.json.age", "adapter_model.safetensors.age"], "decrypt its files"),
    ],
)
def test_a_folder_without_an_adapter_says_what_is_missing(
    tmp_path: Path, names: list[str], message: str
):
    for name in names:
        (tmp_path / name).write_bytes(kit.config())
    with pytest.raises(InputError, match=message):
        read_adapter(tmp_path)


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path):
    with pytest.raises(InputError, match="is no folder"):
        read_adapter(tmp_path / "nowhere")


def test_a_configuration_of_a_million_letters_is_not_read(tmp_path: Path):
    folder = kit.write(tmp_path, config=kit.config() + b" " * (1 << 20))
    with pytest.raises(InputError, match="more than"):
        read_adapter(folder)


# -- made into PEFT's layout -----------------------------------------------------------------------


def test_the_layout_of_hosted_tinker_becomes_that_of_peft(tmp_path: Path):
    theirs = kit.pair("base_model.model.model.unembed_tokens")
    layer = kit.pair("base_model.model.model.layers.1.mlp.up_proj", 2, 3, 5)
    described = kit.config(target_modules="all-linear", base_model_name_or_path=None)
    kit.write(tmp_path, weights=kit.weights({**theirs, **layer}), config=described)
    make_peft(tmp_path, "org/model")
    found = load_file(tmp_path / kit.WEIGHTS)
    assert found.keys() == kit.pair().keys() | layer.keys()
    for name, array in {**kit.pair(), **layer}.items():
        assert np.array_equal(found[name], array)
    written = json.loads((tmp_path / kit.CONFIG).read_text())
    assert written["target_modules"] == ["up_proj", "lm_head"]
    assert written["base_model_name_or_path"] == "org/model"
    assert sorted(path.name for path in tmp_path.iterdir()) == [kit.CONFIG, kit.WEIGHTS]


def test_what_is_in_the_layout_of_peft_keeps_its_bytes(tmp_path: Path):
    kit.write(tmp_path)
    make_peft(tmp_path)
    assert (tmp_path / kit.WEIGHTS).read_bytes() == kit.weights()
    assert (
        json.loads((tmp_path / kit.CONFIG).read_text())["base_model_name_or_path"] == "tinkex/tiny"
    )


# -- archives --------------------------------------------------------------------------------------


def test_an_archive_is_what_tar_reads_and_comes_back(tmp_path: Path):
    kit.write(tmp_path / "a")
    archive = tmp_path / "x.tar"
    archive.write_bytes(pack_folder(tmp_path / "a"))
    with tarfile.open(archive) as tar:
        assert tar.getnames() == [kit.CONFIG, kit.WEIGHTS]
    (tmp_path / "b").mkdir()
    unpack(archive, tmp_path / "b")
    assert {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()} == kit.files()


def test_a_compressed_archive_with_its_files_in_a_folder_is_read(tmp_path: Path):
    kit.write(tmp_path / "step-9")
    with tarfile.open(tmp_path / "x.tar.gz", "w:gz") as tar:
        tar.add(tmp_path / "step-9", "./step-9")
    (tmp_path / "b").mkdir()
    unpack(tmp_path / "x.tar.gz", tmp_path / "b")
    assert {p.name: p.read_bytes() for p in (tmp_path / "b").iterdir()} == kit.files()


def test_names_in_an_archive_cannot_leave_the_folder(tmp_path: Path):
    tricks = {
        "../outside": b"1",
        "/tmp/tinkex-absolute": b"2",
        f"../../{kit.CONFIG}": kit.config(),
        "readme.md": b"3",
    }
    (tmp_path / "x.tar").write_bytes(pack(tricks))
    (tmp_path / "b").mkdir()
    unpack(tmp_path / "x.tar", tmp_path / "b")
    assert [p.name for p in (tmp_path / "b").iterdir()] == [kit.CONFIG]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "x.tar"]


def test_a_link_in_an_archive_is_left_out(tmp_path: Path):
    with tarfile.open(tmp_path / "x.tar", "w") as tar:
        link = tarfile.TarInfo(kit.CONFIG)
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    (tmp_path / "b").mkdir()
    unpack(tmp_path / "x.tar", tmp_path / "b")
    assert list((tmp_path / "b").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"no archive", pack(kit.files())[:700]])
def test_what_is_no_archive_is_refused(tmp_path: Path, content: bytes):
    (tmp_path / "x.tar").write_bytes(content)
    (tmp_path / "b").mkdir()
    with pytest.raises(InputError, match=r"x\.tar: is no readable archive"):
        unpack(tmp_path / "x.tar", tmp_path / "b")


def test_reading_adapters_imports_nothing_heavy():
    program = (
        "import sys, tinkex.adapters.folder, tinkex.adapters.archive, tinkex.adapters.compare; "
        "sys.exit(bool({'torch', 'safetensors', 'starlette'} & sys.modules.keys()))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
