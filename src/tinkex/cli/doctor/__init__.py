"""`tinkex doctor`. It only looks: no check changes anything."""

from tinkex.cli.doctor.command import ARGUMENTS, doctor

__all__ = ["ARGUMENTS", "doctor"]
