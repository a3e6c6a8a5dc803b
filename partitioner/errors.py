"""Errors: expected, got, way out. Every one derives from `MeshwrightError`."""

from __future__ import annotations


class MeshwrightError(RuntimeError):
    """The base of every error of this package."""


class CaptureError(MeshwrightError):
    """A program cannot be held in one fixed graph: a branch or a shape depends on data, or a call is not supported."""


class PlanError(MeshwrightError):
    """No plan meets what was asked: a pin, a budget, a mesh or a batch; the message names the facts in conflict."""


class TooLittle(PlanError):
    """`memory=` cannot be met. `least`: bytes of the plan found that takes least, by whatever was counted."""

    def __init__(self, message: str, least: float):
        super().__init__(message)
        self.least = least


class LawError(MeshwrightError):
    """A pass broke a law: a defect of the compiler. The message names law, pass, node, neighbours, source line."""


class ScheduleError(MeshwrightError):
    """A schedule cannot be read, made or run; the message names rank and action, the cycle or the missing partner."""


class CalibrationError(MeshwrightError):
    """A calibration cannot be read, or is not one of this machine; the message names the file and the field."""
