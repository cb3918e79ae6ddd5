"""The engine needs neither `transformers` nor `peft`: both are what tests compare it with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.unit.engine.models.reference import random_model

ROOT = Path(__file__).parents[4]

SCRIPT = """
import asyncio, json, sys
from pathlib import Path

sys.modules["transformers"] = sys.modules["peft"] = None  # importing them raises
from tests.unit.engine.local_kit import optim_op, spec, train_op, trained, data
from tinkex.engine.protocol import SampleOp, Weights
from tinkex.engine.local import LocalEngine, LocalSettings
from tinkex.engine.models.loader import load_model
from tinkex.types import Datum, ModelInput, SamplingParams

folder = Path(sys.argv[1])
ids = [(5 * i) % 67 for i in range(12)]


async def main():
    model = load_model(str(folder / "base"), name="base")
    async with LocalEngine([model], folder, LocalSettings(cache_bytes=1 << 20)) as engine:
        await engine.create_adapter(spec("m", base_model="base"))
        datum = Datum(ModelInput.from_ints(ids[:-1]), {"target_tokens": ids[1:]})
        (result,) = await trained(engine, train_op("m", [datum]))
        await engine.optim_step([optim_op("m")])
        await engine.save_adapter("m", "x", optimizer=True)
        files = await engine.export_saved("x")
        op = SampleOp(
            op_id="s",
            weights=Weights(base_model="base", location="x"),
            prompt=ModelInput.from_ints(ids),
            params=SamplingParams(max_tokens=3, stop=[]),
            sequence_ids=["s"],
        )
        sample = await engine.sample(op)
        return result.output.metrics["loss:sum"], sorted(files), sample.generated_tokens


print(json.dumps(asyncio.run(main())))
"""


def test_a_folder_is_loaded_trained_sampled_and_exported_without_them(tmp_path: Path):
    model = random_model("Qwen3", head_dim=16)
    model.save_pretrained(tmp_path / "base", max_shard_size="20KB")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "OMP_NUM_THREADS": "1"},
    )
    loss, files, generated = json.loads(done.stdout)
    assert loss > 0
    assert files == ["adapter_config.json", "adapter_model.safetensors"]
    assert generated == 3
