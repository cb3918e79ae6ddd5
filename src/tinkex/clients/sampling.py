"""`SamplingClient`: samples from one fixed set of weights."""

from __future__ import annotations

import asyncio
import functools
import itertools
import random
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from tinkex.clients.arguments import given_text
from tinkex.clients.base_client import BaseClient
from tinkex.clients.handles import read_handle, write_handle
from tinkex.clients.sampling_checks import (
    RetryConfig,
    check_kinds,
    check_options,
    check_response,
    checked_copy,
)
from tinkex.clients.session import Session
from tinkex.clients.twins import awaited, blocking, on_loop
from tinkex.errors import InputError, TinkerError
from tinkex.futures.admission import input_bytes, text_tokens
from tinkex.futures.call_results import given
from tinkex.futures.feed import CompletionFeed
from tinkex.futures.lifecycle import Lifecycle, RetryPolicy, charge
from tinkex.futures.queue_notices import QueueNotices
from tinkex.metrics import meter
from tinkex.spans import span
from tinkex.types import (
    CreateSamplingSessionRequest,
    JoinSamplingSessionRequest,
    SampleRequest,
    SamplingParams,
)
from tinkex.wire import json_codec, routes

if TYPE_CHECKING:
    from collections.abc import Coroutine

    from tinkex.clients.connection import Lease
    from tinkex.futures.call_results import Ticket
    from tinkex.futures.future import APIFuture, Promise
    from tinkex.futures.lifecycle import CallContext
    from tinkex.tokenizers import Tokenizer
    from tinkex.types import ModelInput, SampleResponse, TensorData

# Copies of a sampler number their requests from blocks of their own.
CLONE_BLOCK = 1_000_000_000
_BYTES_PER_TOKEN = 10
# After a 429 without a hint, larger samples pause longer.
_LARGE_BYTES = 128 * 1024
_NO_LIMIT = nullcontext()
_SCHEME = "tinker://"
_HEADERS = {"X-Tinker-Sampling-Backpressure": "1"}


