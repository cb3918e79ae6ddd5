"""What an engine process loads, and how its parent watches it: plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, get_args

from tinkex.engine.local_settings import LocalSettings
from tinkex.errors import InputError

if TYPE_CHECKING:
    from pathlib import Path

DtypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A base model: `tinkex/tiny`, a folder, a GGUF file or a hub id, and what to call it."""

    source: str
    name: str | None = None
    """`source` unless given."""
    deferred: bool = False
    """Loaded when it is first used, if its files are on this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """Everything the engine's process needs to know to start."""

    models: tuple[ModelSource, ...]
    folder: Path
    """The folder of saved adapters, or of copies of them, and of this process's other files."""
    artifacts: str | None = None
    """Where saved adapters are stored instead: a URL that fsspec knows, such as s3://bucket/prefix."""
    device: str = "cpu"
    """Or `auto`: `cuda` where torch sees one."""
    dtype: DtypeName | None = "float32"
    """None is bfloat16 on a GPU and float32 on a CPU."""
    threads: int | None = None
    """Threads of one computation on the CPU; None leaves it to torch, and is 1 beside a GPU."""
    settings: LocalSettings = field(default_factory=LocalSettings)

    def __post_init__(self) -> None:
        if not self.models:
            raise InputError("give at least one base model", "models")
        if self.dtype is not None and self.dtype not in get_args(DtypeName):
            known = ", ".join(get_args(DtypeName))
            raise InputError(f"{self.dtype!r} is not supported; there are {known}", "dtype")
        if self.threads is not None and self.threads < 1:
            raise InputError(f"must be 1 or more, got {self.threads}", "threads")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSettings:
    """How the parent watches an engine's process and how it ends it."""

    heartbeat_interval_s: float = 0.25
    heartbeat_timeout_s: float = 1.25
    """A process silent for this long is frozen, unless it can be seen to compute."""
    start_timeout_s: float = 30.0
    """The same while it starts: loading a large library can hold up every thread for seconds."""
    busy_timeout_s: float = 60.0
    """A process that computes, but is silent for this long, is stuck."""
    stopped_timeout_s: float = 90.0
    """A process that was stopped (SIGSTOP, a debugger) is waited for this long."""
    close_grace_s: float = 5.0
    """How long `close` waits for what runs now before it ends the process by force."""
    reap_timeout_s: float = 0.25
    """How long to wait for a killed process to be gone: one that hangs in a driver may stay."""

    def __post_init__(self) -> None:
        for name in self.__dataclass_fields__:
            value = getattr(self, name)
            # Written so that NaN fails.
            if not 0 < value < float("inf"):
                raise InputError(f"must be a number of seconds above 0, got {value}", name)
        if self.heartbeat_interval_s * 2 > self.heartbeat_timeout_s:
            raise InputError(
                f"must be at least twice heartbeat_interval_s ({self.heartbeat_interval_s})",
                "heartbeat_timeout_s",
            )
