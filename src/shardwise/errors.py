"""Every error Shardwise raises on purpose derives from :class:`ShardwiseError`.

A message says what was tried, what came, where, and what to do. Problems with one input are collected and raised once.
"""

from __future__ import annotations


class ShardwiseError(Exception):
    """Base class of all errors that are about the user's input, never about a bug of ours.

    >>> import shardwise
    >>> try:
    ...     shardwise.load_plan("nowhere.json")
    ... except shardwise.ShardwiseError as error:
    ...     print(error)
    cannot read nowhere.json: No such file or directory
    """


class CaptureError(ShardwiseError):
    """The function could not be turned into a program."""


class RuleError(ShardwiseError):
    """A factor rule is malformed or does not fit the shapes it was given for."""


class TargetError(ShardwiseError):
    """A command-line target (``zoo:NAME`` or ``file.py:function``) could not be loaded."""


class QueryError(ShardwiseError):
    """A path or a question names something that is not there, or several things where one is meant."""


class MeshError(ShardwiseError):
    """A mesh, or an axis of one, cannot be used."""


class DecisionError(ShardwiseError):
    """A decision, tactic or pin cannot be carried out."""


class PlanError(ShardwiseError):
    """A plan cannot be made, read, written or applied."""


class CompileError(ShardwiseError):
    """A program cannot be compiled for the backend that was asked for."""


class HloError(ShardwiseError):
    """The text is not compiled HLO."""


class HardwareError(ShardwiseError):
    """A hardware profile, a topology, or the placing of a mesh on one, cannot be used."""


class InfeasibleError(ShardwiseError):
    """A search found no plan that fits the memory of the devices."""


class VariantError(ShardwiseError):
    """A program cannot be transformed as asked: cut into micro-batches, or made to recompute."""


class SpmdError(ShardwiseError):
    """An op that the device-local program cannot express: its ``kind``, its ``source`` line and the ``reason``."""

    def __init__(self, kind: str, source: str, reason: str):
        super().__init__(f"{kind} at {source} cannot be computed on local blocks: {reason}")
        self.kind, self.source, self.reason = kind, source, reason
