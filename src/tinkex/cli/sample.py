"""`tinkex sample`: a file of prompts in, a file of answers out.

What was answered stays answered: the same command goes on where it was interrupted, and tries
again what failed.
"""

from __future__ import annotations

import concurrent.futures
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tinkex.chat.renderer import Renderer
from tinkex.cli import target as targets
from tinkex.cli.answers_file import ASKED, ERROR, AnswersFile
from tinkex.cli.failures import CommandError, describe, misuse
from tinkex.cli.main import FAILED, INTERRUPTED
from tinkex.cli.output import say, show_one
from tinkex.cli.prompts import read_prompts
from tinkex.errors import (
    BadRequestError,
    ChatTemplateError,
    DataError,
    DataProblem,
    InputError,
    RequestFailedError,
    ResultError,
    TinkerError,
    UnprocessableEntityError,
)
from tinkex.seeing.progress import Progress
from tinkex.types import ModelInput, SamplingParams

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from tinkex.cli.prompts import Prompt
    from tinkex.cli.target import Target
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
    answers: AnswersFile
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
        self.tally.tokens += sum(len(sequence.tokens) for sequence in response.sequences)
        return [
            {
                "text": self.renderer.text(sequence.tokens),
                "tokens": len(sequence.tokens),
                "stop_reason": sequence.stop_reason,
            }
            for sequence in response.sequences
        ]

    def give_up(self) -> None:
        """Nobody waits for the rest."""
        for future in self.waiting:
            future.cancel()


def sample(args: argparse.Namespace) -> int | None:
    """Answer every prompt that has no answer yet."""
    if args.model and args.path:
        raise misuse("give either --model or --path", "A path says which model is under it.")
    prompts = read_prompts(Path(args.prompts), chat=args.chat)
    chosen = targets.find(args.path or args.model) if args.path or args.model else None
    answers, tally = AnswersFile(Path(args.output)), Tally()
    with targets.connected(chosen) as (service, target):
        left = _left(args, prompts, target, answers, tally)
        if left:
            sampler = target.open(service)
            renderer = Renderer.of(sampler.get_tokenizer())
            work = Work(sampler, renderer, args, answers, tally)
            if _run(work, _questions(left, renderer, args.prompts), len(prompts)):
                say(f"Interrupted. {_go_on(args)}")
                return INTERRUPTED
    answers.sort()
    return _report(args, tally)


def _left(
    args: argparse.Namespace,
    prompts: Sequence[Prompt],
    target: Target,
    answers: AnswersFile,
    tally: Tally,
) -> list[tuple[Prompt, str]]:
    """What is still to be asked; the file is left with nothing but good answers to the rest."""
    settings = {
        "model": target.model,
        **{name: getattr(args, name) for name in ("max_tokens", "temperature", "top_p")},
        **{name: getattr(args, name) for name in ("num_samples", "seed")},
    }
    wanted = {prompt.fingerprint(settings): prompt for prompt in prompts}
    known = [] if args.overwrite else answers.read()
    if any(answer[ASKED] not in wanted for answer in known):
        raise CommandError(
            f"{args.output} has answers to other prompts, or with other settings",
            "Choose another file with -o, or begin again with --overwrite.",
        )
    good = {answer[ASKED]: answer for answer in known if ERROR not in answer}
    answers.replace(good.values())
    tally.kept = len(good)
    return [(prompt, asked) for asked, prompt in wanted.items() if asked not in good]


def _questions(
    left: Iterable[tuple[Prompt, str]], renderer: Renderer, source: str
) -> list[Question]:
    """The prompts as tokens; raises DataError with every one that cannot be."""
    questions: list[Question] = []
    problems: list[DataProblem] = []
    for prompt, asked in left:
        try:
            tokens = renderer.prompt(prompt.content)
        except (ChatTemplateError, InputError) as error:
            problems.append(DataProblem(prompt.line, str(error)))
            continue
        stop = None if isinstance(prompt.content, str) else renderer.stop
        questions.append(Question(prompt, asked, tokens, stop or None))
    if problems:
        raise DataError(source, problems)
    return questions


def _run(work: Work, questions: Sequence[Question], total: int) -> bool:
    """Ask all of them, so many at once; says whether it was interrupted."""
    tally = work.tally
    with (
        work.answers,
        Progress(total, f"sampling {Path(work.args.prompts).name}", done=tally.kept) as progress,
    ):
        try:
            waiting = iter(questions)
            while work.waiting or tally.done < total:
                for question in waiting:
                    work.ask(question)
                    if len(work.waiting) >= work.args.concurrency:
                        break
                before = tally.tokens
                work.take()
                progress.step(tally.done, {"tokens": tally.tokens - before})
        except KeyboardInterrupt:
            return True
        except TinkerError:
            say(_go_on(work.args))
            raise
        finally:
            work.give_up()
    return False


def _go_on(args: argparse.Namespace) -> str:
    return f"What was answered is in {args.output}; the same command goes on from there."


def _report(args: argparse.Namespace, tally: Tally) -> int | None:
    show_one(
        args,
        {
            "output": args.output,
            "answered": tally.answered,
            "kept": tally.kept,
            "failed": tally.failed,
            "tokens": tally.tokens,
        },
        [
            ("Answers", args.output),
            ("Answered", tally.answered),
            ("There already", tally.kept or None),
            ("Failed", tally.failed or None),
            ("Tokens", tally.tokens),
        ],
    )
    if not tally.failed:
        return None
    say(f"{tally.failed} failed, the first at {tally.first_error}")
    say(f"Their lines in {args.output} say why; the same command tries them again.")
    return FAILED
