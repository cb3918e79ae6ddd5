"""Every value that travels, by the names the API uses; `__init__.pyi` lists them."""

from tinkex.lazy_imports import lazy_imports

__getattr__, __dir__ = lazy_imports(__name__)
