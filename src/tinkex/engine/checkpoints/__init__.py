"""Adapters outside the device: files, formats, storage, and offloading (parking)."""
