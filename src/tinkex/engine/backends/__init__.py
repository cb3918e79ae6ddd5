"""Primitives by device: `torch` is the reference for any of them, `cuda` replaces most of it."""
