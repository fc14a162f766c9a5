"""The one kind of error a user is meant to read, and the checks that raise it by name."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from numbers import Integral, Real
from typing import Any


class SpecDecError(Exception):
    """Bad input or an impossible request.

    The message is one line: what is wrong, then how to mend it. Command line and notebooks print the
    line alone; everything else that is raised is a fault of ours and keeps its traceback.
    """

    def __init__(self, message: str):
        super().__init__(" ".join(message.split()))  # what is quoted from outside may hold line ends

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return [f"SpecDecError: {self}"]


def whole(name: str, value: Any, least: int, most: int) -> int:
    """``value`` as an int between the two; anything else (a bool, a float, a text) is refused by name."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) <= most:
        raise SpecDecError(f"{name}={value!r:.60} is not possible: give a whole number from {least} to {most}.")
    return int(value)


def number(name: str, value: Any, fits: Callable[[float], bool], want: str) -> float:
    """``value`` as a float that ``fits``; anything else is refused by name, saying what is wanted."""
    with suppress(OverflowError):  # an int too long for a float
        if isinstance(value, Real) and not isinstance(value, bool) and fits(float(value)):
            return float(value)
    raise SpecDecError(f"{name}={value!r:.60} is not possible: give {want}.")


def choice(name: str, value: Any, allowed: Collection[str], or_else: str = "") -> str:
    """``value`` if it is one of ``allowed``; anything else is refused by name, with the choice."""
    if isinstance(value, str) and value in allowed:
        return value
    raise SpecDecError(f"{name}={value!r:.60} is unknown: choose one of {', '.join(allowed)}{or_else}.")


def listed(name: str, value: Any, want: str) -> list[Any]:
    """``value``, any sequence but a text, as a list; anything else is refused by name, saying what is wanted."""
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return list(value)
    raise SpecDecError(f"{name}={value!r:.60} is not possible: give {want}.")
