"""DPO with a loss of your own: SmolLM2-135M learns to answer instead of talking around it.

    python examples/dpo_smollm2.py      # half a minute on two cores; needs tinkex[engine,server]

The loss is a torch function that runs here, between a forward and a backward pass on the server.
The reference is the base model, whose log-probabilities are asked for once. Trained on 16 pairs,
judged by 8 others: by the margin of the implicit rewards, and by what the model then says.
"""

from __future__ import annotations

import random
import sys
from argparse import ArgumentParser
from dataclasses import dataclass

import torch

import tinkex
from tinkex import AdamParams, Datum, ModelInput, SamplingParams
from tinkex.chat import PreferenceExample, Rendered, Renderer

MODEL = "HuggingFaceTB/SmolLM2-135M-Instruct"
CAPITALS = """France Paris, Japan Tokyo, Italy Rome, Spain Madrid, Egypt Cairo, Germany Berlin,
Austria Vienna, Greece Athens, Norway Oslo, Sweden Stockholm, Finland Helsinki, Denmark Copenhagen,
Poland Warsaw, Hungary Budapest, Portugal Lisbon, Ireland Dublin, Belgium Brussels, Turkey Ankara,
Russia Moscow, China Beijing, Thailand Bangkok, Vietnam Hanoi, Cuba Havana, Peru Lima"""
HELD_OUT, BATCH, BETA = 8, 4, 0.1


@dataclass(frozen=True)
class Pair:
    """The chosen and the rejected answer, and the reference's log-probabilities of both."""

    data: list[Datum]
    reference: list[float]


def question(country: str) -> dict[str, str]:
    return {"role": "user", "content": f"What is the capital of {country}?"}


def preference(country: str, city: str) -> PreferenceExample:
    answers = (f"The capital of {country} is {city}.", f"{country} is a beautiful country.")
    chosen, rejected = [[{"role": "assistant", "content": answer}] for answer in answers]
    return PreferenceExample([question(country)], chosen, rejected)


def with_reference(
    reference: tinkex.SamplingClient, pairs: list[tuple[Rendered, Rendered]]
) -> list[Pair]:
    """All log-probabilities are asked for before the first is waited for."""
    flat = [one for pair in pairs for one in pair]
    waiting = [reference.compute_logprobs(ModelInput.from_ints(list(one.tokens))) for one in flat]
    sums = [of_answer(one, found.result()) for one, found in zip(flat, waiting, strict=True)]
    return [
        Pair([one.datum() for one in pair], sums[2 * at : 2 * at + 2])
        for at, pair in enumerate(pairs)
    ]


def of_answer(rendered: Rendered, logprobs: list[float | None]) -> float:
    """The log-probability of an answer as a whole; the prompt's tokens have no weight."""
    return sum(p for p, w in zip(logprobs, rendered.weights, strict=True) if w and p is not None)


def margins(pairs: list[Pair], logprobs: list[torch.Tensor]) -> torch.Tensor:
    """By how much more the chosen answer has gained on the reference than the rejected one."""
    data = [datum for pair in pairs for datum in pair.data]
    weights = [datum.loss_fn_inputs["weights"].to_torch() for datum in data]
    policy = torch.stack([(p * w).sum() for p, w in zip(logprobs, weights, strict=True)])
    gained = policy.reshape(-1, 2) - torch.tensor([pair.reference for pair in pairs])
    return BETA * (gained[:, 0] - gained[:, 1])


def step(training: tinkex.TrainingClient, pairs: list[Pair], learning_rate: float) -> float:
    """One step on a batch of pairs; its loss."""

    def dpo(
        data: list[Datum], logprobs: list[torch.Tensor]
    ) -> tuple[torch.Tensor, dict[str, float]]:
        return -torch.nn.functional.logsigmoid(margins(pairs, logprobs)).mean(), {}

    data = [datum for pair in pairs for datum in pair.data]
    output = training.forward_backward_custom(data, dpo)
    training.optim_step(AdamParams(learning_rate=learning_rate)).result()
    return output.result().metrics["loss:sum"]


def judge(training: tinkex.TrainingClient, pairs: list[Pair]) -> torch.Tensor:
    """The margins of pairs that are not trained."""
    data = [datum for pair in pairs for datum in pair.data]
    outputs = training.forward(data, "cross_entropy").result().loss_fn_outputs
    return margins(pairs, [output["logprobs"].to_torch() for output in outputs])


def answers(
    training: tinkex.TrainingClient, renderer: Renderer, asked: list[list[str]]
) -> list[str]:
    sampler = training.save_weights_and_get_sampling_client()
    greedy = SamplingParams(max_tokens=16, temperature=0.0, stop=renderer.stop)
    prompts = [renderer.prompt([question(country)]) for country, _ in asked]
    waiting = [sampler.sample(ModelInput.from_ints(prompt), 1, greedy) for prompt in prompts]
    return [renderer.text(one.result().sequences[0].tokens) for one in waiting]


def main() -> int:
    parser = ArgumentParser(description="SmolLM2-135M learns to prefer a direct answer.")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    options = parser.parse_args()
    capitals = [entry.split() for entry in CAPITALS.replace("\n", " ").split(", ")]
    random.Random(1).shuffle(capitals)
    asked, order = capitals[:HELD_OUT], random.Random(2)
    with tinkex.ServiceClient() as service:
        training = service.create_lora_training_client(options.model, rank=8, seed=1)
        renderer = Renderer.of(training.get_tokenizer())
        reference = service.create_sampling_client(base_model=options.model)
        pairs = with_reference(reference, [renderer.pair(preference(*one)) for one in capitals])
        held_out, trained = pairs[:HELD_OUT], pairs[HELD_OUT:]
        first = answers(training, renderer, asked)
        for number in range(1, options.steps + 1):
            loss = step(training, order.sample(trained, BATCH), options.learning_rate)
            print(f"step {number}/{options.steps}  loss {loss:.3f}", flush=True)
        found, last = judge(training, held_out), answers(training, renderer, asked)
    for (country, _), old, new in zip(asked, first, last, strict=True):
        print(f"\nWhat is the capital of {country}?\n  before  {old:.70}\n  after   {new:.70}")
    margin, right = float(found.mean()), int((found > 0).sum())
    before, after = [
        sum(city in one for (_, city), one in zip(asked, said, strict=True))
        for said in (first, last)
    ]
    checks = {
        f"held-out margin of the rewards 0.00 -> {margin:.2f}": margin > 1,
        f"the right answer gained more in {right} of {HELD_OUT} pairs": right > 0.8 * HELD_OUT,
        f"names the capital in {before} -> {after} of {HELD_OUT} answers": after > before,
    }
    print()
    for claim, holds in checks.items():
        print(f"{'ok' if holds else 'NO'}: {claim}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
