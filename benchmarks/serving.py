"""A `tinkex serve` of one's own for a measurement, and a base model of a million parameters."""

from __future__ import annotations

import json
import os
import re
import select
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from safetensors.numpy import save_file

if TYPE_CHECKING:
    from collections.abc import Generator

ROOT = Path(__file__).parents[1]
START_S = 120.0
_TICKS = os.sysconf("SC_CLK_TCK")

ONE_MILLION = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 1024,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 0,
    "torch_dtype": "float32",
}


def one_million(folder: Path) -> Path:
    """A Llama of 0.9 million random parameters as a Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(ONE_MILLION))
    random = np.random.default_rng(1)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (1024, 128)}
    for layer in range(4):
        name = f"model.layers.{layer}."
        shapes |= {
            f"{name}self_attn.q_proj.weight": (128, 128),
            f"{name}self_attn.k_proj.weight": (64, 128),
            f"{name}self_attn.v_proj.weight": (64, 128),
            f"{name}self_attn.o_proj.weight": (128, 128),
            f"{name}mlp.gate_proj.weight": (384, 128),
            f"{name}mlp.up_proj.weight": (384, 128),
            f"{name}mlp.down_proj.weight": (128, 384),
            f"{name}input_layernorm.weight": (128,),
            f"{name}post_attention_layernorm.weight": (128,),
        }
    shapes["model.norm.weight"] = (128,)
    tensors = {
        name: np.ones(shape, np.float32)
        if len(shape) == 1
        else (random.standard_normal(shape) / shape[-1] ** 0.5).astype(np.float32)
        for name, shape in shapes.items()
    }
    save_file(tensors, str(folder / "model.safetensors"))
    return folder


@dataclass(frozen=True)
class Server:
    """A server that is ready."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        """CPU time of the API process alone, so far; the engine is another process."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS

    def resident_mib(self) -> float:
        """Memory of the API process."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        return int(found[1]) / 1024 if found else float("nan")


@contextmanager
def serving(folder: Path, *base_models: str, root: Path = ROOT) -> Generator[Server]:
    """`tinkex serve` of a checkout on any port, one tenant, until the end of the block."""
    models = [flag for model in base_models for flag in ("--base-model", model)]
    argv = [sys.executable, "-m", "tinkex.cli", "serve", "--data-dir", str(folder / "data")]
    argv += [*models, "--port", "0", "--no-auth"]
    with (folder / "serve.log").open("w") as log:
        env = {**os.environ, "PYTHONPATH": str(root / "src"), "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=log, text=True, env=env)
    with process:
        try:
            yield Server(ready_url(process, folder / "serve.log"), process.pid)
        finally:
            process.terminate()


def ready_url(process: subprocess.Popen[str], log: Path | None = None) -> str:
    """The address in the first line that a server prints."""
    assert process.stdout is not None
    ready, _, _ = select.select([process.stdout], [], [], START_S)
    line = process.stdout.readline() if ready else ""
    found = re.search(r"on (http://\S+)", line)
    if found is None:
        why = "" if log is None else f": {log.read_text()[-2000:]}"
        raise SystemExit(f"the server did not start{why}")
    return found[1]
