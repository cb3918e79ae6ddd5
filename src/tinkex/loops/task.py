"""A task for reinforcement learning: a Python file with prompts and a reward function.

    def prompts() -> list[str | list[dict]]: ...        # text, or messages
    def reward(prompt, answer: str) -> float: ...
    def eval_prompts() -> list[str | list[dict]]: ...   # optional: to evaluate with

The file is the caller's own program: it is imported and its functions are called.
"""

from __future__ import annotations

import importlib.util
import math
import sys
import traceback
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from tinkex.chat.messages import readable_messages
from tinkex.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path
    from types import ModuleType

    from tinkex.chat.messages import Message

    Prompt = str | list[Message]


@dataclass(frozen=True, slots=True)
class RlTask:
    """The contents of a task's file."""

    path: Path
    prompts: list[Prompt]
    eval_prompts: list[Prompt]
    judge: Callable[[Any, str], Any]

    def reward(self, prompt: Prompt, answer: str) -> float:
        """The reward of an answer; raises InputError when the task's function fails."""
        return _number(_call(self.path, "reward", self.judge, prompt, answer), self.path)


def load_task(path: Path) -> RlTask:
    """Import the file and get its prompts; raises InputError for a file that cannot be used.

    `reward` is tried with an empty answer, which a model may also give.
    """
    module = _module(path)
    judge = _function(module, "reward", path)
    prompts = _prompts(path, "prompts", _function(module, "prompts", path))
    evaluated: list[Prompt] = []
    if hasattr(module, "eval_prompts"):
        evaluated = _prompts(path, "eval_prompts", _function(module, "eval_prompts", path))
    task = RlTask(path, prompts, evaluated, judge)
    task.reward(prompts[0], "")
    return task


def _module(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError("there is no such file", str(path))
    spec = importlib.util.spec_from_file_location(path.stem, path.resolve())
    if spec is None or spec.loader is None:
        raise InputError("is not a Python file; its name must end in .py", str(path))
    module = importlib.util.module_from_spec(spec)
    # Its imports work as when it is run as a program: from the folder that contains it.
    sys.path.insert(0, str(path.resolve().parent))
    _call(path, "the file", spec.loader.exec_module, module)
    return module


def _function(module: ModuleType, name: str, path: Path) -> Callable[..., Any]:
    found: Any = getattr(module, name, None)
    if not callable(found):
        raise InputError(f"has no function {name}()", str(path))
    return found


def _call(path: Path, name: str, function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        lines = [frame.lineno for frame in frames if frame.filename == str(path.resolve())]
        at = f" in line {lines[-1]}" if lines else ""
        reason = f"{name} raised {type(error).__name__}{at}: {error}"
        raise InputError(reason, str(path)) from error


def _prompts(path: Path, name: str, function: Callable[[], Any]) -> list[Prompt]:
    found = _call(path, name, function)
    if not isinstance(found, list | tuple) or not found:
        raise InputError(f"{name}() must return a list with at least one prompt", str(path))
    return [
        _prompt(one, f"{path}: {name}()[{number}]")
        for number, one in enumerate(cast("list[Any]", found))
    ]


def _prompt(one: Any, place: str) -> Prompt:
    if isinstance(one, str) and one:
        return one
    if isinstance(one, list | tuple) and one:
        return cast("Prompt", readable_messages(cast("list[Message]", one), place))
    raise InputError("must be text, or a list of messages, and not be empty", place)


def _number(value: Any, path: Path) -> float:
    try:
        number = float(value)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise InputError(f"reward() must return a finite number, not {value!r}", str(path))
    return number
