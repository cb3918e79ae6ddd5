"""From prompts to the engine and back: limits, many prompts at once, and what they used.

These samples are no operations of the store: no client retrieves them later. They run while their
caller is connected; for limits, turns and usage they count like every other sample.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import anyio

from tinkex.engine.protocol import SampleOp
from tinkex.errors import InputError, RequestFailedError
from tinkex.server.openai.errors import problem
from tinkex.server.scheduler.jobs import sampled
from tinkex.server.scheduler.outcomes import CANCELLED
from tinkex.server.store.records import Operation, OperationOutcome, UsageEntry, changed
from tinkex.types import ModelInput, SamplingParams, Usage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinkex.engine.protocol import Best, OnToken, SampleResult
    from tinkex.errors import ErrorCategory
    from tinkex.server.api.call import Call
    from tinkex.server.openai.models import Chosen
    from tinkex.server.openai.requests import CommonParameters
    from tinkex.server.openai.tokenization import TextCodec

    # Called as (choice, token, log-probability, likeliest).
    OnDrawn = Callable[[int, int, float, Best | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleOrder:
    """What to sample; choice `p * n + s` is sample `s` of prompt `p`."""

    request_id: str
    chosen: Chosen
    prompts: Sequence[Sequence[int]]
    n: int
    params: SamplingParams
    topk: int = 0
    prompt_logprobs: bool = False


def sampling_params(
    request: CommonParameters, max_tokens: int | None, text: TextCodec
) -> SamplingParams:
    """How to draw. Stop strings come on top of the model's own end of text.

    The engine takes strings or tokens, not both, and sees special tokens as their text.
    """
    stops = [*request.stops, *text.eos_texts] if request.stops else None
    return SamplingParams(
        max_tokens=max_tokens,
        seed=request.seed,
        stop=stops,
        temperature=request.temperature,
        top_k=request.top_k,
        top_p=request.top_p,
    )


async def sample(
    call: Call, order: SampleOrder, on_drawn: OnDrawn | None = None
) -> list[SampleResult]:
    """Sample every prompt at once; the first failure ends the others and is raised."""
    _check_room(call, order)
    results: dict[int, SampleResult] = {}
    failure: Exception | None = None

    async def one(number: int) -> None:
        nonlocal failure
        try:
            results[number] = await _one(call, order, number, on_drawn)
        except Exception as error:  # noqa: BLE001 - raised below, without a group around it
            failure = failure or error
            group.cancel_scope.cancel()

    async with anyio.create_task_group() as group:
        for number in range(len(order.prompts)):
            group.start_soon(one, number)
    if failure is not None:
        raise failure
    return [results[number] for number in range(len(order.prompts))]


async def _one(
    call: Call, order: SampleOrder, number: int, on_drawn: OnDrawn | None
) -> SampleResult:
    operation = _operation(call, order, number)
    drawn = 0

    def on_token(index: int, token: int, logprob: float, best: Best | None) -> None:
        nonlocal drawn
        drawn += 1
        if on_drawn is not None:
            on_drawn(number * order.n + index, token, logprob, best)

    heard: OnToken | None = None if on_drawn is None else on_token
    outcome = CANCELLED
    call.parts.meters.accepted(operation)
    try:
        async with call.worker.place(operation):
            operation = changed(operation, started_at=call.now())
            result = await call.parts.engine.sample(_op(order, number, operation), heard)
        outcome = OperationOutcome(usage=sampled(result).usage)
    except Exception as error:
        outcome = OperationOutcome(error=str(error), category=_category(error))
        raise
    finally:
        if outcome.error is not None and drawn:
            # A caller that reads the beginning of a stream has used the tokens drawn for it.
            used = Usage(prompt_tokens=len(order.prompts[number]), generated_tokens=drawn)
            outcome = changed(outcome, usage=used)
        with anyio.CancelScope(shield=True):
            await _account(call, order, operation, outcome)
    return result


def _operation(call: Call, order: SampleOrder, number: int) -> Operation:
    """What the scheduler and the meters know a sample by; it never reaches the store."""
    op_id = f"{order.request_id}:{number}"
    return Operation(
        op_id=op_id,
        kind="sample",
        owner=call.owner,
        session_id="",
        created_at=call.now(),
        sequence_ids=tuple(f"{op_id}:{index}" for index in range(order.n)),
    )


def _op(order: SampleOrder, number: int, operation: Operation) -> SampleOp:
    return SampleOp(
        op_id=operation.op_id,
        weights=order.chosen.weights,
        prompt=ModelInput.from_ints(list(order.prompts[number])),
        params=order.params,
        sequence_ids=operation.sequence_ids,
        prompt_logprobs=order.prompt_logprobs,
        topk_prompt_logprobs=order.topk if order.prompt_logprobs else 0,
        topk_sample_logprobs=order.topk,
        cache_salt=operation.owner,
    )


def _category(error: Exception) -> ErrorCategory:
    if isinstance(error, RequestFailedError):
        return error.category
    return "user" if isinstance(error, InputError) else "server"


async def _account(
    call: Call, order: SampleOrder, operation: Operation, outcome: OperationOutcome
) -> None:
    now = call.now()
    call.parts.meters.ended(operation, outcome, now)
    if outcome.usage != Usage():
        entry = UsageEntry(
            at=now,
            owner=call.owner,
            session_id="",
            base_model=order.chosen.spec.name,
            project_id=None,
            kind="sample",
            usage=outcome.usage,
        )
        await call.store.add_usage(entry)


def _check_room(call: Call, order: SampleOrder) -> None:
    wanted, most = len(order.prompts) * order.n, call.settings.max_samples
    if wanted > most:
        text = f"{wanted} choices are asked for; a request may have {most} at most."
        raise problem(400, text, param="n")
    call.parts.limits.sample(call.owner)
