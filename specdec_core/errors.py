"""The one kind of error a user is meant to read."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from numbers import Integral, Real
from typing import Any


class SpecDecError(Exception):
    """Bad input or an impossible request.

    The message is one line: what is wrong, then how to mend it. Command line and notebooks print the
    line alone; everything else that is raised is a fault of ours and keeps its traceback.
    """

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return [f"SpecDecError: {self}"]


def whole(name: str, value: Any, least: int, most: int) -> int:
    """``value`` as an int between the two; anything else (a bool, a float, a text) is refused by name."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        raise SpecDecError(f"{name}={value!r} is not possible: give a whole number from {least} to {most}.")
    return int(value)


def number(name: str, value: Any, fits: Callable[[float], bool], want: str) -> float:
    """``value`` as a float that ``fits``; anything else is refused by name, saying what is wanted."""
    if not isinstance(value, bool) and isinstance(value, Real):
        with suppress(OverflowError):  # an int too long for a float
            if fits(float(value)):
                return float(value)
    raise SpecDecError(
        f"{name}={str(value)[:60] if isinstance(value, Real) else repr(value)} is not possible: give {want}."
    )
