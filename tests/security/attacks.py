"""Every way found so far in which one tenant, or an outsider, could disturb the others.

Each attack is a function of a world that asserts how its requests are answered. `test_attacks.py`
runs them one by one and asserts memory, states and the server's own measure of its event loop;
`python -m benchmarks.hostile` runs them and prints how long the neighbour waited meanwhile.
"""

from __future__ import annotations

import json
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

from tests.e2e.serving import MODEL
from tinkex.wire.compression import compress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tests.security.world import Answer, World

    Attack = Callable[[World], None]

_INT64 = 2**63 - 1
# What is sent as a number where one is expected, and must be refused as input.
NUMBERS = [-(2**70), -(2**63) - 1, -1, _INT64, 2**63, 2**64, 10**400, 1e308, 0.5]
PROMPT = {"chunks": [{"type": "encoded_text", "tokens": [1, 2, 3]}]}
# The address of an attacker who is no neighbour on the same machine.
ELSEWHERE = "127.0.0.9"
JSON = "application/json"
PROTOBUF = "application/x-protobuf"


def _refused(answer: Answer, *statuses: int) -> None:
    """Refused as input: what is wrong, in few words."""
    allowed = statuses or (400, 413, 422)
    assert answer.status in allowed, (answer.status, answer.body[:300])
    assert len(answer.body) < 4096, len(answer.body)


def _settled(world: World, answer: Answer) -> None:
    """Refused at once, or accepted and ended."""
    assert answer.status in (200, 400, 413, 422, 429), (answer.status, answer.body[:300])
    assert len(answer.body) < 4096, len(answer.body)
    if answer.status == 200:
        world.attacker.result(answer.json["request_id"])


def _zstd(world: World, path: str, body: bytes, media: str = JSON) -> Answer:
    headers = {"content-type": media, "content-encoding": "zstd"}
    return world.attacker.request("POST", path, compress(body), headers)


def _field(number: int, content: bytes) -> bytes:
    """A length-delimited field of protobuf."""
    return _varint(number << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])


# -- 1: numbers --------------------------------------------------------------------------------


def the_last_seq_id_then_none_then_the_end(world: World) -> None:
    session = world.attacker.session()
    model = world.attacker.model(session)
    first = world.attacker.post("optim_step", _step(model, seq_id=_INT64))
    _settled(world, first)
    second = world.attacker.post("optim_step", _step(model))
    assert second.status in (200, 400), second
    world.attacker.finish(session)


def a_seq_id_out_of_every_range(world: World) -> None:
    session = world.attacker.session()
    model, sampler = world.attacker.model(session), world.attacker.sampler(session)
    for number in NUMBERS:
        for path, body in (
            ("optim_step", _step(model, seq_id=number)),
            ("save_weights", {"model_id": model, "seq_id": number, "path": "x"}),
            ("save_weights_for_sampler", {"model_id": model, "seq_id": number}),
            ("load_weights", {"model_id": model, "seq_id": number, "path": "tinker://a/weights/b"}),
            ("tinkex/release_numbers", {"model_id": model, "seq_ids": [number]}),
            ("asample", _sample(sampler, seq_id=number)),
        ):
            answer = world.attacker.post(path, body)
            assert answer.status < 500, (path, number, answer.body[:300])
    world.attacker.finish(session)


