from typing import Any

import pytest

from tinkex.errors import InputError
from tinkex.wire import compression
from tinkex.wire.compression import PIECE_BYTES, compress, decompress

TEXT = b"forward_backward " * 1000


def test_what_was_compressed_comes_back():
    assert decompress(compress(TEXT), len(TEXT)) == TEXT
    assert decompress(compress(b""), 0) == b""


def test_the_frame_header_tells_the_content_size():
    # Single-segment frames carry the size right after magic number and descriptor; the two
    # highest bits of the descriptor say how many bytes it takes, 0 meaning "see bit 5".
    frame = compress(TEXT)
    descriptor = frame[4]
    width = {0: 1, 1: 2, 2: 4, 3: 8}[descriptor >> 6]
    assert descriptor & 0b0010_0000
    size = int.from_bytes(frame[5 : 5 + width], "little") + (256 if width == 2 else 0)
    assert size == len(TEXT)


def test_content_over_the_limit_is_refused_by_its_declared_size():
    with pytest.raises(InputError, match="larger than the 999 bytes"):
        decompress(compress(TEXT), 999)


def test_content_over_the_limit_is_refused_when_no_size_is_declared():
    zstd = pytest.importorskip("backports.zstd")
    compressor = zstd.ZstdCompressor()
    frame = compressor.compress(b"0" * 10_000_000) + compressor.flush()
    assert len(frame) < 2000
    with pytest.raises(InputError, match="larger than the 1000 bytes"):
        decompress(frame, 1000)


@pytest.mark.parametrize(
    "body",
    [b"", b"plain text", compress(TEXT)[:-4], compress(TEXT) + b"x", compress(TEXT) * 2],
    ids=["empty", "no-frame", "truncated", "trailing", "two-frames"],
)
def test_a_body_that_is_not_one_frame_is_an_input_error(body: bytes):
    with pytest.raises(InputError):
        decompress(body, 10 * len(TEXT))


def test_large_content_is_made_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """The library copies what one call returns while it holds the interpreter's lock."""
    asked: list[int] = []
    decompressor = compression.zstd.ZstdDecompressor

    class Recorded:
        def __init__(self, **options: Any) -> None:
            self.inner = decompressor(**options)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

        def decompress(self, data: bytes, max_length: int = -1) -> bytes:
            asked.append(max_length)
            return self.inner.decompress(data, max_length)

    monkeypatch.setattr(compression.zstd, "ZstdDecompressor", Recorded)
    content = bytes(range(251)) * 50_000
    for most in (len(content), 1 << 30):
        assert decompress(compress(content), most) == content
    compressor = compression.zstd.ZstdCompressor()
    frame = compressor.compress(content) + compressor.flush()  # which says no size
    with pytest.raises(InputError, match=str(len(content) - 1)):
        decompress(frame, len(content) - 1)
    assert min(asked) > 0
    assert max(asked) <= PIECE_BYTES < len(content) / 4
