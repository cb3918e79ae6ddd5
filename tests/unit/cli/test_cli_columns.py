"""Two texts side by side: however they arrive, the rows are the same, and they fit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tinkex.cli.chat.text_columns import TextColumns, wrap
from tinkex.tracking.layout import columns_of

LETTERS = st.text("ab c\n\t字é", max_size=60)
PIECES = st.lists(st.tuples(st.integers(0, 1), LETTERS), max_size=20)


def shown(columns: TextColumns, pieces: list[tuple[int, str]]) -> list[str]:
    rows = [row for side, piece in pieces for row in columns.grow(side, piece)]
    return [*rows, *columns.end(0), *columns.end(1)]


@given(pieces=PIECES, width=st.integers(23, 60))
def test_rows_do_not_depend_on_the_pieces_they_came_in(pieces: list[tuple[int, str]], width: int):
    # Tabs are wide by where they stand in a piece, so they stay out of this comparison.
    pieces = [(side, piece.replace("\t", "")) for side, piece in pieces]
    whole = ["".join(piece for side, piece in pieces if side == one) for one in (0, 1)]
    expected = shown(TextColumns(width), list(enumerate(whole)))
    assert shown(TextColumns(width), pieces) == expected


@given(pieces=PIECES, width=st.integers(23, 60))
def test_no_row_is_wider_than_the_terminal(pieces: list[tuple[int, str]], width: int):
    assert all(columns_of(row) <= width for row in shown(TextColumns(width), pieces))


@given(text=LETTERS, more=LETTERS, width=st.integers(4, 30))
def test_only_the_last_row_of_a_growing_text_can_change(text: str, more: str, width: int):
    before, after = wrap(text, width), wrap(text + more, width)
    assert after[: len(before) - 1] == before[:-1]


def test_a_row_is_shown_as_soon_as_both_texts_have_passed_it():
    columns = TextColumns(23)
    assert columns.grow(0, "one two three four") == []
    assert columns.grow(1, "eins") == []
    assert columns.grow(1, " zwei drei") == ["one two    | eins zwei"]
    assert columns.end(1) == []
    assert columns.end(0) == ["three four | drei"]


def test_words_stay_whole_where_they_fit_and_are_cut_where_they_do_not():
    assert wrap("one two three", 7) == ["one two", "three"]
    assert wrap("abcdefghij kl", 4) == ["abcd", "efgh", "ij", "kl"]
    assert wrap("字字字", 4) == ["字字", "字"]
    assert wrap("a\n\nb", 9) == ["a", "", "b"]
