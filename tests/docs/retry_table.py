"""The table of retries in the docs, printed from the rules that `decide()` follows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.transport.retry import BASE_S, BILLING_STEP_S, TABLE

if TYPE_CHECKING:
    from tinkex.transport.retry import RetryClass, RetryRule

CLASSES: tuple[RetryClass, ...] = ("full", "submit", "none", "sample", "poll")
EVENTS = {
    "connection": "connection lost or refused",
    "timeout": "time-out",
    "400 empty": "400 without a body",
    "402": "402",
    "408": "408 (of a poll: without a queue state)",
    "409": "409",
    "410": "410",
    "lost": "result lost (410 to a poll)",
    "429": "429",
    "5xx": "5xx",
    "4xx": "any other 4xx or 3xx",
    "bad_response": "answer that breaks the protocol",
    "failed user": "future failed, category `user`",
    "failed": "future failed, category `server` or `unknown`",
    "credential": "no usable credential",
}


def retry_table() -> str:
    """The table as Markdown."""
    head = "| event | " + " | ".join(f"`{name}`" for name in CLASSES) + " |"
    lines = [head, "|---" * (len(CLASSES) + 1) + "|"]
    for event, title in EVENTS.items():
        # A proxy in front of the server answers an empty 400 when it drops a connection.
        row = TABLE["connection" if event == "400 empty" else event]
        cells = (_cell(row[name]) for name in CLASSES)
        lines.append(f"| {title} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _cell(rule: RetryRule) -> str:
    often = f", at most {rule.tries} tries" if rule.tries else ""
    match rule.action:
        case "raise":
            return "raise"
        case "billing":
            return f"pause {BILLING_STEP_S:g} s"
        case "again":
            return f"send as new, {BASE_S:g}-{rule.cap_s:g} s{often}"
        case "hint":
            return f"server's hint, else {BASE_S:g}-{rule.cap_s:g} s{often}"
        case "backoff":
            return f"{BASE_S:g}-{rule.cap_s:g} s{often}"
