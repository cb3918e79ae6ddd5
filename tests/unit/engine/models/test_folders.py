"""Broken and unsupported Hugging Face folders, and how a name finds its model."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import huggingface_hub
import huggingface_hub.errors as hub_errors
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.unit.engine.models.reference import random_model
from tinkex.config import DEFAULT_MODEL
from tinkex.engine.models.hub import hub_folder
from tinkex.engine.models.loader import load_model
from tinkex.errors import InputError, ModelError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_model("Llama").save_pretrained(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    random_model("Llama").save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


def refused(folder: Path, reason: str) -> str:
    with pytest.raises(ModelError, match=reason) as caught:
        load_model(str(folder))
    return str(caught.value)


def change_config(folder: Path, **values: Any) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_an_unsupported_architecture_is_refused_with_the_list_of_supported_ones(folder: Path):
    change_config(folder, architectures=["MixtralForCausalLM"])
    message = refused(folder, "MixtralForCausalLM is not supported")
    assert "LlamaForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM" in message
    assert "config.json" in message


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"architectures": [], "model_type": None}, r"\(none named\) is not supported"),
        ({"hidden_act": "gelu"}, "the activation 'gelu' is not supported"),
        ({"mlp_bias": True}, "mlp_bias is not supported"),
        ({"use_sliding_window": True}, "sliding-window attention is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is not supported"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope scaling 'yarn' is not supported"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        (
            {"rope_parameters": {"rope_type": "llama3", "high_freq_factor": 1.0}},
            "high_freq_factor must be above",
        ),
        ({"hidden_size": "32"}, r"Expected `int`, got `str` - at `\$.hidden_size`"),
        ({"num_attention_heads": 0}, r"num_attention_heads"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3"),
        ({"head_dim": 7}, "head size 7 is not an even number"),
        ({"vocab_size": 66}, r"embed_tokens\.weight' has the shape \[67, 32\].*\[66, 32\]"),
        ({"num_hidden_layers": 4}, r"'model\.layers\.3\.input_layernorm\.weight' is missing"),
        ({"num_hidden_layers": 2}, r"'model\.layers\.2\..*' has no place in LlamaForCausalLM"),
        ({"attention_bias": True}, r"q_proj\.bias' is missing"),
    ],
)
def test_a_configuration_we_cannot_run_says_why(values: dict[str, Any], reason: str, folder: Path):
    change_config(folder, **values)
    (folder / "generation_config.json").unlink()
    assert str(folder) in refused(folder, reason)


def test_an_end_of_text_id_beyond_the_vocabulary_is_refused(folder: Path):
    (folder / "generation_config.json").write_text('{"eos_token_id": 67}')
    refused(folder, "end-of-text id 67")


def test_a_model_type_serves_where_no_architecture_is_named(folder: Path):
    change_config(folder, architectures=None)
    assert load_model(str(folder)).decoder.config.arch == "LlamaForCausalLM"


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe", b"[]"])
def test_a_configuration_that_is_no_json_object_is_refused(content: bytes, folder: Path):
    (folder / "config.json").write_bytes(content)
    assert "config.json" in refused(folder, ".")


def test_a_folder_without_a_configuration_says_so(tmp_path: Path):
    assert "config.json" in refused(tmp_path, "cannot be read")


def test_a_folder_without_weights_says_so(folder: Path):
    (folder / "model.safetensors").unlink()
    refused(folder, r"neither model\.safetensors nor model\.safetensors\.index\.json")


def test_a_missing_tensor_is_named(folder: Path):
    change_tensors(folder, lambda tensors: tensors.__delitem__("model.norm.weight"))
    message = refused(folder, r"the tensor 'model\.norm\.weight' is missing")
    assert "model.safetensors" in message


def test_an_untied_model_without_a_head_is_refused(folder: Path):
    change_tensors(folder, lambda tensors: tensors.__delitem__("lm_head.weight"))
    refused(folder, r"the tensor 'lm_head\.weight' is missing")


def test_a_tensor_of_the_wrong_shape_is_named(folder: Path):
    name = "model.layers.1.self_attn.k_proj.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(8, 32)}))
    refused(folder, rf"'{name}' has the shape \[8, 32\]; the configuration asks for \[16, 32\]")


def test_a_tensor_too_many_is_named(folder: Path):
    change_tensors(folder, lambda tensors: tensors.update(vision=torch.zeros(2)))
    refused(folder, "the tensor 'vision' has no place in LlamaForCausalLM")


def test_a_tensor_of_integers_is_named(folder: Path):
    change_tensors(
        folder,
        lambda tensors: tensors.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}),
    )
    refused(folder, r"'model\.norm\.weight' holds torch\.int8")


def test_frequencies_and_a_repeated_head_in_a_file_are_ignored(tmp_path: Path):
    model = random_model("Llama", tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    extra = {
        "lm_head.weight": torch.zeros(67, 32),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4),
    }
    change_tensors(tmp_path, lambda tensors: tensors.update(extra))
    decoder = load_model(str(tmp_path)).decoder
    assert torch.equal(decoder.unembed_VD, model.get_input_embeddings().weight)


def test_a_truncated_file_names_the_tensor_at_which_it_ends(folder: Path):
    file = folder / "model.safetensors"
    content = file.read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    header.pop("__metadata__", None)
    last = max(header, key=lambda name: header[name]["data_offsets"])
    file.write_bytes(content[:-1])
    message = refused(folder, f"truncated: it ends inside or before the tensor '{last}'")
    assert "model.safetensors" in message


@pytest.mark.parametrize("kept_bytes", [0, 5, 8, 100])
def test_a_file_cut_inside_its_header_is_refused(kept_bytes: int, folder: Path):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept_bytes])
    assert "model.safetensors" in refused(folder, "truncated|no readable safetensors file")


def test_a_file_that_is_no_safetensors_is_refused(folder: Path):
    (folder / "model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0" + b"{]" * 40)
    refused(folder, "no readable safetensors file")


def test_a_missing_shard_is_named_with_a_tensor_it_holds(sharded: Path):
    shard = sorted(sharded.glob("model-*.safetensors"))[1]
    shard.unlink()
    assert shard.name in refused(sharded, "is missing; it holds the tensor 'model")


def test_a_shard_without_a_tensor_of_the_index_is_refused(sharded: Path):
    file = sharded / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    name = "model.norm.weight"
    other = next(
        shard for shard in index["weight_map"].values() if shard != index["weight_map"][name]
    )
    index["weight_map"][name] = other
    file.write_text(json.dumps(index))
    assert other in refused(sharded, f"the tensor '{name}' is missing")


@pytest.mark.parametrize("content", ["{}", "{", '{"weight_map": {"a": 1}}'])
def test_a_broken_index_is_refused(content: str, sharded: Path):
    (sharded / "model.safetensors.index.json").write_text(content)
    assert "index.json" in refused(sharded, ".")


def test_an_index_cannot_point_out_of_its_folder(sharded: Path):
    content = json.dumps({"weight_map": {"model.norm.weight": "../other.safetensors"}})
    (sharded / "model.safetensors.index.json").write_text(content)
    refused(sharded, "is not a plain file name")


# -- names ----------------------------------------------------------------------------------------


def unreachable(name: str) -> Path:
    raise ConnectionError("no route to the hub")


def test_a_hub_id_is_loaded_from_the_folder_it_is_fetched_to(folder: Path):
    loaded = load_model("someone/some-model", fetch=lambda name: folder)
    assert loaded.decoder.config.name == "someone/some-model"
    assert loaded.origin == str(folder)


def test_a_folder_can_be_given_a_name(folder: Path):
    assert load_model(str(folder), name="ours").decoder.config.name == "ours"


def test_an_id_the_hub_does_not_give_is_refused_with_the_cause():
    with pytest.raises(ModelError, match=r"someone/some-model.*no route to the hub"):
        load_model("someone/some-model", fetch=unreachable)


@pytest.mark.parametrize(
    "name", ["", "a/b/c", "../x", "no such thing", "a/b\n", "a\0b", "x" * 5000 + "/"]
)
def test_a_name_that_can_be_nothing_is_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # where none of these is there
    with pytest.raises(InputError, match="base_model") as caught:
        load_model(name, fetch=unreachable)
    assert caught.value.path == "base_model"


def test_a_type_for_integers_is_refused():
    with pytest.raises(InputError, match=r"dtype: torch\.int8 is not supported"):
        load_model("tinkex/tiny", dtype=torch.int8)


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache in a folder of its own, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def cached(hub_cache: Path, name: str) -> Path:
    repository = hub_cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    return snapshot


def test_a_model_in_the_hubs_cache_needs_no_network(hub_cache: Path):
    snapshot = cached(hub_cache, "someone/some-model")
    random_model("Llama").save_pretrained(snapshot)
    assert load_model("someone/some-model").origin == str(snapshot)


def test_a_cache_that_lacks_the_weights_counts_as_no_model(hub_cache: Path):
    snapshot = cached(hub_cache, "someone/some-model")
    random_model("Llama").save_pretrained(snapshot)
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="no safetensors"):
        hub_folder("someone/some-model")


def test_an_empty_cache_counts_as_no_model(hub_cache: Path):
    for name in ("someone/some-model", "-not-.-valid-"):
        with pytest.raises(FileNotFoundError):
            hub_folder(name)


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (hub_errors.RepositoryNotFoundError, "it has no model of this name"),
        (hub_errors.GatedRepoError, "it is gated; accept its terms"),
        (hub_errors.LocalEntryNotFoundError, "it cannot be reached, and its cache"),
        (hub_errors.OfflineModeIsEnabled, "it cannot be reached, and its cache"),
        (hub_errors.FileMetadataError, "the first line"),
    ],
)
def test_a_paragraph_of_the_hub_becomes_a_line(
    raised: type[Exception], said: str, monkeypatch: pytest.MonkeyPatch
):
    def refuse(*_: object, **__: object) -> None:
        error = raised.__new__(raised)  # some want the reply of a server
        error.args = ("the first line\nPlease read\nall of this.",)
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    with pytest.raises(ModelError) as caught:
        load_model("someone/some-model")
    line = f"someone/some-model: there is no such folder, and the hub does not give it: {said}"
    assert str(caught.value).startswith(line)
    assert "\n" not in str(caught.value)


def test_an_unsupported_model_of_the_hub_is_refused_before_its_weights_are_needed(hub_cache: Path):
    snapshot = cached(hub_cache, DEFAULT_MODEL)
    (snapshot / "config.json").write_text('{"architectures": ["MambaForCausalLM"]}')
    with pytest.raises(ModelError, match="MambaForCausalLM is not supported"):
        load_model(DEFAULT_MODEL)
