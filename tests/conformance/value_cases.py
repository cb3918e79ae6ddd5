"""What an SDK makes of odd values; run as a program by the interpreter of either SDK.

`python value_cases.py tinker` prints one JSON line: for each case, what the value dumps as or
which built-in errors the refusal can be caught as. Imports nothing of ours but the SDK by name,
so that both run the very same lines.
"""

from __future__ import annotations

import importlib
import json
import sys
import warnings
from collections import deque
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable

# Fresh every time: a generator can be read once.
VALUES: dict[str, Callable[[], Any]] = {
    "None": lambda: None,
    "True": lambda: True,
    "0": lambda: 0,
    "-1": lambda: -1,
    "-2": lambda: -2,
    "5": lambda: 5,
    "5.0": lambda: 5.0,
    "5.5": lambda: 5.5,
    "1e300": lambda: 1e300,
    "nan": lambda: float("nan"),
    "inf": lambda: float("inf"),
    "2**31": lambda: 2**31,
    "2**70": lambda: 2**70,
    "'5'": lambda: "5",
    "'x'": lambda: "x",
    "''": lambda: "",
    "b'x'": lambda: b"x",
    "bytearray": lambda: bytearray(b"x"),
    "np.int64": lambda: np.int64(5),
    "np.float32": lambda: np.float32(5),
    "np.bool": lambda: np.bool_(True),
    "array()": lambda: np.array(5),
    "[]": list,
    "[1, 2]": lambda: [1, 2],
    "[1.0, 2.0]": lambda: [1.0, 2.0],
    "[1.5]": lambda: [1.5],
    "[-1]": lambda: [-1],
    "[True]": lambda: [True],
    "[None]": lambda: [None],
    "['1']": lambda: ["1"],
    "['a', 'b']": lambda: ["a", "b"],
    "['a', 1]": lambda: ["a", 1],
    "[[1, 2], [3, 4]]": lambda: [[1, 2], [3, 4]],
    "[[1], [2, 3]]": lambda: [[1], [2, 3]],
    "[2**31]": lambda: [2**31],
    "[2**70]": lambda: [2**70],
    "[np.int64]": lambda: [np.int64(1)],
    "(1, 2)": lambda: (1, 2),
    "range": lambda: range(2),
    "deque": lambda: deque([1, 2]),
    "generator": lambda: (item for item in [1, 2]),
    "dict keys": lambda: {1: 0, 2: 0}.keys(),
    "{1, 2}": lambda: {1, 2},
    "{}": dict,
    "{'a': 1}": lambda: {"a": 1},
    "{'a': 'b'}": lambda: {"a": "b"},
    "int array": lambda: np.array([1, 2]),
    "int32 array": lambda: np.array([1, 2], np.int32),
    "uint8 array": lambda: np.array([1, 2], np.uint8),
    "bool array": lambda: np.array([True, False]),
    "float array": lambda: np.array([1.0, 2.5]),
    "float16 array": lambda: np.array([1.0, 2.5], np.float16),
    "text array": lambda: np.array(["a"]),
    "object array": lambda: np.array([1, None], object),
    "2-D array": lambda: np.array([[1, 2], [3, 4]]),
    "strided array": lambda: np.arange(4)[::2],
    "read-only array": lambda: np.frombuffer(np.arange(2).tobytes(), np.int64),
    "object()": object,
}

NOW = datetime(2026, 1, 1, tzinfo=UTC)
# One good value of each type; every field in turn is then given every odd value.
GOOD: dict[str, Callable[[Any], dict[str, Any]]] = {
    "AdamParams": lambda _: {"learning_rate": 1e-3},
    "Checkpoint": lambda _: {
        "checkpoint_id": "c",
        "checkpoint_type": "training",
        "time": NOW,
        "tinker_path": "p",
    },
    "Cursor": lambda _: {"offset": 0, "limit": 1, "total_count": 2},
    "Datum": lambda types: {"model_input": types.ModelInput.from_ints([1, 2])},
    "DimuonParams": lambda _: {"learning_rate": 1e-3},
    "DmelChunk": lambda _: {"dmel": b"\x00\x01\x02"},
    "EncodedTextChunk": lambda _: {"tokens": [1]},
    "ImageAssetPointerChunk": lambda _: {"format": "png", "location": "l"},
    "ImageChunk": lambda _: {"data": b"x", "format": "png"},
    "LoraConfig": lambda _: {"rank": 8},
    "ModelInput": lambda _: {"chunks": []},
    "SampleRequest": lambda types: {
        "prompt": types.ModelInput.from_ints([1]),
        "sampling_params": types.SamplingParams(max_tokens=1),
    },
    "SamplingParams": lambda _: {"max_tokens": 1},
    "SaveWeightsRequest": lambda _: {"model_id": "m"},
    "TensorData": lambda _: {"data": [1, 2], "dtype": "int64"},
}
FIELDS: dict[str, str] = {
    "AdamParams": "learning_rate beta1 grad_clip_norm",
    "Checkpoint": "time size_bytes public user_metadata checkpoint_type",
    "Cursor": "offset",
    "Datum": "loss_fn_inputs",
    "DimuonParams": "learning_rate beta1 type",
    "DmelChunk": "dmel",
    "EncodedTextChunk": "tokens type",
    "ImageAssetPointerChunk": "format location expected_tokens",
    "ImageChunk": "data expected_tokens",
    "LoraConfig": "rank seed train_mlp",
    "ModelInput": "chunks",
    "SampleRequest": "num_samples prompt sampling_params prompt_logprobs target_prompt_logprobs",
    "SamplingParams": "max_tokens seed stop temperature top_k top_p misspelt",
    "SaveWeightsRequest": "path ttl_seconds user_metadata misspelt",
    "TensorData": "data dtype shape",
}


