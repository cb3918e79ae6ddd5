"""Adapters in other people's formats, compared with the real `peft` and `transformers`."""

from __future__ import annotations

import json
import os
import resource
import warnings
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes

from tests.unit.engine.training.kit import (
    CONFIG,
    QWEN,
    QWEN2,
    add,
    decoder,
    op,
    run,
    tokens,
    trainer,
)
from tinkex.engine.checkpoints.merged import hugging_face_config, write_merged
from tinkex.engine.checkpoints.peft import export_peft, import_folder
from tinkex.engine.checkpoints.storage import full_disk
from tinkex.engine.decoder import DecoderConfig, RopeScaling
from tinkex.engine.models.loader import load_model
from tinkex.engine.training.trainer import Trainer
from tinkex.errors import InputError, StorageError
from tinkex.types import Datum, ModelInput

if TYPE_CHECKING:
    from tinkex.engine.lora import LoraWeights

IDS = tokens(24, 5)
UNTIED = replace(CONFIG, tied_embeddings=False)
FAMILIES = {"llama-tied": CONFIG, "llama-untied": UNTIED, "qwen2": QWEN2, "qwen3": QWEN}
TOLERANCE = 1e-4  # float32 through two different orders of operations


def _logprobs(made: Trainer, model_id: str = "m") -> torch.Tensor:
    """Log-probabilities of every token at every position, as the trainer sees them."""
    vocabulary = [list(range(CONFIG.vocab_size))] * len(IDS)
    weights = [[0.0] * CONFIG.vocab_size] * len(IDS)
    example = Datum(ModelInput.from_ints(IDS), {"target_tokens": vocabulary, "weights": weights})
    (result,) = run(made, op(model_id, [example], backward=False))
    return torch.from_numpy(result.output.loss_fn_outputs[0]["logprobs"].to_numpy())


def _theirs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([IDS])).logits[0].log_softmax(-1)


def _base_folder(folder: Path, config: DecoderConfig) -> Path:
    """The base model as a folder: a merge of an adapter that does nothing."""
    made = trainer(config)
    add(made, "base", 1, stir=False, train_unembed=False)
    _merge(folder, made.adapters["base"].weights)
    return folder


def _merge(folder: Path, weights: LoraWeights) -> None:
    base = decoder(weights.config)
    write_merged(folder, base.stored, weights, base.model_type)


def _transformers(folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("flags", [{}, {"train_unembed": False}, {"train_mlp": False}], ids=str)
def test_the_real_peft_reads_an_exported_adapter(tmp_path, name, flags):
    peft = pytest.importorskip("peft")
    made = trainer(FAMILIES[name])
    add(made, "m", 5, **flags)
    for file, content in export_peft(made.weights("m")).items():
        (tmp_path / file).write_bytes(content)
    base = _transformers(_base_folder(tmp_path / "base", FAMILIES[name]))
    plain = _theirs(base)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(base, tmp_path).eval()
    found = _theirs(model)
    assert (found - plain).abs().max() > 0.05
    assert (found - _logprobs(made)).abs().max() < TOLERANCE


def test_an_adapter_made_by_the_real_peft_is_read(tmp_path):
    peft = pytest.importorskip("peft")
    base = _transformers(_base_folder(tmp_path / "base", CONFIG))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        settings = peft.LoraConfig(
            r=6, lora_alpha=12, target_modules=["q_proj", "v_proj", "down_proj", "lm_head"]
        )
        model = peft.get_peft_model(base, settings).eval()
        generator = torch.Generator().manual_seed(2)
        for parameter_name, parameter in model.named_parameters():
            if "lora_B" in parameter_name:
                with torch.no_grad():
                    parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
        model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    weights = import_folder(tmp_path / "adapter", CONFIG)
    assert weights.lora.rank == 6
    assert weights.lora.train_unembed
    assert (_logprobs(_holding(weights)) - _theirs(model)).abs().max() < TOLERANCE


def _holding(weights: LoraWeights) -> Trainer:
    made = trainer(weights.config)
    add(made, "m", weights.lora.rank, stir=False, train_unembed=weights.lora.train_unembed)
    made._adapters["m"] = replace(made.adapters["m"], weights=weights)
    return made


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("unembed", [True, False])
def test_a_merged_folder_gives_the_same_logprobs_and_keeps_the_embedding(tmp_path, name, unembed):
    config = FAMILIES[name]
    made = trainer(config)
    add(made, "m", 5, train_unembed=unembed)
    _merge(tmp_path, made.adapters["m"].weights)
    model = _transformers(tmp_path)
    assert (_theirs(model) - _logprobs(made)).abs().max() < TOLERANCE
    embedding = model.get_input_embeddings().weight
    assert torch.equal(embedding, decoder(config).stored.embed_VD)
    tied = config.tied_embeddings and not unembed
    assert (model.get_output_embeddings().weight is embedding) == tied
    assert model.config.tie_word_embeddings == tied


def test_a_merged_folder_has_the_modes_that_the_umask_gives(tmp_path):
    before = os.umask(0o027)
    try:
        _base_folder(tmp_path / "merged", CONFIG)
    finally:
        os.umask(before)
    files = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "merged").iterdir()}
    assert {"config.json", "model-00001.safetensors"} <= files.keys()
    assert set(files.values()) == {0o640}


