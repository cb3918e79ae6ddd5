"""Base models that are loaded when they are first used."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import anyio
import huggingface_hub
import pytest
import torch

from tests.unit.engine.models.reference import random_model
from tinkex.config import DEFAULT_MODEL
from tinkex.engine.local import LocalEngine, LocalSettings
from tinkex.engine.models.hub import packaged_file
from tinkex.engine.models.loader import BaseModel, DeferredModel, defer_model, load_model
from tinkex.engine.process.child import build_engine
from tinkex.engine.process.spec import EngineSpec, ModelSource
from tinkex.engine.protocol import AdapterSpec, SampleOp, SampleResult, Weights
from tinkex.errors import ModelError, RequestFailedError
from tinkex.types import AdamOptimizerConfig, LoraConfig, ModelInput, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.anyio
SETTINGS = LocalSettings(cache_bytes=1 << 22)
CPU = torch.device("cpu")


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    random_model("Llama").save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def deferred(folder: Path) -> DeferredModel:
    found = defer_model(str(folder), dtype=torch.float32, device=CPU, name="small")
    assert isinstance(found, DeferredModel)
    return found


async def sample(engine: LocalEngine, weights: Weights | None = None) -> SampleResult:
    return await engine.sample(
        SampleOp(
            op_id="s",
            weights=weights or Weights(base_model="small"),
            prompt=ModelInput.from_ints([3, 4, 5]),
            params=SamplingParams(max_tokens=4, seed=1),
            sequence_ids=["a"],
        )
    )


async def test_a_deferred_model_looks_and_samples_like_a_loaded_one(folder: Path, tmp_path: Path):
    loaded = load_model(str(folder), name="small")
    async with LocalEngine([loaded], tmp_path / "a", SETTINGS) as engine:
        specs, expected = list(engine.models), (await sample(engine)).response
    async with LocalEngine([deferred(folder)], tmp_path / "b", SETTINGS) as engine:
        assert list(engine.models) == specs
        assert (await sample(engine)).response == expected
        assert list(engine.models) == specs


async def test_it_is_loaded_once_and_not_before_it_is_used(folder: Path, tmp_path: Path):
    loads: list[str] = []
    model = deferred(folder)

    def load() -> BaseModel:
        loads.append("load")
        return model.load()

    counted = DeferredModel(model.config, model.tokenizer, model.device, load)
    async with LocalEngine([load_model("tinkex/tiny"), counted], tmp_path, SETTINGS) as engine:
        await sample(engine, Weights(base_model="tinkex/tiny"))
        await engine.stats()
        assert loads == []
        await sample(engine)
        await sample(engine)
        assert loads == ["load"]


async def test_an_adapter_of_a_model_that_is_not_loaded_can_be_exported_and_sampled(
    folder: Path, tmp_path: Path
):
    spec = AdapterSpec(
        model_id="m",
        base_model="small",
        lora=LoraConfig(rank=2, seed=1),
        optimizer=AdamOptimizerConfig(),
    )
    weights = Weights(base_model="small", location="kept")
    async with LocalEngine([deferred(folder)], tmp_path, SETTINGS) as engine:
        await engine.create_adapter(spec)
        await engine.save_adapter("m", "kept", optimizer=False)
        files = await engine.export_saved("kept")
        expected = (await sample(engine, weights)).response
    async with LocalEngine([deferred(folder)], tmp_path, SETTINGS) as engine:
        assert await engine.export_saved("kept") == files
        assert (await sample(engine, weights)).response == expected


async def test_weights_that_cannot_be_read_are_an_error_of_the_calls_that_use_them(
    folder: Path, tmp_path: Path
):
    model = deferred(folder)
    (folder / "model.safetensors").write_bytes(b"damaged")
    async with LocalEngine([load_model("tinkex/tiny"), model], tmp_path, SETTINGS) as engine:
        for _ in range(2):
            with pytest.raises((ModelError, RequestFailedError)):
                await sample(engine)
        assert await sample(engine, Weights(base_model="tinkex/tiny"))


def test_a_model_whose_shape_cannot_be_read_is_refused_at_once(folder: Path):
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelError, match="config"):
        deferred(folder)


def test_what_is_cheap_is_made_at_once():
    tiny = defer_model("tinkex/tiny", dtype=torch.float32, device=CPU)
    assert isinstance(tiny, BaseModel)


def cached(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> Path:
    """The hub's cache beside `folder`, without a network; it has a place for one model."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder.parent / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = folder.parent / "hub" / f"models--{name.replace('/', '--')}"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text("a" * 40)
    (repository / "snapshots").mkdir()
    return repository / "snapshots" / ("a" * 40)


async def test_only_what_describes_a_model_of_the_hub_is_needed_before_its_use(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    snapshot = cached(folder, monkeypatch, "someone/some-model")
    shutil.copytree(folder, snapshot, ignore=shutil.ignore_patterns("*.safetensors"))
    model = defer_model("someone/some-model", dtype=torch.float32, device=CPU, name="small")
    assert isinstance(model, DeferredModel)
    async with LocalEngine([model], tmp_path / "a", SETTINGS) as engine:
        with pytest.raises((ModelError, RequestFailedError), match="no safetensors files"):
            await sample(engine)
        shutil.copy(folder / "model.safetensors", snapshot)
        assert await sample(engine)


def test_a_model_that_the_hub_does_not_give_is_refused_at_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    cached(folder, monkeypatch, "someone/other")
    with pytest.raises(
        ModelError, match="someone/some-model: there is no such folder, and the hub"
    ):
        defer_model("someone/some-model", dtype=torch.float32, device=CPU)


def test_an_engine_goes_without_deferred_models_that_are_not_to_be_had(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    cached(folder, monkeypatch, "someone/other")
    missing = ModelSource("someone/some-model", deferred=True)
    spec = EngineSpec(models=(missing, ModelSource("tinkex/tiny")), folder=tmp_path, device="cpu")
    engine = build_engine(spec, lambda _: None)
    assert [model.name for model in engine.models] == ["tinkex/tiny"]
    assert "left out: someone/some-model" in caplog.text
    anyio.run(engine.close)
    with pytest.raises(ModelError, match="someone/some-model"):
        build_engine(EngineSpec(models=(missing,), folder=tmp_path, device="cpu"), lambda _: None)


@pytest.mark.smollm2
def test_a_packaged_model_is_known_without_being_loaded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert packaged_file(DEFAULT_MODEL) is not None
    model = defer_model(DEFAULT_MODEL, dtype=torch.float32, device=CPU)
    assert isinstance(model, DeferredModel)
    assert (model.config.name, model.config.vocab_size) == (DEFAULT_MODEL, 49152)
    assert model.tokenizer is not None
