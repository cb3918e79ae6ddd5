"""Both SDKs are given the same odd values: they agree, or the page for newcomers says why not."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from interpreters import REPOSITORY, finish

if TYPE_CHECKING:
    from interpreters import Interpreters

pytestmark = [pytest.mark.official]

PROGRAM = str(Path(__file__).with_name("value_cases.py"))
PAGE = REPOSITORY / "docs" / "coming-from-tinker.md"

# A sentence of the page, and the cases (in full) that it explains.
REFUSED_BY_OURS: dict[str, str] = {
    "Text is not a number": r".*(= '5'|\('5'\)|= \['1'\]|\(\['1'\]\))",
    "`True` is not 1, and 0 is not `False`": (
        r".*(= (True|np\.bool|\[True\])|\((True|np\.bool|\[True\])\))"
        r"|(Checkpoint\.public|LoraConfig\.train_mlp|SampleRequest\.prompt_logprobs) = 0"
    ),
    "Bytes are neither text nor numbers": r".*(= (b'x'|bytearray)|\(bytearray\))",
    "NaN and infinity are refused": r"(AdamParams|SamplingParams)\.\w+ = (nan|inf)",
    "A number that no server accepts is refused": (
        r"LoraConfig\.rank = (0|-1|-2|2\*\*31|2\*\*70)"
        r"|SampleRequest\.num_samples = (0|-1|-2|2\*\*31|2\*\*70)"
        r"|SamplingParams\.(max_tokens|temperature|top_k) = (-1|-2|2\*\*31|2\*\*70)"
        r"|SamplingParams\.top_p = (?!0$).*"
        r"|Image\w+\.expected_tokens = (-1|-2|2\*\*70)"
        r"|(LoraConfig|SamplingParams)\.seed = 2\*\*70"
        r"|SaveWeightsRequest\.ttl_seconds = 2\*\*70"
    ),
    "A token id lies between 0 and 2\u00b3\u00b9 - 1": (
        r"(EncodedTextChunk\.tokens|SamplingParams\.stop) = \[(-1|2\*\*31|2\*\*70)\]"
        r"|ModelInput\.(from_ints\(\[|append_int\()(-1|-2|2\*\*31|2\*\*70)\]?\)"
    ),
    "A number is not a time": r"Checkpoint\.time = .*",
    "Fractions are not cut off": (
        r"TensorData\.data = (5\.5|\[1\.5\]|float16 array|float array)"
        r"|target_tokens\((\[1\.5\]|float16 array|float array)\)"
    ),
    "A number that float32 cannot hold is refused": r"TensorData float32\(1e300\)",
    "A shape is a list": r"TensorData\.shape = -[12]",
    "A loss input has one value per position": r"(target_tokens|weights|mask)\(array\(\)\)",
    "Misspelt fields are refused": (
        r"SamplingParams\.misspelt = .*"
        r"|(SampleRequest\.sampling_params = |SamplingParams\.model_validate\()\{'a': .*"
    ),
    "`model_construct` and `model_copy` check": r"(construct|copy) unchecked",
    "take names of fields only": r"dump nested selection",
    "The deprecated names of pydantic 1": r"pydantic 1 dict|schema",
    "A path with an empty part": r"path empty (name|run)",
}
ACCEPTED_BY_OURS: dict[str, str] = {
    "Arrays count as lists of tokens": (
        r"(EncodedTextChunk\.tokens = |ModelInput\.from_ints\()"
        r"((int|int32|uint8|strided|read-only) array)\)?"
    ),
    "Tuples, ranges, deques, generators and object arrays count as lists": (
        r"(target_tokens|weights|mask)\((\(1, 2\)|range|deque|object array)\)"
        r"|SamplingParams\.stop = (generator|dict keys)"
        r"|TensorData\.shape = (int|int32|uint8) array"
    ),
    "Unsigned bytes and bools count as whole numbers": (
        r"(TensorData\.from_numpy|target_tokens|weights|mask)\((np\.bool|(uint8|bool) array)\)"
    ),
    "Other names keep their type": r"mask\(\[.*\]\)",
}
DIFFERENT: dict[str, str] = {
    "A loss input's element type depends on its name": r"weights\(.* array\)",
    "`exclude_unset` means `exclude_defaults`": r"dump explicit default",
    "equal `Datum`s are unequal": r"equal datums",
}
ABSENT = {"pydantic 1 dict", "schema"}
# Python's own errors, which the official client lets through where it checks nothing.
ACCIDENTAL = {"AttributeError", "KeyError", "OverflowError", "AssertionError"}


@pytest.fixture(scope="module")
def differences(
    interpreters: Interpreters, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Any, Any]]:
    """Official and ours, by case, where they are not the same."""
    home = tmp_path_factory.mktemp("home")
    programs = [
        interpreters.start(python, [PROGRAM, sdk], home=home)
        for python, sdk in ((interpreters.official, "tinker"), (interpreters.cookbook, "tinkex"))
    ]
    theirs, ours = (json.loads(finish(program)) for program in programs)
    assert len(ours) > 3000
    assert list(theirs) == list(ours)
    return {case: (theirs[case], ours[case]) for case in ours if ours[case] != theirs[case]}


def unexplained(cases: list[str], reasons: dict[str, str]) -> list[str]:
    return [c for c in cases if not any(re.fullmatch(r, c) for r in reasons.values())]


def unused(cases: list[str], reasons: dict[str, str]) -> list[str]:
    return [name for name, r in reasons.items() if not any(re.fullmatch(r, c) for c in cases)]


@pytest.mark.req("S12")
@pytest.mark.req("B12")
@pytest.mark.parametrize(
    ("made_by_theirs", "made_by_ours", "reasons"),
    [
        (True, False, REFUSED_BY_OURS),
        (False, True, ACCEPTED_BY_OURS),
        (True, True, DIFFERENT),
    ],
    ids=["refused", "accepted", "different"],
)
def test_every_difference_between_the_sdks_has_a_reason(
    differences: dict[str, tuple[Any, Any]],
    made_by_theirs: bool,
    made_by_ours: bool,
    reasons: dict[str, str],
) -> None:
    cases = [
        case
        for case, (theirs, ours) in differences.items()
        if ("made" in theirs) == made_by_theirs and ("made" in ours) == made_by_ours
    ]
    assert unexplained(cases, reasons) == []
    assert unused(cases, reasons) == []


@pytest.mark.req("S12")
def test_our_refusals_are_caught_by_whoever_catches_the_official_ones(
    differences: dict[str, tuple[Any, Any]],
) -> None:
    for case, (theirs, ours) in differences.items():
        if "refused" in ours:
            missing = set(theirs.get("refused", ())) - set(ours["refused"])
            assert missing <= ACCIDENTAL, case
            assert case in ABSENT or "ValueError" in ours["refused"], case


def test_the_page_for_newcomers_gives_every_reason() -> None:
    page = " ".join(PAGE.read_text().split())
    assert [r for r in (*REFUSED_BY_OURS, *ACCEPTED_BY_OURS, *DIFFERENT) if r not in page] == []
