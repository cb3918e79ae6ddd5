"""What the engine puts around its kernels for CUDA, against the plain code it stands in for.

In float32, so that it also runs in Triton's interpreter; sums differ in their order only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tests.unit.engine.training.kit import CONFIG, decoder
from tinkex.engine.attention.paged import PagedAttention, TokenSpan
from tinkex.engine.backends.cuda.adapters import CudaAdapters
from tinkex.engine.backends.cuda.attention import pages
from tinkex.engine.backends.cuda.cross_entropy import cross_entropy
from tinkex.engine.backends.cuda.fixed_rows import FixedRows
from tinkex.engine.backends.cuda.strict_products import CudaProducts
from tinkex.engine.backends.torch import TORCH
from tinkex.engine.backends.torch.layers import concatenated_view
from tinkex.engine.backends.torch.rectangles import rectangles
from tinkex.engine.decoder import SHARED_INPUT, projection_shape
from tinkex.engine.lora import LoraWeights, Segment, adapted_projections, initial, logits, wrap
from tinkex.engine.lora.head import adapt_
from tinkex.engine.sampler.runner import VersionRows
from tinkex.types import LoraConfig

if TYPE_CHECKING:
    from tinkex.engine.models.families import StoredDecoder

SPANS = [TokenSpan(0, 9, [4, 1, 7]), TokenSpan(6, 7, [0, 5]), TokenSpan(3, 11, [2, 6, 3])]
BLOCK = 4


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def adapter(rank: int, **lora: bool) -> LoraWeights:
    weights = initial(CONFIG, LoraConfig(rank=rank, **lora), rank)
    weights.flat_P.copy_(noise(rank, *weights.flat_P.shape) * 0.1)
    return weights


def moved(weights: LoraWeights | None, device: str) -> LoraWeights | None:
    if weights is None:
        return None
    return wrap(weights.config, weights.lora, weights.flat_P.to(device))


def on(device: str) -> StoredDecoder:
    """The kit's model on the device."""
    made = type(decoder())(CONFIG, dtype=torch.float32, device=torch.device(device))
    for (_, slot), (_, value) in zip(made.stored.named(), decoder().stored.named(), strict=True):
        slot.copy_(value)
    return made


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-5)


def test_pages_attend_as_the_plain_paged_attention_does(device: str) -> None:
    heads, kv_heads, dim = CONFIG.num_heads, CONFIG.num_kv_heads, 16
    slots, tokens = 8 * BLOCK, sum(map(len, SPANS))
    earlier = noise(1, 2, CONFIG.num_layers, slots, kv_heads, dim)
    q = noise(2, tokens, heads, dim)
    k, v = noise(3, tokens, kv_heads, dim), noise(4, tokens, kv_heads, dim)
    plain = PagedAttention(earlier.transpose(2, 3).contiguous(), SPANS, block_size=BLOCK)
    cache = earlier.to(device)
    made = pages(SPANS, block_size=BLOCK, strict=True, device=cache.device)
    found = made.attend(cache, 1, q.to(device), k.to(device), v.to(device))
    close(found, plain(1, q, k, v))


def test_the_samplers_layers_add_what_each_segments_adapter_adds(device: str) -> None:
    weights, made = {"a": adapter(3), "b": adapter(20, train_mlp=False), "base": None}, on(device)
    parts = [("a", 0, 5), ("base", 5, 9), ("b", 9, 28), ("a", 28, 30)]
    plain = adapted_projections(decoder(), [Segment(a, b, weights[v]) for v, a, b in parts])
    fast = CudaAdapters(made, {v: moved(w, device) for v, w in weights.items()}.get, slots=4)
    versions = [VersionRows(v, a, b) for v, a, b in parts]
    for number, names in enumerate(SHARED_INPUT):
        x = noise(number, 30, projection_shape(CONFIG, names[0])[1])
        found = fast.project(versions)(1, names, x.to(device))
        for mine, theirs in zip(found, plain(1, names, x), strict=True):
            close(mine, theirs)
    h = noise(9, 30, CONFIG.hidden_size)
    close(fast.logits(h.to(device), versions), plain_logits(h, weights, parts))


def test_strict_training_multiplies_as_the_plain_layers_do(device: str) -> None:
    weights = {"a": adapter(3), "b": adapter(20, train_mlp=False)}
    parts = [("a", 0, 21), ("b", 21, 30)]
    plain = adapted_projections(decoder(), [Segment(a, b, weights[v]) for v, a, b in parts])
    made = on(device)
    segments = [Segment(a, b, moved(weights[v], device)) for v, a, b in parts]
    products = CudaProducts(made, segments, FixedRows())
    for number, names in enumerate(SHARED_INPUT):
        x = noise(number, 30, projection_shape(CONFIG, names[0])[1])
        linear = made.linear(1, names)
        y = products.base(linear, x.to(device))
        products.add(1, names, x.to(device), y)
        for mine, theirs in zip(linear.split(y), plain(1, names, x), strict=True):
            close(mine, theirs)
    h = noise(9, 30, CONFIG.hidden_size)
    expected = plain_logits(h, weights, parts)
    for start, stop in ((0, 30), (16, 28)):
        close(products.logits(h[start:stop].to(device), start, stop), expected[start:stop])


def plain_logits(h: Tensor, weights: dict[str, LoraWeights | None], parts: list) -> Tensor:
    found = logits(h, decoder().head)
    for version, start, stop in parts:
        adapt_(found[start:stop], h[start:stop], weights[version], TORCH)
    return found


def test_parts_of_one_tensor_are_seen_as_one_and_others_are_not() -> None:
    whole = noise(1, 3, 6, 2)
    a, b, c = whole.split_with_sizes((1, 3, 2), dim=1)
    joined = concatenated_view((a, b, c))
    assert joined is not None
    assert joined.data_ptr() == whole.data_ptr()
    assert torch.equal(joined, whole)
    assert concatenated_view((a, c)) is None
    assert concatenated_view((b, a)) is None
    assert concatenated_view((a, b.clone())) is None


def test_targets_of_any_width_have_the_logprobs_and_gradients_of_the_plain_softmax(
    device: str,
) -> None:
    counts = [1, 1, 7, 7, 0, 3, 12]
    logits_CV = noise(1, 9, 300) * 4  # two rows more than there are targets for
    ids_M = torch.randint(0, 300, (sum(counts),), generator=torch.Generator().manual_seed(2))
    gradient_M = noise(3, sum(counts))
    parts = list(rectangles([(0, 2), (2, 5), (5, 7)], counts, 0))
    wanted = TORCH.cross_entropy(logits_CV.clone(), parts, ids_M, gradient_M, torch.float32)
    moved_M = [vector.to(device) for vector in (ids_M, gradient_M)]
    found = cross_entropy(logits_CV.to(device), parts, *moved_M, torch.float32)
    close(torch.cat(found[0]), torch.cat(wanted[0]))
    assert found[1] is not None
    assert wanted[1] is not None
    close(found[1][:7], wanted[1][:7])
    scored = cross_entropy(logits_CV.to(device), parts, moved_M[0], None, torch.float32)
    assert scored[1] is None
    assert torch.equal(torch.cat(scored[0]), torch.cat(found[0]))
