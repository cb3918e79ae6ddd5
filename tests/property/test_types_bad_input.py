"""Whatever is thrown at a public constructor, it makes a value or raises our error."""

import copy
import dataclasses
import inspect
import pickle
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec import inspect as mi

from tinkex import types
from tinkex.errors import InputError
from tinkex.types.training import batch_to_send
from tinkex.types.value import Value

PUBLIC = [getattr(types, name) for name in types.__all__]
STRUCTS = [kind for kind in PUBLIC if isinstance(kind, type) and issubclass(kind, Value)]
DATA = [types.TensorData, *(kind for kind in PUBLIC if dataclasses.is_dataclass(kind))]

FAST = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow], max_examples=300)

numbers = st.one_of(
    st.integers(),
    st.sampled_from([0, -1, 2**31, 2**63, 2**64, 2**70, True]),
    st.floats(),
    st.complex_numbers(),
)
scalars = st.one_of(
    st.none(),
    numbers,
    st.text(max_size=5),
    st.binary(max_size=5),
    st.sampled_from(["int64", "float32", "stop", "png", "adamw", "cross_entropy", "success"]),
    st.datetimes(),
)
objects = st.sampled_from(
    [
        object(),
        object,
        np.float32("nan"),
        np.int64(3),
        np.bool_(True),
        np.str_("x"),
        np.datetime64("2026-01-01"),
        np.zeros(0),
        np.arange(3),
        np.ones((2, 2), np.uint16),
        np.array(["a"]),
        np.array([None, 1], object),
        np.array(1.5),
        torch.ones(2),
        torch.ones(1, dtype=torch.complex64),
        torch.zeros(3, 9),
        torch.tensor(2),
        range(3),
        {1, 2},
        frozenset({1}),
        types.SamplingParams(),
        types.ModelInput.from_ints([1]),
        types.AdamParams(),
        types.OptimParamsBase(type="x"),
        types.TensorData([1], "int64"),
        types.SampledSequence("stop", "s"),
        types.RequestErrorCategory.User,
        lambda: None,
    ]
)
junk = st.recursive(
    st.one_of(scalars, objects),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.tuples(inner, inner),
        st.dictionaries(
            st.one_of(st.text(max_size=4), st.just("type"), st.integers()), inner, max_size=3
        ),
    ),
    max_leaves=6,
)
names = st.text("abcdefgh_", min_size=1, max_size=12)


def attempt(make: Callable[[], Any]) -> tuple[Any, InputError | None]:
    """What `make` returned, or our error; any other exception fails the test."""
    try:
        return make(), None
    except InputError as error:
        return None, error


@FAST
@given(st.data())
@pytest.mark.req("S12")
def test_structs_refuse_junk_with_its_path(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(STRUCTS))
    keys = st.sampled_from([*kind.__struct_fields__, "type"])
    fields = data.draw(st.dictionaries(st.one_of(keys, names), junk, max_size=4))
    value, error = attempt(lambda: kind(**fields))
    if error is None:
        assert isinstance(value, kind)
    else:
        assert error.path.startswith(kind.__name__)


@FAST
@given(st.data())
@pytest.mark.req("S12")
def test_one_bad_field_among_good_ones_is_named(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([kind for kind in STRUCTS if kind.__struct_fields__]))
    good = data.draw(struct(kind))
    name = data.draw(st.sampled_from(kind.__struct_fields__))
    fields = {key: getattr(good, key) for key in kind.__struct_fields__}
    fields[name] = data.draw(junk)
    _, error = attempt(lambda: kind(**fields))
    assert error is None or error.path.startswith(f"{kind.__name__}.")


@FAST
@given(st.data())
def test_model_validate_refuses_junk_with_our_error(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(STRUCTS))
    keys = st.one_of(st.sampled_from([*kind.__struct_fields__, "type"]), st.integers())
    thing = data.draw(st.one_of(junk, st.dictionaries(keys, junk, max_size=3)))
    _, error = attempt(lambda: kind.model_validate(thing))
    assert error is None or error.path.startswith(kind.__name__)


@FAST
@given(st.data())
@pytest.mark.req("S12")
def test_data_classes_refuse_junk_with_its_path(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(DATA))
    parameters = list(inspect.signature(kind).parameters.values())
    fields: dict[str, Any] = {}
    for parameter in parameters:
        required = parameter.default is inspect.Parameter.empty
        if required or data.draw(st.booleans()):
            fields[parameter.name] = data.draw(st.one_of(junk, likely(parameter.name)))
    value, error = attempt(lambda: kind(**fields))
    assert repr(value) if error is None else error.path


def likely(name: str) -> st.SearchStrategy[Any]:
    """Something that may fit, so that later checks are reached too."""
    small = st.lists(st.integers(0, 3), max_size=3)
    choices: dict[str, st.SearchStrategy[Any]] = {
        "dtype": st.sampled_from(["int64", "float32"]),
        "shape": small,
        "sparse_crow_indices": small,
        "sparse_col_indices": small,
        "stop_reason": st.just("stop"),
        "sequence_id": st.just("s"),
        "model_id": st.just("m"),
        "loss_fn": st.just("ppo"),
        "model_input": st.just(types.ModelInput.from_ints([1])),
        "loss_fn_inputs": st.dictionaries(st.sampled_from(["weights", "mask"]), junk, max_size=2),
    }
    return choices.get(name, small)