def calls(types: Any) -> dict[str, Callable[[Any], Any]]:
    """What else is called with every odd value."""
    one = types.ModelInput.from_ints([1, 2])
    return {
        "ModelInput.from_ints": types.ModelInput.from_ints,
        "ModelInput.append": one.append,
        "ModelInput.append_int": one.append_int,
        "TensorData.from_numpy": types.TensorData.from_numpy,
        "TensorData float32": lambda value: types.TensorData(data=value, dtype="float32"),
        "target_tokens": lambda value: types.Datum(one, {"target_tokens": value}),
        "weights": lambda value: types.Datum(one, {"weights": value}),
        "mask": lambda value: types.Datum(one, {"mask": value}),
        "from_tinker_path": types.ParsedCheckpointTinkerPath.from_tinker_path,
        "SamplingParams.model_validate": types.SamplingParams.model_validate,
        "AdamParams.model_validate": types.AdamParams.model_validate,
    }


def single_cases(types: Any) -> dict[str, Callable[[], Any]]:
    """Cases that are not the product of anything."""
    params = types.SamplingParams(max_tokens=5, stop=["a"])
    chunk = types.EncodedTextChunk(tokens=[1, 2])
    prompt = types.ModelInput(chunks=[chunk])
    datum = types.Datum(prompt, {"target_tokens": [1, 2]})
    path = types.ParsedCheckpointTinkerPath.from_tinker_path
    image = types.ImageChunk(data=b"x", format="png")
    return {
        "dump exclude": lambda: params.model_dump(exclude={"seed"}),
        "dump include": lambda: params.model_dump(include={"seed", "stop"}),
        "dump exclude_unset": lambda: params.model_dump(exclude_unset=True),
        "dump exclude_defaults": lambda: params.model_dump(exclude_defaults=True),
        "dump exclude_none": lambda: params.model_dump(exclude_none=True),
        "dump nested unset": lambda: prompt.model_dump(exclude_unset=True),
        "dump nested selection": lambda: prompt.model_dump(exclude={"chunks": {0: {"type"}}}),
        "dump explicit default": lambda: types.SamplingParams(seed=None).model_dump(
            exclude_unset=True
        ),
        "dump bytes": lambda: image.model_dump(),
        "dump bytes json": lambda: json.loads(image.model_dump_json()),
        "dump options": lambda: params.model_dump(by_alias=True, round_trip=True, warnings=False),
        "dump json": lambda: json.loads(prompt.model_dump_json(indent=2, exclude={"type"})),
        "fields": lambda: sorted(type(params).model_fields),
        "fields of a chunk": lambda: sorted(types.EncodedTextChunk.model_fields),
        "required": lambda: [
            types.LoraConfig.model_fields[name].is_required() for name in ("rank", "seed")
        ],
        "default": lambda: types.AdamParams.model_fields["beta2"].default,
        "fields set": lambda: sorted(params.model_fields_set),
        "construct": lambda: types.AdamParams.model_construct(beta1=0.5),
        "construct unchecked": lambda: types.AdamParams.model_construct(beta1="x").beta1,
        "dict": lambda: dict(params),
        "iterate": lambda: [name for name, _ in prompt],
        "assign": lambda: setattr(params, "seed", 1),
        "assign unknown": lambda: setattr(params, "sed", 1),
        "delete": lambda: delattr(params, "seed"),
        "assign to a request": lambda: setattr(types.AdamParams(), "beta1", 1.0),
        "assign to a datum": lambda: setattr(datum, "model_input", prompt),
        "assign to a tensor": lambda: setattr(datum.loss_fn_inputs["target_tokens"], "shape", [1]),
        "copy update": lambda: params.model_copy(update={"seed": 3}),
        "copy unchecked": lambda: params.model_copy(update={"seed": "x"}).seed,
        "validate json": lambda: types.SamplingParams.model_validate_json('{"max_tokens": 4}'),
        "validate bad json": lambda: types.SamplingParams.model_validate_json("{"),
        "pydantic 1 dict": lambda: params.dict(),
        "schema": lambda: bool(types.AdamParams.model_json_schema()),
        "hash with a list": lambda: hash(params),
        "hash": lambda: hash(types.AdamParams()) == hash(types.AdamParams()),
        "hash of a prompt": lambda: hash(prompt),
        "chunks are a list": lambda: (prompt.chunks + [chunk])[1].tokens,  # noqa: RUF005 -- adding lists is the point
        "tokens are a list": lambda: chunk.tokens + [3],  # noqa: RUF005 -- adding lists is the point
        "tuple tokens": lambda: types.EncodedTextChunk(tokens=(1, 2)).tokens,
        "equal prompts": lambda: prompt == types.ModelInput.from_ints([1, 2]),
        "equal datums": lambda: datum == types.Datum(prompt, {"target_tokens": [1, 2]}),
        "positional": lambda: types.AdamParams(1e-3),
        "datum positional": lambda: types.Datum(prompt, {"weights": [1.0, 2.0]}),
        "unknown member of a reply": lambda: types.Cursor.model_validate(
            {"offset": 0, "limit": 1, "total_count": 2, "new": 3}
        ),
        "path": lambda: path("tinker://r/weights/n"),
        "path empty name": lambda: path("tinker://r/weights/"),
        "path empty run": lambda: path("tinker:///weights/n"),
        "path trailing slash": lambda: path("tinker://r/weights/n/"),
        "path other kind": lambda: path("tinker://r/things/n"),
        "path without scheme": lambda: path("r/weights/n"),
        "path nested name": lambda: path("tinker://r/weights/a/b"),
        "shape tuple": lambda: types.TensorData(data=[1, 2], dtype="int64", shape=(2,)).shape,
        "shape -1": lambda: types.TensorData(data=[1, 2], dtype="int64", shape=[-1, 1]).shape,
        "shape too large": lambda: types.TensorData(data=[1, 2], dtype="int64", shape=[3]),
        "spans one-sided": lambda: types.Datum(prompt, {}, [], None),
        "chunk dict": lambda: types.ModelInput(chunks=[{"tokens": [1], "type": "encoded_text"}]),
        "chunk dict without type": lambda: types.ModelInput(chunks=[{"tokens": [1]}]),
        "chunk generator": lambda: types.ModelInput(chunks=(item for item in [chunk])),
        "chunk deque": lambda: types.ModelInput(chunks=deque([chunk])),
        "params dict": lambda: types.SampleRequest(
            prompt={"chunks": []}, sampling_params={"max_tokens": 4}
        ),
    }


