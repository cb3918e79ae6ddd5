"""What a training pass takes: planned beforehand, compared with what it really takes."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.engine.training.kit import (
    CONFIG,
    QWEN,
    add,
    datum,
    gradient,
    op,
    run,
    tokens,
    trainer,
)
from tinkex.engine.protocol import TrainResult
from tinkex.engine.training.memory import TARGET_BYTES, PassMemory, block_bytes
from tinkex.errors import RequestFailedError
from tinkex.types import Datum, LoraConfig, ModelInput, TensorData

# Large enough for the activations to stand out from everything else.
WIDE = {
    "hidden_size": 128,
    "intermediate_size": 512,
    "num_layers": 4,
    "head_dim": 32,
    "vocab_size": 503,
    "max_context": 4096,
}
SHAPES = [replace(CONFIG, **WIDE), replace(QWEN, **WIDE)]
RANK = 8


def _made(config, **options):
    made = trainer(config, logits_bytes=16 * 4 * config.vocab_size, **options)
    add(made, "m", RANK)
    return made


def _passes_recomputed(made) -> list[bool]:
    """Notes for each pass whether its blocks are computed again: they then run twice."""
    notes: list[bool] = []
    inner = made._context.decoder

    class Noting:
        def __getattr__(self, name):
            return getattr(inner, name)

        def hidden(self, tokens_T, positions_T, attend, project, run_block):
            notes.append(run_block.__name__ != "keep_activations")
            return inner.hidden(tokens_T, positions_T, attend, project, run_block)

    made._context = replace(made._context, decoder=Noting())
    return notes


def _limited(config, tokens: int, *, recompute: bool) -> int:
    """A limit that just holds one sequence of this length."""
    memory = PassMemory(
        config=config, itemsize=4, logits_bytes=16 * 4 * config.vocab_size, limit_bytes=None
    )
    lora = LoraConfig(rank=RANK)
    each = memory.token_bytes(lora, backward=True, recompute=recompute) + TARGET_BYTES
    fixed = memory.operation_bytes(lora, backward=True)
    return 3 * memory.logits_bytes + fixed + tokens * each


def _saved_bytes(made, length: int) -> int:
    """Bytes of the memory that autograd keeps, each block of it once."""
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(made, op("m", [datum(length, 1)]))
    return sum(storage.nbytes() for storage in kept.values())


def _peak_bytes(made, length: int) -> int:
    """The most memory that was taken at one time, as the allocator saw it."""
    return _peak_of(made, op("m", [datum(length, 1)]))


def _peak_of(made, wanted) -> int:
    gc.collect()  # tensors of other tests that are freed meanwhile would count as less memory
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run(made, wanted)
    results = seen.profiler.kineto_results
    live = peak = 0
    for event in results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.mark.parametrize("config", SHAPES, ids=["llama", "qwen3"])
def test_what_autograd_keeps_is_what_was_estimated(config):
    made = _made(config)
    saved = (_saved_bytes(made, 600) - _saved_bytes(made, 200)) / 400
    estimate = config.num_layers * block_bytes(config, RANK, 4)
    # The last norm's input is kept too and belongs to no block.
    assert saved - 4 * (config.hidden_size + 2 * config.head_dim) <= estimate <= 1.5 * saved


@pytest.mark.parametrize("config", SHAPES, ids=["llama", "qwen3"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_a_pass_never_takes_more_than_was_planned(config, recompute):
    limit = _limited(config, 600, recompute=recompute)
    made = _made(config, memory_bytes=limit)
    notes = _passes_recomputed(made)
    run(made, op("m", [datum(40, 1)]))  # what is made once, such as thread pools, comes first
    peak = _peak_bytes(made, 600)
    assert notes == [False, recompute]
    # Planned for the worst moment of each part, which do not fall together; the fixed part,
    # the gradient, stands out when little else is kept.
    assert limit / (2.5 if recompute else 1.5) < peak <= limit


def test_recomputing_gives_the_same_bits(request):
    kept, again = (
        _made(SHAPES[0]),
        _made(SHAPES[0], memory_bytes=_limited(SHAPES[0], 99, recompute=True)),
    )
    notes = _passes_recomputed(again)
    for data, loss in ([datum(99, 1)], "cross_entropy"), ([datum(70, 2, 0, "ppo")], "ppo"):
        left, right = run(kept, op("m", data, loss)), run(again, op("m", data, loss))
        assert left[0].output == right[0].output
    assert notes == [True, True]
    assert torch.equal(gradient(kept, "m"), gradient(again, "m"))


def test_an_operation_is_cut_before_anything_is_recomputed():
    made = _made(SHAPES[0], memory_bytes=_limited(SHAPES[0], 70, recompute=False))
    notes = _passes_recomputed(made)
    run(made, op("m", [datum(30, n) for n in range(8)]))
    assert notes == [False] * 4  # slices of 64 tokens: two sequences each


def test_a_sequence_that_can_never_fit_is_refused_with_the_number_that_would():
    limit = _limited(SHAPES[0], 300, recompute=True)
    made = _made(SHAPES[0], memory_bytes=limit)
    run(made, op("m", [datum(9)]))
    before = gradient(made, "m")
    with _NoTensors():
        refused = made.train([op("m", [datum(20), datum(301)])])[0]
    assert isinstance(refused, RequestFailedError)
    assert refused.category == "user"
    assert "data[1].model_input: has 301 tokens" in str(refused)
    assert str(refused).endswith("has memory for 300")
    assert gradient(made, "m") is before
    assert isinstance(made.train([op("m", [datum(300)])])[0], TrainResult)


def _sparse(length: int, columns: int, loss: str = "cross_entropy") -> Datum:
    """Targets of `columns` per token of which one is written down."""

    def csr(dtype, value):
        return TensorData([value], dtype, [length, columns], [0] + [1] * length, [0])

    inputs = {"target_tokens": csr("int64", 5)}
    if loss == "cross_entropy":
        inputs["weights"] = csr("float32", 1.0)
    else:
        inputs |= {"logprobs": csr("float32", -6.0), "advantages": csr("float32", 1.0)}
    if loss == "gspo":
        names = ("clip_low_threshold", "clip_high_threshold", "sequence_ratio_mask")
        inputs |= {name: csr("float32", 1.0) for name in names}
    return Datum(ModelInput.from_ints(tokens(length)), inputs)


def _filled_bytes(call) -> int:
    """The most memory that arrays took while `call` ran."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _holding(tokens: int, targets: int) -> int:
    """A limit that just holds a sequence and so many targets."""
    return _limited(SHAPES[0], tokens, recompute=True) + (targets - tokens) * TARGET_BYTES


