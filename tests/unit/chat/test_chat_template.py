"""Templates: what Hugging Face's expect is there, and nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from tinkex.chat.template import ChatTemplate
from tinkex.errors import ChatTemplateError, InputError
from tinkex.testing import FakeClock

HELLO = [{"role": "user", "content": "hé <b>"}]


def render(source: str, messages: list[Any] = HELLO, **options: Any) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(
        messages, add_generation_prompt=True, options=options, clock=FakeClock()
    )


def refusal(source: str, **options: Any) -> str:
    with pytest.raises(ChatTemplateError) as caught:
        render(source, **options)
    return str(caught.value)


def test_messages_markers_and_options_are_known():
    source = (
        "{{ bos_token }}{% for m in messages %}{{ m.role }}:{{ m['content'] }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}{{ mood }}>{% endif %}"
    )
    assert render(source, mood="sad") == "<s>user:hé <b></s>sad>"


def test_without_the_generation_prompt_a_template_is_told_so():
    template = ChatTemplate("{{ add_generation_prompt }}{{ tools | tojson }}", None, None)
    clock = FakeClock()
    assert template.render(HELLO, add_generation_prompt=False, clock=clock) == "Falsenull"
    tools = [{"type": "function"}]
    with_tools = template.render(HELLO, add_generation_prompt=True, clock=clock, tools=tools)
    assert with_tools == 'True[{"type": "function"}]'


def test_blocks_leave_no_lines_behind():
    assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"


def test_json_is_written_as_it_is():
    assert render("{{ messages | tojson }}") == '[{"role": "user", "content": "hé <b>"}]'
    assert render("{{ messages[0] | tojson(indent=1) }}").startswith('{\n "role"')


def test_loops_can_be_left_and_generations_marked():
    source = "{% for i in range(9) %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}"
    assert render(source) == "01"
    assert render("{% generation %}said{% endgeneration %}") == "said"


def test_the_date_is_that_of_the_clock():
    assert render("{{ strftime_now('%Y') }}") == "2025"


def test_what_a_template_raises_reaches_the_caller():
    told = refusal("{{ raise_exception('Roles must alternate') }}")
    assert "Roles must alternate" in told


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for %}", "broken"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "'append' of 'list' object is unsafe"),
        ("{{ messages[0].content.x.y }}", "has no attribute"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{% for i in range(9999) %}{{ 'x' * 9999 }}{% endfor %}", "too long"),
        ("{% for i in range(9999999) %}{% endfor %}", "more than 100000 times"),
        ("{% for i in range(999) %}{% for j in range(999) %}{% endfor %}{% endfor %}",
         "more than 100000 times"),
        ("{% include 'x' %}", "no loader"),
    ],
)  # fmt: skip
def test_a_bad_template_is_an_error_and_nothing_worse(source: str, words: str):
    assert words in refusal(source)


def test_messages_nested_too_deeply_are_an_error():
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(ChatTemplateError, match="recursion"):
        render("{{ messages | tojson }}", deep)


def test_a_template_that_takes_too_long_is_given_up():
    class Hasty(FakeClock):
        def now(self) -> float:
            self._now += 1.0
            return self._now

    template = ChatTemplate("{% for i in range(99) %}{{ i }}{% endfor %}", None, None)
    with pytest.raises(ChatTemplateError, match="too long"):
        template.render(HELLO, add_generation_prompt=True, clock=Hasty())


def test_options_cannot_replace_what_the_renderer_says():
    with pytest.raises(InputError, match="options: bos_token, range cannot be set"):
        render("x", range=1, bos_token="y", mood="sad")
