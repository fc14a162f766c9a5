"""Where a text ends: EOS ids, stop strings, budget, context. The same for speculative and ordinary decoding."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Stops:
    """End conditions.

    Attributes:
        eos: token ids that end the text; the EOS token itself is emitted and counted.
        strings: texts that end it. The tokens up to the one that completes the string are emitted and counted; the
            text ends before the string.
        context: most tokens, prompt included, or None.
        decode: token ids -> text; needed for ``strings`` only.
    """

    eos: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    context: int | None = None
    decode: Callable[[Sequence[int]], str] | None = None

    def cut(
        self, output: Sequence[int], new: Sequence[int], budget: int, room: int | None
    ) -> tuple[list[int], str | None]:
        """The part of ``new`` that belongs to the text that so far is ``output``, and why it ended, if it did.

        ``budget`` tokens may still be emitted, ``room`` tokens still fit the context.
        """
        kept: list[int] = []
        for token in new:
            kept.append(token)
            if token in self.eos:
                return kept, "eos"
            if self.strings and self._string_in([*output, *kept]):
                return kept, "stop_string"
            if len(kept) >= budget:
                return kept, "budget"
            if room is not None and len(kept) >= room:
                return kept, "context"
        return kept, None

    def _string_in(self, output: list[int]) -> bool:
        """Whether the end of ``output`` completes a stop string. Only a tail is decoded, long enough to hold one: a
        character takes at most four tokens, but special tokens may take no text at all."""
        assert self.decode is not None
        longest = max(len(s) for s in self.strings)
        tail = 4 * longest + 4
        while len(text := self.decode(output[-tail:])) <= longest and tail < len(output):
            tail *= 2
        return any(s in text for s in self.strings)

    def text(self, output: Sequence[int]) -> str:
        """The decoded output, ended before the first stop string."""
        assert self.decode is not None
        text = self.decode(output)
        return text[: min((text.index(s) for s in self.strings if s in text), default=len(text))]
