"""`tinkex chat` from a pipe: one line is one message, answers are all that comes out."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tinkex.cli.chat.text_columns import heading
from tinkex.cli.commands import DONE, FAILED, MISUSED
from tinkex.errors import RequestFailedError
from tinkex.testing import faults

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Ran, Saved
    from tinkex.testing import FakeServer

    Run = Callable[..., Ran]
    Chat = Callable[..., Ran]

TINY = "tinkex/tiny"
SHORT = ("--max-tokens", "8", "--seed", "5")


@pytest.fixture
def chat(run: Run, monkeypatch: pytest.MonkeyPatch) -> Chat:
    """A chat with what is in the pipe."""

    def command(*lines: str, words: tuple[str, ...] = (TINY, *SHORT)) -> Ran:
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return run("chat", *words)

    return command


def streamed(server: FakeServer) -> list[dict[str, Any]]:
    return [seen.json for seen in server.requests if seen.path == "/v1/completions"]


def without_streams(server: FakeServer, status: int = 404) -> None:
    server.faults.on(
        None, faults.reply(status), times=None, when=lambda seen: seen.path.startswith("/v1/")
    )


def said(ran: Ran) -> list[str]:
    return [
        answer["text"] for line in ran.out.splitlines() for answer in json.loads(line)["answers"]
    ]


def prompt_text(request: dict[str, Any]) -> str:
    """The toy tokenizer: ids below 256 are bytes."""
    return bytes(token if token < 256 else 0x20 for token in request["prompt"]).decode()


def test_each_line_is_answered_and_nothing_else_is_printed(chat: Chat, server: FakeServer):
    ran = chat("hello", "", "again")
    assert (ran.status, ran.err) == (DONE, "")
    told = said(chat("hello", "again", words=(TINY, *SHORT, "-f", "json")))
    assert ran.out == "".join(f"{text}\n" for text in told)
    assert len(told) == 2
    assert len(streamed(server)) == 4
    assert not server.seen("asample")


def test_what_was_said_is_part_of_the_next_prompt(chat: Chat, server: FakeServer):
    ran = chat("first question", "second question", words=(TINY, *SHORT, "-f", "json"))
    answer = said(ran)[0]
    first, second = map(prompt_text, streamed(server))
    assert "first question" in first
    assert first.rstrip().endswith("assistant")
    assert second.startswith(first)
    assert answer.strip() in second
    assert "second question" in second


@pytest.mark.parametrize("status", [404, 405, 400, 429, 501])
def test_without_streams_whole_answers_come(chat: Chat, server: FakeServer, status: int):
    words = (TINY, *SHORT, "--temperature", "0", "-f", "json")
    told = said(chat("hello", words=words))
    without_streams(server, status)
    server.requests.clear()
    ran = chat("hello", words=words)
    assert said(ran) == told
    assert len(server.seen("asample")) == 1


def test_a_server_without_that_route_is_asked_once(chat: Chat, server: FakeServer):
    without_streams(server)
    assert chat("one", "two", "three").status == DONE
    assert len(streamed(server)) == 1
    assert len(server.seen("asample")) == 3


@pytest.mark.usefixtures("server")
def test_a_missing_model_is_told_by_its_name(chat: Chat):
    ran = chat("hello", words=("tinkex/none",))
    assert ran.status == FAILED
    assert "tinkex/none" in ran.err


def test_a_failure_ends_a_piped_chat(chat: Chat, server: FakeServer):
    server.engine.fail_next("sample", RequestFailedError("Not like this.", None, "user"))
    without_streams(server)
    ran = chat("hello", "never asked")
    assert ran.status == FAILED
    assert "Not like this." in ran.err
    assert len(server.seen("asample")) == 1


def test_an_answer_that_breaks_off_is_no_answer(chat: Chat, server: FakeServer):
    server.faults.on(None, faults.drop_midway(), when=lambda seen: seen.path.startswith("/v1/"))
    assert chat("hello").status == FAILED


def test_an_error_inside_a_stream_is_told(chat: Chat, server: FakeServer):
    event = b'data: {"error": {"message": "Out of luck."}}\n\n'
    server.faults.on(
        None,
        faults.reply(200, event, media_type="text/event-stream"),
        when=lambda seen: seen.path.startswith("/v1/"),
    )
    ran = chat("hello")
    assert ran.status == FAILED
    assert "Out of luck." in ran.err


def test_an_answer_cannot_steer_the_terminal(chat: Chat, server: FakeServer):
    event = b'data: {"choices": [{"text": "\\u001b[31mred\\u0007\\tx\\n"}]}\n\ndata: [DONE]\n\n'
    server.faults.on(
        None,
        faults.reply(200, event, media_type="text/event-stream"),
        when=lambda seen: seen.path.startswith("/v1/"),
    )
    assert chat("hello").out == "[31mred\tx\n\n"


def test_a_model_without_a_template_cannot_chat(chat: Chat, server: FakeServer):
    ran = chat("hello", words=("tinkex/tiny-2",))
    assert ran.status == FAILED
    assert "template" in ran.err
    assert not streamed(server)


# -- commands --------------------------------------------------------------------------------------


def test_a_system_message_comes_first_and_begins_anew(chat: Chat, server: FakeServer):
    assert chat("one", "/system Be brief.", "two", "/system", "three").status == DONE
    one, two, three = map(prompt_text, streamed(server))
    assert "system" not in one
    assert two.index("Be brief.") < two.index("two")
    assert "one" not in two
    assert "Be brief." not in three


def test_a_system_message_can_be_given_at_the_start(chat: Chat, server: FakeServer):
    chat("one", words=(TINY, *SHORT, "--system", "Be kind."))
    assert "Be kind." in prompt_text(streamed(server)[0])


def test_reset_forgets_what_was_said(chat: Chat, server: FakeServer):
    ran = chat("first", "/reset", "second")
    assert "The conversation is forgotten." in ran.err
    assert "first" not in prompt_text(streamed(server)[1])


def test_the_temperature_can_be_changed(chat: Chat, server: FakeServer):
    chat("one", "/temperature 0", "two")
    assert [request["temperature"] for request in streamed(server)] == [0.7, 0.0]


def test_a_conversation_is_saved_as_a_line_to_train_on(chat: Chat, server: FakeServer):
    Path("mine.jsonl").write_text('{"messages": []}\n')
    ran = chat("hello", "/save mine.jsonl", words=(TINY, *SHORT, "-f", "json"))
    assert ran.status == DONE
    line = json.loads(Path("mine.jsonl").read_text().splitlines()[1])
    assert line["messages"] == [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": said(ran)[0].strip()},
    ]
    assert line["model"] == TINY


def test_two_slashes_begin_a_message_that_begins_with_one(chat: Chat, server: FakeServer):
    assert chat("//help me").status == DONE
    assert "/help me" in prompt_text(streamed(server)[0])
    assert "//help" not in prompt_text(streamed(server)[0])


def test_help_lists_every_command_and_quit_leaves(chat: Chat, server: FakeServer):
    ran = chat("/help", "/quit", "never asked")
    assert ran.status == DONE
    for name in ("compare", "reset", "system", "temperature", "save", "help", "quit"):
        assert f"/{name}" in ran.err
    assert max(map(len, ran.err.splitlines())) <= 80
    assert not streamed(server)


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("/nonsense", "/help"),
        ("/temperature hot", "hot"),
        ("/temperature -1", "-1"),
        ("/temperature nan", "nan"),
        ("/save", "/save chat.jsonl"),
        ("/compare", "/compare off"),
    ],
)
def test_a_command_that_makes_no_sense_is_a_misuse_in_a_pipe(chat: Chat, line: str, word: str):
    ran = chat(line)
    assert ran.status == MISUSED
    assert word in ran.err


@pytest.mark.usefixtures("server")
def test_an_empty_conversation_is_not_saved(chat: Chat):
    assert chat("/save mine.jsonl").status == FAILED
    assert not Path("mine.jsonl").exists()


# -- two at once -----------------------------------------------------------------------------------


def test_two_answer_side_by_side_in_eighty_columns(chat: Chat, saved: Saved, server: FakeServer):
    words = (saved.sampler, "--max-tokens", "120", "--seed", "5")
    ran = chat("alone", "/compare base", "together", "/compare off", "alone again", words=words)
    assert ran.status == DONE, ran.err
    assert max(map(len, ran.out.splitlines())) <= 80
    asked = [(r["model"], "alone" in prompt_text(r)) for r in streamed(server)]
    assert asked[0] == (saved.sampler, True)
    # Both begin anew: what one has said would lead the other.
    assert sorted(asked[1:3]) == sorted([(saved.sampler, False), (TINY, False)])
    assert asked[3][0] == saved.sampler
    assert len(asked) == 4


def test_the_names_stand_above_the_columns():
    rows = heading("tinkex/tiny", "tinker://a/sampler_weights/" + "x" * 60, 80)
    assert rows[0].startswith("tinkex/tiny ")
    assert " | tinker://a/" in rows[0]
    assert set(rows[-1]) == {"-", "+"}
    assert max(map(len, rows)) <= 80


@pytest.mark.usefixtures("server")
def test_two_answers_as_json_have_the_names_of_both(chat: Chat, saved: Saved):
    ran = chat(f"/compare {saved.sampler}", "hello", words=(TINY, *SHORT, "-f", "json"))
    (line,) = [json.loads(line) for line in ran.out.splitlines()]
    assert line["message"] == "hello"
    assert [answer["model"] for answer in line["answers"]] == [TINY, saved.sampler]


# -- whom ------------------------------------------------------------------------------------------


def test_the_folder_of_a_run_stands_for_its_newest_weights(
    chat: Chat, saved: Saved, server: FakeServer
):
    folder = Path("runs/one")
    folder.mkdir(parents=True)
    write_run(folder, adapter_path=None)
    ran = chat("hello", words=("runs/one",))
    assert ran.status == FAILED
    assert "tinkex run watch runs/one" in ran.err
    saves = [
        {"step": 1, "state_path": "tinker://x/weights/1", "sampler_path": "tinker://x/s/1"},
        {"step": 2, "state_path": saved.training, "sampler_path": saved.sampler},
    ]
    lines = "".join(json.dumps(save) + "\n" for save in saves)
    (folder / "checkpoints.jsonl").write_text(lines)
    assert chat("hello", words=("runs/one", *SHORT)).status == DONE
    assert streamed(server)[-1]["model"] == saved.sampler


def write_run(folder: Path, **more: Any) -> None:
    record = {
        "kind": "sft",
        "model": TINY,
        "title": "sft",
        "settings": {},
        "files": {},
        "rendered": "",
        "steps": 2,
        "version": "0",
        "began": 0.0,
    }
    (folder / "run.json").write_text(json.dumps(record | more))


@pytest.mark.parametrize("name", ["./nothing", "/nothing/at/all"])
def test_a_folder_that_is_not_there_is_named(chat: Chat, name: str):
    ran = chat("hello", words=(name,))
    assert ran.status == FAILED
    assert name in ran.err


def test_a_folder_that_is_no_run_is_refused(chat: Chat):
    Path("stuff").mkdir()
    ran = chat("hello", words=("stuff",))
    assert ran.status == FAILED
    assert "run.json" in ran.err


@pytest.mark.usefixtures("server")
def test_a_model_has_to_be_named_where_a_server_has_several(chat: Chat):
    ran = chat("hello", words=())
    assert ran.status == MISUSED
    assert TINY in ran.err