def test_targets_that_can_never_fit_are_refused_before_they_are_filled():
    made = _made(SHAPES[0], memory_bytes=_holding(290, 290 * 400))
    answers = []
    taken = _filled_bytes(lambda: answers.extend(made.train([op("m", [_sparse(290, 401)])])))
    assert taken < 290 * 401  # a byte for each would be more
    (refused,) = answers
    assert isinstance(refused, RequestFailedError)
    assert refused.category == "user"
    assert str(refused) == (
        'data[0].loss_fn_inputs["target_tokens"]: has 116290 values; an operation whose longest '
        "sequence has 290 tokens has memory for 116000"
    )
    assert isinstance(made.train([op("m", [_sparse(290, 400)])])[0], TrainResult)


def test_the_targets_of_all_data_of_an_operation_count_together():
    made = _made(SHAPES[0], memory_bytes=_holding(16, 2 * 16 * 100 + 16))
    fitting = [_sparse(16, 100), _sparse(16, 100), datum(16)]
    assert isinstance(made.train([op("m", fitting)])[0], TrainResult)
    refused = made.train([op("m", [*fitting, datum(4)])])[0]
    assert str(refused) == (
        'data[3].loss_fn_inputs["target_tokens"]: has 4 values and, with the data before it, '
        "3220; an operation whose longest sequence has 16 tokens has memory for 3216"
    )


def test_weights_of_another_shape_are_refused_before_they_are_filled():
    made = _made(SHAPES[0])
    targets, rows = _sparse(20, 500).loss_fn_inputs["target_tokens"], 4000
    tall = TensorData([1.0], "float32", [rows, 500], [0] + [1] * rows, [0])
    example = Datum(ModelInput.from_ints(tokens(20)), {"target_tokens": targets, "weights": tall})
    answers = []
    taken = _filled_bytes(lambda: answers.extend(made.train([op("m", [example])])))
    assert "has shape [4000, 500], target_tokens has [20, 500]" in str(answers[0])
    assert taken < 4 * rows * 500


@pytest.mark.parametrize("loss", ["cross_entropy", "ppo", "gspo"])
@pytest.mark.parametrize("backward", [True, False])
def test_a_target_never_takes_more_than_was_planned(loss, backward):
    made = _made(SHAPES[0])

    def taken(columns: int) -> int:
        wanted = op("m", [_sparse(256, columns, loss)], loss, backward=backward)
        # Tensors and arrays need not peak together, so this is more than what is taken.
        return _peak_of(made, wanted) + _filled_bytes(lambda: run(made, wanted))

    taken(2)  # what is made once comes first
    each = (taken(400) - taken(100)) / (256 * 300)
    # The plan is made for gspo, which reads the most.
    assert (TARGET_BYTES / 2 if loss == "gspo" else 0) < each <= TARGET_BYTES


def test_an_operation_with_many_targets_is_cut_into_smaller_slices():
    memory = PassMemory(
        config=SHAPES[0],
        itemsize=4,
        logits_bytes=1 << 16,
        limit_bytes=_limited(SHAPES[0], 700, recompute=False),
    )
    lora = LoraConfig(rank=RANK)
    room = 600 * memory.token_bytes(lora, backward=True)
    many = room // TARGET_BYTES
    assert memory.slice_tokens(lora, 8192, backward=True, targets=700) == 512
    assert memory.slice_tokens(lora, 8192, backward=True, targets=many) == 64


