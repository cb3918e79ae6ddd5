"""`tinkex sample`: a file of prompts in, a file of answers out.

What was answered stays answered: the same command goes on where it was interrupted, and tries
again what failed.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.chat.renderer import Renderer
from tinkex.cli import target as targets
from tinkex.cli.answers_file import ASKED, ERROR, AnswersFile
from tinkex.cli.asking import Question, Tally, Work
from tinkex.cli.failures import CommandError, misuse
from tinkex.cli.main import FAILED, INTERRUPTED
from tinkex.cli.output import say, show_one
from tinkex.cli.prompts import read_prompts
from tinkex.errors import ChatTemplateError, DataError, DataProblem, InputError, TinkerError
from tinkex.seeing.progress import Progress

if TYPE_CHECKING:
    import argparse
    from collections.abc import Iterable, Sequence

    from tinkex.cli.prompts import Prompt
    from tinkex.cli.target import Target


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
