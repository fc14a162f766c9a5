"""The one kind of error a user is meant to read."""

from __future__ import annotations


class SpecDecError(Exception):
    """Bad input or an impossible request.

    The message is one line: what is wrong, then how to mend it. Command line and notebooks print the
    line alone; everything else that is raised is a fault of ours and keeps its traceback.
    """

    def _render_traceback_(self) -> list[str]:
        """What IPython shows in place of a traceback."""
        return [f"SpecDecError: {self}"]