def test_slices_share_a_pass_only_if_their_targets_fit_too():
    two = 2 * _limited(SHAPES[0], 20, recompute=False) + 15_000 * TARGET_BYTES
    made = _made(SHAPES[0], memory_bytes=two - 3 * 16 * 4 * SHAPES[0].vocab_size)
    add(made, "other", RANK)
    notes = _passes_recomputed(made)
    run(made, op("m", [datum(20)]), op("other", [datum(20)]))
    assert notes == [False]
    run(made, op("m", [_sparse(20, 500)]), op("other", [_sparse(20, 500)]))
    assert notes == [False] * 3


def test_a_forward_pass_needs_less_than_one_with_a_gradient():
    made = _made(SHAPES[0], memory_bytes=_limited(SHAPES[0], 300, recompute=True))
    (result,) = run(made, op("m", [datum(320)], backward=False))
    assert result.tokens == 320


def test_the_cut_is_the_same_on_machines_of_about_the_same_memory():
    def cut(limit: int) -> int:
        memory = PassMemory(config=SHAPES[0], itemsize=4, logits_bytes=1 << 16, limit_bytes=limit)
        return memory.slice_tokens(LoraConfig(rank=RANK), 8192, backward=True, targets=700)

    base = _limited(SHAPES[0], 700, recompute=False)
    assert cut(base) == cut(int(base * 1.1)) == cut(int(base * 0.9)) == 512
    assert cut(100 * base) == 8192


class _NoTensors(TorchDispatchMode):
    """Fails the test when anything is computed on a tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        raise AssertionError(f"{func} ran")


class _Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that is made; views of others are not."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        given = {storage.data_ptr() for storage in _storages(args)}
        for storage in _storages(made if isinstance(made, tuple | list) else (made,)):
            if storage.data_ptr() not in given:
                self.bytes = max(self.bytes, storage.nbytes())
        return made


def _storages(values):
    # Weights that the CPU's library has rearranged for itself show no memory.
    tensors = (v for v in values if isinstance(v, torch.Tensor) and not v.is_mkldnn)
    return [tensor.untyped_storage() for tensor in tensors]


@pytest.mark.parametrize("loss", ["cross_entropy", "ppo"])
@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_memory_grows_with_tokens_times_hidden_and_never_with_the_vocabulary(loss, recompute):
    growth: dict[int, list[int]] = {}
    lengths = (256, 384, 512)
    for vocabulary in (503, 2003):
        config = replace(SHAPES[0], vocab_size=vocabulary)
        limit = _limited(config, 512, recompute=True) if recompute else None
        made = _made(config, memory_bytes=limit)
        largest: list[int] = []
        for length in lengths:
            with _Largest() as seen:
                run(made, op("m", [datum(length, 1, 0, loss)], loss))
            largest.append(seen.bytes)
        growth[vocabulary] = largest
    # 16 rows of logits are all that the vocabulary decides: the largest tensors are the MLP's,
    # and whole logits would be larger.
    assert growth[2003] == growth[503]
    assert [size / length for size, length in zip(growth[503], lengths, strict=True)] == [
        2 * 4 * SHAPES[0].intermediate_size
    ] * 3
    assert 2 * SHAPES[0].intermediate_size < 2003


def test_the_vocabulary_adds_16_rows_of_logits_to_the_peak_whatever_the_length():
    def peak(vocabulary: int, length: int) -> int:
        made = _made(replace(SHAPES[0], vocab_size=vocabulary))
        _peak_bytes(made, 40)  # what is made once comes first
        gc.collect()
        return _peak_bytes(made, length)

    lengths = (256, 512)
    plain = [peak(503, length) for length in lengths]
    for vocabulary in (2003, 4003):
        more = [peak(vocabulary, length) - low for length, low in zip(lengths, plain, strict=True)]
        assert more[0] == more[1]
        assert more[0] <= 3 * 16 * 4 * (vocabulary - 503)


def test_no_limit_means_none():
    memory = PassMemory(config=CONFIG, itemsize=4, logits_bytes=1, limit_bytes=None)
    assert memory.most_tokens(LoraConfig(rank=8), backward=True) is None
    assert memory.most_targets(LoraConfig(rank=8), 9, backward=True) is None
    assert memory.slice_tokens(LoraConfig(rank=8), 77, backward=True, targets=9**9) == 77
    assert memory.fits(1 << 60)


def test_wider_numbers_and_higher_ranks_take_more():
    narrow, wide = (block_bytes(CONFIG, RANK, size) for size in (2, 4))
    assert narrow < wide < 2 * narrow  # norms are computed in four bytes in any case
    assert block_bytes(CONFIG, 256, 4) - block_bytes(CONFIG, 1, 4) == 7 * 255 * 4