@FAST
@given(st.one_of(junk, st.lists(st.one_of(scalars, objects), max_size=4)))
@pytest.mark.req("B12")
def test_from_ints_makes_ids_or_names_the_bad_one(tokens: Any) -> None:
    made, error = attempt(lambda: types.ModelInput.from_ints(tokens))
    if error is not None:
        assert error.path.startswith("tokens")
    else:
        assert all(type(token) is int and 0 <= token < 2**31 for token in made.to_ints())


@FAST
@given(
    st.lists(st.integers(0, 9), max_size=4),
    st.dictionaries(
        st.sampled_from(["target_tokens", "weights", "advantages", "logprobs", "other"]),
        st.one_of(
            junk,
            st.lists(st.floats(width=32), max_size=4),
            st.lists(st.integers(-2, 9), max_size=4),
        ),
        max_size=4,
    ),
    st.one_of(junk, st.sampled_from(["cross_entropy", "ppo", "custom"])),
)
@pytest.mark.req("B14")
def test_datums_are_refused_before_they_are_sent_or_are_sound(
    tokens: list[int], inputs: dict[str, Any], loss_fn: Any
) -> None:
    datum, error = attempt(lambda: types.Datum(types.ModelInput.from_ints(tokens), inputs))
    if error is None:
        _, error = attempt(lambda: batch_to_send([datum], loss_fn, vocab_size=10))
    if error is not None:
        assert error.path.startswith(("loss_fn_inputs[", "loss_fn", "data[0]"))
    elif loss_fn in ("cross_entropy", "ppo"):
        for key, tensor in datum.loss_fn_inputs.items():
            if key != "other":
                assert tensor.to_numpy().shape[0] == len(tokens)
                assert np.isfinite(tensor.to_numpy()).all()


# Valid values, derived from the declared types.

_SPECIAL: dict[str, st.SearchStrategy[Any]] = {
    "optimizer_config": st.sampled_from(
        [
            types.AdamOptimizerConfig(),
            types.DimuonOptimizerConfig(),
            types.OptimizerConfigBase(type="z"),
        ]
    ),
    "adam_params": st.just(types.AdamParams()),
    "optimizer_params": st.none(),
    "stop": st.one_of(st.none(), st.text(), st.lists(st.text()), st.lists(st.integers(0, 9))),
    "seed": st.one_of(st.none(), st.integers(0, 2**32)),
}
_instants = st.datetimes(min_value=datetime(2000, 1, 1), timezones=st.just(UTC))
_texts = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=4)


def valid(kind: Any) -> st.SearchStrategy[Any]:  # noqa: C901 -- one line per kind of type
    match kind:
        case mi.IntType():
            low = kind.ge if kind.ge is not None else -5
            high = (
                kind.le if kind.le is not None else (kind.lt - 1 if kind.lt is not None else 10**6)
            )
            return st.integers(low, high)
        case mi.FloatType():
            low = kind.ge if kind.ge is not None else -5.0
            high = kind.le if kind.le is not None else 0.75
            return st.floats(low, high, allow_nan=False)
        case mi.StrType():
            return _texts
        case mi.BoolType():
            return st.booleans()
        case mi.NoneType():
            return st.none()
        case mi.BytesType():
            return st.binary(max_size=4)
        case mi.DateTimeType():
            return _instants
        case mi.LiteralType():
            return st.sampled_from(kind.values)
        case mi.EnumType():
            return st.sampled_from(list(kind.cls))
        case mi.ListType():
            low = kind.min_length or 0
            return st.lists(valid(kind.item_type), min_size=low, max_size=max(low, 2))
        case mi.DictType():
            return st.dictionaries(_texts, valid(kind.value_type), max_size=2)
        case mi.UnionType():
            return st.one_of(*(valid(part) for part in kind.types))
        case mi.StructType():
            return struct(kind.cls)
        case mi.CustomType():
            return st.just(types.TensorData([1, 2], "int64", [1, 2]))
        case _:
            return st.one_of(st.none(), st.integers(0, 9), _texts)


def struct(kind: type[Value]) -> st.SearchStrategy[Any]:
    described = mi.type_info(kind)
    assert isinstance(described, mi.StructType)
    fields = {field.name: _SPECIAL.get(field.name, valid(field.type)) for field in described.fields}
    return st.builds(kind, **fields)


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=400)
@given(st.data())
@pytest.mark.req("S12")
def test_every_valid_value_pickles_copies_compares_and_comes_back(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(STRUCTS))
    value = data.draw(struct(kind))
    for twin in (
        pickle.loads(pickle.dumps(value)),
        copy.copy(value),
        copy.deepcopy(value),
        value.model_copy(),
        kind.model_validate(value.model_dump()),
        kind.model_validate_json(value.model_dump_json()),
    ):
        assert twin == value
        assert type(twin) is kind
    assert not (value != value.model_copy())  # noqa: SIM202 -- `!=` is its own method
    repr(value)


@settings(deadline=None, suppress_health_check=list(HealthCheck), max_examples=200)
@given(st.data())
@pytest.mark.req("S9")
def test_decoding_skips_members_that_are_not_known(data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from([k for k in STRUCTS if not getattr(k, "__open__", False)]))
    value = data.draw(struct(kind))
    body = {**value.model_dump(mode="json"), "a_new_member": {"x": [1]}}
    hook = {"dec_hook": lambda _, obj: types.TensorData.from_json(obj)}
    assert msgspec.json.decode(msgspec.json.encode(body), type=kind, **hook) == value
