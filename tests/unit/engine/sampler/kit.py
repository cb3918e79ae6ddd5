"""Small makers shared by the sampler's tests: a model, operations, and a cache-free reference."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional as F

from tests.unit.engine.projections import base_projections
from tinkex.engine.lora import logits as head_logits
from tinkex.engine.models.tiny import tiny_decoder
from tinkex.engine.models.tokenizer import byte_tokenizer
from tinkex.engine.protocol import SampleOp, Weights
from tinkex.engine.sampler import Sampler, SamplerSettings
from tinkex.types import ModelInput, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from tinkex.engine.decoder import Decoder, Project
    from tinkex.engine.protocol import SampleResult
    from tinkex.engine.sampler import SampleRun, VersionRows

EOS = 256


@cache
def tiny() -> Decoder:
    return tiny_decoder()


class BaseOnly:
    """`Adapters` of a kind that the engine does not know: no version has an adapter."""

    def __init__(self, decoder: Decoder) -> None:
        self._project = base_projections(decoder, batch_invariant=True)
        self._head = decoder.head

    def project(self, segments: Sequence[VersionRows]) -> Project:
        return self._project

    def logits(self, h_RD: Tensor, segments: Sequence[VersionRows]) -> Tensor:
        return head_logits(h_RD, self._head)


def text(length: int, start: int = 0) -> list[int]:
    """A prompt without repetition that a prefix cache could confuse."""
    return [(start * 31 + i * 7 + i * i) % 251 for i in range(length)]


def op(
    prompt: Sequence[int],
    *,
    num_samples: int = 1,
    op_id: str = "op",
    extra: dict[str, Any] | None = None,
    **params: Any,
) -> SampleOp:
    """One operation; by default greedy, without stops, of 8 tokens."""
    chosen: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "stop": [], **params}
    return SampleOp(
        op_id=op_id,
        weights=Weights(base_model="tinkex/tiny"),
        prompt=ModelInput.from_ints(list(prompt)),
        params=SamplingParams(**chosen),
        sequence_ids=[f"{op_id}-{i}" for i in range(num_samples)],
        **(extra or {}),
    )


def sampler(*, decoder: Decoder | None = None, **settings: Any) -> Sampler:
    tokenizer = byte_tokenizer()
    adapters = settings.pop("adapters", None)
    chosen: dict[str, Any] = {"cache_tokens": 4096, "block_size": 4, **settings}
    return Sampler(
        decoder or tiny(),
        SamplerSettings(**chosen),
        adapters=adapters,
        decode=tokenizer.decode,
    )


def drive(target: Sampler, *, most_steps: int = 5000) -> list[SampleRun]:
    """Step until idle, checking the books after each step."""
    ended: list[SampleRun] = []
    for _ in range(most_steps):
        if target.idle:
            return ended
        ended += target.step()
        target.check()
    raise AssertionError("the sampler does not come to an end")


def answer(run: SampleRun) -> SampleResult:
    assert run.error is None, run.error
    assert run.result is not None
    return run.result


def sample(target: Sampler, operation: SampleOp, **options: Any) -> SampleResult:
    run = target.submit(operation, **options)
    drive(target)
    return answer(run)


def tokens(result: SampleResult) -> list[list[int]]:
    return [sequence.tokens for sequence in result.response.sequences]


@torch.no_grad()
def logits(ids: Sequence[int], project: Project | None = None) -> Tensor:
    """All logits of a sequence, computed in one plain pass without any cache."""
    decoder = tiny()

    def attend(layer: int, q_THd: Tensor, k_TGd: Tensor, v_TGd: Tensor) -> Tensor:
        repeat = q_THd.shape[1] // k_TGd.shape[1]
        out = F.scaled_dot_product_attention(
            q_THd.transpose(0, 1),
            k_TGd.transpose(0, 1).repeat_interleave(repeat, 0),
            v_TGd.transpose(0, 1).repeat_interleave(repeat, 0),
            is_causal=True,
        )
        return out.transpose(0, 1).reshape(len(ids), -1)

    h_TD = decoder.hidden(
        torch.tensor(ids), torch.arange(len(ids)), attend, project or base_projections(decoder)
    )
    return F.linear(h_TD, decoder.unembed_VD)


def greedy(prompt: Sequence[int], count: int) -> list[int]:
    """The likeliest continuation, recomputed from scratch for every token."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits(ids)[-1].argmax()))
    return ids[len(prompt) :]
