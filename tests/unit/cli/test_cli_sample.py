"""`tinkex sample`: prompts in, answers out; nothing is lost and nothing is done twice."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tinkex.cli.commands import DONE, FAILED, MISUSED
from tinkex.cli.output import harmless
from tinkex.errors import RequestFailedError
from tinkex.testing import faults

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Ran, Saved
    from tinkex.testing import FakeServer

    Run = Callable[..., Ran]

MODEL = ("--model", "tinkex/tiny")
SHORT = ("--max-tokens", 6, "--seed", 3)


def prompts(*lines: object, name: str = "prompts.jsonl") -> Path:
    path = Path(name)
    text = [
        line if isinstance(line, str) and name.endswith("txt") else json.dumps(line)
        for line in lines
    ]
    path.write_text("".join(f"{line}\n" for line in text))
    return path


def answers(name: str = "out.jsonl") -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(name).read_text().splitlines()]


def asked(server: FakeServer) -> int:
    return len(server.seen("asample"))


@pytest.mark.usefixtures("server")
def test_strings_prompts_and_messages_are_answered_in_order(run: Run):
    messages = [{"role": "user", "content": "hello"}]
    path = prompts("one", {"prompt": "two", "id": "b"}, {"messages": messages, "id": 7})
    ran = run("sample", path, "-o", "out.jsonl", *MODEL, *SHORT, "--num-samples", 2, "-f", "json")
    assert ran.status == DONE, ran.err
    assert ran.json == {
        "output": "out.jsonl",
        "answered": 3,
        "kept": 0,
        "failed": 0,
        "tokens": sum(s["tokens"] for answer in answers() for s in answer["samples"]),
    }
    first, second, third = answers()
    assert (first["line"], first["prompt"]) == (1, "one")
    assert (second["id"], second["prompt"]) == ("b", "two")
    assert (third["id"], third["messages"]) == (7, messages)
    assert all(len(answer["samples"]) == 2 for answer in answers())
    assert {sample["stop_reason"] for sample in first["samples"]} <= {"stop", "length"}


@pytest.mark.usefixtures("server")
def test_training_data_can_be_asked_again(run: Run):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    path = prompts({"messages": messages, "score": 3}, {"prompt": "Q:", "completion": " A"})
    assert run("sample", path, "-o", "out.jsonl", *MODEL, *SHORT).status == DONE
    assert [answer.get("messages") for answer in answers()] == [messages[:1], None]
    assert answers()[1]["prompt"] == "Q:"


@pytest.mark.usefixtures("server")
def test_lines_of_text_are_prompts_and_a_users_messages_with_chat(run: Run):
    path = prompts("one", "", "three", name="prompts.txt")
    assert run("sample", path, "-o", "out.jsonl", *MODEL, *SHORT).status == DONE
    assert [answer["line"] for answer in answers()] == [1, 3]
    assert run("sample", path, "-o", "chat.jsonl", *MODEL, *SHORT, "--chat").status == DONE
    assert answers("chat.jsonl")[1]["messages"] == [{"role": "user", "content": "three"}]


@pytest.mark.usefixtures("server")
def test_the_same_seed_gives_the_same_answers_whatever_runs_beside_them(run: Run):
    path = prompts("one", "one", "two")
    for name, concurrency in (("a.jsonl", 1), ("b.jsonl", 3)):
        words = ("sample", path, "-o", name, *MODEL, *SHORT, "--concurrency", concurrency)
        assert run(*words).status == DONE
    assert answers("a.jsonl") == answers("b.jsonl")
    assert answers("a.jsonl")[0]["samples"] != answers("a.jsonl")[1]["samples"]


def test_what_was_answered_is_not_asked_again(run: Run, server: FakeServer):
    words = ("sample", prompts("one", "two", "three"), "-o", "out.jsonl", *MODEL, *SHORT)
    assert run(*words).status == DONE
    stamp = Path("out.jsonl").stat()
    before = asked(server)
    ran = run(*words, "-f", "json")
    assert ran.json["kept"] == 3
    assert asked(server) == before
    assert Path("out.jsonl").stat().st_ino == stamp.st_ino
    assert Path("out.jsonl").stat().st_mtime_ns == stamp.st_mtime_ns


def test_a_cut_off_file_is_mended_and_gone_on_with(run: Run, server: FakeServer):
    words = ("sample", prompts("one", "two", "three"), "-o", "out.jsonl", *MODEL, *SHORT)
    assert run(*words).status == DONE
    whole = Path("out.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    Path("out.jsonl").write_text(lines[2] + lines[0] + lines[1][:20])
    before = asked(server)
    assert run(*words).status == DONE
    assert asked(server) == before + 1
    assert Path("out.jsonl").read_text() == whole


def test_a_failure_is_written_down_and_tried_again(run: Run, server: FakeServer):
    words = ("sample", prompts("one", "two"), "-o", "out.jsonl", *MODEL, *SHORT)
    server.engine.fail_next("sample", RequestFailedError("No such luck.", None, "user"))
    ran = run(*words, "--concurrency", 1)
    assert ran.status == FAILED
    assert "1 failed, the first at line 1: No such luck." in ran.err
    assert answers()[0]["error"] == {"code": "request_failed", "message": "No such luck."}
    assert "samples" not in answers()[0]
    ran = run(*words, "-f", "json")
    assert ran.status == DONE
    assert ran.json | {"tokens": 0} == {
        "output": "out.jsonl",
        "answered": 1,
        "kept": 1,
        "failed": 0,
        "tokens": 0,
    }
    assert [set(answer) >= {"samples"} for answer in answers()] == [True, True]


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("change", [("--temperature", "0.1"), ("--max-tokens", "7"), ("--chat",)])
def test_answers_of_other_settings_are_not_mixed_in(run: Run, change: tuple[str, ...]):
    words = ("sample", prompts("one"), "-o", "out.jsonl", *MODEL, *SHORT)
    assert run(*words).status == DONE
    before = Path("out.jsonl").read_text()
    ran = run(*words, *change)
    assert ran.status == FAILED
    assert "--overwrite" in ran.err
    assert Path("out.jsonl").read_text() == before
    assert run(*words, *change, "--overwrite").status == DONE


@pytest.mark.usefixtures("server")
def test_answers_to_other_prompts_are_not_mixed_in(run: Run):
    words = ("-o", "out.jsonl", *MODEL, *SHORT)
    assert run("sample", prompts("one"), *words).status == DONE
    assert run("sample", prompts("another"), *words).status == FAILED


@pytest.mark.usefixtures("server")
def test_a_file_that_is_no_file_of_answers_is_left_alone(run: Run):
    Path("out.jsonl").write_text("my diary\n")
    ran = run("sample", prompts("one"), "-o", "out.jsonl", *MODEL)
    assert ran.status == FAILED
    assert "line 1 is not an answer" in ran.err
    assert Path("out.jsonl").read_text() == "my diary\n"


def test_all_bad_lines_are_told_before_anything_is_sent(run: Run, server: FakeServer):
    path = Path("prompts.jsonl")
    path.write_text(
        '{"prompt": 3}\nnot json\n{"prompt": "a", "messages": []}\n{"messages": []}\n[1]\n'
        '{"messages": [{"role": "boss", "content": "x"}]}\n{"id": true, "prompt": "x"}\n'
        '{"messages": [{"role": "assistant", "content": "x"}]}\n"good"\n""\n'
        '{"id": 1, "prompt": "x"}\n{"id": 1, "prompt": "y"}\n'
    )
    ran = run("sample", path, "-o", "out.jsonl", *MODEL)
    assert ran.status == FAILED
    for line in (1, 2, 3, 4, 5, 6, 7, 8, 10, 12):
        assert f"line {line}:" in ran.err
    assert "line 9:" not in ran.err
    assert "line 11:" not in ran.err
    assert not server.requests
    assert not Path("out.jsonl").exists()


@pytest.mark.parametrize(
    ("content", "word"), [(b"", "no prompt"), (b"\n\n", "no prompt"), (b"\xff\xfe", "UTF-8")]
)
def test_a_file_without_prompts_is_refused(run: Run, content: bytes, word: str):
    Path("prompts.txt").write_bytes(content)
    ran = run("sample", "prompts.txt", "-o", "out.jsonl", *MODEL)
    assert ran.status == FAILED
    assert word in ran.err


def test_a_missing_file_is_named(run: Run):
    ran = run("sample", "nothing.txt", "-o", "out.jsonl", *MODEL)
    assert ran.status == FAILED
    assert "nothing.txt" in ran.err


def test_messages_for_a_model_without_a_template_are_refused_with_their_lines(
    run: Run, server: FakeServer
):
    path = prompts("text", {"messages": [{"role": "user", "content": "x"}]})
    ran = run("sample", path, "-o", "out.jsonl", "--model", "tinkex/tiny-2")
    assert ran.status == FAILED
    assert "line 2:" in ran.err
    assert asked(server) == 0


def test_a_prompt_that_does_not_fit_is_one_failure_among_answers(run: Run, server: FakeServer):
    path = prompts("x" * 9000, "short")
    ran = run("sample", path, "-o", "out.jsonl", *MODEL, *SHORT)
    assert ran.status == FAILED
    assert [("error" in answer) for answer in answers()] == [True, False]


def test_a_checkpoint_can_be_sampled(run: Run, saved: Saved):
    words = ("-o", "out.jsonl", "--path", saved.sampler, *SHORT)
    assert run("sample", prompts("one"), *words).status == DONE
    assert len(answers()) == 1


def test_a_lost_server_ends_the_command_and_what_was_answered_stays(run: Run, server: FakeServer):
    path = prompts("one", "two", "three")
    server.faults.on("asample", faults.reply(401), nth=1, times=None)
    ran = run("sample", path, "-o", "out.jsonl", *MODEL, *SHORT, "--concurrency", 1)
    assert ran.status == FAILED
    assert "the same command continues" in ran.err
    assert len(answers()) == 1


@pytest.mark.usefixtures("server")
def test_a_model_has_to_be_named_where_there_are_several(run: Run):
    ran = run("sample", prompts("one"), "-o", "out.jsonl")
    assert ran.status == MISUSED
    assert "tinkex/tiny-2" in ran.err


def test_a_path_that_is_not_there_is_not_taken_for_a_model(run: Run):
    ran = run("sample", "--prompt", "one", "--path", "runs/nothing")
    assert ran.status == FAILED
    assert "There is no folder runs/nothing" in ran.err
    assert "--model" in ran.err


def test_a_model_and_a_path_are_one_too_many(run: Run):
    ran = run("sample", prompts("one"), "-o", "o.jsonl", *MODEL, "--path", "tinker://x/y/z")
    assert ran.status == MISUSED


@pytest.mark.parametrize(
    "words",
    [
        ("--max-tokens", "0"),
        ("--temperature", "-1"),
        ("--temperature", "nan"),
        ("--top-p", "0"),
        ("--top-p", "1.5"),
        ("--num-samples", "0"),
        ("--concurrency", "x"),
    ],
)
def test_numbers_that_make_no_sense_are_a_misuse(run: Run, words: tuple[str, str]):
    ran = run("sample", prompts("one"), "-o", "out.jsonl", *MODEL, *words)
    assert ran.status == MISUSED
    assert words[0] in ran.err


@pytest.mark.usefixtures("server")
def test_progress_goes_to_standard_error_without_colours(run: Run):
    ran = run("sample", prompts("one", "two"), "-o", "out.jsonl", *MODEL, *SHORT)
    assert "prompt 2/2" in ran.err
    assert "2 prompts in" in ran.err
    assert "step" not in ran.err
    assert "\033" not in ran.err + ran.out
    assert max(map(len, (ran.err + ran.out).splitlines())) <= 80


# -- without a file -------------------------------------------------------------------------------


@pytest.mark.usefixtures("server")
def test_one_prompt_prints_its_answer_and_nothing_else(run: Run):
    ran = run("sample", "--prompt", "one", *MODEL, *SHORT)
    assert ran.status == DONE, ran.err
    assert run("sample", prompts("one"), "-o", "out.jsonl", *MODEL, *SHORT).status == DONE
    assert ran.out.strip("\n") == harmless(answers()[0]["samples"][0]["text"]).strip("\n")


@pytest.mark.usefixtures("server")
def test_several_answers_are_printed_in_order_below_their_prompts(run: Run):
    words = ("--prompt", "one", "--prompt", "two\nlines", *MODEL, *SHORT, "--num-samples", 2)
    ran = run("sample", *words)
    assert ran.status == DONE, ran.err
    assert [line for line in ran.out.splitlines() if line.startswith("---")] == [
        "--- prompt 1, sample 1: one",
        "--- prompt 1, sample 2: one",
        "--- prompt 2, sample 1: two lines",
        "--- prompt 2, sample 2: two lines",
    ]
    assert "prompt 2/2" in ran.err
    assert "2/2" not in ran.out


@pytest.mark.usefixtures("server")
def test_without_a_file_json_lines_go_to_standard_output(run: Run):
    path = prompts("one", {"prompt": "two", "id": "b"})
    ran = run("sample", path, *MODEL, *SHORT, "-f", "json")
    assert run("sample", path, "-o", "out.jsonl", *MODEL, *SHORT).status == DONE
    assert [json.loads(line) for line in ran.out.splitlines()] == answers()


def test_a_prompt_that_fails_is_told_and_the_others_are_printed(run: Run, server: FakeServer):
    server.engine.fail_next("sample", RequestFailedError("No such luck.", None, "user"))
    words = ("--prompt", "one", "--prompt", "two", *MODEL, *SHORT, "--concurrency", 1)
    ran = run("sample", *words)
    assert ran.status == FAILED
    assert "prompt 1 failed: No such luck." in ran.err
    assert ran.out.strip()
    assert "No such luck" not in ran.out


def test_a_lost_server_does_not_take_the_answers_along(run: Run, server: FakeServer):
    server.faults.on("asample", faults.reply(401), nth=1, times=None)
    words = ("--prompt", "one", "--prompt", "two", *MODEL, *SHORT, "--concurrency", 1)
    ran = run("sample", *words, "-f", "json")
    assert ran.status == FAILED
    assert ran.json["prompt"] == "one"
    assert "With -o OUT answers are kept" in ran.err


@pytest.mark.parametrize("words", [(), ("prompts.txt", "--prompt", "one")])
def test_prompts_come_from_a_file_or_from_the_command_line(run: Run, words: tuple[str, ...]):
    ran = run("sample", *words, *MODEL)
    assert ran.status == MISUSED
    assert "tinkex sample --prompt" in ran.err


def test_text_that_is_no_file_is_told_from_a_prompt(run: Run):
    ran = run("sample", "What is the capital of France?", *MODEL)
    assert ran.status == FAILED
    assert "There is no file What is the capital of France?" in ran.err
    assert "--prompt TEXT" in ran.err


# -- models that were tuned for chats -------------------------------------------------------------


def trained(run: Run, *rows: dict[str, Any], more: tuple[object, ...] = ()) -> str:
    """The folder of a short run on these examples."""
    Path("data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ("train", "sft", "data.jsonl", *MODEL, "--steps", 1, "--batch-size", 1)
    assert run(*words, *more).status == DONE
    return "runs/data-sft"


CHAT = {
    "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
}


@pytest.mark.usefixtures("server")
def test_a_run_that_was_trained_on_chats_is_asked_as_in_a_chat(run: Run):
    folder = trained(run, CHAT)
    words = ("sample", "--prompt", "one", "--path", folder, *SHORT, "-f", "json")
    ran = run(*words)
    assert ran.json["messages"] == [{"role": "user", "content": "one"}]
    assert "was trained on chats" in ran.err
    assert run(*words, "--no-chat").json["prompt"] == "one"


@pytest.mark.usefixtures("server")
def test_a_run_that_was_trained_on_text_is_asked_with_text(run: Run):
    folder = trained(run, {"prompt": "a", "completion": "b"})
    words = ("sample", "--prompt", "one", "--path", folder, *SHORT, "-f", "json")
    ran = run(*words)
    assert ran.json["prompt"] == "one"
    assert "chat" not in ran.err
    assert run(*words, "--chat").json["messages"] == [{"role": "user", "content": "one"}]


@pytest.mark.usefixtures("server")
def test_empty_answers_of_a_model_with_a_template_lead_to_chat(run: Run):
    # A run that has learned to say spaces and then nothing.
    folder = trained(run, {"prompt": "a", "completion": " "}, more=("--learning-rate", 50))
    words = ("sample", "--prompt", "one", *SHORT)
    ran = run(*words, "--path", folder)
    assert ran.status == DONE
    assert "Warning: 1 of 1 answers are empty." in ran.err
    assert "--chat sends each prompt as a user's message" in ran.err
    ran = run(*words, "--path", folder, "--chat")
    assert "answers are empty" in ran.err
    assert "--chat sends" not in ran.err
    assert "empty" not in run(*words, *MODEL).err
