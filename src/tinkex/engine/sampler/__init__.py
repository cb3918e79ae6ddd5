"""Sampling: continuous batching over a paged key/value cache."""

from tinkex.engine.sampler.request import SampleRun
from tinkex.engine.sampler.runner import Adapters, LoraAdapters, VersionRows, cache_bytes_per_token
from tinkex.engine.sampler.sampler import BASE, Sampler, SamplerSettings

__all__ = [
    "BASE",
    "Adapters",
    "LoraAdapters",
    "SampleRun",
    "Sampler",
    "SamplerSettings",
    "VersionRows",
    "cache_bytes_per_token",
]
