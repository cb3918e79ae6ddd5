"""A model in a chat: it answers piece by piece where the server can stream."""

from __future__ import annotations

import queue
from typing import TYPE_CHECKING, TypedDict

from tinkex.chat.renderer import Renderer
from tinkex.chat.text_streams import text_pieces
from tinkex.cli.target import SamplingTarget
from tinkex.errors import APIStatusError
from tinkex.types import ModelInput, SamplingParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from tinkex.chat.messages import Message
    from tinkex.clients.service import ServiceClient
    from tinkex.futures.future import APIFuture

    # Takes a piece of an answer.
    OnPiece = Callable[[str], None]
    # Starts an answer.
    StartAnswer = Callable[[OnPiece], APIFuture[None]]

_NO_SUCH_ROUTE = (404, 405)


class ChatSampling(TypedDict):
    """The sampling settings."""

    temperature: float
    top_p: float
    max_tokens: int
    seed: int | None


class Speaker:
    """A model or a checkpoint that takes part in a chat."""

    def __init__(self, service: ServiceClient, target: SamplingTarget) -> None:
        self.name = target.name
        self._model = target.model
        self._service = service
        self._sampler = target.open(service)
        tokenizer = self._sampler.get_tokenizer()
        self._renderer = Renderer.of(tokenizer)
        self._stop = self._renderer.stop
        # The streaming route takes stop sequences as text.
        self._stop_texts = [text for token in self._stop if (text := tokenizer.decode([token]))]
        # Mutable state: False once the server has refused to stream.
        self._streams = True

    @property
    def base(self) -> SamplingTarget:
        """Its base model."""
        return SamplingTarget(base_model=self._sampler.get_base_model())

    def start(
        self, messages: Sequence[Message], sampling: ChatSampling, on_piece: OnPiece
    ) -> APIFuture[None]:
        """Start an answer; raises at once if the chat template cannot render the messages."""
        prompt = self._renderer.prompt(messages)

        async def answer() -> None:
            if self._streams:
                try:
                    await self._stream(prompt, sampling, on_piece)
                    return
                except APIStatusError as error:
                    # Sample instead; if the request is bad, sampling reports the error.
                    self._streams = error.status_code not in _NO_SUCH_ROUTE
            on_piece(await self._whole(prompt, sampling))

        return self._service.operations.start(lambda _: answer())

    async def _stream(
        self, prompt: Sequence[int], sampling: ChatSampling, on_piece: OnPiece
    ) -> None:
        pieces = text_pieces(
            await self._service.holder.opened(),
            self._model,
            prompt,
            **sampling,
            stop=self._stop_texts or None,
        )
        async for piece in pieces:
            on_piece(piece)

    async def _whole(self, prompt: Sequence[int], sampling: ChatSampling) -> str:
        params = SamplingParams(**sampling, stop=self._stop or None)
        drawn = await self._sampler.sample_async(ModelInput.from_ints(prompt), 1, params)
        return self._renderer.text(drawn.sequences[0].tokens)


def stream_all(starts: Sequence[StartAnswer]) -> Iterator[tuple[int, str | None]]:
    """Start several answers and yield their pieces as they arrive; None ends an answer.

    Raises the error of a failed answer. Closing the iterator cancels unfinished answers.
    """
    pieces: queue.SimpleQueue[tuple[int, str | None]] = queue.SimpleQueue()
    futures: list[APIFuture[None]] = []
    try:
        for index, start in enumerate(starts):
            futures.append(start(_put_into(pieces, index)))
            # It ends after its last piece: both are put by the client's loop thread.
            futures[-1].add_done_callback(lambda _, index=index: pieces.put((index, None)))
        left = len(futures)
        while left:
            index, piece = pieces.get()
            if piece is None:
                left -= 1
                futures[index].result()
            yield index, piece
    finally:
        for future in futures:
            future.cancel()


def _put_into(pieces: queue.SimpleQueue[tuple[int, str | None]], index: int) -> OnPiece:
    return lambda piece: pieces.put((index, piece))
