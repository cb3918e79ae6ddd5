"""Bounds of what a single request may name: numbers, texts, lists, tensors, and work.

This is the only place of these figures; docs/reference/refusals.md prints them. A member of a
request that has no entry here has the default of its kind, so that none is without a bound.
Limits of bytes and limits of a tenant are settings of the server.
"""

from __future__ import annotations

from typing import Final

LARGEST: Final = 2**53 - 1
"""The largest whole number that every JSON reader holds exactly. One more still fits a BIGINT."""

MAX_TOPK: Final = 1024
"""Tokens per position in `topk_*`, and draws per position in `prompt_alt_tokens_k`."""

INTEGERS: Final[dict[str, tuple[int, int]]] = {
    "num_samples": (1, 65_536),
    "max_tokens": (0, 2**31 - 1),
    "topk_prompt_logprobs": (0, MAX_TOPK),
    "topk_sample_logprobs": (0, MAX_TOPK),
    "prompt_alt_tokens_k": (0, MAX_TOPK),
    "expected_tokens": (0, 2**31 - 1),
    "top_k": (-1, 2**31 - 1),
    "seed": (-(2**63), 2**64 - 1),
    "rank": (0, 2**31 - 1),
    # `check_ttl` says what a lifetime may be.
    "ttl_seconds": (-LARGEST, LARGEST),
    # Copies of a sampling client number their samples from blocks of 10^9, the last near 10^18.
    "seq_id": (0, 2**62),
}
"""The least and the most of integers by the name of their member; others have `WHOLE`."""
WHOLE: Final = (0, LARGEST)

METADATA_BYTES: Final = 16_384
"""The `user_metadata` of one object, as JSON."""

ID_CHARACTERS: Final = 256
TEXT_CHARACTERS: Final = 1024
STOP_CHARACTERS: Final = 1024
TAG_CHARACTERS: Final = 256
TEXTS: Final[dict[str, int]] = {
    "model_id": ID_CHARACTERS,
    "session_id": ID_CHARACTERS,
    "sampling_session_id": ID_CHARACTERS,
    "request_id": ID_CHARACTERS,
    "project_id": ID_CHARACTERS,
    "destination_project_id": ID_CHARACTERS,
    "last_session_id": ID_CHARACTERS,
    "retrieved_request_ids": ID_CHARACTERS,
    "project_ids": ID_CHARACTERS,
    "process_uuid": ID_CHARACTERS,
    "event_id": ID_CHARACTERS,
    "tags": TAG_CHARACTERS,
    "stop": STOP_CHARACTERS,
    "user_metadata": METADATA_BYTES,
    # Keys, and tokens made from them.
    "weights_access_token": 8192,
    "age_encryption_recipients": 8192,
    "detail": 16_384,
    "location": 16_384,
    # What a client reports of its own failures.
    "error_message": 1_048_576,
    "traceback": 1_048_576,
}
"""The most characters of texts by the name of their member; others have `TEXT_CHARACTERS`."""

PAGE_ITEMS: Final = 10_000
"""`limit` of a listing, in a query."""
PAGE_OFFSET: Final = 1_000_000_000
"""`offset` of a listing, in a query."""
LISTED_RECORDS: Final = 1000
"""Runs or checkpoints in one reply, whatever its `limit`; each may have `METADATA_BYTES`."""

LIST_ITEMS: Final = 65_536
LISTS: Final[dict[str, int]] = {
    "tags": 64,
    "stop": 64,
    "chunks": 16_384,
    "tokens": 1_048_576,
    "data": 16_384,
    "loss_fn_inputs": 256,
    "loss_fn_config": 256,
    "inputs": 256,
    "nodes": 4096,
    "seq_ids": 10_000,
    "age_encryption_recipients": 64,
}
"""The most items of lists and maps by the name of their member; others have `LIST_ITEMS`."""

JSON_DEPTH: Final = 64
"""How deeply free-form members may be nested."""
JSON_PARTS: Final = 65_536
TRAINING_JSON_PARTS: Final = 262_144
"""Lists and objects in one JSON body: of most requests, and with a batch."""
JSON_VALUES: Final = 262_144
SAMPLE_JSON_VALUES: Final = 1_048_576
TRAINING_JSON_VALUES: Final = 4_194_304
"""Values of every kind in one JSON body: of most requests, with a prompt, with a batch."""
SAMPLE_BYTES: Final = 16 << 20
"""The body of a sample and of telemetry, where the settings do not say less."""
TRAINING_JSON_BYTES: Final = 32 << 20
"""The body of a training batch in JSON, which older clients send."""
PROTOBUF_PARTS: Final = 65_536
"""Messages in one protobuf body and directly in them."""

TENSOR_DIMENSIONS: Final = 8
TENSOR_BYTES: Final = 1 << 31
"""A tensor once it is filled: a sparse one is short to write."""

SAMPLED_TOKENS: Final = 1 << 23
"""`num_samples` times `max_tokens`, which is at most the model's context."""
SCORED_CELLS: Final = 1 << 21
"""Tokens of a request times what is reported of each: `topk_*`, `prompt_alt_tokens_k`, targets."""


def too_much_sampling(
    *,
    samples: int,
    prompt_tokens: int,
    new_tokens: int,
    topk_sample: int = 0,
    topk_prompt: int = 0,
    alternatives: int = 0,
    targets: int = 0,
) -> tuple[str, str] | None:
    """What of a sample is more work than one request may ask for, and where; None if nothing is.

    `new_tokens` are those that fit the context; `targets` are the cells of its target tensor.
    """
    drawn = samples * new_tokens
    if drawn > SAMPLED_TOKENS:
        text = f"{samples} samples of up to {new_tokens} tokens are more than {SAMPLED_TOKENS}"
        return f"{text} tokens; ask for fewer of either", "num_samples"
    for cells, name in (
        (drawn * topk_sample, "topk_sample_logprobs"),
        (prompt_tokens * topk_prompt, "topk_prompt_logprobs"),
        (prompt_tokens * alternatives, "prompt_alt_tokens_k"),
        (targets, "target_prompt_logprobs"),
    ):
        if cells > SCORED_CELLS:
            return f"asks for up to {cells} numbers; {SCORED_CELLS} are the most", name
    return None
