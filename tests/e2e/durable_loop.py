"""A training loop as users write them, told as numbers.

    python durable_loop.py tinker|tinkex        (server and key come from the environment)

Two models of different rank; gradients of two passes per step; everything of a step is submitted
before anything is waited for; samples come from the weights of a moment while training goes on.
Prints one line of JSON: every number that came back.
"""

from __future__ import annotations

import importlib
import json
import sys
from typing import Any

TEXT = list(b"the quick brown fox jumps over the lazy dog")
STEPS = 5
WAIT_S = 370


def datum(sdk: Any, first: int, length: int) -> Any:
    tokens = (TEXT + TEXT)[first : first + length + 1]
    return sdk.Datum(
        model_input=sdk.ModelInput.from_ints(tokens[:-1]),
        loss_fn_inputs={"target_tokens": tokens[1:], "weights": [1.0] * length},
    )


class Run:
    """One model's loop; `submit` and `collect` take turns as loops that overlap steps do."""

    def __init__(self, sdk: Any, service: Any, number: int) -> None:
        self.sdk = sdk
        self.number = number
        self.training = service.create_lora_training_client(
            base_model="tinkex/tiny", rank=4 + 4 * number, seed=7 + number
        )
        self.pending: list[Any] = []
        self.told: list[Any] = []

    def submit(self, step: int) -> None:
        """Two passes and a step, none of them waited for."""
        for part in range(2):
            data = [datum(self.sdk, step + part, 9 + part), datum(self.sdk, 2 * step, 5)]
            self.pending.append(self.training.forward_backward(data, "cross_entropy"))
        params = self.sdk.AdamParams(learning_rate=1e-3 * (1 + self.number), weight_decay=0.01)
        self.pending.append(self.training.optim_step(params))

    def collect(self) -> None:
        """The numbers of everything that was submitted."""
        for future in self.pending:
            result = future.result(timeout=WAIT_S)
            self.told.append(dict(sorted((result.metrics or {}).items())))
            for output in getattr(result, "loss_fn_outputs", []):
                self.told.append(list(output["logprobs"].tolist()))
        self.pending.clear()

    def save(self, step: int) -> None:
        saved = self.training.save_state(f"m{self.number}-step-{step}").result(timeout=WAIT_S)
        self.told.append(saved.path.rpartition("/")[2])

    def sample(self, step: int) -> None:
        """Several calls at once from the weights as they are now, while training goes on."""
        sampler = self.training.save_weights_and_get_sampling_client()
        prompt = self.sdk.ModelInput.from_ints(TEXT[:8])
        params = self.sdk.SamplingParams(max_tokens=6, temperature=1.0, seed=step)
        futures = [sampler.sample(prompt, 1, params) for _ in range(4)]
        self.submit(step)
        for future in futures:
            sequence = future.result(timeout=WAIT_S).sequences[0]
            self.told.append([list(sequence.tokens), list(sequence.logprobs)])


def main(name: str) -> None:
    sdk = importlib.import_module(name)
    service = sdk.ServiceClient()
    runs = [Run(sdk, service, number) for number in range(2)]
    for step in range(STEPS):
        for run in runs:
            run.submit(step)
        for run in runs:
            run.save(step)
            if step % 2:
                run.sample(step)
            run.collect()
    print(json.dumps([run.told for run in runs]), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
