"""Once the tokenizer is known, ids that the model cannot know are refused before they are sent."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from tokenizers import Tokenizer, models

from tests.unit.clients.world import datum
from tinkex import InputError
from tinkex.engine.protocol import ModelSpec
from tinkex.testing import FakeClock, FakeEngine, FakeServer

if TYPE_CHECKING:
    from pathlib import Path


@pytest.mark.req("B14")
def test_ids_outside_the_vocabulary_are_named(tmp_path: Path):
    words = {f"w{i}": i for i in range(10)}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"}'
    )
    model = ModelSpec(name=str(tmp_path), max_context_length=64, vocab_size=10)

    async def scenario() -> None:
        clock = FakeClock()
        server = FakeServer(clock=clock, engine=FakeEngine(clock, models=[model]))
        async with server, clock.running(), server.service() as service:
            training = await service.create_lora_training_client_async(str(tmp_path), rank=2)
            assert len(await training.get_tokenizer_async()) == 10
            sent = len(server.seen("forward_backward"))
            refused = training.forward([datum(tokens=4), datum(tokens=4, first=7)], "cross_entropy")
            with pytest.raises(InputError, match="vocabulary") as caught:
                await refused
            assert caught.value.path.startswith("data[1]")
            assert len(server.seen("forward_backward")) == sent
            await training.forward([datum(tokens=4)], "cross_entropy")

    asyncio.run(scenario())
