"""Requests and responses: strict construction, immutability, conveniences."""

import copy
import json
import pickle
import subprocess
import sys
from collections import UserList, deque
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import pytest

from tests.patience import PATIENCE_S
from tinkex import types
from tinkex.errors import InputError, InputTypeError
from tinkex.types.value import Value


@pytest.mark.req("S1")
def test_adam_defaults_are_the_protocols() -> None:
    params = types.AdamParams()
    assert (params.learning_rate, params.beta1, params.beta2, params.eps) == (
        1e-4,
        0.9,
        0.95,
        1e-12,
    )
    assert (params.weight_decay, params.grad_clip_norm) == (0.0, 0.0)


@pytest.mark.req("S7")
def test_optional_sample_fields_are_unset_by_default() -> None:
    request = types.SampleRequest(
        prompt=types.ModelInput.empty(), sampling_params=types.SamplingParams()
    )
    assert request.prompt_logprobs is None
    assert request.record_stability_info is None
    assert request.target_prompt_logprobs is None
    assert request.seq_id is None
    assert request.topk_prompt_logprobs == 0


@pytest.mark.req("S7")
@pytest.mark.parametrize("value", [True, False, None])
def test_prompt_logprobs_keeps_what_it_is_given(value: bool | None) -> None:
    request = types.SampleRequest(
        prompt=types.ModelInput.empty(),
        sampling_params=types.SamplingParams(),
        prompt_logprobs=value,
    )
    assert request.prompt_logprobs is value


@pytest.mark.req("S3")
def test_enums_are_exactly_the_protocols() -> None:
    from typing import get_args

    assert get_args(types.StopReason) == ("length", "stop")
    assert get_args(types.TensorDtype) == ("int64", "float32")
    assert get_args(types.CheckpointType) == ("training", "sampler", "external")
    assert get_args(types.LossFnType) == (
        "cross_entropy",
        "importance_sampling",
        "ppo",
        "cispo",
        "dro",
        "gspo",
        "stable_reinforce",
        "custom",
    )
    assert get_args(types.Severity) == ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
    assert get_args(types.EventType) == (
        "SESSION_START",
        "SESSION_END",
        "UNHANDLED_EXCEPTION",
        "GENERIC_EVENT",
    )


