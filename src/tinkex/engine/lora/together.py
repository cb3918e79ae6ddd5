"""The low-rank products of many pieces in one call of machine code.

The same numbers as one by one, bit for bit in the forward pass; most of these products are so small
that calling a library for each takes longer than some of them.

Shapes: S tokens of a piece, R rank, Z ranks of projections that share an input, I inputs, O outputs
of one projection, Y outputs of those that share an input, side by side.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinkex.engine.native import Passing, place, suits

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor

    from tinkex.engine.lora.pieces import Piece
    from tinkex.engine.native import Place


def goes_together(piece: Piece) -> bool:
    """Whether there is code for all of its products: whatever other pieces there are."""
    return all(map(suits, (piece.factors.a_ZI, *piece.factors.bs_OR)))


def add_products(pieces: Sequence[Piece], x_TI: Tensor, y_TY: Tensor) -> list[Tensor]:
    """Add the pieces' products to their rows; return their inner activations."""
    x, y, products = place(x_TI), place(y_TY), Passing()
    inner: list[Tensor] = []
    for piece in pieces:
        first, count = piece.rows.start, piece.rows.stop - piece.rows.start
        z_SZ = x_TI.new_empty(count, piece.factors.a_ZI.shape[0])
        products.shrink(place(z_SZ), x.from_row(first), piece.factors.a_ZI, count)
        for b_OR, z, own in _parts(piece, place(z_SZ), y.from_row(first)):
            products.expand_add(own, z, b_OR, count, piece.scale)
        inner.append(z_SZ)
    products.run()
    return inner


def write_slopes(
    pieces: Sequence[Piece],
    x_TI: Tensor,
    inner: Sequence[Tensor],
    dy_TY: Tensor,
    dx_TI: Tensor | None,
) -> None:
    """Add the pieces' slopes by the input to `dx`, and write their gradients."""
    products = Passing()
    kept: list[Tensor] = []  # until all is computed
    for piece, z_SZ in zip(pieces, inner, strict=True):
        first, count = piece.rows.start, piece.rows.stop - piece.rows.start
        a_ZI, dz_SZ = piece.factors.a_ZI, x_TI.new_empty(z_SZ.shape)
        kept.append(dz_SZ)
        ranks, inputs = a_ZI.shape
        dy, dz = place(dy_TY).from_row(first), place(dz_SZ)
        for b_OR, own_dz, own_dy in _parts(piece, dz, dy):
            outputs, rank = b_OR.shape
            products.multiply(own_dz, own_dy, place(b_OR), (count, rank, outputs), piece.scale)
        if dx_TI is not None:
            to = place(dx_TI).from_row(first)
            products.multiply(to, dz, place(a_ZI), (count, inputs, ranks), add=True)
        if piece.gradient is None:
            continue
        x = place(x_TI).from_row(first)
        products.multiply(place(piece.gradient.a_ZI), dz.turned, x, (ranks, inputs, count))
        grown = zip(piece.gradient.bs_OR, _parts(piece, place(z_SZ), dy), strict=True)
        for db_OR, (b_OR, z, own_dy) in grown:
            outputs, rank = b_OR.shape
            shape = outputs, rank, count
            products.multiply(place(db_OR), own_dy.turned, z, shape, piece.scale)
    products.run()


def _parts(piece: Piece, z: Place, y: Place) -> Iterator[tuple[Tensor, Place, Place]]:
    """B of each projection, with its inner activations and its outputs."""
    outputs = 0
    for number, b_OR in enumerate(piece.factors.bs_OR):
        yield b_OR, z.from_column(number * b_OR.shape[1]), y.from_column(outputs)
        outputs += b_OR.shape[0]
