"""Checkpoints leave a real server and come back.

What `peft` and `transformers` make of them is asked of the tiny model and of SmolLM2-135M. Commands
are processes of their own, as a user starts them.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import warnings
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.docs.blocks import blocks_of, page_named
from tests.e2e.serving import KEY, environment, started
from tinkex import AdamParams, Datum, ModelInput, RestClient, ServiceClient
from tinkex.config import DEFAULT_MODEL

if TYPE_CHECKING:
    from collections.abc import Generator, Iterator
    from pathlib import Path

    from tests.e2e.serving import Served

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")

TINY = "tinkex/tiny"
MODELS = [TINY, pytest.param(DEFAULT_MODEL, marks=(pytest.mark.smollm2, pytest.mark.exhaustive))]
TEXT = list(b"to export is to part with something and still have it")
TOLERANCE = 2e-4
"""Float32 through two programs that add up in different orders."""


@dataclass(frozen=True)
class World:
    """A server with one model, and a folder to work in."""

    url: str
    model: str
    home: Path

    def run(self, *words: object, folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
        """One command, as a process."""
        return subprocess.run(
            [sys.executable, "-m", "tinkex.cli", *map(str, words)],
            cwd=folder,
            env=environment(self.home, TINKER_BASE_URL=self.url, TINKER_API_KEY=KEY, **env),
            capture_output=True,
            text=True,
            check=False,
        )

    def json(self, *words: object, folder: Path) -> Any:
        """What a command that must succeed says."""
        done = self.run(*words, "-f", "json", folder=folder)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def service(self) -> ServiceClient:
        return ServiceClient(base_url=self.url, api_key=KEY)

    def trained(self, steps: int = 4, rate: float = 2e-3, **lora: Any) -> str:
        """The path of a checkpoint that has learned something."""
        data = [Datum(ModelInput.from_ints(TEXT[:-1]), {"target_tokens": TEXT[1:]})]
        with self.service() as service:
            training = service.create_lora_training_client(self.model, rank=4, seed=1, **lora)
            for _ in range(steps):
                training.forward_backward(data, "cross_entropy").result()
                training.optim_step(AdamParams(learning_rate=rate)).result()
            return training.save_state("final").result().path

    def scores(self, path: str) -> np.ndarray:
        """The log-probabilities that a checkpoint gives to the text."""
        with self.service() as service:
            sampler = service.create_sampling_client(model_path=path)
            found = sampler.compute_logprobs(ModelInput.from_ints(TEXT)).result()
        return np.array(found[1:], np.float64)


@contextmanager
def serving(data: Path, model: str) -> Generator[Served]:
    """A server of one model and one tenant."""
    flags = ("--base-model", model, "--threads", "1", "--no-auth", "--port", "0")
    with started(data, *flags) as server:
        server.wait_ready()
        yield server


@pytest.fixture(scope="module", params=MODELS)
def world(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[World]:
    home = tmp_path_factory.mktemp("home")
    with serving(home / "data", request.param) as server:
        yield World(server.url, request.param, home)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    home = tmp_path_factory.mktemp("tiny")
    with serving(home / "data", TINY) as server:
        yield World(server.url, TINY, home)


def scores_of(model: Any) -> np.ndarray:
    """The same of a model of `transformers` or `peft`."""
    with torch.no_grad():
        logits = model(torch.tensor([TEXT])).logits[0].float()
    found = logits.log_softmax(-1)[torch.arange(len(TEXT) - 1), torch.tensor(TEXT[1:])]
    return found.double().numpy()


def loaded(folder: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def base(world: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base model as a Hugging Face folder: an adapter that has learned nothing, merged."""
    folder = tmp_path_factory.mktemp("base")
    untrained = world.trained(steps=0, train_unembed=False)
    words = ("--layout", "merged", "--dtype", "float32")
    said = world.json("checkpoint", "export", untrained, "-o", "model", *words, folder=folder)
    assert said["verified"]["adapter_effect"] == 0.0
    return folder / "model"


# -- out -------------------------------------------------------------------------------------------