@pytest.mark.req("B13")
@pytest.mark.req("S12")
def test_misspelt_sampling_parameter_is_refused_with_the_nearest_name() -> None:
    with pytest.raises(InputTypeError, match="did you mean 'temperature'") as caught:
        types.SamplingParams(temprature=1)  # pyright: ignore[reportCallIssue]
    assert caught.value.path == "SamplingParams.temprature"
    assert isinstance(caught.value, TypeError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.req("B13")
def test_misspelt_key_of_a_nested_dict_is_refused_too() -> None:
    with pytest.raises(InputTypeError, match="did you mean 'max_tokens'") as caught:
        types.SampleRequest(prompt=types.ModelInput.empty(), sampling_params={"max_token": 4})  # pyright: ignore[reportArgumentType]
    assert caught.value.path == "SampleRequest.sampling_params.max_token"


@pytest.mark.req("S12")
@pytest.mark.parametrize(
    ("fields", "path", "text"),
    [
        ({"temperature": "5"}, "SamplingParams.temperature", "expected float, got str"),
        ({"max_tokens": True}, "SamplingParams.max_tokens", "expected int or None, got bool"),
        ({"max_tokens": 5.5}, "SamplingParams.max_tokens", "expected int or None, got float"),
        ({"max_tokens": 2**70}, "SamplingParams.max_tokens", "must be <="),
        ({"temperature": float("nan")}, "SamplingParams.temperature", "finite"),
        ({"temperature": float("inf")}, "SamplingParams.temperature", "finite"),
        ({"temperature": -1}, "SamplingParams.temperature", "must be >= 0"),
        ({"top_p": 1.5}, "SamplingParams.top_p", "must be <= 1"),
        ({"top_k": -2}, "SamplingParams.top_k", "must be >= -1"),
        ({"seed": 2**64}, "SamplingParams.seed", "64 bits"),
        ({"stop": ["a", 1]}, "SamplingParams.stop", "mixed"),
        ({"stop": [-1]}, "SamplingParams.stop[0]", "not a token id"),
        ({"stop": 5}, "SamplingParams.stop", "expected str or list"),
    ],
)
def test_bad_sampling_parameters_are_refused_with_their_path(
    fields: dict[str, object], path: str, text: str
) -> None:
    with pytest.raises(InputError, match=text) as caught:
        types.SamplingParams(**fields)  # pyright: ignore[reportArgumentType]
    assert caught.value.path == path


@pytest.mark.req("S12")
def test_missing_and_positional_arguments_are_errors_of_the_tree() -> None:
    with pytest.raises(InputTypeError) as caught:
        types.SampleRequest(prompt=types.ModelInput.empty())  # pyright: ignore[reportCallIssue]
    assert caught.value.path == "SampleRequest.sampling_params"
    with pytest.raises(InputTypeError, match="keyword"):
        types.AdamParams(1e-3)  # pyright: ignore[reportCallIssue]


@pytest.mark.req("S12")
@pytest.mark.parametrize("array", [np.int64(5), np.zeros(3), np.array(5)])
def test_an_array_is_not_taken_for_a_value_without_fields(array: Any) -> None:
    with pytest.raises(InputTypeError) as caught:
        types.SampleRequest(prompt=types.ModelInput.empty(), sampling_params=array)
    assert caught.value.path == "SampleRequest.sampling_params"


@pytest.mark.req("B13")
@pytest.mark.parametrize("listed", [list, tuple])
def test_a_misspelt_key_of_a_chunk_is_refused_wherever_it_stands(listed: Any) -> None:
    chunk = types.EncodedTextChunk(tokens=[1])
    for chunks in ([{"tokns": [1]}], [chunk, {"tokens": [1], "tpye": "encoded_text"}]):
        with pytest.raises(InputError):
            types.ModelInput(chunks=listed(chunks))


def test_a_list_where_a_prompt_belongs_is_told_how_to_become_one() -> None:
    with pytest.raises(InputTypeError, match="from_ints"):
        types.SampleRequest(prompt=[1, 2], sampling_params=types.SamplingParams())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("kind", [np.float32, np.float64, np.int64])
def test_numpy_scalars_count_as_numbers(kind: type) -> None:
    params = types.AdamParams(learning_rate=kind(1))
    assert type(params.learning_rate) is float


def test_an_integer_counts_as_a_float_and_becomes_one() -> None:
    assert type(types.SamplingParams(temperature=1).temperature) is float


@pytest.mark.req("S12")
def test_values_are_immutable() -> None:
    params = types.SamplingParams()
    for kind in (AttributeError, ValueError, InputError):  # programs catch any of them
        with pytest.raises(kind, match=r"SamplingParams\.temperature.*model_copy") as caught:
            params.temperature = 2.0  # pyright: ignore[reportAttributeAccessIssue]
        assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)
    with pytest.raises(ValueError, match=r"OptimParamsBase\.type"):
        del types.OptimParamsBase(type="x").type
    assert params == types.SamplingParams()


@pytest.mark.req("S12")
def test_lists_are_copied_so_that_the_callers_edits_do_not_show() -> None:
    tokens = [1, 2]
    chunk = types.EncodedTextChunk(tokens=tokens)
    tokens.append(3)
    assert chunk.tokens == [1, 2]


@pytest.mark.req("S12")
def test_values_pickle_copy_and_compare() -> None:
    request = types.SampleRequest(
        prompt=types.ModelInput.from_ints([1, 2]),
        sampling_params=types.SamplingParams(stop=["a"]),
        target_prompt_logprobs=types.TensorData([1, 2], "int64", [1, 2]),
    )
    for twin in (pickle.loads(pickle.dumps(request)), copy.copy(request), copy.deepcopy(request)):
        assert twin == request
    assert request != request.model_copy(update={"num_samples": 2})


def test_model_copy_checks_what_it_changes() -> None:
    params = types.SamplingParams(max_tokens=4)
    assert params.model_copy(update={"temperature": 0}) == types.SamplingParams(
        max_tokens=4, temperature=0
    )
    with pytest.raises(InputTypeError):
        params.model_copy(update={"temperature": "hot"})


def test_model_dump_keeps_or_leaves_out_what_is_unset() -> None:
    params = types.SamplingParams(max_tokens=4)
    assert params.model_dump() == {
        "max_tokens": 4,
        "seed": None,
        "stop": None,
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
    }
    assert params.model_dump(exclude_none=True) == {
        "max_tokens": 4,
        "temperature": 1.0,
        "top_k": -1,
        "top_p": 1.0,
    }


