"""Reinforcement learning: a group of answers per prompt, each judged against the group's mean.

On policy: a step publishes the weights, samples from them and trains on what came. The answers'
random numbers are a function of the seed, the step and the prompt.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from tinkex.chat.renderer import Renderer
from tinkex.errors import InputError, ResultError
from tinkex.loops.batches import counted, loss_of, total_steps
from tinkex.loops.loop import Begun, Pending
from tinkex.loops.schedule import batch, sampling_seed
from tinkex.loops.task import load_task
from tinkex.tokenizers import tokenizer_for
from tinkex.types import Datum, ModelInput, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from tinkex.clients.sampling import SamplingClient
    from tinkex.clients.service import ServiceClient
    from tinkex.clients.training import TrainingClient
    from tinkex.clock import Clock
    from tinkex.futures.future import APIFuture
    from tinkex.loops.settings import RlSettings
    from tinkex.loops.task import Prompt, Task
    from tinkex.types import AdamParams, SampledSequence, SampleResponse

_EPOCHS = 20


class RlJob:
    """A task to learn; made, it has run the task's file. Raises InputError for a bad one."""

    def __init__(self, settings: RlSettings, task: Path) -> None:
        self.settings = settings
        self.files = {"task": task}
        self._task = load_task(task)
        self.steps = total_steps(settings, _EPOCHS, len(self._task.prompts))
        prompts = len(self._task.prompts) + len(self._task.eval_prompts)
        self.material = counted(prompts, "prompt")
        self.chat = not all(isinstance(prompt, str) for prompt in self._task.prompts)

    def prepare(self, service: ServiceClient, clock: Clock) -> PreparedRl:
        """Turn the prompts to tokens."""
        renderer = Renderer.of(tokenizer_for(service, self.settings.base_model), clock=clock)
        task = self._task
        return PreparedRl(
            self.settings,
            task,
            renderer,
            [_tokens(renderer, prompt, task.path) for prompt in task.prompts],
            [_tokens(renderer, prompt, task.path) for prompt in task.eval_prompts],
        )


@dataclass(frozen=True, slots=True)
class PreparedRl:
    """Prompts as tokens."""

    settings: RlSettings
    task: Task
    renderer: Renderer
    prompts: list[list[int]]
    eval_prompts: list[list[int]]
    higher_is_better = True

    @property
    def judged_by(self) -> str | None:
        return "eval_reward" if self.eval_prompts else None

    @property
    def rendered(self) -> str:
        return hashlib.sha256(json.dumps([self.prompts, self.eval_prompts]).encode()).hexdigest()

    def recipe(
        self,
        service: ServiceClient,
        training: TrainingClient,
        folder: Path,
        note: Callable[[str], None],
    ) -> RlRecipe:
        return RlRecipe(self, training)


