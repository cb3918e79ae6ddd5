"""The cookbook's `weights.download` of a training checkpoint, which it asks for encrypted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from interpreters import finish

from tinkex.testing import FakeServer

if TYPE_CHECKING:
    from pathlib import Path

    from interpreters import Interpreters

pytestmark = [pytest.mark.official]

PROGRAM = """
import os
import sys
from pathlib import Path

import tinker
from tinker_cookbook import weights

service = tinker.ServiceClient()
training = service.create_lora_training_client("tinkex/tiny", rank=4)
datum = tinker.Datum(
    model_input=tinker.ModelInput.from_ints([1, 2, 3]),
    loss_fn_inputs={"target_tokens": [2, 3, 4], "weights": [0.0, 1.0, 1.0]},
)
training.forward_backward([datum], "cross_entropy").result()
training.optim_step(tinker.AdamParams(learning_rate=0.1)).result()
state = training.save_state("state").result().path
plain = training.save_weights_external("plain").result().path

seen = []
for path, folder in ((state, "encrypted"), (plain, "plain")):
    weights.download(tinker_path=path, output_dir=folder)
    seen.append({file.name: file.read_bytes() for file in Path(folder).iterdir()})
assert seen[0] == seen[1], [sorted(files) for files in seen]
listed = service.create_rest_client().list_user_checkpoints().result().checkpoints
assert {one.tinker_path for one in listed} == {state, plain}, listed
print(*sorted(seen[0]))
sys.stdout.flush()
os._exit(0)  # the Rust half of official clients sometimes aborts while Python shuts down
"""


def test_the_cookbook_downloads_a_training_checkpoint_bit_for_bit(
    interpreters: Interpreters, tmp_path: Path
) -> None:
    script = tmp_path / "download.py"
    script.write_text(PROGRAM)
    with FakeServer().serve() as server:
        program = interpreters.start(
            interpreters.official, [str(script)], home=tmp_path, cwd=tmp_path, base_url=server.url
        )
        assert finish(program) == "adapter_config.json adapter_model.safetensors\n"