def test_model_dump_leaves_out_defaults_all_the_way_down() -> None:
    request = types.SampleRequest(
        prompt=types.ModelInput.from_ints([1]), sampling_params=types.SamplingParams(max_tokens=4)
    )
    short = {"prompt": {"chunks": [{"tokens": [1]}]}, "sampling_params": {"max_tokens": 4}}
    assert request.model_dump(exclude_unset=True) == short
    assert request.model_dump(exclude_defaults=True) == short
    assert json.loads(request.model_dump_json(exclude_unset=True)) == short
    assert request.model_fields_set == {"prompt", "sampling_params"}


@pytest.mark.parametrize("names", [{"seed", "stop"}, ["seed", "stop"], {"seed": True, "stop": ...}])
def test_model_dump_takes_and_leaves_out_named_fields(names: Any) -> None:
    params = types.SamplingParams(seed=3)
    assert params.model_dump(include=names) == {"seed": 3, "stop": None}
    assert "seed" not in params.model_dump(exclude=names)
    assert json.loads(params.model_dump_json(include=names, exclude_none=True)) == {"seed": 3}


@pytest.mark.parametrize("names", ["seed", 5, {"seed": {"x"}}])
def test_model_dump_refuses_names_it_cannot_follow(names: Any) -> None:
    with pytest.raises(InputTypeError) as caught:
        types.SamplingParams().model_dump(exclude=names)
    assert caught.value.path == "SamplingParams.exclude"


def test_types_describe_their_fields() -> None:
    fields = types.LoraConfig.model_fields
    assert list(fields) == ["rank", "seed", "train_unembed", "train_mlp", "train_attn"]
    assert fields["rank"].is_required()
    assert (fields["train_mlp"].is_required(), fields["train_mlp"].default) == (False, True)
    assert fields["train_mlp"].annotation is bool
    assert types.EncodedTextChunk.model_fields["type"].default == "encoded_text"


def test_values_can_be_turned_into_a_dict() -> None:
    assert dict(types.SamplingParams(seed=3)) == types.SamplingParams(seed=3).model_dump()
    prompt = types.ModelInput.from_ints([1])
    assert dict(prompt) == {"chunks": prompt.chunks}
    assert dict(types.OptimParamsBase(type="x", beta=1)) == {"type": "x", "beta": 1}  # pyright: ignore[reportCallIssue]
    assert dict(types.OptimStepResponse()) == {"metrics": None}


def test_model_construct_checks_like_the_constructor() -> None:
    assert types.AdamParams.model_construct(beta1=0.5) == types.AdamParams(beta1=0.5)
    with pytest.raises(InputTypeError):
        types.AdamParams.model_construct(beta1="x")


@pytest.mark.parametrize("five", [5.0, np.float32(5), np.float64(5), np.int8(5)])
def test_a_whole_number_counts_as_an_integer(five: Any) -> None:
    params = types.SamplingParams(max_tokens=five, stop=[five])
    assert (params.max_tokens, params.stop) == (5, [5])
    assert type(params.max_tokens) is int
    for bad in (5.5, float("inf"), 1e300):
        with pytest.raises(InputError):
            types.Cursor(offset=bad, limit=1, total_count=1)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize(
    "listed", [deque, iter, tuple, UserList, lambda items: dict.fromkeys(items).keys()]
)
def test_any_ordered_collection_counts_as_a_list(listed: Any) -> None:
    request = types.CreateSessionRequest(
        tags=listed(["a", "b"]), user_metadata=None, sdk_version="1"
    )
    assert request.tags == ["a", "b"]
    assert types.SamplingParams(stop=listed([1, 2])).stop == [1, 2]
    assert types.EncodedTextChunk(tokens=deque([1, 2])).tokens == [1, 2]
    chunk = types.EncodedTextChunk(tokens=[1])
    # Chunks are not hashable, so a dict cannot hold them as keys.
    if listed in (deque, iter, tuple, UserList):
        assert types.ModelInput(chunks=listed([chunk])).chunks == [chunk]


def test_dump_keeps_nulls_inside_free_form_maps() -> None:
    request = types.CreateSessionRequest(
        tags=[], user_metadata={"a": None, "b": [1, None]}, sdk_version="1"
    )
    dumped = request.model_dump(exclude_none=True)
    assert dumped["user_metadata"] == {"a": None, "b": [1, None]}
    assert "project_id" not in dumped


