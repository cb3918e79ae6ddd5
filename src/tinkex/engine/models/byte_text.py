"""Text of models over bytes: ids below 256 are bytes of UTF-8, then come the special tokens.

Written as a `tokenizer.json` and not with the library, which the test kit does not need.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tinkex.engine.protocol import ModelText

BYTE_EOS: Final = 256
BYTE_VOCAB_SIZE: Final = 264
"""256 bytes, the special tokens, and ids that are never used up to a multiple of eight."""
_SPECIALS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_text() -> ModelText:
    """The tokenizer and the chat template of such a model."""
    return ModelText(
        tokenizer_json=_tokenizer_json(),
        chat_template=_TEMPLATE,
        eos_token=_SPECIALS[0],
        eos_token_ids=(BYTE_EOS,),
    )


def _tokenizer_json() -> bytes:
    byte_level = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return msgspec.json.encode(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": BYTE_EOS + i, "content": content, "special": True, **plain}
                for i, content in enumerate(_SPECIALS)
            ],
            "normalizer": None,
            "pre_tokenizer": {**byte_level, "add_prefix_space": False, "use_regex": False},
            "post_processor": None,
            "decoder": {**byte_level, "use_regex": True},
            "model": {"type": "BPE", "vocab": _vocabulary(), "merges": []},
        }
    )


def _vocabulary() -> dict[str, int]:
    """Printable Latin-1 stands for itself, the other bytes for the characters from 256 on."""
    itself = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in itself]
    return {chr(byte if byte in itself else 256 + others.index(byte)): byte for byte in range(256)}
