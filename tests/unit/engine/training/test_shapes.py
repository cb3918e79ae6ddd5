"""Which matrices an adapter covers, how many parameters that is, and how it starts."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.unit.engine.training.kit import CONFIG, add, trainer
from tinkex.engine.lora import check_lora, initial, parameter_count
from tinkex.errors import InputError, NothingToTrain, RequestFailedError
from tinkex.types import LoraConfig

LLAMA_8B = replace(
    CONFIG,
    name="Llama-3.1-8B",
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
)
QWEN_4B = replace(
    CONFIG,
    name="Qwen3-4B",
    vocab_size=151_936,
    hidden_size=2560,
    intermediate_size=9728,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
)


def _only(part: str, rank: int = 1) -> LoraConfig:
    return LoraConfig(
        rank=rank,
        train_attn=part == "attn",
        train_mlp=part == "mlp",
        train_unembed=part == "unembed",
    )


@pytest.mark.parametrize(
    ("config", "part", "per_rank"),
    [
        (LLAMA_8B, "mlp", 1_769_472),
        (LLAMA_8B, "attn", 851_968),
        (LLAMA_8B, "unembed", 132_352),
        (QWEN_4B, "mlp", 1_327_104),
        (QWEN_4B, "attn", 737_280),
        (QWEN_4B, "unembed", 154_496),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_parameter_counts_are_the_vendors(config, part, per_rank):
    assert parameter_count(config, _only(part)) == per_rank
    assert parameter_count(config, _only(part, 37)) == 37 * per_rank


@pytest.mark.parametrize("rank", [257, 10_000])
def test_a_rank_that_is_too_large_is_refused_with_the_limit(rank):
    with pytest.raises(InputError, match=r"lora_config.rank: must be between 1 and 256"):
        check_lora(LoraConfig(rank=rank))


def test_an_adapter_that_trains_nothing_is_refused():
    with pytest.raises(NothingToTrain):
        check_lora(_only("nothing"))


def test_the_trainer_refuses_a_bad_adapter_as_the_users_mistake():
    made = trainer()
    with pytest.raises(RequestFailedError, match="between 1 and 256") as failed:
        add(made, "m", 300, stir=False)
    assert failed.value.category == "user"
    assert not made.adapters


def test_a_fresh_adapter_changes_nothing_because_b_is_zero():
    weights = initial(CONFIG, LoraConfig(rank=5), 3)
    for target, pair in weights.named():
        assert not pair.b_OR.any()
        assert pair.a_RI.abs().max() <= target.inputs**-0.5
        assert pair.a_RI.std() > 0.4 * target.inputs**-0.5


def test_the_same_seed_gives_the_same_bits_whatever_else_is_covered():
    whole = initial(CONFIG, LoraConfig(rank=5), 3)
    part = initial(CONFIG, LoraConfig(rank=5, train_attn=False), 3)
    other = initial(CONFIG, LoraConfig(rank=5), 4)
    for target, pair in part.named():
        same, different = (w.pair(target.layer, target.matrix) for w in (whole, other))
        assert same is not None
        assert different is not None
        assert torch.equal(pair.a_RI, same.a_RI)
        assert not torch.equal(pair.a_RI, different.a_RI)


def test_the_bits_of_a_seed_are_pinned():
    # The same on every device and in every release: a changed value breaks users' seeds.
    pair = initial(CONFIG, LoraConfig(rank=2), 3).pair(0, "q_proj")
    assert pair is not None
    assert [value.hex() for value in pair.a_RI.flatten()[:3].tolist()] == [
        "-0x1.36b2600000000p-4",
        "-0x1.5a20b80000000p-3",
        "-0x1.0545c20000000p-3",
    ]


def test_two_models_without_a_seed_differ_and_each_starts_the_same_again():
    def start(model_id: str) -> torch.Tensor:
        made = trainer()
        add(made, model_id, stir=False, seed=None)
        return made.adapters[model_id].weights.flat_P

    assert torch.equal(start("one"), start("one"))
    assert not torch.equal(start("one"), start("two"))
