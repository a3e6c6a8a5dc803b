"""Seconds and bytes as short text: three digits and a unit."""

from __future__ import annotations


def seconds_text(seconds: float) -> str:
    """`12.3 us`, `4.56 ms`, `7.89 s`."""
    return _scaled(seconds * 1e6, ("us", "ms", "s"))


def bytes_text(nbytes: float) -> str:
    """`12 B`, `34.5 KB`, `6.78 GB`; a KB is 1000 bytes."""
    return f"{nbytes:.0f} B" if nbytes < 999.5 else _scaled(nbytes / 1e3, ("KB", "MB", "GB", "TB", "PB"))


def _scaled(value: float, units: tuple[str, ...]) -> str:
    sign, value = ("-" if value < 0 else ""), abs(value)
    for unit in units[:-1]:
        if value < 999.5:
            return f"{sign}{_digits(value)} {unit}"
        value /= 1000
    return f"{sign}{_digits(value)} {units[-1]}"


def _digits(value: float) -> str:
    """Three digits."""
    if not value:
        return "0"
    return f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
