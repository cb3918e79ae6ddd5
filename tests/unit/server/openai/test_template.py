"""What a template refuses is answered with a 400; `tests/unit/chat` has what templates can do."""

from __future__ import annotations

from typing import Any

import pytest

from tinkex.chat.template import ChatTemplate
from tinkex.errors import BadRequestError
from tinkex.server.openai.endpoints import prompt_text
from tinkex.testing import FakeClock

HELLO = [{"role": "user", "content": "hello"}]


def refusal(source: str, **options: Any) -> dict[str, Any]:
    with pytest.raises(BadRequestError) as caught:
        prompt_text(ChatTemplate(source, None, None), HELLO, options, FakeClock())
    body: Any = caught.value.body
    return body["error"]


def test_a_prompt_asks_for_the_assistants_next_message():
    template = ChatTemplate("{% if add_generation_prompt %}{{ mood }}>{% endif %}", None, None)
    assert prompt_text(template, HELLO, {"mood": "sad"}, FakeClock()) == "sad>"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for %}", "This model's chat template is broken"),
        ("{{ raise_exception('Roles must alternate') }}", "Roles must alternate"),
    ],
)
def test_what_a_template_refuses_is_the_callers_to_read(source: str, words: str):
    error = refusal(source)
    assert words in error["message"]
    assert (error["param"], error["code"]) == ("messages", "invalid_messages")


def test_options_cannot_replace_what_the_server_says():
    error = refusal("x", range=1, bos_token="y", mood="sad")
    assert "bos_token, range" in error["message"]
    assert error["param"] == "chat_template_kwargs"