def test_the_real_peft_computes_what_the_server_does(world: World, base: Path, tmp_path: Path):
    path = world.trained()
    said = world.json("checkpoint", "export", path, "-o", "adapter", folder=tmp_path)
    assert said["verified"]["difference"] <= said["verified"]["allowed"]
    theirs = loaded(base)
    assert np.abs(scores_of(theirs) - world.scores(path)).mean() > 0.05, "the adapter matters"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    assert np.abs(scores_of(adapted) - world.scores(path)).max() < TOLERANCE


def test_transformers_computes_the_merged_model_as_the_server_does(
    world: World, base: Path, tmp_path: Path
):
    path = world.trained()
    words = ("--layout", "merged", "--dtype", "float32", "-o", "model")
    world.json("checkpoint", "export", path, *words, folder=tmp_path)
    assert np.abs(scores_of(loaded(tmp_path / "model")) - world.scores(path)).max() < TOLERANCE
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.decode(tokenizer.encode("Grüße!"), skip_special_tokens=True) == "Grüße!"
    messages = [{"role": "user", "content": "hi"}]
    assert "hi" in tokenizer.apply_chat_template(messages, tokenize=False)


def test_sampler_weights_and_exports_leave_alike(tiny: World, tmp_path: Path):
    with tiny.service() as service:
        training = service.create_lora_training_client(tiny.model, rank=2, seed=3)
        sampler = training.save_weights_for_sampler("draft").result().path
        export = training.save_weights_external("out").result().path
    for number, path in enumerate((sampler, export)):
        tiny.json("checkpoint", "export", path, "-o", f"x{number}", folder=tmp_path)
    one, two = (load_file(tmp_path / f"x{n}" / "adapter_model.safetensors") for n in range(2))
    assert one.keys() == two.keys()
    assert all(torch.equal(one[name], two[name]) for name in one)


# -- in --------------------------------------------------------------------------------------------


def test_an_adapter_of_the_real_peft_is_computed_as_there(world: World, base: Path, tmp_path: Path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = peft.LoraConfig(
            r=3, lora_alpha=7, use_rslora=True, target_modules=["q_proj", "v_proj", "down_proj"]
        )
        adapted = peft.get_peft_model(loaded(base), config).eval()
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_B" in name:
                    parameter.normal_(0.0, 0.02, generator=generator)
        adapted.save_pretrained(tmp_path / "theirs")
    words = ("--model", world.model, "--name", "theirs")
    said = world.json("checkpoint", "import", "theirs", *words, folder=tmp_path)
    assert said["verified"]["adapter_effect"] > 0.01
    path = said["tinker_path"]
    assert np.abs(scores_of(adapted) - world.scores(path)).max() < TOLERANCE
    with world.service() as service:
        assert service.create_training_client_from_state(path).get_info().lora_rank == 3


def test_what_went_out_comes_back_is_trained_on_and_goes_out_again(tiny: World, tmp_path: Path):
    path = tiny.trained()
    tiny.json("checkpoint", "export", path, "-o", "a", folder=tmp_path)
    kinds = ("weights", "sampler_weights")
    back = [
        tiny.json("checkpoint", "import", "a", "--kind", kind, folder=tmp_path)["tinker_path"]
        for kind in kinds
    ]
    for found in back:
        assert np.abs(tiny.scores(found) - tiny.scores(path)).max() < 1e-5
    data = [Datum(ModelInput.from_ints(TEXT[:-1]), {"target_tokens": TEXT[1:]})]
    with tiny.service() as service:
        training = service.create_training_client_from_state(back[0])
        before = training.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]
        training.optim_step(AdamParams(learning_rate=2e-3)).result()
        after = training.forward_backward(data, "cross_entropy").result().metrics["loss:sum"]
        again = training.save_state("on").result().path
    assert after < before
    tiny.json("checkpoint", "export", again, "-o", "b", folder=tmp_path)
    assert (tmp_path / "b" / "adapter_model.safetensors").is_file()


