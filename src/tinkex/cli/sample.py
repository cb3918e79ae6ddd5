"""`tinkex sample`: samples answers to prompts, to a file or to standard output.

Answers in the file are kept: the same command continues after an interruption, and retries prompts
that failed.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from tinkex.cli.answers import ASKED, ERROR, AnswersFile, AnswersShown
from tinkex.cli.command_errors import CommandError, misuse
from tinkex.cli.commands import FAILED, INTERRUPTED, TEMPERATURE, TOP_P, Argument, whole_number
from tinkex.cli.output import say, show_one
from tinkex.errors import ChatTemplateError, DataError, DataProblem, InputError, TinkerError
from tinkex.tracking.progress import Progress
from tinkex.tracking.views import doing

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tinkex.chat.renderer import Renderer
    from tinkex.cli.prompts import Prompt, PromptQueue, Question, Tally
    from tinkex.cli.target import SamplingTarget

_COUNT = whole_number(1)

ARGUMENTS = (
    Argument(
        "prompts PROMPTS",
        ".jsonl: each line is a string, or an object with prompt or messages; "
        "any other file: each line is a prompt",
        nargs="?",
    ),
    Argument(
        "--prompt TEXT",
        "a prompt, instead of a file; may be repeated",
        dest="given",
        action="append",
    ),
    Argument(
        "-o --output OUT", "write JSON lines, one for each prompt (default: print the answers)"
    ),
    Argument("--model NAME", "a base model (default: the server's only one)"),
    Argument("--path PATH", "a tinker:// path, or the folder of a training run"),
    Argument(
        "--chat",
        "send text as a user's message instead of text to continue (default: as the run of "
        "--path was trained, else --no-chat)",
        action=argparse.BooleanOptionalAction,
    ),
    Argument("--max-tokens N", "per sample", type=_COUNT, default=256),
    TEMPERATURE,
    TOP_P,
    Argument("--num-samples N", "per prompt", type=_COUNT, default=1),
    Argument("--seed N", "makes samples reproducible", type=int),
    Argument("--concurrency N", "prompts in flight at once", type=_COUNT, default=32),
    Argument("--overwrite", "replace OUT if it exists"),
)


def sample(args: argparse.Namespace) -> int | None:
    """Answer every prompt that has no answer yet."""
    from tinkex.chat.renderer import Renderer
    from tinkex.cli import target as targets
    from tinkex.cli.prompts import PromptQueue, Tally

    if args.model and args.path:
        raise misuse("Give either --model or --path", "A path says which model is under it.")
    _check_path(args.path)
    chosen = targets.find(args.path or args.model) if args.path or args.model else None
    chat = _is_chat(args)
    prompts = _prompts(args, chat=chat)
    tally = Tally()
    if args.output:
        answers = AnswersFile(Path(args.output))
    else:
        answers = AnswersShown(as_json=args.format == "json")
    with targets.connected(chosen) as (service, target):
        left = _left(args, prompts, target, answers, tally)
        if left:
            with doing(f"Loading {target.name}"):
                sampler = target.open(service)
                renderer = Renderer.of(sampler.get_tokenizer())
            work = PromptQueue(sampler, renderer, args, answers, tally)
            questions = _questions(left, renderer, args.prompts or "--prompt")
            try:
                interrupted = _run(work, questions, len(prompts))
            finally:
                if not args.output:
                    answers.end()
            _warn_of_empty(tally, renderer, target.name, chat=chat)
            if interrupted:
                say(f"Interrupted. {_go_on(args)}")
                return INTERRUPTED
    if args.output:
        answers.end()
    return _report(args, tally)


def _check_path(path: str | None) -> None:
    if path and not path.startswith("tinker://") and not Path(path).exists():
        raise CommandError(
            f"There is no folder {path}",
            "--path takes a tinker:// path or the folder of a training run; a base model is named\n"
            "with --model.",
        )


def _is_chat(args: argparse.Namespace) -> bool:
    """Whether text is a user's message; by default, whether the run was trained on messages."""
    if args.chat is not None:
        return args.chat
    from tinkex.loops.run_folder import RunFolder

    record = RunFolder(Path(args.path)).read() if args.path else None
    if record is None or not record.chat:
        return False
    say(
        f"{args.path} was trained on chats:\n"
        "each prompt is sent as a user's message (--no-chat: as text)."
    )
    return True


def _prompts(args: argparse.Namespace, *, chat: bool) -> list[Prompt]:
    from tinkex.cli.prompts import given_prompts, read_prompts

    if bool(args.prompts) == bool(args.given):
        raise misuse(
            "Give either a file of prompts or --prompt",
            'For example:  tinkex sample --prompt "Hello!"  or  tinkex sample prompts.txt',
        )
    if args.given:
        return given_prompts(args.given, chat=chat)
    try:
        return read_prompts(Path(args.prompts), chat=chat)
    except FileNotFoundError:
        raise CommandError(
            f"There is no file {args.prompts}", "A prompt itself is given with --prompt TEXT."
        ) from None


def _warn_of_empty(tally: Tally, renderer: Renderer, name: str, *, chat: bool) -> None:
    """Warn of empty answers: a chat model often ends plain text at once."""
    if 2 * tally.empty < max(tally.samples, 1):
        return
    say(f"Warning: {tally.empty} of {tally.samples} answers are empty.")
    if renderer.has_template and not chat:
        say(f"{name} has a chat template. --chat sends each prompt as a user's message.")


def _left(
    args: argparse.Namespace,
    prompts: Sequence[Prompt],
    target: SamplingTarget,
    answers: AnswersFile | AnswersShown,
    tally: Tally,
) -> list[tuple[Prompt, str]]:
    """The prompts without an answer; the file keeps only the good answers to the others."""
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
    """The prompts as tokens; raises DataError with every prompt that cannot be rendered."""
    from tinkex.cli.prompts import Question

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


def _run(work: PromptQueue, questions: Sequence[Question], total: int) -> bool:
    """Ask all questions, `--concurrency` at once; returns whether it was interrupted."""
    tally = work.tally
    with (
        work.answers,
        Progress(total, _title(work.args), done=tally.kept, unit="prompt") as progress,
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
            work.cancel()
    return False


def _title(args: argparse.Namespace) -> str:
    return f"sampling {Path(args.prompts).name}" if args.prompts else "sampling"


def _go_on(args: argparse.Namespace) -> str:
    if not args.output:
        return "With -o OUT answers are kept, and the same command continues after them."
    return f"The answers so far are in {args.output}; the same command continues after them."


def _report(args: argparse.Namespace, tally: Tally) -> int | None:
    if args.output:
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
    if args.output:
        say(f"{tally.failed} failed, the first at {tally.first_error}")
        say(f"Their lines in {args.output} say why; the same command tries them again.")
    return FAILED