@pytest.mark.req("S8")
def test_image_bytes_are_base64_in_json() -> None:
    chunk = types.ImageChunk(data=b"hi", format="png")
    assert json.loads(chunk.model_dump_json()) == {
        "type": "image",
        "data": "aGk=",
        "format": "png",
        "expected_tokens": None,
    }
    assert chunk.model_dump()["data"] == "aGk="
    assert types.ImageChunk.model_validate(chunk.model_dump()) == chunk
    assert types.ImageChunk.model_validate_json(chunk.model_dump_json()) == chunk
    assert types.ImageChunk(data="aGk=", format="png") == chunk  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="base64"):
        types.ImageChunk(data="@@", format="png")  # pyright: ignore[reportArgumentType]


@pytest.mark.req("S8")
def test_image_pointers_carry_a_location() -> None:
    chunk = types.ImageAssetPointerChunk(format="jpeg", location="s3://x", expected_tokens=3)
    assert chunk.model_dump(exclude_none=True) == {
        "type": "image_asset_pointer",
        "format": "jpeg",
        "location": "s3://x",
        "expected_tokens": 3,
    }


@pytest.mark.req("S9")
def test_unknown_members_of_a_response_are_ignored_and_of_a_request_refused() -> None:
    assert types.Cursor.model_validate(
        {"offset": 0, "limit": 1, "total_count": 2, "new": 3}
    ) == types.Cursor(offset=0, limit=1, total_count=2)
    with pytest.raises(InputTypeError) as caught:
        types.AdamParams.model_validate({"nesterov": True})
    assert caught.value.path == "AdamParams.nesterov"


@pytest.mark.req("S9")
def test_unions_decode_by_their_tag() -> None:
    text = b'{"sessions": [{"session_id": "s", "created_at": "2026-01-01T00:00:00Z", "owner": "o",'
    text += b'"project_id": "p", "checkpoints_count": 0, "status": {"type": "failed", "category":'
    text += b'"user", "message": "m", "new": 1, "reason": {"type": "training_run",'
    text += b'"training_run_id": "r"}}}]}'
    page = msgspec.json.decode(text, type=types.SessionSearchResponse)
    assert page.sessions[0].status == types.SessionFailed(
        category="user",
        message="m",
        reason=types.SessionFailedTrainingRunReason(training_run_id="r"),
    )
    assert page.sessions[0].status.type == "failed"


@pytest.mark.req("S9")
def test_an_unknown_tag_names_its_path() -> None:
    with pytest.raises(InputError, match="'encoded_text'") as caught:
        types.ModelInput.model_validate({"chunks": [{"type": "video", "data": ""}]})
    assert caught.value.path == "ModelInput.chunks[0].type"
    with pytest.raises(msgspec.ValidationError, match=r"chunks\[0\]\.type"):
        msgspec.json.decode(b'{"chunks": [{"type": "video"}]}', type=types.ModelInput)


def test_a_tag_may_be_passed_when_it_is_right() -> None:
    chunk = types.EncodedTextChunk(tokens=[1], type="encoded_text")
    assert chunk == types.EncodedTextChunk(tokens=[1])
    with pytest.raises(InputError) as caught:
        types.EncodedTextChunk(tokens=[1], type="image")  # pyright: ignore[reportArgumentType]
    assert caught.value.path == "EncodedTextChunk.type"


@pytest.mark.req("S11")
@pytest.mark.parametrize(
    ("text", "member"),
    [("USER", "User"), ("server", "Server"), ("Unknown", "Unknown"), ("x", "Unknown")],
)
def test_error_categories_accept_any_case_and_fall_back_to_unknown(text: str, member: str) -> None:
    category = types.RequestErrorCategory[member]
    assert types.RequestErrorCategory(text) is category
    body = json.dumps({"error": "e", "category": text}).encode()
    assert msgspec.json.decode(body, type=types.RequestFailedResponse).category is category
    assert category.value == member.lower()


@pytest.mark.req("S10")
def test_the_public_sampler_save_shows_its_path_only() -> None:
    public = types.SaveWeightsForSamplerResponse(path="tinker://r/sampler_weights/x")
    assert not hasattr(public, "sampling_session_id")
    assert "sampling_session_id" not in public.model_dump()
    internal = types.SaveWeightsForSamplerResponseInternal(sampling_session_id="s")
    assert internal.sampling_session_id == "s"


