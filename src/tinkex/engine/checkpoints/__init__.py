"""Adapters outside the device: files, formats, storage, and memory that they are parked in."""
