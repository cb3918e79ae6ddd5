"""The JSON of answers: two endpoints, each as a whole and in pieces."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from tinkex._version import __version__

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from tinkex.engine.protocol import Best, SampleResult
    from tinkex.server.openai.choice import Delta, Token
    from tinkex.server.openai.tokenization import Pieces

# JSON has no infinity; OpenAI writes this for a token that cannot come.
_NEVER = -9999.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Frame:
    """What every message of one answer says."""

    request_id: str
    created: int
    model: str
    pieces: Pieces
    logprobs: bool = False
    topk: int = 0
    include_usage: bool = False
    """Whether a stream ends with its usage, which is then null in its other messages."""

    def wrap(self, kind: str, choices: list[dict[str, Any]], **others: Any) -> dict[str, Any]:
        """A message of this answer."""
        if self.include_usage:
            others.setdefault("usage", None)
        return {
            "id": self.request_id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"tinkex-{__version__}",
            "choices": choices,
            **others,
        }


class Shape:
    """How one endpoint writes its answers; `prefix` begins their ids."""

    prefix: ClassVar[str]
    _KIND: ClassVar[str]
    _CHUNK: ClassVar[str]

    def whole(self, frame: Frame, choices: Sequence[Delta], usage: dict[str, Any]) -> Any:
        """All choices at once."""
        written = [self._whole(frame, i, choice) for i, choice in enumerate(choices)]
        return frame.wrap(self._KIND, written, usage=usage)

    def opening(self, frame: Frame, choice: int) -> list[dict[str, Any]]:
        """The events of a choice before its first piece."""
        return []

    def piece(self, frame: Frame, choice: int, delta: Delta) -> dict[str, Any]:
        """A piece of a choice."""
        return frame.wrap(self._CHUNK, [self._piece(frame, choice, delta)])

    def ending(self, frame: Frame, usage: dict[str, Any]) -> dict[str, Any]:
        """What a stream used."""
        return frame.wrap(self._CHUNK, [], usage=usage)

    def _whole(self, frame: Frame, index: int, delta: Delta) -> dict[str, Any]:
        raise NotImplementedError

    def _piece(self, frame: Frame, index: int, delta: Delta) -> dict[str, Any]:
        return self._whole(frame, index, delta)


class Completion(Shape):
    """`/v1/completions`: pieces are small answers."""

    prefix = "cmpl"
    _KIND = _CHUNK = "text_completion"

    def _whole(self, frame: Frame, index: int, delta: Delta) -> dict[str, Any]:
        return {
            "index": index,
            "text": delta.text,
            "logprobs": _completion_logprobs(frame, delta.tokens) if frame.logprobs else None,
            "finish_reason": delta.finish,
        }


class Chat(Shape):
    """`/v1/chat/completions`: one message per choice."""

    prefix = "chatcmpl"
    _KIND, _CHUNK = "chat.completion", "chat.completion.chunk"

    def opening(self, frame: Frame, choice: int) -> list[dict[str, Any]]:
        first = {"role": "assistant", "content": ""}
        written = {"index": choice, "delta": first, "logprobs": None, "finish_reason": None}
        return [frame.wrap(self._CHUNK, [written])]

    def _whole(self, frame: Frame, index: int, delta: Delta) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": delta.text, "refusal": None},
            "logprobs": _chat_logprobs(frame, delta.tokens) if frame.logprobs else None,
            "finish_reason": delta.finish,
        }

    def _piece(self, frame: Frame, index: int, delta: Delta) -> dict[str, Any]:
        return {
            "index": index,
            "delta": {"content": delta.text} if delta.text or delta.tokens else {},
            "logprobs": _chat_logprobs(frame, delta.tokens) if frame.logprobs else None,
            "finish_reason": delta.finish,
        }


def usage_of(results: Iterable[SampleResult]) -> dict[str, Any]:
    """What an answer used; a prompt counts once however many samples it has."""
    found = list(results)
    prompt = sum(result.prompt_tokens for result in found)
    completion = sum(result.generated_tokens for result in found)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(result.cached_tokens for result in found)},
    }


def _completion_logprobs(frame: Frame, tokens: Sequence[Token]) -> dict[str, Any]:
    shown = frame.pieces.shown
    best = [_best_by_text(frame, token.best) for token in tokens] if frame.topk else None
    return {
        "tokens": [shown(token.id) for token in tokens],
        "token_logprobs": [_finite(token.logprob) for token in tokens],
        "top_logprobs": best,
        "text_offset": [token.offset for token in tokens],
    }


def _best_by_text(frame: Frame, best: Best | None) -> dict[str, float | None] | None:
    if best is None:
        return None
    # Different tokens may read the same: the likelier one, which comes first, stays.
    pairs = list(zip(*best, strict=True))[: frame.topk]
    return {frame.pieces.shown(token): _finite(logprob) for token, logprob in reversed(pairs)}


def _chat_logprobs(frame: Frame, tokens: Sequence[Token]) -> dict[str, Any]:
    content = [
        {
            **_chat_token(frame, token.id, token.logprob),
            "top_logprobs": [
                _chat_token(frame, other, logprob)
                for other, logprob in list(zip(*token.best, strict=True))[: frame.topk]
            ]
            if token.best is not None
            else [],
        }
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def _chat_token(frame: Frame, token: int, logprob: float | None) -> dict[str, Any]:
    pieces = frame.pieces
    return {
        "token": pieces.shown(token),
        "logprob": _finite(logprob),
        "bytes": list(pieces.bytes_of(token)) or None,
    }


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, _NEVER)
