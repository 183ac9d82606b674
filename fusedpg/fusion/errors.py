"""What the compiler refuses, and why."""

from __future__ import annotations


class FusionError(ValueError):
    """A program or a schedule that cannot be; the message names the node and its source line."""


class IllegalProgram(FusionError):
    """The traced function uses something that has no meaning, or none that is known here."""


class IllegalTransformation(FusionError):
    """A transformation would change the result, or does not apply to this program."""
