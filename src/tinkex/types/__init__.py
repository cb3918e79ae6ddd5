"""Every value that travels, by the names the API uses; `__init__.pyi` lists them."""

from tinkex.lazy_imports import import_lazily

__getattr__, __dir__ = import_lazily(__name__)
