"""Saved adapters as files: in a folder of this machine, or at any URL that fsspec knows."""

from tinkex.engine.saved.base import SavedFiles
from tinkex.engine.saved.folder import FolderFiles
from tinkex.engine.saved.open import open_saved

__all__ = ["FolderFiles", "SavedFiles", "open_saved"]
