"""The page about the engine lists its settings as they are."""

from __future__ import annotations

import dataclasses
import re

from tests.docs.blocks import page_named
from tinkex.engine.local_settings import LocalSettings

PAGE = page_named("engine.md")


def test_the_page_lists_every_setting_with_its_default():
    rows = re.findall(r"^\| `(\w+)` \| `([^`]*)` \|", PAGE.read_text(), re.MULTILINE)
    settings = {field.name: repr(field.default) for field in dataclasses.fields(LocalSettings)}
    assert dict(rows) == settings
    assert len(rows) == len(settings)
