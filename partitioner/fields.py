"""The fields of a JSON object, read one by one: what is missing, unknown or wrong is named with its place."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NoReturn

from .errors import CalibrationError


class Fields:
    """One object of a file. `where` is the file and the path to the object: `c.json: links.tp`."""

    def __init__(self, content: Any, where: str):
        if not isinstance(content, dict):
            raise CalibrationError(f"{where}: expected an object with fields, got {_kind(content)}")
        self.content: dict[str, Any] = content
        self.where = where
        self._read: set[str] = set()

    def names(self, among: Iterable[str] | None = None) -> tuple[str, ...]:
        """All names, where any name is allowed, or any of `among`."""
        known = sorted(self.content if among is None else among)
        for name in self.content:
            if name not in known:
                self.fail(name, f"unknown; there are {', '.join(known)}")
        return tuple(self.content)

    def whole(self, name: str) -> int:
        """A whole number above 0."""
        value = self.number(name)
        if not value.is_integer():
            self.fail(name, f"expected a whole number, got {value:g}")
        return int(value)

    def number(self, name: str, least: float | None = None) -> float:
        """A finite number: above 0, or at least `least`."""
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail(name, f"expected a number, got {_kind(value)}")
        if not math.isfinite(value) or (value <= 0 if least is None else value < least):
            wanted = "above 0" if least is None else f"of at least {least:g}"
            self.fail(name, f"expected a number {wanted}, got {value}")
        return float(value)

    def text(self, name: str, among: Iterable[str]) -> str:
        """One of the given words."""
        value, known = self._get(name), sorted(among)
        if value not in known:
            self.fail(name, f"expected one of {', '.join(known)}; got {value!r}")
        return value

    def inner(self, name: str) -> Fields:
        """The object of that name."""
        return Fields(self._get(name), f"{self.where}: {name}" if ": " not in self.where else f"{self.where}.{name}")

    def items(self, name: str) -> list[Fields]:
        """The objects of a list of at least one."""
        value = self._get(name)
        if not isinstance(value, list) or not value:
            self.fail(name, f"expected a list of at least one object, got {_kind(value)}")
        return [Fields(item, f"{self.where}.{name}[{i}]") for i, item in enumerate(value)]

    def done(self) -> None:
        """That no field is left unread."""
        for name in self.content:
            if name not in self._read:
                self.fail(name, f"unknown; the fields are {', '.join(sorted(self._read))}")

    def fail(self, name: str, text: str) -> NoReturn:
        at = f"{self.where}.{name}" if ": " in self.where else f"{self.where}: {name}"
        raise CalibrationError(f"{at}: {text}")

    def _get(self, name: str) -> Any:
        self._read.add(name)
        if name not in self.content:
            self.fail(name, f"missing; this object has {', '.join(self.content) or 'no field'}")
        return self.content[name]


def _kind(value: Any) -> str:
    return {list: "a list", dict: "an object", str: "a text", bool: "true or false"}.get(type(value), repr(value))
