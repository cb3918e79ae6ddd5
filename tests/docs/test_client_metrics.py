"""The table of the client's metrics is the one in the code."""

from __future__ import annotations

import re

import pytest

from tests.docs.blocks import page_named
from tinkex.metrics import METRICS, WAIT_REASONS

pytestmark = pytest.mark.req("S39")

SECTION = page_named("metrics.md").read_text().partition("## The client\n")[2].partition("\n## ")[0]


def test_every_metric_is_listed_with_its_kind_unit_labels_and_meaning() -> None:
    rows = [line for line in SECTION.splitlines() if line.startswith("| `tinkex.")]
    assert rows == [
        f"| `{metric.name}` | {metric.kind} | `{metric.unit}` | "
        f"{', '.join(f'`{label}`' for label in metric.labels)} | {metric.meaning} |"
        for metric in METRICS
    ]


def test_every_reason_of_a_wait_is_listed() -> None:
    assert tuple(re.findall(r"^\| `(\w+)` \|", SECTION, re.MULTILINE)) == WAIT_REASONS
