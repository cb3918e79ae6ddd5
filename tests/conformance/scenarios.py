"""The list of stories, written once for both SDKs.

A scenario is a function of an SDK module (`tinker` or `tinkex`) and a `Connection`; it
returns plain JSON that says what the caller saw. The same list runs against the recorder
(the bodies the official client sends are stored and ours must equal them) and against
`tinkex.testing.FakeServer` (both SDKs must see the same and the server must see the same).
"""

from __future__ import annotations

import mixed_stories as mixed
import rest_stories as rest
import sampling_stories as sampling
import training_stories as training
from story import Scenario

SCENARIOS = (
    Scenario(training.session_with_every_option),
    Scenario(training.session_without_options),
    Scenario(training.session_left_by_an_exception),
    Scenario(training.models_with_every_option),
    Scenario(training.training_bodies),
    Scenario(training.training_with_provenance),
    Scenario(training.training_with_torch, torch=True),
    Scenario(training.compressed_training, config={"proto_compress_fwdbwd": True}),
    Scenario(training.parallel_chunks, config={"fwdbwd_max_chunk_len": 2}, ordered=False),
    Scenario(
        training.serial_chunks, config={"fwdbwd_max_chunk_len": 2, "parallel_fwdbwd_chunks": False}
    ),
    Scenario(
        training.chunks_cut_by_bytes, config={"fwdbwd_max_chunk_bytes_count": 200}, ordered=False
    ),
    Scenario(training.optimizer_steps),
    Scenario(training.saves),
    Scenario(training.resume_in_three_steps),
    Scenario(training.resume_in_one_step, config={"create_model_via_load_weights": True}),
    Scenario(training.resume_from_foreign_weights),
    Scenario(training.loads_into_a_model),
    Scenario(training.copies),
    Scenario(sampling.samples, torch=True),
    Scenario(sampling.samples_of_pictures),
    Scenario(
        sampling.samples_polled_together,
        config={"sample_use_retrieve_futures": True},
        ordered=False,
    ),
    Scenario(
        sampling.samples_after_waiting,
        polls=(
            {"type": "try_again", "request_id": "x", "queue_state": "active"},
            {"status": "complete_metadata", "request_id": "x", "response_payload_size": 100},
        ),
        fake=False,
    ),
    Scenario(
        sampling.cancelled_sample,
        dynamic={"sample_cancel_enabled": True},
        hold_samples=True,
        fake=False,
    ),
    Scenario(sampling.sampler_handed_over, config={"sample_join_sampling_session": True}),
    Scenario(training.custom_loss_on_the_client, torch=True),
    Scenario(
        training.custom_loss_on_the_server, config={"custom_loss_server_side": True}, torch=True
    ),
    Scenario(rest.rest_calls),
    Scenario(rest.admin_calls),
    Scenario(mixed.everything_async),
    Scenario(mixed.session_with_an_exchanged_token, config={"pjwt_auth_enabled": True}),
    Scenario(mixed.mistakes, recorded=False),
    Scenario(rest.rest_async),
    Scenario(mixed.telemetry_of_a_session, telemetry=True, fake=False),
)
