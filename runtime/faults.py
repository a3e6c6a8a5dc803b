"""Faults of a running program: each names the rank, what it did, and the user's source line."""

from __future__ import annotations

from ..partitioner.errors import MeshwrightError

__all__ = ["DeadlockError", "DivergedError", "MeshwrightError", "MismatchError", "PeerError", "RankError"]


class DeadlockError(MeshwrightError):
    """No rank can move; the message says what every rank waits for."""


class MismatchError(MeshwrightError):
    """The ranks of a group started different collectives, or one was given a tensor that does not fit it."""


class DivergedError(MeshwrightError):
    """Some ranks are out of step with the others: another program, batch, step or values, or a NaN of their own.

    Attributes:
        ranks: those that are; where no more have one than the other, those that differ from the first.
    """

    def __init__(self, text: str, ranks: tuple[int, ...]):
        super().__init__(text)
        self.ranks = ranks


class PeerError(MeshwrightError):
    """A collective failed on the wire: a peer is gone, or did not answer in time.

    Attributes:
        why: which ranks are the cause.
    """

    def __init__(self, text: str, why: str = ""):
        super().__init__(f"{text}: {why}" if why else text)
        self.why = why or text


class RankError(MeshwrightError):
    """The program of one rank raised; the exception is the cause.

    Attributes:
        rank: the rank, or the program's name where the rank is not known yet.
        node: the graph node that raised, or "".
        where: the user's source line, or "".
    """

    def __init__(self, rank: int | str, cause: BaseException, node: str = "", where: str = ""):
        name = f"rank {rank}" if isinstance(rank, int) else rank
        at = (f", node {node}" if node else "") + (f", at {where}" if where else "")
        super().__init__(f"{name}{at}: {type(cause).__name__}: {cause}")
        self.rank, self.node, self.where = rank, node, where
        self.__cause__ = cause

    def on(self, rank: int) -> RankError:
        """The same error with the rank filled in."""
        cause = self.__cause__ or self
        return RankError(rank, cause, self.node, self.where).with_traceback(self.__traceback__)