class RlRecipe:
    """Importance sampling over answers that carry what they are better than their group."""

    ahead = False

    def __init__(self, prepared: PreparedRl, training: TrainingClient) -> None:
        self._prepared = prepared
        self._settings = prepared.settings
        self._training = training
        # Mutable state: a sampler of the weights as they are; None once they have changed.
        self._published: SamplingClient | None = None

    def begin(self, step: int) -> Begun:
        """Ask for the answers that the step learns from."""
        known, settings = self._prepared, self._settings
        chosen = batch(step, settings.batch_size, len(known.prompts), settings.seed)
        sampler = self._sampler()
        asked = [
            self._ask(sampler, known.prompts[number], sampling_seed(settings.seed, step, place))
            for place, number in enumerate(chosen)
        ]

        def submit(adam: AdamParams) -> Pending:
            groups = [
                self._judged(known.task.prompts[number], known.prompts[number], future.result())
                for number, future in zip(chosen, asked, strict=True)
            ]
            return self._submit(groups, adam)

        def abandon() -> None:
            for future in asked:
                future.cancel()

        return Begun(submit, abandon)

    def evaluate(self) -> Pending:
        """Submit the task's own evaluation prompts, answered greedily."""
        known, sampler = self._prepared, self._sampler()
        greedy = SamplingParams(
            max_tokens=self._settings.max_tokens, temperature=0.0, seed=0, stop=known.renderer.stop
        )
        asked = [sampler.sample(ModelInput.from_ints(p), 1, greedy) for p in known.eval_prompts]

        def wait() -> dict[str, float]:
            answers = [self._text(future.result().sequences[0]) for future in asked]
            rewards = map(known.task.reward, known.task.eval_prompts, answers)
            return {"eval_reward": fmean(rewards)}

        return Pending(wait)

    def _sampler(self) -> SamplingClient:
        if self._published is None:
            self._published = self._training.save_weights_and_get_sampling_client()
        return self._published

    def _ask(
        self, sampler: SamplingClient, prompt: list[int], seed: int
    ) -> APIFuture[SampleResponse]:
        params = SamplingParams(
            max_tokens=self._settings.max_tokens,
            temperature=self._settings.temperature,
            seed=seed,
            stop=self._prepared.renderer.stop,
        )
        return sampler.sample(ModelInput.from_ints(prompt), self._settings.group_size, params)

    def _judged(self, prompt: Prompt, tokens: list[int], answered: SampleResponse) -> _Group:
        answers = answered.sequences
        task = self._prepared.task
        rewards = [task.reward(prompt, self._text(answer)) for answer in answers]
        return _Group(tokens, answers, rewards)

    def _text(self, answer: SampledSequence) -> str:
        return self._prepared.renderer.text(answer.tokens)

    def _submit(self, groups: Sequence[_Group], adam: AdamParams) -> Pending:
        values = {
            "reward": fmean(reward for group in groups for reward in group.rewards),
            "answer_tokens": fmean(len(one.tokens) for group in groups for one in group.answers),
            "tokens": float(sum(group.tokens for group in groups)),
        }
        data = [datum for group in groups for datum in group.data()]
        if not data:  # all answers of each group are worth the same: there is nothing to learn
            return Pending(lambda: values)
        trained = sum(len(one.tokens) for group in groups for one in group.answers)
        passed = self._training.forward_backward(data, "importance_sampling")
        stepped = self._training.optim_step(adam)
        self._published = None

        def wait() -> dict[str, float]:
            loss = loss_of(passed.result()) / trained
            stepped.result()
            return {"loss": loss, **values}

        return Pending(wait, stepped)


@dataclass(frozen=True, slots=True)
class _Group:
    """The answers to one prompt, and what each is worth."""

    prompt: list[int]
    answers: Sequence[SampledSequence]
    rewards: list[float]

    @property
    def tokens(self) -> int:
        return sum(len(self.prompt) + len(answer.tokens) for answer in self.answers)

    def data(self) -> list[Datum]:
        """The answers with their advantages; none where all are worth the same."""
        if len(set(self.rewards)) == 1:
            return []
        mean = fmean(self.rewards)
        pairs = zip(self.answers, self.rewards, strict=True)
        return [self._datum(answer, reward - mean) for answer, reward in pairs]

    def _datum(self, answer: SampledSequence, advantage: float) -> Datum:
        """The sampled tokens carry the advantage; the prompt's positions carry nothing."""
        if answer.logprobs is None:
            raise ResultError("the server sampled without log-probabilities, which training needs")
        silent = len(self.prompt) - 1
        inputs: dict[str, Any] = {
            "target_tokens": [*self.prompt[1:], *answer.tokens],
            "logprobs": [0.0] * silent + answer.logprobs,
            "advantages": [0.0] * silent + [advantage] * len(answer.tokens),
        }
        return Datum(ModelInput.from_ints([*self.prompt, *answer.tokens[:-1]]), inputs)


def _tokens(renderer: Renderer, prompt: Prompt, path: Path) -> list[int]:
    tokens = renderer.prompt(prompt)
    if not tokens:
        raise InputError("a prompt comes to no token at all", str(path))
    return tokens
