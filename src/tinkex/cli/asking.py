"""Questions of `tinkex sample` under way: sent, waited for, and their answers written down."""

from __future__ import annotations

import concurrent.futures
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from tinkex.cli.answers_file import ASKED, ERROR
from tinkex.cli.failures import describe
from tinkex.errors import (
    BadRequestError,
    InputError,
    RequestFailedError,
    ResultError,
    UnprocessableEntityError,
)
from tinkex.types import ModelInput, SamplingParams

if TYPE_CHECKING:
    import argparse

    from tinkex.chat.renderer import Renderer
    from tinkex.cli.answers_file import AnswersFile
    from tinkex.cli.answers_shown import AnswersShown
    from tinkex.cli.prompts import Prompt
    from tinkex.clients.sampling import SamplingClient
    from tinkex.futures.future import APIFuture
    from tinkex.types import SampleResponse

# What is wrong with one prompt; anything else is wrong with all of them.
_OF_ONE = (
    BadRequestError,
    UnprocessableEntityError,
    InputError,
    RequestFailedError,
    ResultError,
)


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt that is still to be answered."""

    prompt: Prompt
    asked: str
    tokens: list[int]
    stop: list[int] | None


@dataclass(slots=True)
class Tally:
    """How it went so far."""

    answered: int = 0
    kept: int = 0
    failed: int = 0
    samples: int = 0
    empty: int = 0
    tokens: int = 0
    first_error: str = ""

    @property
    def done(self) -> int:
        """Prompts that need no more work in this run of the command."""
        return self.answered + self.kept + self.failed


@dataclass(slots=True)
class Work:
    """What is under way: questions by their futures."""

    sampler: SamplingClient
    renderer: Renderer
    args: argparse.Namespace
    answers: AnswersFile | AnswersShown
    tally: Tally
    waiting: dict[APIFuture[SampleResponse], Question] = field(
        default_factory=dict["APIFuture[SampleResponse]", Question]
    )

    def ask(self, question: Question) -> None:
        """Send one."""
        args, line = self.args, question.prompt.line
        params = SamplingParams(
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            # Another one for each prompt, and the same whatever else is under way.
            seed=None if args.seed is None else args.seed + line,
            stop=question.stop,
        )
        tokens = ModelInput.from_ints(question.tokens)
        self.waiting[self.sampler.sample(tokens, args.num_samples, params)] = question

    def take(self) -> None:
        """Wait for at least one answer and write down what has come."""
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

    def give_up(self) -> None:
        """Nobody waits for the rest."""
        for future in self.waiting:
            future.cancel()