def test_a_disk_that_has_no_room_for_a_merged_folder_is_said_as_such(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, before[1]))
    try:
        with pytest.raises(StorageError, match="File too large") as refused:
            _base_folder(tmp_path / "merged", CONFIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert full_disk(refused.value) == "File too large"


def test_a_merged_folder_loads_in_our_own_engine(tmp_path, monkeypatch):
    monkeypatch.setattr("tinkex.engine.checkpoints.merged.SHARD_BYTES", 20_000)
    made = trainer()
    add(made, "m", 5)
    _merge(tmp_path, made.adapters["m"].weights)
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    merged = Trainer(load_model(str(tmp_path), name="merged").decoder)
    add(merged, "fresh", 1, stir=False)
    assert (_logprobs(merged, "fresh") - _logprobs(made)).abs().max() < TOLERANCE


def test_export_and_import_give_back_the_same_bits():
    made = trainer()
    add(made, "m", 5, train_attn=False)
    weights = made.adapters["m"].weights
    back = _imported(export_peft(weights))
    assert torch.equal(back.flat_P, weights.flat_P)
    assert not back.lora.train_attn


def _imported(files: dict[str, bytes]) -> LoraWeights:
    with TemporaryDirectory() as folder:
        for name, content in files.items():
            (Path(folder) / name).write_bytes(content)
        return import_folder(Path(folder), CONFIG)


def test_names_are_those_of_peft():
    made = trainer()
    add(made, "m", 5)
    files = export_peft(made.adapters["m"].weights)
    names = set(load_bytes(files["adapter_model.safetensors"]))
    prefix = "base_model.model.model.layers.1"
    assert f"{prefix}.self_attn.q_proj.lora_A.weight" in names
    assert f"{prefix}.mlp.down_proj.lora_B.weight" in names
    assert "base_model.model.lm_head.lora_A.weight" in names
    config = json.loads(files["adapter_config.json"])
    assert (config["r"], config["lora_alpha"]) == (5, 32)
    assert "lm_head" in config["target_modules"]


def test_archives_name_the_unembedding_as_hosted_tinker_does_and_are_read_back():
    made = trainer()
    add(made, "m", 5)
    weights = made.adapters["m"].weights
    files = export_peft(weights, "tinker")
    theirs = load_bytes(files["adapter_model.safetensors"])
    ours = load_bytes(export_peft(weights)["adapter_model.safetensors"])
    renamed = {
        name.replace("base_model.model.lm_head.", "base_model.model.model.unembed_tokens."): tensor
        for name, tensor in ours.items()
    }
    assert theirs.keys() == renamed.keys() != ours.keys()
    assert all(torch.equal(theirs[name], renamed[name]) for name in renamed)
    assert "unembed_tokens" in json.loads(files["adapter_config.json"])["target_modules"]
    assert torch.equal(_imported(files).flat_P, weights.flat_P)
    with pytest.raises(InputError, match="layout: 'gguf' is unknown; there are peft, tinker"):
        export_peft(weights, cast("Any", "gguf"))


def _files(**changes: Any) -> dict[str, bytes]:
    made = trainer()
    add(made, "m", 2)
    files = export_peft(made.adapters["m"].weights)
    config = {**json.loads(files["adapter_config.json"]), **changes}
    return {**files, "adapter_config.json": json.dumps(config).encode()}


def _with_tensor(name: str, tensor: torch.Tensor) -> dict[str, bytes]:
    files = _files()
    tensors = {**load_bytes(files["adapter_model.safetensors"]), name: tensor}
    return {**files, "adapter_model.safetensors": save_bytes(tensors)}


LAYER = "base_model.model.model.layers.0.mlp.up_proj"


def _with_layer(layer: int, rank: int) -> dict[str, bytes]:
    module = LAYER.replace("0", str(layer))
    tensors = {
        f"{module}.lora_A.weight": torch.zeros(rank, CONFIG.hidden_size),
        f"{module}.lora_B.weight": torch.zeros(CONFIG.intermediate_size, rank),
    }
    files = _files(r=rank, target_modules=["up_proj"])
    return {**files, "adapter_model.safetensors": save_bytes(tensors)}


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no adapter_config.json"),
        ({"adapter_config.json": b'{"r": 2}'}, "has no adapter_model.safetensors"),
        ({**_files(), "adapter_config.json": b"{"}, "adapter_config.json"),
        (_files(use_dora=True), "use_dora is not supported"),
        (_with_layer(0, rank=1000), "rank 1000 is not supported"),
        (_files(peft_type="IA3"), "peft_type IA3"),
        (_files(modules_to_save=["lm_head"]), "modules_to_save is not supported"),
        ({**_files(), "adapter_model.safetensors": b"junk"}, "is no safetensors file"),
        (_with_tensor(f"{LAYER}.lora_A.weight", torch.zeros(3, 32)), "has shape [3, 32]"),
        (
            _with_tensor(f"{LAYER}.lora_A.weight", torch.full((2, 32), torch.nan)),
            "not finite",
        ),
        (_with_layer(9, rank=2), "test/small has no"),
        (
            _with_tensor("base_model.model.model.embed_tokens.lora_A.weight", torch.zeros(2, 32)),
            "is not a matrix this engine adapts",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_files_that_are_not_an_adapter_of_ours_are_refused(files, message):
    with pytest.raises(InputError) as refused:
        _imported(files)
    assert message in str(refused.value)


def test_the_configuration_says_what_the_model_is():
    scaling = RopeScaling(kind="llama3", factor=8.0, original_max_context=64)
    config = replace(CONFIG, rope_scaling=scaling)
    written = hugging_face_config(config, "llama", torch.bfloat16, tied=True)
    assert written["rope_scaling"]["rope_type"] == "llama3"
    assert written["torch_dtype"] == "bfloat16"
    odd = replace(CONFIG, rope_scaling=RopeScaling(kind="factors", factors=(1.0,)))
    with pytest.raises(InputError, match="come from a GGUF file"):
        hugging_face_config(odd, "llama", torch.float32, tied=True)
