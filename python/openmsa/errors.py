"""Exceptions. Every fault that can be seen before work starts raises one of these, and then nothing was written."""

from __future__ import annotations


class Error(Exception):
    """Base of all OpenMSA exceptions. The text names the argument, the value found, the rule, and how to mend it."""

    def __init__(self, message: str, argument: str = "") -> None:
        super().__init__(message, argument)
        self.argument = argument
        """Name of the argument at fault (``"batch.cu_seqlens_q"``); empty if there is none."""

    def __str__(self) -> str:
        return str(self.args[0])


class InvalidArgumentError(Error, ValueError):
    """An argument breaks the contract."""


class UnsupportedError(Error, RuntimeError):
    """The contract allows it, but nothing in this build does it; the text lists what is supported."""


class OutOfWorkspaceError(Error, RuntimeError):
    """A caller-owned workspace is too small."""


class OutOfPagesError(Error, RuntimeError):
    """A paged cache has no free page left for the tokens asked for; nothing was changed."""


class DeviceError(Error, RuntimeError):
    """No such device, or its driver reported a failure."""