def other_numbers_out_of_every_range(world: World) -> None:
    session = world.attacker.session()
    model, sampler = world.attacker.model(session), world.attacker.sampler(session)
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
    saved = f"training_runs/{model}/checkpoints/weights/x"
    for number in NUMBERS:
        for method, path, body in (
            ("POST", "create_model", _model(session, model_seq_id=number)),
            ("POST", "create_model", _model(session, lora_config={"rank": number})),
            ("POST", "create_model", _model(session, lora_config={"rank": 4, "seed": number})),
            ("POST", "create_sampling_session", _sampler(session, number)),
            ("POST", "create_custom_loss", _loss(session, custom_loss_seq_id=number)),
            ("POST", "save_weights", {"model_id": model, "ttl_seconds": number, "path": "x"}),
            ("PUT", f"{saved}/ttl", {"ttl_seconds": number}),
            ("POST", "retrieve_futures", {"target": target, "prev_cursor": number}),
            ("POST", "retrieve_futures", {"target": target, "timeout": number}),
            ("POST", "sessions/search", {"limit": number}),
            ("POST", "asample", _sample(sampler, num_samples=number)),
            ("POST", "asample", _sample(sampler, prompt_logprobs_last_n=number)),
            ("POST", "optim_step", _step(model, adam_params={"learning_rate": number})),
        ):
            content = {"content-type": JSON}
            data = json.dumps(body).encode()
            answer = world.attacker.request(method, path, data, content)
            assert answer.status < 500, (path, body, answer.body[:300])
    world.attacker.finish(session)


# -- 2: heads ----------------------------------------------------------------------------------