@pytest.mark.exhaustive
def test_the_commands_of_the_page_run(tiny: World, tmp_path: Path):
    run_id = tiny.trained().removeprefix("tinker://").partition("/")[0]
    lines = [
        line.replace("RUN", run_id)
        for block in blocks_of(page_named("export.md"))
        if block.language == "sh"
        for line in block.text.splitlines()
    ]
    assert len(lines) == 3
    for line in lines:
        done = tiny.run(*line.split()[1:], folder=tmp_path)
        assert done.returncode == 0, done.stderr
        assert max(map(len, done.stdout.splitlines())) <= 80


# -- what must not look done -----------------------------------------------------------------------


@pytest.mark.exhaustive
def test_a_base_model_of_other_weights_is_refused_and_nothing_is_left(tiny: World, tmp_path: Path):
    path = tiny.trained()
    words = ("--layout", "merged", "-o", "model")
    tiny.json("checkpoint", "export", path, *words, folder=tmp_path)
    done = tiny.run("checkpoint", "export", path, "-o", "x", "--base", "model", folder=tmp_path)
    assert done.returncode == 1
    assert "is another model here than on the server" in done.stderr
    assert sorted(found.name for found in tmp_path.iterdir()) == ["model"]


@pytest.mark.exhaustive
def test_rounding_that_costs_too_much_of_a_faint_adapter_is_refused(tiny: World, tmp_path: Path):
    faint = tiny.trained(steps=1, rate=2e-5)
    words = ("--layout", "merged", "-o", "model")
    done = tiny.run("checkpoint", "export", faint, *words, "--dtype", "bfloat16", folder=tmp_path)
    assert done.returncode == 1
    assert "--dtype float32" in done.stderr
    assert list(tmp_path.iterdir()) == []
    tiny.json("checkpoint", "export", faint, *words, folder=tmp_path)


def test_an_export_that_computes_something_else_is_refused(
    tiny: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    from tinkex.cli import checkpoint_files
    from tinkex.cli.main import main

    honest = checkpoint_files.fetch_adapter

    def tampered(service: Any, path: str, folder: Path, base_model: str | None = None) -> Any:
        adapter = honest(service, path, folder, base_model)
        file = folder / "adapter_model.safetensors"
        tensors = load_file(file)
        name = next(name for name in tensors if name.endswith("up_proj.lora_B.weight"))
        save_file({**tensors, name: tensors[name] * 0.5}, file)
        return adapter

    monkeypatch.setattr(checkpoint_files, "fetch_adapter", tampered)
    monkeypatch.setenv("TINKER_BASE_URL", tiny.url)
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    monkeypatch.chdir(tmp_path)
    assert main(["checkpoint", "export", tiny.trained(), "-o", "x"]) == 1
    assert "do not compute what the server does" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_adapter_of_another_model_is_refused_by_its_shapes(tiny: World, tmp_path: Path):
    path = tiny.trained()
    tiny.json("checkpoint", "export", path, "-o", "a", folder=tmp_path)
    file = tmp_path / "a" / "adapter_model.safetensors"
    wide = {
        name: torch.zeros(t.shape[0], 576) if name.endswith("lora_A.weight") else t
        for name, t in load_file(file).items()
    }
    save_file(wide, file)
    done = tiny.run("checkpoint", "import", "a", folder=tmp_path)
    assert done.returncode == 1
    assert "has shape [4, 576], expected [4, 128]" in done.stderr


def test_an_import_that_was_acknowledged_outlives_a_killed_server(tmp_path: Path):
    with serving(tmp_path / "data", TINY) as server:
        world = World(server.url, TINY, tmp_path)
        trained = world.trained()
        before = world.scores(trained)
        world.json("checkpoint", "export", trained, "-o", "a", folder=tmp_path)
        with world.service() as service:
            path = RestClient(service.holder).import_adapter(tmp_path / "a").result()
            server.end(signal.SIGKILL)
    with serving(tmp_path / "data", TINY) as server:
        again = World(server.url, TINY, tmp_path)
        assert np.abs(again.scores(path) - before).max() < 1e-5
