"""What an operation cost, in tokens and seconds."""

from tinkex.types.base import Count, Response


class Usage(Response):
    """Tokens and time of one operation; `+` adds two of them up."""

    prompt_tokens: Count = 0
    cached_tokens: Count = 0
    generated_tokens: Count = 0
    trained_tokens: Count = 0
    queue_s: float | None = None
    device_s: float | None = None

    def __add__(self, other: object) -> "Usage":
        if not isinstance(other, Usage):
            return NotImplemented
        return Usage(
            prompt_tokens=self.prompt_tokens + other.prompt_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            generated_tokens=self.generated_tokens + other.generated_tokens,
            trained_tokens=self.trained_tokens + other.trained_tokens,
            queue_s=_total(self.queue_s, other.queue_s),
            device_s=_total(self.device_s, other.device_s),
        )


def _total(left: float | None, right: float | None) -> float | None:
    """The sum of what is known; None only when neither is."""
    if left is None or right is None:
        return right if left is None else left
    return left + right
