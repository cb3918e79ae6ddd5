"""Reinforcement learning: a group of answers per prompt, each judged against the group's mean.

On policy: a step publishes the weights, samples from them and trains on the samples. The sampling
seeds are a function of the run's seed, the step and the prompt.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

from tinkex.chat.renderer import Renderer
from tinkex.errors import InputError, ResultError
from tinkex.loops.batches import loss_of
from tinkex.loops.dataset import counted, total_steps
from tinkex.loops.schedule import batch, sampling_seed
from tinkex.loops.task import load_task
from tinkex.loops.training_loop import PreparedStep, Submission
from tinkex.tokenizers import tokenizer_for
from tinkex.types import Datum, ModelInput, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tinkex.clients.sampling import SamplingClient
    from tinkex.clients.service import ServiceClient
    from tinkex.clock import Clock
    from tinkex.futures.future import APIFuture
    from tinkex.loops.run_settings import RlSettings
    from tinkex.loops.task import Prompt, RlTask
    from tinkex.loops.training_loop import RunContext
    from tinkex.types import AdamParams, SampledSequence, SampleResponse

_EPOCHS = 20


class RlJob:
    """A task to learn. The constructor runs the task's file and raises InputError for a bad one."""

    def __init__(self, settings: RlSettings, task: Path) -> None:
        self.settings = settings
        self.files = {"task": task}
        self._task = load_task(task)
        self.steps = total_steps(settings, _EPOCHS, len(self._task.prompts))
        prompts = len(self._task.prompts) + len(self._task.eval_prompts)
        self.material = counted(prompts, "prompt")
        self.chat = not all(isinstance(prompt, str) for prompt in self._task.prompts)

    def prepare(self, service: ServiceClient, clock: Clock) -> RlRecipe:
        """Render the prompts."""
        renderer = Renderer.of(tokenizer_for(service, self.settings.base_model), clock=clock)
        return RlRecipe(self.settings, self._task, renderer)


class RlRecipe:
    """Importance sampling; an answer's advantage is its reward less the mean of its group."""

    ahead = False
    higher_is_better = True

    def __init__(self, settings: RlSettings, task: RlTask, renderer: Renderer) -> None:
        self._settings = settings
        self._task = task
        self._renderer = renderer
        self._prompts = [_tokens(renderer, prompt, task.path) for prompt in task.prompts]
        self._eval_prompts = [_tokens(renderer, prompt, task.path) for prompt in task.eval_prompts]
        self.judged_by = "eval_reward" if self._eval_prompts else None
        both = json.dumps([self._prompts, self._eval_prompts])
        self.rendered = hashlib.sha256(both.encode()).hexdigest()
        # Mutable state: a sampler of the current weights; None once they have changed.
        self._published: SamplingClient | None = None

    def start(self, run: RunContext) -> None:
        """Set the model to train."""
        self._training = run.training

    def begin(self, step: int) -> PreparedStep:
        """Sample the answers that the step trains on."""
        settings = self._settings
        chosen = batch(step, settings.batch_size, len(self._prompts), settings.seed)
        sampler = self._sampler()
        asked = [
            self._ask(sampler, self._prompts[number], sampling_seed(settings.seed, step, place))
            for place, number in enumerate(chosen)
        ]

        def submit(adam: AdamParams) -> Submission:
            groups = [
                self._judged(number, future.result())
                for number, future in zip(chosen, asked, strict=True)
            ]
            return self._submit(groups, adam)

        def abandon() -> None:
            for future in asked:
                future.cancel()

        return PreparedStep(submit, abandon)

    def evaluate(self) -> Submission:
        """Submit the task's own evaluation prompts, answered greedily."""
        sampler = self._sampler()
        greedy = SamplingParams(
            max_tokens=self._settings.max_tokens, temperature=0.0, seed=0, stop=self._renderer.stop
        )
        asked = [sampler.sample(ModelInput.from_ints(p), 1, greedy) for p in self._eval_prompts]

        def wait() -> dict[str, float]:
            answers = [self._text(future.result().sequences[0]) for future in asked]
            rewards = map(self._task.reward, self._task.eval_prompts, answers)
            return {"eval_reward": fmean(rewards)}

        return Submission(wait)

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
            stop=self._renderer.stop,
        )
        return sampler.sample(ModelInput.from_ints(prompt), self._settings.group_size, params)

    def _judged(self, number: int, answered: SampleResponse) -> _Group:
        answers, prompt = answered.sequences, self._task.prompts[number]
        rewards = [self._task.reward(prompt, self._text(answer)) for answer in answers]
        return _Group(self._prompts[number], answers, rewards)

    def _text(self, answer: SampledSequence) -> str:
        return self._renderer.text(answer.tokens)

    def _submit(self, groups: Sequence[_Group], adam: AdamParams) -> Submission:
        values = {
            "reward": fmean(reward for group in groups for reward in group.rewards),
            "answer_tokens": fmean(len(one.tokens) for group in groups for one in group.answers),
            "tokens": float(sum(group.tokens for group in groups)),
        }
        data = [datum for group in groups for datum in group.data()]
        if not data:  # every group has equal rewards: all advantages are zero
            return Submission(lambda: values)
        trained = sum(len(one.tokens) for group in groups for one in group.answers)
        passed = self._training.forward_backward(data, "importance_sampling")
        stepped = self._training.optim_step(adam)
        self._published = None

        def wait() -> dict[str, float]:
            loss = loss_of(passed.result()) / trained
            stepped.result()
            return {"loss": loss, **values}

        return Submission(wait, stepped)


@dataclass(frozen=True, slots=True)
class _Group:
    """The answers to one prompt, and their rewards."""

    prompt: list[int]
    answers: Sequence[SampledSequence]
    rewards: list[float]

    @property
    def tokens(self) -> int:
        return sum(len(self.prompt) + len(answer.tokens) for answer in self.answers)

    def data(self) -> list[Datum]:
        """The answers with their advantages; none where all rewards are equal."""
        if len(set(self.rewards)) == 1:
            return []
        mean = fmean(self.rewards)
        pairs = zip(self.answers, self.rewards, strict=True)
        return [self._datum(answer, reward - mean) for answer, reward in pairs]

    def _datum(self, answer: SampledSequence, advantage: float) -> Datum:
        """The sampled tokens carry the advantage; the prompt's positions have advantage 0."""
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
        raise InputError("a prompt has no tokens", str(path))
    return tokens