CAUGHT_AS = (ValueError, TypeError, AttributeError, KeyError, AssertionError, OverflowError)


def outcome(make: Callable[[], Any]) -> Any:
    """What `make` gives as JSON, or what its refusal can be caught as."""
    try:
        value = make()
    except Exception as error:  # noqa: BLE001 -- which one it is, is the outcome
        return {"refused": [kind.__name__ for kind in CAUGHT_AS if isinstance(error, kind)]}
    return {"made": shown(value)}


def shown(value: Any) -> Any:
    """A value of either SDK in plain JSON; what has no value is told by its type."""
    if hasattr(value, "model_dump"):
        return shown(value.model_dump(mode="python"))
    if hasattr(value, "loss_fn_inputs"):
        return {"input": shown(value.model_input), "loss": shown(value.loss_fn_inputs)}
    if hasattr(value, "tolist") and hasattr(value, "dtype") and hasattr(value, "data"):
        numbers = value.tolist() if isinstance(value, np.ndarray) else value.data
        return {"data": shown(numbers), "dtype": str(value.dtype), "shape": shown(value.shape)}
    if isinstance(value, dict):
        return {str(key): shown(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque | range):
        return [shown(item) for item in value]
    if isinstance(value, float):
        return int(value) if value.is_integer() else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, bytes):
        return value.hex()
    return type(value).__name__


def main(name: str) -> None:
    """Print the outcome of every case."""
    warnings.simplefilter("ignore")
    types = importlib.import_module(f"{name}.types")
    seen: dict[str, Any] = {}
    for kind, fields in FIELDS.items():
        for field in fields.split():
            for text, value in VALUES.items():
                given = {**GOOD[kind](types), field: value()}
                seen[f"{kind}.{field} = {text}"] = outcome(partial(getattr(types, kind), **given))
    for call, function in calls(types).items():
        for text, value in VALUES.items():
            seen[f"{call}({text})"] = outcome(partial(function, value()))
    for text, make in single_cases(types).items():
        seen[text] = outcome(make)
    sys.stdout.write(json.dumps(seen))


if __name__ == "__main__":
    main(sys.argv[1])
