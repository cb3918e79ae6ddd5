"""Sampling: choose weights, copy samplers, submit samples."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.errors import APIStatusError, InputError, quoted
from tinkex.server.api.call import reply
from tinkex.server.api.checkpoints import readable, readers
from tinkex.server.api.errors import refuse
from tinkex.server.api.sessions import open_session
from tinkex.server.api.submit import accepted
from tinkex.server.scheduler.checkpoints import check_sampleable
from tinkex.server.scheduler.lost_samples import CLONE_BLOCK
from tinkex.server.store.ownership import claim_key
from tinkex.server.store.records import Operation, StoredSampler
from tinkex.types import (
    CreateSamplingSessionRequest,
    CreateSamplingSessionResponse,
    EncodedTextChunk,
    GetSamplerResponse,
    JoinSamplingSessionRequest,
    JoinSamplingSessionResponse,
    SampleRequest,
)
from tinkex.types.bounds import too_much_sampling

if TYPE_CHECKING:
    from starlette.responses import Response

    from tinkex.server.api.call import Call
    from tinkex.server.store.records import StoredCheckpoint


async def create_sampling_session(call: Call) -> Response:
    """Choose the weights to sample from; they stay what they are now."""
    request = await call.json(CreateSamplingSessionRequest)
    session = await call.live_session(request.session_id)
    sampler_id = f"{session.session_id}:sample:{request.sampling_session_seq_id}"
    sampler = await _sampler(call, sampler_id, session.session_id, request)
    return reply(CreateSamplingSessionResponse(sampling_session_id=sampler.sampler_id))


async def _sampler(
    call: Call,
    sampler_id: str,
    session_id: str,
    request: CreateSamplingSessionRequest | SampleRequest,
) -> StoredSampler:
    base_model, location = request.base_model, None
    if request.model_path is not None:
        checkpoint = await _named_weights(call, request.model_path)
        if base_model not in (None, checkpoint.base_model):
            raise refuse(
                400, f"{checkpoint.path} is on {checkpoint.base_model}, not on {base_model}."
            )
        check_sampleable(checkpoint)
        base_model, location = checkpoint.base_model, checkpoint.location
    if base_model is None:
        raise refuse(400, "Name what to sample from: base_model, or a model_path.")
    return await call.parts.limits.add_sampler(
        StoredSampler(
            sampler_id=sampler_id,
            owner=call.owner,
            session_id=session_id,
            base_model=(await call.base_model(base_model)).name,
            created_at=call.now(),
            model_path=request.model_path,
            location=location,
        )
    )


async def _named_weights(call: Call, path: str) -> StoredCheckpoint:
    return await readable(call, path, await readers(call, None))


async def join_sampling_session(call: Call) -> Response:
    """Number one more copy of a sampling client."""
    request = await call.json(JoinSamplingSessionRequest)
    sampler = await own_sampler(call, request.sampling_session_id)
    counter = await call.store.join_sampler(sampler.sampler_id)
    return reply(JoinSamplingSessionResponse(client_counter=counter))


async def get_sampler(call: Call) -> Response:
    """What a sampler samples from."""
    sampler = await own_sampler(call, call.param("sampler"))
    return reply(
        GetSamplerResponse(
            sampler_id=sampler.sampler_id,
            base_model=sampler.base_model,
            model_path=sampler.model_path,
        )
    )


async def own_sampler(call: Call, sampler_id: str) -> StoredSampler:
    """One of the caller's samplers."""
    sampler = await call.store.get_sampler(sampler_id)
    if sampler is None or sampler.owner != call.owner:
        raise refuse(404, f"There is no sampling session {quoted(sampler_id)}.")
    if call.access.project_id is not None:
        await call.session(sampler.session_id)
    return sampler


async def asample(call: Call) -> Response:
    """Accept a sample; a known seq_id is answered by the first, with the same ids."""
    request = await call.json(SampleRequest)
    most = call.settings.max_samples
    if not 1 <= request.num_samples <= most:
        raise refuse(400, f"num_samples must lie between 1 and {most}, not {request.num_samples}.")
    sampler = await _sampler_of(call, request)
    # The oldest clients have a sampler for every request, which is best answered where it is.
    here = request.sampling_session_id is None
    await call.own(claim_key(sampler), sampler.base_model, here=here)
    seq_id = request.seq_id
    number = str(seq_id) if seq_id is not None else await _number_of(call)
    op_id = f"{sampler.sampler_id}:{number}"
    try:
        await call.live_session(sampler.session_id)
        _check_weights(sampler)
        call.parts.limits.sample(call.owner)
        await call.parts.limits.storage(call.owner)
    except APIStatusError:
        # Looked up only now: almost every sample is new and accepted.
        known = await call.store.get_operation(op_id)
        if known is None:
            raise
        return accepted(known)
    operation = Operation(
        op_id=op_id,
        kind="sample",
        owner=call.owner,
        session_id=sampler.session_id,
        created_at=call.now(),
        request=_impossible(call, sampler, request) or request,
        seq_id=seq_id or 0,
        sampler_id=sampler.sampler_id,
        clone=(seq_id or 0) // CLONE_BLOCK,
        sequence_ids=tuple(f"{op_id}:{index}" for index in range(request.num_samples)),
    )
    return accepted(await call.worker.submit(operation))


def _impossible(call: Call, sampler: StoredSampler, request: SampleRequest) -> InputError | None:
    """Why the engine could only refuse a sample, so that its prompt is not kept until then."""
    specs = call.parts.engine.models
    context = next((s.max_context_length for s in specs if s.name == sampler.base_model), None)
    if context is None:
        return None
    chunks, params = request.prompt.chunks, request.sampling_params
    prompt = sum(len(c.tokens) for c in chunks if isinstance(c, EncodedTextChunk))
    if prompt > context:
        return InputError(f"has {prompt} tokens, {sampler.base_model} takes {context}", "prompt")
    left, targets = context - prompt, request.target_prompt_logprobs
    problem = too_much_sampling(
        samples=request.num_samples,
        prompt_tokens=prompt,
        new_tokens=left if params.max_tokens is None else min(left, params.max_tokens),
        topk_sample=request.topk_sample_logprobs,
        topk_prompt=request.topk_prompt_logprobs,
        alternatives=request.prompt_alt_tokens_k,
        targets=0 if targets is None else targets.size_bytes // 8,
    )
    return None if problem is None else InputError(*problem)


def _check_weights(sampler: StoredSampler) -> None:
    if sampler.dropped is not None:
        raise refuse(
            400,
            f"Sampling session {quoted(sampler.sampler_id)} has no weights any more: "
            f"{sampler.dropped}. Save the weights again, or sample from a saved checkpoint.",
        )


async def _sampler_of(call: Call, request: SampleRequest) -> StoredSampler:
    if request.sampling_session_id is not None:
        return await own_sampler(call, request.sampling_session_id)
    # Clients before sampling sessions name the weights in every request. The node is chosen before
    # a session is made, which another node would make again.
    base_model = request.base_model
    if request.model_path is not None:
        base_model = (await _named_weights(call, request.model_path)).base_model
    await call.at_engine(None if base_model is None else (await call.base_model(base_model)).name)
    session = await open_session(call, heartbeats=False)
    return await _sampler(call, f"{session.session_id}:sample:0", session.session_id, request)


async def _number_of(call: Call) -> str:
    """Names a request whose client does not number them."""
    return call.idempotency_key() or call.parts.new_id()
