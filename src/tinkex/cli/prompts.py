"""The prompts of `tinkex sample`: read and checked, then sent, and their answers recorded.

All prompts are read before the first is sent. Training data can serve as prompts: unknown members
are ignored, and an answer at the end of the messages is removed.
"""

from __future__ import annotations

import concurrent.futures
import hashlib
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

from tinkex.chat.messages import readable_messages
from tinkex.cli.answers import ASKED, ERROR
from tinkex.cli.command_errors import describe
from tinkex.errors import (
    BadRequestError,
    DataError,
    DataProblem,
    InputError,
    RequestFailedError,
    ResultError,
    UnprocessableEntityError,
)
from tinkex.types import ModelInput, SamplingParams

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from tinkex.chat.renderer import Renderer
    from tinkex.cli.answers import AnswersFile, AnswersShown
    from tinkex.clients.sampling import SamplingClient
    from tinkex.futures.future import APIFuture
    from tinkex.types import SampleResponse

_JSON_LINES = (".jsonl", ".ndjson")


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: text, or messages; `id` is the caller's own, if there is one."""

    line: int
    content: str | list[dict[str, Any]]
    id: str | int | None = None

    def record(self) -> dict[str, Any]:
        """The members that an answer repeats."""
        kind = "prompt" if isinstance(self.content, str) else "messages"
        named = {} if self.id is None else {"id": self.id}
        return {"line": self.line, **named, kind: self.content}

    def fingerprint(self, settings: Mapping[str, Any]) -> str:
        """A hash of the prompt and the sampling settings."""
        asked = json.dumps([self.record(), dict(settings)], sort_keys=True)
        return hashlib.sha256(asked.encode()).hexdigest()[:16]


def given_prompts(texts: Sequence[str], *, chat: bool) -> list[Prompt]:
    """Prompts from the command line; raises InputError for one that is empty."""
    return [Prompt(number, _text(text, chat)) for number, text in enumerate(texts, start=1)]


def read_prompts(path: Path, *, chat: bool) -> list[Prompt]:
    """The prompts of a file; raises DataError with every bad line.

    With `chat`, text is a user's message instead of text to continue.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        why = f"byte {error.start} is not UTF-8: save the file as UTF-8"
        raise DataError(str(path), [DataProblem(0, why)]) from None
    prompts: list[Prompt] = []
    problems: list[DataProblem] = []
    for number, line in _filled(lines):
        try:
            prompts.append(_prompt(line, number, path.suffix in _JSON_LINES, chat=chat))
        except InputError as error:
            problems.append(DataProblem(number, str(error)))
    problems += _repeated(prompts)
    if not lines or not (prompts or problems):
        problems = [DataProblem(0, "it has no prompt")]
    if problems:
        raise DataError(str(path), sorted(problems, key=lambda problem: problem.line))
    return prompts


def _filled(lines: list[str]) -> Iterator[tuple[int, str]]:
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())


def _prompt(line: str, number: int, is_json: bool, *, chat: bool) -> Prompt:
    value: object = _parsed(line) if is_json else line
    if isinstance(value, str):
        return Prompt(number, _text(value, chat))
    if not isinstance(value, dict):
        raise InputError("a prompt is a string, or an object with prompt or messages")
    members = cast("dict[str, Any]", value)
    if ("prompt" in members) == ("messages" in members):
        raise InputError("give either prompt or messages")
    if not isinstance(name := members.get("id"), str | int | None) or isinstance(name, bool):
        raise InputError("must be text or a whole number", "id")
    if "prompt" in members:
        if not isinstance(members["prompt"], str):
            raise InputError("must be text", "prompt")
        return Prompt(number, _text(members["prompt"], chat), name)
    return Prompt(number, _messages(members["messages"]), name)


def _parsed(line: str) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InputError(f"is not JSON: {error}") from None


def _text(text: str, chat: bool) -> str | list[dict[str, Any]]:
    if not text.strip():
        raise InputError("is empty", "prompt")
    return readable_messages([{"role": "user", "content": text}]) if chat else text


def _messages(value: object) -> list[dict[str, Any]]:
    if not isinstance(value, list) or not value:
        raise InputError("must be a list of messages", "messages")
    messages = readable_messages(cast("list[Any]", value))
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()
    if not messages:
        raise InputError("has nothing but answers", "messages")
    return messages


def _repeated(prompts: list[Prompt]) -> list[DataProblem]:
    seen: dict[str | int, int] = {}
    problems: list[DataProblem] = []
    for prompt in prompts:
        if prompt.id is None:
            continue
        if prompt.id in seen:
            why = f"id: {prompt.id!r} is the id of line {seen[prompt.id]}, too"
            problems.append(DataProblem(prompt.line, why))
        seen.setdefault(prompt.id, prompt.line)
    return problems


# -- asking --------------------------------------------------------------------------------------

# Errors about a single prompt; any other error concerns all of them and ends the command.
_OF_ONE = (
    BadRequestError,
    UnprocessableEntityError,
    InputError,
    RequestFailedError,
    ResultError,
)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt without an answer."""

    prompt: Prompt
    asked: str
    tokens: list[int]
    stop: list[int] | None


