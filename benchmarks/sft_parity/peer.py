"""The same recipe with `transformers` and `peft`: tokens, weights and order come from outside.

    python -m benchmarks.sft_parity.peer WORK.json [ADAPTER]

prints the held-out loss as JSON: after each of the steps at which the other side evaluated, too.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch.nn import functional as F

from benchmarks.engine_cpu.peer import TARGETS, load
from tinkex.loops.schedule import batch, learning_rate

Example = tuple[list[int], list[float]]


def model_with_adapter(rank: int, seed: int, adapter: str | None) -> Any:
    """The model with a fresh adapter: that of a folder, or one of its own."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks about the tied head when saving
        if adapter is not None:
            return PeftModel.from_pretrained(load(), adapter, is_trainable=True)
        torch.manual_seed(seed)
        config = LoraConfig(r=rank, lora_alpha=32, target_modules=TARGETS, task_type="CAUSAL_LM")
        return get_peft_model(load(), config)


def summed_loss(model: Any, examples: list[Example]) -> tuple[torch.Tensor, float]:
    """The loss of all trained tokens of a padded batch, and how many those are."""
    longest = max(len(tokens) for tokens, _ in examples)
    ids = torch.zeros(len(examples), longest, dtype=torch.long)
    weights, mask = torch.zeros(len(examples), longest), torch.zeros_like(ids)
    for row, (tokens, own) in enumerate(examples):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        weights[row, : len(tokens)] = torch.tensor(own)
        mask[row, : len(tokens)] = 1
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1]
    losses = F.cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none")
    return (losses * weights[:, 1:]).sum(), weights[:, 1:].sum().item()


def held_out_loss(model: Any, examples: list[Example]) -> float:
    """The mean over trained tokens."""
    with torch.no_grad():
        parts = [summed_loss(model, examples[i : i + 8]) for i in range(0, len(examples), 8)]
    return sum(loss.item() for loss, _ in parts) / sum(count for _, count in parts)


def main() -> None:
    """Train, and print the held-out loss by step."""
    work = json.loads(Path(sys.argv[1]).read_text())
    recipe, train = work["recipe"], work["train"]
    model = model_with_adapter(
        recipe["rank"], recipe["seed"], sys.argv[2] if len(sys.argv) > 2 else None
    )
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, betas=(0.9, 0.95), eps=1e-12, weight_decay=0.0)
    losses = {0: held_out_loss(model, work["held_out"])}
    peak, schedule, warmup = (recipe[n] for n in ("learning_rate", "lr_schedule", "warmup"))
    for step in range(1, recipe["steps"] + 1):
        chosen = batch(step, recipe["batch_size"], len(train), recipe["seed"])
        loss, count = summed_loss(model, [train[i] for i in chosen])
        (loss / count).backward()
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, recipe["steps"], peak, schedule, warmup)
        optimizer.step()
        optimizer.zero_grad()
        if step in work["evaluate_at"]:
            losses[step] = held_out_loss(model, work["held_out"])
        print(f"peer: step {step}  loss {loss.item() / count:.3f}", file=sys.stderr)
    print(json.dumps(losses))


if __name__ == "__main__":
    main()
