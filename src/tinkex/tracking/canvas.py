"""A grid of character cells to draw curves on: fine dots for lines, a mark per cell for points.

Braille characters hold two by four dots each, so a line is drawn eight times finer than the cells;
where Braille cannot be shown, a line is made of marks too.
"""

from __future__ import annotations

from itertools import groupby

_DOTS_X, _DOTS_Y = 2, 4
_BRAILLE = 0x2800
# The bit of each dot: left column from the top, then the right one.
_BITS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
_NORMAL = "\033[0m"
_PAINTS = ("\033[36m", "\033[33m", "\033[32m", "\033[35m", "\033[34m", "\033[31m")

Where = tuple[float, float]
"""A place from (0, 0), bottom left, to (1, 1), top right."""


class Canvas:
    """Cells of `width` by `height`; what is drawn later lies on top."""

    def __init__(self, width: int, height: int, *, unicode: bool) -> None:
        self.width, self.height = width, height
        self._fine = (_DOTS_X, _DOTS_Y) if unicode else (1, 1)
        # Mutable: what is in each cell that is not empty, and which series drew it last.
        self._dots: dict[tuple[int, int], int] = {}
        self._marks: dict[tuple[int, int], str] = {}
        self._owner: dict[tuple[int, int], int] = {}

    @property
    def columns(self) -> int:
        """How many places a line can tell apart from left to right."""
        return self.width * self._fine[0]

    def line(self, points: list[Where], mark: str, owner: int) -> None:
        """Connect the points, in dots where there are dots, else in marks."""
        places = [self._place(point, self._fine) for point in points]
        for start, end in zip(places, places[1:] or places, strict=False):
            for x, y in _between(start, end):
                self._dot(x, y, mark, owner)

    def points(self, points: list[Where], mark: str, owner: int) -> None:
        """A mark at each point."""
        for point in points:
            cell = self._place(point, (1, 1))
            self._marks[cell], self._owner[cell] = mark, owner

    def rows(self, *, colour: bool) -> list[str]:
        """The cells as text, from the top row down."""
        return [self._row(y, colour=colour) for y in range(self.height)]

    def _row(self, y: int, *, colour: bool) -> str:
        cells = [(x, y) for x in range(self.width)]
        return "".join(
            paint("".join(map(self._text, run)), owner, colour=colour and owner is not None)
            for owner, run in groupby(cells, key=self._owner.get)
        )

    def _text(self, cell: tuple[int, int]) -> str:
        dots = self._dots.get(cell)
        return self._marks.get(cell) or (chr(_BRAILLE + dots) if dots else " ")

    def _dot(self, x: int, y: int, mark: str, owner: int) -> None:
        fine_x, fine_y = self._fine
        cell = (x // fine_x, y // fine_y)
        self._owner[cell] = owner
        if self._fine == (1, 1):
            self._marks[cell] = mark
        else:
            self._dots[cell] = self._dots.get(cell, 0) | _BITS[x % fine_x][y % fine_y]

    def _place(self, point: Where, fine: tuple[int, int]) -> tuple[int, int]:
        """From a place to a column and a row, counted from the top left."""
        columns, rows = self.width * fine[0], self.height * fine[1]
        return round(point[0] * (columns - 1)), round((1 - point[1]) * (rows - 1))


def paint(text: str, owner: int | None, *, colour: bool) -> str:
    """Text in the colour that the series has on the canvas."""
    return f"{_PAINTS[(owner or 0) % len(_PAINTS)]}{text}{_NORMAL}" if colour else text


def _between(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Every dot on the way."""
    (x0, y0), (x1, y1) = start, end
    steps = max(abs(x1 - x0), abs(y1 - y0), 1)
    return [
        (round(x0 + (x1 - x0) * at / steps), round(y0 + (y1 - y0) * at / steps))
        for at in range(steps + 1)
    ]
