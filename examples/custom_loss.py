"""A loss of your own over log-probabilities, written in torch.

    python examples/custom_loss.py

The loss runs on your side, in your thread, between a forward and a backward pass. This one is a
preference loss (DPO without a reference model) over pairs: chosen, rejected. Needs torch; runs on
the built-in fake server.
"""

from __future__ import annotations

import sys

import torch

import tinkex
from tinkex import AdamParams, Datum, ModelInput
from tinkex.testing import API_KEY, FakeServer

PROMPT = b"answer: "
PAIRS = [(b"yes please", b"qqqq zzzz"), (b"so be it", b"xx xx xx")]
STEPS = 10


def datum(answer: bytes) -> Datum:
    """A custom loss is handed the log-probabilities of `target_tokens`."""
    tokens = list(PROMPT + answer)
    return Datum(
        model_input=ModelInput.from_ints(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:]}
    )


def preference_loss(
    data: list[Datum], logprobs: list[torch.Tensor]
) -> tuple[torch.Tensor, dict[str, float]]:
    """Even entries are preferred to the odd ones after them."""
    skip = len(PROMPT) - 1
    scores = [one[skip:].mean() for one in logprobs]
    margins = torch.stack([good - bad for good, bad in zip(scores[::2], scores[1::2], strict=True)])
    loss = -torch.nn.functional.logsigmoid(margins).sum()
    return loss, {"margin:mean": float(margins.detach().mean())}


def main() -> int:
    data = [datum(answer) for pair in PAIRS for answer in pair]
    margins: list[float] = []
    with (
        FakeServer().serve() as server,
        tinkex.ServiceClient(base_url=server.url, api_key=API_KEY) as service,
    ):
        training = service.create_lora_training_client("tinkex/tiny", rank=8)
        for step in range(STEPS):
            output = training.forward_backward_custom(data, preference_loss)
            training.optim_step(AdamParams(learning_rate=0.3))
            margins.append(output.result().metrics["margin:mean"])
            print(f"step {step + 1:2}/{STEPS}  margin {margins[-1]:+.3f}")
    learned = margins[-1] > margins[0] + 1 and margins[-1] > 0
    print(f"{'ok' if learned else 'NO'}: margin went {margins[0]:+.2f} -> {margins[-1]:+.2f}")
    return 0 if learned else 1


if __name__ == "__main__":
    sys.exit(main())
