"""What the sampler says is what the real `peft` and `transformers` say of the same adapter."""

from __future__ import annotations

import asyncio
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from tests.unit.engine.local_kit import optim_op, spec, trained
from tests.unit.engine.models.reference import random_model
from tinkex.engine.checkpoints.adapter_file import load
from tinkex.engine.checkpoints.merged import write_merged
from tinkex.engine.checkpoints.peft import import_folder
from tinkex.engine.local import LocalEngine, LocalSettings
from tinkex.engine.models.loader import load_model
from tinkex.engine.protocol import SampleOp, TrainOp, Weights
from tinkex.engine.sampler import LoraAdapters, Sampler, SamplerSettings
from tinkex.types import Datum, ModelInput, SamplingParams

if TYPE_CHECKING:
    from pathlib import Path

    from tinkex.engine.models.loader import BaseModel
    from tinkex.engine.protocol import SampleResult

peft = pytest.importorskip("peft")

TOLERANCE = 1e-4  # float32 through two different orders of operations
PROMPT = [(7 * i * i + 3 * i) % 67 for i in range(20)]
TIED = {"tie_word_embeddings": True}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "tied, unembedding trained": ("Llama", TIED, {}),
    "tied, unembedding left": ("Llama", TIED, {"train_unembed": False}),
    "untied": ("Qwen3", {"head_dim": 16}, {}),
    "biased": ("Qwen2", TIED, {"train_mlp": False}),
}


def question(weights: Weights) -> SampleOp:
    """A greedy text, with the log-probabilities of its prompt."""
    return SampleOp(
        op_id="q",
        weights=weights,
        prompt=ModelInput.from_ints(PROMPT),
        params=SamplingParams(max_tokens=12, temperature=0.0, stop=[]),
        sequence_ids=["s"],
        prompt_logprobs=True,
    )


async def learned(model: BaseModel, folder: Path, flags: dict[str, Any]) -> tuple[Any, Any]:
    """Train an adapter for a few steps: a sample from it, and its files in PEFT's layout."""
    settings = LocalSettings(cache_bytes=1 << 20)
    async with LocalEngine([model], folder, settings) as engine:
        await engine.create_adapter(spec("m", 5, base_model="base", **flags))
        text = [(i * 11) % 67 for i in range(30)]
        datum = Datum(ModelInput.from_ints(text[:-1]), {"target_tokens": text[1:]})
        for _ in range(4):
            op = TrainOp(op_id="t", model_id="m", data=[datum], loss_fn="cross_entropy")
            await trained(engine, op)
            await engine.optim_step([optim_op("m", learning_rate=0.05)])
        await engine.save_adapter("m", "done", optimizer=False)
        sample = await engine.sample(question(Weights(base_model="base", location="done")))
        return sample, await engine.export_saved("done")


def check(found: SampleResult, model: Any) -> None:
    """Prompt and sampled log-probabilities are those of `model`, and so is the greedy text."""
    sequence = found.response.sequences[0]
    with torch.no_grad():
        logits_TV = model(torch.tensor([PROMPT + sequence.tokens])).logits[0]
    expected = logits_TV.log_softmax(-1).numpy()
    asked = np.arange(len(PROMPT) - 1)
    drawn = np.arange(len(PROMPT) - 1, len(PROMPT) + len(sequence.tokens) - 1)
    prompt = found.response.prompt_logprobs_np
    assert prompt is not None
    assert np.abs(prompt[1:] - expected[asked, PROMPT[1:]]).max() < TOLERANCE
    assert np.abs(sequence.logprobs_np - expected[drawn, sequence.tokens]).max() < TOLERANCE
    assert expected[drawn].argmax(-1).tolist() == sequence.tokens


def saved_base(folder: Path, family: str, settings: dict[str, Any]) -> Any:
    model = random_model(family, **settings)
    model.save_pretrained(folder)
    return model


def transformers_model(folder: Path) -> Any:
    import transformers

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.mark.parametrize("case", CASES)
def test_samples_have_the_logprobs_of_the_exported_adapter(case: str, tmp_path: Path):
    family, settings, flags = CASES[case]
    theirs = saved_base(tmp_path / "base", family, settings)
    ours = load_model(str(tmp_path / "base"), name="base")
    sample, files = asyncio.run(learned(ours, tmp_path / "engine", flags))
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(AssertionError):  # the adapter matters
        check(sample, theirs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.PeftModel.from_pretrained(theirs, tmp_path).eval()
    check(sample, adapted)


@pytest.mark.parametrize("case", CASES)
def test_samples_have_the_logprobs_of_the_merged_folder(case: str, tmp_path: Path):
    family, settings, flags = CASES[case]
    base = saved_base(tmp_path / "base", family, settings)
    ours = load_model(str(tmp_path / "base"), name="base")
    decoder: Any = ours.decoder
    sample, _ = asyncio.run(learned(ours, tmp_path / "engine", flags))
    state = load(tmp_path / "engine" / "saved" / "done.safetensors", decoder.config)
    write_merged(tmp_path / "merged", decoder.stored, state.weights, decoder.model_type)
    merged = transformers_model(tmp_path / "merged")
    check(sample, merged)
    embedding = merged.get_input_embeddings().weight
    # The input embedding stays what it was, also where the head came from it.
    assert torch.equal(embedding, base.get_input_embeddings().weight)
    untied = not settings.get("tie_word_embeddings") or flags.get("train_unembed", True)
    assert (merged.get_output_embeddings().weight is embedding) is not untied


def test_an_adapter_of_the_real_peft_samples_as_it_does_there(tmp_path: Path):
    base = saved_base(tmp_path / "base", "Llama", TIED)
    decoder: Any = load_model(str(tmp_path / "base"), name="base").decoder
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        targets = ["k_proj", "o_proj", "gate_proj", "lm_head"]
        adapted = peft.get_peft_model(
            base, peft.LoraConfig(r=3, lora_alpha=7, target_modules=targets)
        ).eval()
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0.0, 0.1, generator=generator)
        adapted.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    weights = import_folder(tmp_path / "adapter", decoder.config)
    versions = {"theirs": weights}
    sampler = Sampler(
        decoder,
        SamplerSettings(cache_tokens=256, block_size=4),
        adapters=LoraAdapters(decoder, versions.__getitem__),
    )
    run = sampler.submit(question(Weights(base_model="base")), version="theirs")
    while not sampler.idle:
        sampler.step()
    assert run.result is not None, run.error
    check(run.result, adapted)