def an_endless_header(world: World) -> None:
    _pour(world, b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-a: ", b"a" * (1 << 20), 300)


def an_endless_target(world: World) -> None:
    _pour(world, b"GET /", b"a" * (1 << 20), 100)


def headers_without_end(world: World) -> None:
    _pour(world, b"GET /healthz HTTP/1.1\r\nhost: x\r\n", b"a: b\r\n" * 100_000, 100)


def _pour(world: World, head: bytes, piece: bytes, pieces: int) -> None:
    """Send until the server closes; it must have refused what came."""
    answer = b""
    with world.connect(ELSEWHERE) as connection, suppress(ConnectionError, TimeoutError):
        connection.sendall(head)
        for _ in range(pieces):
            connection.sendall(piece)
        connection.shutdown(socket.SHUT_WR)
        answer = connection.recv(100)
    assert answer[9:12] in (b"", b"400", b"414", b"431"), answer


# -- 3: small bodies, large work ---------------------------------------------------------------


def a_tensor_with_a_shape_of_sixty_million(world: World) -> None:
    session = world.attacker.session()
    model = world.attacker.model(session)
    tensor = _field(1, b"\0\0\0\0") + b"\x18\x01" + _field(4, b"\1" * 60_000_000)
    named = _field(1, b"weights") + _field(2, tensor)
    datum = _field(1, _field(1, _field(1, b"\1\0\0\0"))) + _field(2, named)
    body = _field(1, model.encode()) + b"\x10\x01" + _field(3, datum) + _field(4, b"cross_entropy")
    _settled(world, _zstd(world, "forward_backward", body, PROTOBUF))
    world.attacker.finish(session)


def packed_numbers_in_every_field(world: World) -> None:
    session = world.attacker.session()
    model = world.attacker.model(session)
    for number in range(1, 8):
        body = _field(1, model.encode()) + _field(number, b"\1" * 30_000_000)
        answer = _zstd(world, "forward_backward", body, PROTOBUF)
        assert answer.status in (200, 400, 404, 413), (number, answer.status, answer.body[:300])
    world.attacker.finish(session)


def millions_of_strings_under_an_unknown_key(world: World) -> None:
    body = b'{"unknown":[' + b'"",' * 13_000_000 + b'""],"model_id":"x"}'
    _refused(_zstd(world, "forward_backward", body), 400, 404, 413)
    _refused(_zstd(world, "asample", body), 400, 404, 413)


def millions_of_tokens(world: World) -> None:
    session = world.attacker.session()
    sampler = world.attacker.sampler(session)
    for count in (13_000_000, 32_000_000):
        body = json.dumps(_sample(sampler, prompt=None)).encode()
        tokens = b"1," * (count - 1) + b"1"
        prompt = b'{"chunks":[{"type":"encoded_text","tokens":[' + tokens + b"]}]}"
        _refused(_zstd(world, "asample", body.replace(b'"prompt": null', b'"prompt":' + prompt)))
    world.attacker.finish(session)


def millions_of_lists_and_objects(world: World) -> None:
    for piece in (b"[],", b"{},", b"[[[]]],", b'{"a":{}},', b"null,", b"0,", b"0.1,", b"true,"):
        body = b'{"a":[' + piece * (60_000_000 // len(piece)) + b"0]}"
        _refused(_zstd(world, "asample", body), 400, 404, 413)


def deep_nesting(world: World) -> None:
    for route in ("asample", "forward_backward", "create_session", "/v1/completions"):
        for piece in (b"[", b'{"a":', b'[{"a":'):
            headers = {"content-type": JSON}
            body = b'{"a":' + piece * 100_000
            answer = world.attacker.request("POST", route, body, headers)
            _refused(answer, 400, 404, 413, 422)


def strings_that_must_be_unescaped(world: World) -> None:
    body = b'{"sdk_version":"' + rb"\u0041" * 600_000 + b'","tags":[]}'
    headers = {"content-type": JSON}
    answer = world.attacker.request("POST", "create_session", body, headers)
    _refused(answer)


def a_large_body_as_it_is(world: World) -> None:
    """Not compressed: it arrives in very many pieces."""
    session = world.attacker.session()
    model = world.attacker.model(session)
    tokens = _field(1, _field(1, _field(1, b"\1\0\0\0" * 15_000_000)))
    body = _field(1, model.encode()) + b"\x10\x01" + _field(3, tokens) + _field(4, b"cross_entropy")
    for _ in range(2):
        answer = world.attacker.request(
            "POST", "forward_backward", body, {"content-type": PROTOBUF}
        )
        _settled(world, answer)
    world.attacker.finish(session)


# -- 4: counts ---------------------------------------------------------------------------------


def counts_of_samples(world: World) -> None:
    session = world.attacker.session()
    sampler = world.attacker.sampler(session)
    long = {"chunks": [{"type": "encoded_text", "tokens": [1] * 500}]}
    for number, members in enumerate(
        (
            {"prompt_alt_tokens_k": 10**7, "prompt": long},
            {"prompt_alt_tokens_k": 2**31 - 1},
            {"topk_prompt_logprobs": 10**7, "prompt_logprobs": True, "prompt": long},
            {"topk_sample_logprobs": 10**7},
            {"num_samples": 10**6},
            {"sampling_params": {"max_tokens": 2**31 - 1}},
            {"sampling_params": {"max_tokens": 4, "stop": ["a" * 1000] * 2000}},
            {"sampling_params": {"max_tokens": 4, "stop": list(range(100_000))}},
            {"sampling_params": {"max_tokens": 4, "top_k": 2**31 - 1}},
            {"prompt_logprobs_last_n": 2**31, "prompt_logprobs": True},
            {"target_prompt_logprobs": {"data": [1], "dtype": "int64", "shape": [2, 10**9]}},
            {
                "target_prompt_logprobs": {
                    "data": [1] * 10**5,
                    "dtype": "int64",
                    "shape": [2, 50000],
                }
            },
        )
    ):
        _settled(world, world.attacker.post("asample", _sample(sampler, seq_id=number, **members)))
    world.attacker.finish(session)


def prompts_as_long_as_the_context(world: World) -> None:
    """All at once: one tenant's prompts must not be computed before those of all others."""
    session = world.attacker.session()
    sampler = world.attacker.sampler(session)
    asked: list[str] = []
    for number in range(12):
        tokens = [(number * 31 + i * 7) % 250 for i in range(8_000)]
        prompt = {"chunks": [{"type": "encoded_text", "tokens": tokens}]}
        answer = world.attacker.post("asample", _sample(sampler, seq_id=number, prompt=prompt))
        assert answer.status == 200, answer.body[:300]
        asked.append(json.loads(answer.body)["request_id"])
    for request_id in asked:
        assert "error" not in str(world.attacker.result(request_id))[:300]
    world.attacker.finish(session)


def stop_strings_that_are_looked_for_all_the_time(world: World) -> None:
    """As many and as long as may be, each ending in a character that every text has."""
    session = world.attacker.session()
    sampler = world.attacker.sampler(session)
    stop = [f"{number:02d}" + "x" * 1021 + chr(32 + number) for number in range(64)]
    members = {"sampling_params": {"max_tokens": 32, "stop": stop}, "num_samples": 32}
    prompt = {"chunks": [{"type": "encoded_text", "tokens": [97 + i % 20 for i in range(1500)]}]}
    asked = _sample(sampler, seq_id=0, prompt=prompt, **members)
    answer = world.attacker.post("asample", asked)
    assert answer.status == 200, answer.body[:300]
    assert "error" not in str(world.attacker.result(json.loads(answer.body)["request_id"]))[:300]
    world.attacker.finish(session)


def ranks_and_models(world: World) -> None:
    session = world.attacker.session()
    for number, rank in enumerate((10**5, 10**7, 2**31 - 1, 0)):
        _settled(
            world,
            world.attacker.post(
                "create_model", _model(session, model_seq_id=number, lora_config={"rank": rank})
            ),
        )
    world.attacker.finish(session)


def lists_of_ids(world: World) -> None:
    session = world.attacker.session()
    model, sampler = world.attacker.model(session), world.attacker.sampler(session)
    target = {"type": "sampling_session", "sampling_session_id": sampler, "cloned_sampler_id": 0}
    for path, body in (
        ("tinkex/release_numbers", {"model_id": model, "seq_ids": list(range(400_000))}),
        (
            "retrieve_futures",
            {"target": target, "prev_cursor": 0, "retrieved_request_ids": ["x"] * 400_000},
        ),
        ("sessions/search", {"project_ids": ["x"] * 400_000}),
        ("sessions/search", {"user_metadata": {str(n): "x" for n in range(100_000)}}),
    ):
        answer = world.attacker.post(path, body)
        assert answer.status in (200, 400, 413), (path, answer.status, answer.body[:300])
    world.attacker.finish(session)


# -- 5: what is kept ---------------------------------------------------------------------------


def metadata_of_megabytes(world: World) -> None:
    text = "x" * 3_900_000
    for members in (
        {"user_metadata": {"a": text}},
        {"tags": [text]},
        {"display_name": text},
        {"project_id": text},
        {"sdk_version": text},
        {"tags": ["x"] * 500_000},
    ):
        body = {"tags": [], "user_metadata": {}, "sdk_version": "0.36.0", **members}
        for _ in range(7):
            _refused(world.attacker.post("create_session", body), 400, 413, 429, 507)
    session = world.attacker.session()
    for path, body in (
        ("create_model", _model(session, user_metadata={"a": text})),
        (f"sessions/{session}/project", {"project_id": text}),
        (f"sessions/{session}/finish", {"reason": {"type": "success"}, "detail": text}),
    ):
        method = "PUT" if path.endswith("project") else "POST"
        data = json.dumps(body).encode()
        _refused(world.attacker.request(method, path, data, {"content-type": JSON}))
    for path in ("sessions?limit=1000", "training_runs?limit=1000"):
        assert len(world.attacker.get(path).body) < 1 << 20
    world.attacker.finish(session)


def custom_losses_of_megabytes(world: World) -> None:
    session = world.attacker.session()
    for number in range(20):
        graph = {"nodes": [{"op": "placeholder", "name": "x" * 3_800_000, "target": "x"}]}
        body = _loss(session, custom_loss_seq_id=number, graph=graph)
        _refused(world.attacker.post("create_custom_loss", body), 400, 413, 429)
    world.attacker.finish(session)


# -- 6: connections ----------------------------------------------------------------------------


def half_sent_heads(world: World) -> None:
    """Held while the neighbour works; whether they time out is in `test_connections.py`."""
    with ExitStack() as stack:
        for _ in range(600):
            with suppress(OSError):
                connection = stack.enter_context(world.connect(ELSEWHERE))
                connection.sendall(b"GET /healthz HTTP/1.1\r\nhost: x\r\nx-a: ")
        world.assert_well()


def silent_connections(world: World) -> None:
    with ExitStack() as stack:
        for _ in range(600):
            with suppress(OSError):
                stack.enter_context(world.connect(ELSEWHERE))
        world.assert_well()


def bodies_that_do_not_come(world: World) -> None:
    head = (
        "POST /api/v1/asample HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"x-api-key: {world.attacker.key}\r\ncontent-length: 1000000\r\n\r\n"
    )
    with ExitStack() as stack:
        for _ in range(100):
            with suppress(OSError):
                connection = stack.enter_context(world.connect(ELSEWHERE))
                connection.sendall(head.encode() + b'{"a":')
        world.assert_well()


def answers_that_are_not_read(world: World) -> None:
    """Requests are sent on and on, and what comes back is left lying."""
    request = (
        "GET /api/v1/get_server_capabilities HTTP/1.1\r\nhost: x\r\n"
        f"x-api-key: {world.attacker.key}\r\n\r\n"
    ).encode()
    with ExitStack() as stack:
        for _ in range(10):
            connection = stack.enter_context(world.connect(ELSEWHERE))
            connection.settimeout(1.0)
            with suppress(OSError):
                for _ in range(2000):
                    connection.sendall(request * 20)
        world.assert_well()


# -- 7: bad keys -------------------------------------------------------------------------------


def many_bad_keys_from_made_up_addresses(world: World) -> None:
    statuses: set[int] = set()
    for number in range(400):
        headers = {
            "x-api-key": f"tml-{number}",
            "x-forwarded-for": f"10.0.{number // 250}.{number % 250}",
        }
        with world.connect(ELSEWHERE) as connection:
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            head = f"GET /api/v1/sessions HTTP/1.1\r\nhost: x\r\n{lines}connection: close\r\n\r\n"
            connection.sendall(head.encode())
            statuses.add(int(connection.recv(100)[9:12]))
    assert statuses == {401, 429}, statuses
    # The neighbour is somebody else, whatever address the bad ones came from.
    assert world.neighbour.get("sessions").status == 200


# -- 8: input that was answered by 500 ---------------------------------------------------------


def numbers_of_thousands_of_digits(world: World) -> None:
    digits = "9" * 5000
    for path in ("sessions", "training_runs", "checkpoints"):
        for name in ("limit", "offset"):
            _refused(world.attacker.get(f"{path}?{name}={digits}"), 400, 414, 431)
    for name in (
        "x-tinker-sdk-version",
        "x-stainless-package-version",
        "x-tinkex-version",
        "content-length",
        "user-agent",
        "range",
        "x-idempotency-key",
    ):
        answer = world.attacker.request("GET", "sessions", None, {name: digits})
        assert answer.status in (200, 400, 413, 431), (name, answer.status, answer.body[:300])
        made = world.attacker.request("POST", "client/config", b"{}", {name: digits})
        assert made.status in (200, 400, 413, 431), (name, made.status, made.body[:300])
    for path in ("billing/usage/events", "audit"):
        for query in (f"starting_on={digits}&ending_before={digits}", f"day={digits}"):
            answer = world.attacker.get(f"{path}?{query}")
            assert answer.status in (200, 400, 414), (path, query[:20], answer.status)


def nested_json_below_v1(world: World) -> None:
    for path in ("/v1/completions", "/v1/chat/completions"):
        for member in ("prompt", "messages", "stop", "metadata", "logit_bias"):
            for deep in (b"[" * 90_000 + b"]" * 90_000, b'{"a":' * 90_000 + b"1" + b"}" * 90_000):
                body = (
                    b'{"model":"' + MODEL.encode() + b'","' + member.encode() + b'":' + deep + b"}"
                )
                answer = world.attacker.request("POST", path, body, {"content-type": JSON})
                _refused(answer)


def a_nested_adapter_config(world: World) -> None:
    from tests.unit.adapters import kit
    from tinkex.adapters.archive import pack

    deep = b'{"r": 4, "a": ' + b"[" * 200_000 + b"]" * 200_000 + b"}"
    for config in (deep, b"[" * 500_000, b'{"r": ' + b"9" * 5000 + b"}"):
        body = pack({**kit.files(), kit.CONFIG: config})
        _refused(
            world.attacker.request(
                "POST",
                f"import_weights?base_model={MODEL}&name=x",
                body,
                {"content-type": "application/x-tar"},
            )
        )


# -- 9: the log --------------------------------------------------------------------------------


def ids_of_megabytes(world: World) -> None:
    text = "x" * 3_900_000
    before = len(world.log)
    for path, body in (
        ("get_info", {"model_id": text}),
        ("optim_step", _step(text)),
        ("retrieve_future", {"request_id": text}),
        ("cancel_future", {"request_id": text}),
        ("asample", _sample(text)),
        ("weights_info", {"tinker_path": f"tinker://{text}/weights/x"}),
        ("session_heartbeat", {"session_id": text}),
        ("create_model", _model(text)),
        ("/v1/completions", {"model": text, "prompt": "x"}),
    ):
        answer = world.attacker.post(path, body)
        assert answer.status in (400, 404, 413), (path, answer.status)
        assert len(answer.body) < 4096, (path, len(answer.body))
    assert len(world.log) - before < 100_000


# -- many at once ------------------------------------------------------------------------------


def small_requests_at_once(world: World) -> None:
    """What one tenant may send anyway, from many connections."""
    end = time.monotonic() + 3.0

    def ask(_: int) -> Iterator[int]:
        while time.monotonic() < end:
            yield world.attacker.get("sessions?limit=10").status

    with ThreadPoolExecutor(16) as pool:
        statuses = {
            status for some in pool.map(lambda n: set(ask(n)), range(16)) for status in some
        }
    assert statuses <= {200, 429}, statuses


def _step(model: str, **members: Any) -> dict[str, Any]:
    return {"model_id": model, "adam_params": {}, **members}


def _sample(sampler: str, **members: Any) -> dict[str, Any]:
    base = {"num_samples": 1, "prompt": PROMPT, "sampling_params": {"max_tokens": 1}}
    return {"sampling_session_id": sampler, **base, **members}


def _model(session: str, **members: Any) -> dict[str, Any]:
    base = {"model_seq_id": 0, "base_model": MODEL, "lora_config": {"rank": 4}}
    return {"session_id": session, **base, **members}


def _sampler(session: str, number: float) -> dict[str, Any]:
    return {"session_id": session, "sampling_session_seq_id": number, "base_model": MODEL}


def _loss(session: str, **members: Any) -> dict[str, Any]:
    graph = {"nodes": [{"op": "placeholder", "name": "x", "target": "x"}]}
    base = {"custom_loss_seq_id": 0, "name": "n", "inputs": [{"name": "x", "rank": 1}]}
    return {"session_id": session, **base, "graph": graph, **members}


ATTACKS: dict[str, tuple[Attack, ...]] = {
    "1 numbers": (
        the_last_seq_id_then_none_then_the_end,
        a_seq_id_out_of_every_range,
        other_numbers_out_of_every_range,
    ),
    "2 heads": (an_endless_header, an_endless_target, headers_without_end),
    "3 small bodies": (
        a_tensor_with_a_shape_of_sixty_million,
        packed_numbers_in_every_field,
        millions_of_strings_under_an_unknown_key,
        millions_of_tokens,
        millions_of_lists_and_objects,
        deep_nesting,
        strings_that_must_be_unescaped,
        a_large_body_as_it_is,
    ),
    "4 counts": (
        counts_of_samples,
        prompts_as_long_as_the_context,
        stop_strings_that_are_looked_for_all_the_time,
        ranks_and_models,
        lists_of_ids,
    ),
    "5 rows": (metadata_of_megabytes, custom_losses_of_megabytes),
    "6 connections": (
        half_sent_heads,
        silent_connections,
        bodies_that_do_not_come,
        answers_that_are_not_read,
    ),
    "7 keys": (many_bad_keys_from_made_up_addresses,),
    "8 input": (numbers_of_thousands_of_digits, nested_json_below_v1, a_nested_adapter_config),
    "9 log": (ids_of_megabytes,),
    "load": (small_requests_at_once,),
}
"""By the number of the class of findings they belong to."""
