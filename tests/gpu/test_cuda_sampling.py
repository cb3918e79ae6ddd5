"""Captured decoding on the GPU against the plain path, and everything a request may ask for."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.gpu import kit


def _plain_logprobs(config: str, ids: list[int], rank: int | None) -> np.ndarray:
    """Log-probabilities of a sequence by the CPU in float32."""
    trainer = kit.trainer(kit.decoder(kit.CONFIGS[config], "cpu", torch.float32))
    kit.add(trainer, "x", rank or 4)
    if rank is None:
        adapter = trainer.adapters["x"]
        adapter.weights.flat_P.zero_()
    return kit.logprobs(kit.run(trainer, kit.train_op("x", [kit.datum(ids)], backward=False))[0])[0]


@pytest.mark.parametrize("config", ["qwen", "llama"])
def test_many_adapters_in_one_batch_each_sample_from_their_own(config: str) -> None:
    made = kit.decoder(kit.CONFIGS[config])
    trainer = kit.trainer(made)
    ranks = [1, 7, 16, 33, 64, 100]
    versions = {f"v{rank}": kit.add(trainer, f"v{rank}", rank) for rank in ranks}
    sampler = kit.sampler(made, {**versions, "base": None})
    names = [*versions, "base"] * 3
    prompts = [kit.tokens(15 + 4 * i, i) for i in range(len(names))]
    results = kit.drive(
        sampler,
        [
            (name, kit.sample_op(prompt, seed=i))
            for i, (name, prompt) in enumerate(zip(names, prompts, strict=True))
        ],
    )
    for name, prompt, result in zip(names, prompts, results, strict=True):
        (sequence,) = result.response.sequences
        rank = None if name == "base" else int(name[1:])
        plain = _plain_logprobs(config, [*prompt, *sequence.tokens], rank)[len(prompt) - 1 :]
        # bf16 activations against float32.
        assert np.abs(np.array(sequence.logprobs) - plain).mean() < 0.05


def test_the_same_call_gives_the_same_tokens() -> None:
    made = kit.decoder(kit.QWEN)
    results = []
    for _ in range(2):
        sampler = kit.sampler(made, {"base": None}, strict=True)
        ops = [("base", kit.sample_op(kit.tokens(20, 1), seed=5, samples=4, max_tokens=30))]
        results.append(kit.drive(sampler, ops)[0].response.sequences)
    first, second = ([s.tokens for s in sequences] for sequences in results)
    assert first == second
    assert len({tuple(tokens) for tokens in first}) == 4


def test_requests_of_any_kind_and_length_answer_as_if_alone() -> None:
    made = kit.decoder(kit.QWEN)
    ops = [
        kit.sample_op(
            kit.tokens(5 + 3 * number, number),
            seed=number,
            max_tokens=1 + 5 * number % 23,
            **({"top_k": 5} if number % 3 == 0 else {}),
            **({"stop": list(range(0, 5000, 7))} if number % 4 == 1 else {}),
        )
        for number in range(20)
    ]
    together = kit.drive(
        kit.sampler(made, {"base": None}, strict=True), [("base", op) for op in ops]
    )
    for op, found in zip(ops, together, strict=True):
        (alone,) = kit.drive(kit.sampler(made, {"base": None}, strict=True), [("base", op)])
        (mine,), (theirs,) = found.response.sequences, alone.response.sequences
        assert (mine.tokens, mine.stop_reason) == (theirs.tokens, theirs.stop_reason)
        assert mine.logprobs == theirs.logprobs


def test_greedy_filtered_and_topk_rows_share_a_batch() -> None:
    made = kit.decoder(kit.QWEN)
    prompt = kit.tokens(20, 1)
    ops = [
        kit.sample_op(prompt, temperature=0.0),
        kit.sample_op(prompt, top_k=1, seed=3),
        kit.sample_op(prompt, top_p=1e-6, seed=4),
        kit.sample_op(prompt, temperature=0.0, extra={"topk_sample_logprobs": 3}),
        kit.sample_op(prompt, seed=6),
    ]
    sampler = kit.sampler(made, {"base": None})
    results = kit.drive(sampler, [("base", op) for op in ops])
    greedy, *others = (result.response.sequences[0] for result in results)
    # The most likely token alone is left in all of these.
    for sequence in others[:3]:
        assert sequence.tokens == greedy.tokens
    found = others[2].topk_logprobs_np
    assert found is not None
    assert found.token_ids[:, 0].tolist() == greedy.tokens
    assert others[3].tokens != greedy.tokens


def test_draws_follow_the_exact_distribution() -> None:
    made = kit.decoder(kit.QWEN)
    made.unembed_VD.mul_(5)  # few tokens have nearly all of the probability
    prompt, samples, inverse = kit.tokens(9, 2), 1024, 1.25
    sampler = kit.sampler(made, {"base": None}, max_sequences=256)
    op = kit.sample_op(prompt, samples=samples, seed=1, max_tokens=1, temperature=1 / inverse)
    drawn = [s.tokens[0] for s in kit.drive(sampler, [("base", op)])[0].response.sequences]
    ask = kit.sample_op(prompt, max_tokens=1, temperature=0.0, extra={"topk_sample_logprobs": 20})
    best = kit.drive(sampler, [("base", ask)])[0].response.sequences[0].topk_logprobs_np
    assert best is not None
    values = best.logprobs[0].astype(np.float64)
    weights = np.exp(inverse * values)
    # Beyond these 20 tokens a token weighs at most the last one's weight per probability.
    others = (1 - np.exp(values).sum()) * np.exp((inverse - 1) * values[-1])
    low, high = weights[0] / (weights.sum() + others), weights[0] / weights.sum()
    assert high - low < 0.05, "the bounds say nothing"
    share = drawn.count(int(best.token_ids[0, 0])) / samples
    margin = 4 * (high * (1 - low) / samples) ** 0.5
    assert low - margin <= share <= high + margin


def test_cancelling_frees_the_cache_at_once() -> None:
    made = kit.decoder(kit.QWEN)
    sampler = kit.sampler(made, {"base": None})
    before = sampler.free_tokens
    run = sampler.submit(kit.sample_op(kit.tokens(50, 1), max_tokens=500), version="base")
    for _ in range(5):
        sampler.step()
    assert sampler.free_tokens < before
    sampler.cancel(run)
    sampler.check()
    assert sampler.free_tokens == before
