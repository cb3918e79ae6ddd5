"""Machine code for this CPU, made while the program runs: there is no compiler to install."""

from tinkex.engine.native.optimizer import adamw
from tinkex.engine.native.passing import Passing, Place, place, suits
from tinkex.engine.native.product import NativeProduct

__all__ = ["NativeProduct", "Passing", "Place", "adamw", "place", "suits"]
