"""The same work done with `transformers` and `peft`; every function returns seconds per round."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from benchmarks.engine_gpu.ours import RANK
from benchmarks.engine_gpu.shapes import random_tokens

if TYPE_CHECKING:
    from tinkex.engine.decoder import DecoderConfig

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def random_model(config: DecoderConfig) -> Any:
    """The shape as the peer's own class, in bf16 on the GPU."""
    kinds: dict[str, tuple[Any, Any]] = {
        "Qwen3ForCausalLM": (Qwen3Config, Qwen3ForCausalLM),
        "LlamaForCausalLM": (LlamaConfig, LlamaForCausalLM),
    }
    config_class, model_class = kinds[config.arch]
    made = config_class(
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        intermediate_size=config.intermediate_size,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_context,
        tie_word_embeddings=config.tied_embeddings,
        attn_implementation="sdpa",
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return model_class(made)
    finally:
        torch.set_default_dtype(before)


class Training:
    """A forward, a backward and an AdamW step over a padded batch."""

    def __init__(self, config: DecoderConfig, rows: int, length: int) -> None:
        lora = LoraConfig(r=RANK, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM")
        self._model = get_peft_model(random_model(config), lora)
        trained = [p for p in self._model.parameters() if p.requires_grad]
        self._optimizer = torch.optim.AdamW(trained, lr=1e-4, fused=True)
        self._tokens = torch.tensor(random_tokens(config, rows, length, seed=7), device="cuda")

    def __call__(self) -> float:
        began = time.perf_counter()
        self._model(input_ids=self._tokens, labels=self._tokens).loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        return time.perf_counter() - began


class Sampling:
    """`generate` over one batch."""

    def __init__(
        self, config: DecoderConfig, *, requests: int, prompt: int, generated: int
    ) -> None:
        self._config = config
        self._model = random_model(config).eval()
        self._shape = (requests, prompt, generated)
        self._round = 0

    @torch.inference_mode()
    def __call__(self) -> float:
        requests, prompt, generated = self._shape
        self._round += 1
        rows = random_tokens(self._config, requests, prompt, seed=self._round)
        tokens = torch.tensor(rows, device="cuda")
        began = time.perf_counter()
        self._model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=generated,
            min_new_tokens=generated,
            do_sample=True,
            top_k=0,
            pad_token_id=0,
        )
        torch.cuda.synchronize()
        return time.perf_counter() - began