class SamplingClient(BaseClient[Session]):
    """Samples from a base model or from saved weights. Made by the other clients.

    It can be pickled and sent to other processes, and turned into a text handle; neither holds a
    credential: the receiving process uses its own (`TINKER_API_KEY` or a stored key).
    """

    def __init__(
        self,
        lease: Lease[Session],
        sampling_session_id: str,
        *,
        retry_config: RetryConfig | None = None,
        record_stability_info: bool = False,
        clone_id: int | None = 0,
    ) -> None:
        # Mutable state, touched on the loop only: the next request number (once the clone id is
        # known), the completion feed, and the slots for samples under way.
        super().__init__(lease.connection, lease.operations())
        self.lease = lease  # keeps the session alive
        self._sampling_session_id = sampling_session_id
        self._record_stability_info = record_stability_info
        self._clone_id = clone_id
        self._numbers: itertools.count[int] | None = None
        self._numbering = asyncio.Lock()
        self._feed: CompletionFeed | None = None
        self._slots: asyncio.Semaphore | None = None
        self._notices = QueueNotices(
            f"sampler {sampling_session_id}",
            lease.connection.clock,
            lambda state, reason: self.on_queue_state_change(state, reason),
            lease.connection.telemetry,
        )
        self.retry_config = retry_config or RetryConfig()

    @property
    def sampling_session_id(self) -> str:
        """The server's id of this sampler."""
        return self._sampling_session_id

    @property
    def record_stability_info(self) -> bool:
        """Whether the server is asked to record what stability losses need."""
        return self._record_stability_info

    # -- sampling -----------------------------------------------------------------------------

    def sample(
        self,
        prompt: ModelInput,
        num_samples: int,
        sampling_params: SamplingParams,
        include_prompt_logprobs: bool = False,
        topk_prompt_logprobs: int = 0,
        topk_sample_logprobs: int = 0,
        target_prompt_logprobs: TensorData | None = None,
        prompt_alt_tokens_k: int = 0,
        prompt_logprobs_last_n: int | None = None,
    ) -> APIFuture[SampleResponse]:
        """Draw `num_samples` continuations of `prompt`.

        `target_prompt_logprobs` is an int64 tensor `[len(prompt) - 1, K]`: cell `[i, j]` asks for
        that token's log-probability at prompt position `i + 1`, -1 asks for nothing.
        `prompt_alt_tokens_k` draws so many alternatives at each prompt position after the first.
        `prompt_logprobs_last_n` scores only the last tokens, with `include_prompt_logprobs`.
        """
        try:
            check_kinds(prompt, sampling_params)
            request = checked_copy(
                SampleRequest(
                    num_samples=num_samples,
                    prompt=prompt,
                    sampling_params=sampling_params,
                    sampling_session_id=self._sampling_session_id,
                    prompt_logprobs=include_prompt_logprobs,
                    topk_prompt_logprobs=topk_prompt_logprobs,
                    topk_sample_logprobs=topk_sample_logprobs,
                    target_prompt_logprobs=target_prompt_logprobs,
                    prompt_alt_tokens_k=prompt_alt_tokens_k,
                    prompt_logprobs_last_n=prompt_logprobs_last_n,
                    record_stability_info=self._record_stability_info,
                )
            )
        except TinkerError as error:
            return self._operations.refuse(error)
        return self._operations.start(functools.partial(self._sample, request))

    sample_async = awaited(sample)

    def compute_logprobs(
        self, prompt: ModelInput, prompt_logprobs_last_n: int | None = None
    ) -> APIFuture[list[float | None]]:
        """The log-probability of each token of `prompt`; the first has none."""
        scored = self.sample(
            prompt,
            1,
            SamplingParams(max_tokens=1),
            include_prompt_logprobs=True,
            prompt_logprobs_last_n=prompt_logprobs_last_n,
        )
        return scored.then(_prompt_logprobs)

    compute_logprobs_async = awaited(compute_logprobs)

    # -- on the loop --------------------------------------------------------------------------

    async def _sample(
        self, request: SampleRequest, promise: Promise[SampleResponse]
    ) -> SampleResponse:
        """Draw within the total deadline, which counts from here."""
        session = self._connection
        if session.context is None or session.closed:
            await session.opened()
        context = session.context
        assert context is not None
        with span("sampling.sample", sampling_session_id=self._sampling_session_id):
            if context.total_s is None:
                return await self._draw(context, request, promise)
            async with context.limit("the sample", context.clock.now()):
                return await self._draw(context, request, promise)

    async def _draw(
        self, context: CallContext, request: SampleRequest, promise: Promise[SampleResponse]
    ) -> SampleResponse:
        """One lifecycle, with another number each time that the server has lost the sample."""
        session, flags = self._connection, context.api.client_config
        # A copy learns its clone id with them, by which the server knows its completions.
        numbers = self._numbers or await self._number()
        estimate = input_bytes(request.prompt, per_token=_BYTES_PER_TOKEN)
        if flags.sample_use_retrieve_futures:
            # One poll for all samples, so that any number of them may be under way.
            feed, slot = self._feed or self._open_feed(context), _NO_LIMIT
        else:
            if self._slots is None:
                self._slots = asyncio.Semaphore(max(flags.sample_max_concurrent_requests, 1))
            feed, slot = None, self._slots
        asked = context.clock.now()
        async with slot:
            if meter.on:
                meter.wait("slot", context.clock.now() - asked)
            life = Lifecycle(
                context,
                routes.ASAMPLE,
                "Sample",
                promise,
                self._notices.observe,
                policy=self._policy(context),
                admission=session.admission,
                pause_s=1.0 if estimate <= _LARGE_BYTES else 5.0,
                feed=feed,
            )
            submit = functools.partial(self._submit, life, request, promise, numbers, estimate)
            ticket = await submit()
            with span("sampling.wait", request_id=ticket.request_id):
                result = await life.finish(ticket, submit)
        response: SampleResponse = result.value
        generated = 0
        for sequence in response.sequences:
            generated += 0 if sequence.tokens_np is None else len(sequence.tokens_np)
        session.usage += charge(
            result,
            prompt_tokens=text_tokens(request.prompt),
            cached_tokens=response.prompt_cache_hit_tokens,
            generated_tokens=generated,
        )
        check_response(response, request)
        return response

    def _policy(self, context: CallContext) -> RetryPolicy:
        """What the user's settings and the server's flags say about retries."""
        config, flags, patience_s = self.retry_config, context.api.client_config, context.silence_s
        if config.enable_stuck_detection and flags.sample_enable_stuck_detection:
            patience_s = min(patience_s, config.progress_timeout)
        return RetryPolicy(
            config.enable_retry_logic and not flags.sample_no_retries,
            patience_s,
            config.retryable_exceptions,
            config.delay_s,
        )

    async def _submit(
        self,
        life: Lifecycle,
        request: SampleRequest,
        promise: Promise[SampleResponse],
        numbers: itertools.count[int],
        estimate_bytes: int,
    ) -> Ticket:
        """Send the sample under its next number; returns when the server has accepted it."""
        session = self._connection
        assert session.context is not None
        assert session.admission is not None
        promise.note(state="queued", request_id=None)
        numbered = msgspec.structs.replace(request, seq_id=next(numbers))
        body = json_codec.encode(numbered)
        with span("sampling.submit", seq_id=numbered.seq_id):
            post = session.context.api.prepared(routes.ASAMPLE, body, _HEADERS)
            room = functools.partial(session.admission.room, estimate_bytes)
            ticket = await life.submit(post, room)
        promise.note(state="running", request_id=ticket.request_id)
        if ticket.sequence_ids:
            return ticket
        # Servers older than sequence ids; the ids only need to be unique in the session.
        ids = [f"{ticket.request_id}:{i}" for i in range(request.num_samples)]
        return replace(ticket, sequence_ids=ids)

    def _open_feed(self, context: CallContext) -> CompletionFeed:
        self._feed = CompletionFeed(
            context.api,
            context.clock,
            self._operations.portal.spawn,
            self._sampling_session_id,
            self._clone_id or 0,
            silence_s=context.silence_s,
        )
        return self._feed

    async def _number(self) -> itertools.count[int]:
        """Request numbers: from 0, or for a copy from a block of its own."""
        async with self._numbering:
            if self._numbers is None:
                if self._clone_id is None:
                    self._clone_id = await self._join()
                self._numbers = itertools.count(self._clone_id * CLONE_BLOCK)
            return self._numbers

    async def _join(self) -> int:
        api = self.holder.api
        if not api.client_config.sample_join_sampling_session:
            return random.SystemRandom().randint(1, CLONE_BLOCK)
        joined = await api.call(
            routes.JOIN_SAMPLING_SESSION,
            JoinSamplingSessionRequest(sampling_session_id=self._sampling_session_id),
        )
        return joined.client_counter

    # -- about this sampler -------------------------------------------------------------------

    @on_loop
    async def get_base_model_async(self) -> str:
        """The name of the base model."""
        api = await self.holder.opened()
        sampler = await api.call(routes.GET_SAMPLER, params={"sampler": self._sampling_session_id})
        return sampler.base_model

    get_base_model = blocking(get_base_model_async)

    # Not a coroutine function, for the reason given in TrainingClient.
    def get_tokenizer_async(self) -> Coroutine[Any, Any, Tokenizer]:
        """The model's tokenizer; from `transformers` where installed, else `tokenizers`."""
        return self._load_tokenizer()

    async def _load_tokenizer(self) -> Tokenizer:
        from tinkex.tokenizers import tokenizer_of

        base_model = await self.get_base_model_async()
        return await tokenizer_of(await self.holder.opened(), base_model)

    get_tokenizer = blocking(get_tokenizer_async)

    def get_sampler_handle(self) -> str:
        """Text from which another process can make a copy of this client; holds no credential."""
        return write_handle(
            self.lease,
            self._sampling_session_id,
            record_stability_info=self._record_stability_info,
        )

    @staticmethod
    def from_sampler_handle(handle: str, *, api_key: str | None = None) -> SamplingClient:
        """A copy of the client that `handle` was made from; makes no request yet."""
        said, lease = read_handle(handle, api_key)
        return SamplingClient(
            lease,
            said.sampling_session_id,
            record_stability_info=said.record_stability_info,
            clone_id=None,
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (SamplingClient.from_sampler_handle, (self.get_sampler_handle(),))

    def on_queue_state_change(self, queue_state: str, queue_state_reason: str | None) -> None:
        """Called whenever the server's queue pauses or moves again; override or replace it."""


async def open_sampler(
    lease: Lease[Session],
    *,
    model_path: str | None = None,
    base_model: str | None = None,
    retry_config: RetryConfig | None = None,
    record_stability_info: bool = False,
) -> SamplingClient:
    """Open a sampler on the server."""
    check_options(retry_config, record_stability_info)
    if model_path is None and base_model is None:
        raise InputError("give model_path or base_model", "model_path")
    if base_model is not None:
        given_text(base_model, "base_model")
    if model_path is not None and not given_text(model_path, "model_path").startswith(_SCHEME):
        raise InputError(f"must start with {_SCHEME}, not {model_path!r}", "model_path")
    session = lease.connection

    async def create() -> str:
        api = await session.opened()
        assert session.session_id is not None
        request = CreateSamplingSessionRequest(
            session_id=session.session_id,
            sampling_session_seq_id=next(session.sampling_session_seq_ids),
            base_model=base_model,
            model_path=model_path,
        )
        return (await api.call(routes.CREATE_SAMPLING_SESSION, request)).sampling_session_id

    return SamplingClient(
        lease,
        await lease.operations().run(create),
        retry_config=retry_config,
        record_stability_info=record_stability_info,
    )


def _prompt_logprobs(response: SampleResponse) -> list[float | None]:
    return given(response.prompt_logprobs, "prompt_logprobs", "compute_logprobs")