def test_console_links_quote_their_parts() -> None:
    saved = types.SaveWeightsForSamplerResponse(path="tinker://a:train:0/sampler_weights/x y")
    assert saved.get_console_url().endswith("/checkpoints/a%3Atrain%3A0/sampler_weights%2Fx%20y")
    assert saved.get_playground_url().endswith(
        "?mode=checkpoint&checkpoint=tinker%3A%2F%2Fa%3Atrain%3A0%2Fsampler_weights%2Fx%20y"
    )


@pytest.mark.parametrize("kind", ["weights", "sampler_weights", "external_weights"])
def test_checkpoint_paths_are_split(kind: str) -> None:
    parsed = types.ParsedCheckpointTinkerPath.from_tinker_path(f"tinker://s:train:1/{kind}/n")
    assert parsed.training_run_id == "s:train:1"
    assert parsed.checkpoint_id == f"{kind}/n"


@pytest.mark.parametrize(
    "path",
    [
        "",
        "tinker://",
        "tinker://a/b",
        "tinker://a/weights/",
        "tinker:///weights/n",
        "a/weights/n",
        "tinker://a/weights/n/m",
        "tinker://a/things/n",
    ],
)
def test_bad_checkpoint_paths_are_refused(path: str) -> None:
    with pytest.raises(InputError) as caught:
        types.ParsedCheckpointTinkerPath.from_tinker_path(path)
    assert caught.value.path == "tinker_path"


def test_optim_step_takes_its_parameters_by_any_of_three_names() -> None:
    adam = types.AdamParams(learning_rate=1e-3)
    dimuon = types.DimuonParams(learning_rate=1e-3)
    for name in ("optim_params", "adam_params", "optimizer_params"):
        assert types.OptimStepRequest(model_id="m", **{name: adam}).optim_params == adam  # pyright: ignore[reportArgumentType]
        assert types.OptimStepRequest(model_id="m", **{name: dimuon}).optim_params == dimuon  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="give one"):
        types.OptimStepRequest(model_id="m", optim_params=adam, adam_params=adam)
    with pytest.raises(InputError) as caught:
        types.OptimStepRequest(model_id="m")
    assert caught.value.path == "OptimStepRequest.optim_params"


def test_optim_step_names_its_parameters_by_family_when_dumped() -> None:
    adam = types.OptimStepRequest(model_id="m", optim_params=types.AdamParams())
    assert "adam_params" in adam.model_dump(exclude_none=True)
    other = types.OptimStepRequest(
        model_id="m",
        optim_params=types.OptimParamsBase(type="lion", beta=0.5),  # pyright: ignore[reportCallIssue]
    )
    assert other.model_dump(exclude_none=True)["optimizer_params"] == {"type": "lion", "beta": 0.5}


def test_unknown_optimizer_families_keep_their_fields() -> None:
    config = types.OptimizerConfigBase(type="lion", beta=0.5)  # pyright: ignore[reportCallIssue]
    request = types.CreateModelRequest(
        session_id="s", model_seq_id=0, base_model="b", optimizer_config=config
    )
    decoded = msgspec.json.decode(request.model_dump_json(), type=types.CreateModelRequest)
    assert decoded.optimizer_config == config
    assert decoded.optimizer_config.beta == 0.5  # pyright: ignore[reportAttributeAccessIssue]
    for twin in (pickle.loads(pickle.dumps(config)), copy.copy(config), copy.deepcopy(config)):
        assert twin == config
    assert "beta=0.5" in repr(config)
    assert config != types.OptimizerConfigBase(type="lion")


def test_known_optimizer_families_decode_into_their_classes_and_stay_closed() -> None:
    text = b'{"base_model": "b", "is_lora": true, "optimizer_config": {"type": "dimuon"}}'
    info = msgspec.json.decode(text, type=types.WeightsInfoResponse)
    assert info.optimizer_config == types.DimuonOptimizerConfig()
    assert isinstance(info.optimizer_config, types.OptimizerConfigBase)
    with pytest.raises(InputTypeError):
        types.DimuonParams(learning_rate=1, momentum=1)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"learning_rate": -1},
        {"learning_rate": float("inf")},
        {"learning_rate": 1, "beta1": 1},
        {"learning_rate": 1, "beta1": -0.1},
        {"learning_rate": 1, "grad_clip_norm": float("nan")},
        {"learning_rate": 1, "type": "adamw"},
    ],
)
def test_dimuon_ranges_are_checked(fields: dict[str, object]) -> None:
    with pytest.raises(InputError) as caught:
        types.DimuonParams(**fields)  # pyright: ignore[reportArgumentType]
    assert caught.value.path.startswith("DimuonParams.")


