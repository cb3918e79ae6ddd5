"""Ready-made training: what there is to set about each kind of run.

Nothing has a default here. What is not given comes from the settings in `tinkex.loops`, and for a
run that is resumed from the run itself.
"""

from __future__ import annotations

from tinkex.cli.table.base import Argument, Command, Verbs

_DATA = Argument("data", metavar="DATA.jsonl", help="what to train on: see `tinkex data view`")
_MODEL = Argument(
    "--model",
    metavar="NAME[=FOLDER]",
    help="the model to start from (default: HuggingFaceTB/SmolLM2-135M-Instruct)",
)
_OUTPUT = Argument("--output", metavar="DIR", help="the run's folder (default: runs/FILE-KIND)")
_EVAL = Argument("--eval", metavar="FILE", help="evaluate with these examples")
_EVAL_FRACTION = Argument(
    "--eval-fraction",
    type=float,
    metavar="X",
    help="evaluate with this part of the data, which is then not trained on",
)
_STEPS = Argument("--steps", type=int, metavar="N", help="how many steps")
_RANK = Argument("--rank", type=int, metavar="N", help="of the LoRA adapter (default: 16)")
_SCHEDULE = Argument(
    "--lr-schedule",
    choices=("constant", "linear", "cosine"),
    metavar="NAME",
    help="constant, linear (down to nothing) or cosine",
)
_WARMUP = Argument("--warmup", type=int, metavar="N", help="steps until the rate is reached")
_SEED = Argument(
    "--seed", type=int, metavar="N", help="of the adapter and the order of things (default: 0)"
)
_SAVE_EVERY = Argument(
    "--save-every", type=int, metavar="N", help="save every so many steps (default: 10 times)"
)
_EVAL_EVERY = Argument(
    "--eval-every", type=int, metavar="N", help="evaluate every so many steps (default: 10 times)"
)
_PATIENCE = Argument(
    "--patience",
    type=int,
    metavar="N",
    help="stop after N evaluations that are no better; the best is kept",
)
_REPORT = Argument(
    "--report",
    action="append",
    metavar="WHERE",
    help="results also go to tensorboard, wandb or wandb:PROJECT; may be repeated",
)
_RESUME = Argument("--resume", action="store_true", help="go on with the run in the folder")

_COMMON = (_RANK, _SCHEDULE, _WARMUP, _SEED, _SAVE_EVERY, _EVAL_EVERY, _PATIENCE, _REPORT, _RESUME)


def _epochs(default: int) -> Argument:
    text = f"how often to go through the data (default: {default})"
    return Argument("--epochs", type=int, metavar="N", help=text)


def _batch_size(what: str) -> Argument:
    return Argument("--batch-size", type=int, metavar="N", help=f"{what} in a step (default: 8)")


def _learning_rate(default: str) -> Argument:
    text = f"the highest (default: {default})"
    return Argument("--learning-rate", type=float, metavar="X", help=text)


def _max_tokens(what: str, default: int) -> Argument:
    return Argument("--max-tokens", type=int, metavar="N", help=f"{what} (default: {default})")


TRAIN: Verbs = (
    "fine-tune a model with a ready-made loop",
    {
        "sft": Command(
            "train:sft",
            "teach a model by examples",
            _DATA,
            _MODEL,
            _OUTPUT,
            _EVAL,
            _EVAL_FRACTION,
            _STEPS,
            _epochs(3),
            _batch_size("examples"),
            _learning_rate("3e-4"),
            Argument(
                "--train-on",
                choices=("all", "last"),
                metavar="WHICH",
                help="all of an assistant's messages, or the last (default: all)",
            ),
            _max_tokens("longest example that is taken", 2048),
            *_COMMON,
        ),
        "dpo": Command(
            "train:dpo",
            "teach a model which of two answers is better",
            _DATA,
            _MODEL,
            _OUTPUT,
            _EVAL,
            _EVAL_FRACTION,
            _STEPS,
            _epochs(1),
            _batch_size("pairs"),
            _learning_rate("5e-5"),
            Argument(
                "--beta",
                type=float,
                metavar="X",
                help="how dear it is to leave the base model (default: 0.1)",
            ),
            _max_tokens("longest example that is taken", 2048),
            *_COMMON,
        ),
        "rl": Command(
            "train:rl",
            "let a model find out what is rewarded",
            Argument("task", metavar="TASK.py", help="has prompts() and reward(prompt, answer)"),
            _MODEL,
            _OUTPUT,
            _STEPS,
            _batch_size("prompts"),
            _learning_rate("3e-4"),
            Argument(
                "--group-size", type=int, metavar="N", help="answers to a prompt (default: 8)"
            ),
            _max_tokens("of an answer, at most", 128),
            Argument("--temperature", type=float, metavar="X", help="of the answers (default: 1)"),
            *_COMMON,
        ),
    },
)
