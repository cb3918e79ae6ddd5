"""The toy model's tokenizer: ids below 256 are bytes, then come a few special tokens.

Written as a `tokenizer.json` and not with the library, which tests without text do not need.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tinkex.engine.protocol import ModelText

SPECIALS: Final = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE: Final = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def toy_text() -> ModelText:
    """Text for a model whose id 256 ends it."""
    return ModelText(
        tokenizer_json=_tokenizer_json(),
        chat_template=TEMPLATE,
        eos_token=SPECIALS[0],
        eos_token_ids=(256,),
    )


def _tokenizer_json() -> bytes:
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return msgspec.json.encode(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [
                {"id": 256 + i, "content": content, "special": True, **plain}
                for i, content in enumerate(SPECIALS)
            ],
            "normalizer": None,
            "pre_tokenizer": {**byte_level, "use_regex": False},
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