def test_lora_rank_is_at_least_one() -> None:
    with pytest.raises(InputError) as caught:
        types.LoraConfig(rank=0)
    assert caught.value.path == "LoraConfig.rank"


def test_session_search_limits_are_checked() -> None:
    for fields in (
        {"limit": 0},
        {"limit": 201},
        {"display_name": ""},
        {"statuses": []},
        {"owner": {"type": "user", "owner_urns": []}},
    ):
        with pytest.raises(InputError):
            types.SessionSearchRequest(**fields)  # pyright: ignore[reportArgumentType]


def test_search_cursors_need_a_time_zone() -> None:
    now = datetime(2026, 1, 1, tzinfo=UTC)
    assert (
        types.SessionSearchCursor(last_created_at=now, last_session_id="s").last_created_at == now
    )
    with pytest.raises(InputError) as caught:
        types.SessionSearchCursor(last_created_at=now.replace(tzinfo=None), last_session_id="s")
    assert caught.value.path == "SessionSearchCursor.last_created_at"


def test_usage_adds_up_and_stays_out_of_comparisons() -> None:
    one = types.Usage(prompt_tokens=1, queue_s=0.5)
    two = types.Usage(prompt_tokens=2, device_s=0.25)
    assert one + two == types.Usage(prompt_tokens=3, queue_s=0.5, device_s=0.25)
    assert types.OptimStepResponse(metrics={}, usage=one) == types.OptimStepResponse(metrics={})
    assert types.OptimStepResponse(metrics={}) != types.OptimStepResponse(metrics={"a": 1.0})
    assert "usage" not in types.OptimStepResponse().model_dump()


@pytest.mark.req("B1")
def test_tokens_are_hidden_in_reprs() -> None:
    assert "canary" not in repr(types.AuthTokenResponse(jwt="canary"))
    load = types.LoadWeightsRequest(path="p", optimizer=True, weights_access_token="canary")
    copying = types.CopyWeightsRequest(source_path="p", weights_access_token="canary")
    assert "canary" not in repr(load) + repr(copying)
    assert load.weights_access_token == "canary"


def test_pydantic_models_can_hold_these_types() -> None:
    pydantic = pytest.importorskip("pydantic")

    class Holder(pydantic.BaseModel):  # type: ignore[misc,name-defined]
        params: types.SamplingParams
        tensor: types.TensorData

    holder = Holder(params={"max_tokens": 3}, tensor=types.TensorData([1], "int64"))
    assert holder.params == types.SamplingParams(max_tokens=3)
    assert Holder.model_validate_json(holder.model_dump_json()) == holder
    with pytest.raises(pydantic.ValidationError, match="did you mean"):
        Holder(params={"max_token": 3}, tensor=types.TensorData([1], "int64"))


def test_values_that_contain_themselves_are_refused() -> None:
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(InputError):
        types.CustomLossNode(op="output", name="n", target="t", args="x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(InputError, match="contains itself"):
        types.SamplingParams(stop=loop)  # pyright: ignore[reportArgumentType]


def test_every_struct_can_be_decoded_by_msgspec() -> None:
    structs = [getattr(types, name) for name in types.__all__]
    structs = [kind for kind in structs if isinstance(kind, type) and issubclass(kind, Value)]
    assert len(structs) > 100
    for kind in structs:
        msgspec.json.Decoder(kind, dec_hook=lambda _, obj: obj)


def test_importing_types_loads_no_heavy_library() -> None:
    code = (
        "import sys, tinkex.types;"
        "print([m for m in ('numpy', 'torch', 'pydantic') if m in sys.modules])"
    )
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert shown.stdout.strip() == "[]"


def test_chunks_work_in_run_time_type_expressions() -> None:
    assert int | types.ModelInputChunk
    assert list[types.ModelInputChunk]
    assert types.EncodedTextChunk | None


@pytest.mark.req("S7")
def test_a_bad_key_of_a_map_is_refused_at_the_maps_own_path() -> None:
    with pytest.raises(InputTypeError, match="keys must be str, got int") as caught:
        types.OptimStepResponse(metrics={5: 1.0})  # pyright: ignore[reportArgumentType]
    assert caught.value.path == "OptimStepResponse.metrics"