@dataclass(slots=True)
class Tally:
    """The counts so far."""

    answered: int = 0
    kept: int = 0
    failed: int = 0
    samples: int = 0
    empty: int = 0
    tokens: int = 0
    first_error: str = ""

    @property
    def done(self) -> int:
        """Prompts that this run of the command has finished."""
        return self.answered + self.kept + self.failed


@dataclass(slots=True)
class PromptQueue:
    """Sends questions and records their answers; `waiting` has those in flight."""

    sampler: SamplingClient
    renderer: Renderer
    args: argparse.Namespace
    answers: AnswersFile | AnswersShown
    tally: Tally
    waiting: dict[APIFuture[SampleResponse], Question] = field(
        default_factory=dict["APIFuture[SampleResponse]", Question]
    )

    def ask(self, question: Question) -> None:
        """Send a question."""
        args, line = self.args, question.prompt.line
        params = SamplingParams(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            # Different for each prompt, and independent of what else is in flight.
            seed=None if args.seed is None else args.seed + line,
            stop=question.stop,
        )
        tokens = ModelInput.from_ints(question.tokens)
        self.waiting[self.sampler.sample(tokens, args.num_samples, params)] = question

    def take(self) -> None:
        """Wait for at least one answer and record all that have arrived."""
        done, _ = concurrent.futures.wait(
            self.waiting, return_when=concurrent.futures.FIRST_COMPLETED
        )
        for future in done:
            question = self.waiting.pop(future)  # pyright: ignore[reportArgumentType] - one of its keys
            answer = question.prompt.record() | {ASKED: question.asked}
            try:
                answer["samples"] = self._samples(future.result())
                self.tally.answered += 1
            except _OF_ONE as error:
                answer[ERROR] = {"code": error.code, "message": describe(error)}
                self.tally.failed += 1
                self.tally.first_error = self.tally.first_error or (
                    f"line {question.prompt.line}: {describe(error)}"
                )
            self.answers.add(answer)

    def _samples(self, response: SampleResponse) -> list[dict[str, Any]]:
        samples: list[dict[str, Any]] = [
            {
                "text": self.renderer.text(sequence.tokens),
                "tokens": len(sequence.tokens),
                "stop_reason": sequence.stop_reason,
            }
            for sequence in response.sequences
        ]
        self.tally.tokens += sum(sample["tokens"] for sample in samples)
        self.tally.samples += len(samples)
        self.tally.empty += sum(not sample["text"].strip() for sample in samples)
        return samples

    def cancel(self) -> None:
        """Cancel the questions in flight."""
        for future in self.waiting:
            future.cancel()
