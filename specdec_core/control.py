"""Controls that act before the cost is paid. In this version: the guard around a draft that breaks."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .drafters.base import Drafter, Proposal

EMPTY_BLOCK = "draft returned an empty block"


@dataclass
class Guard:
    """Runs a drafter so that nothing it does can change the output or stop the run (condition G5).

    A draft that raises, returns something misshapen or outlasts ``timeout`` seconds is dropped for the rest of the
    call: its cache can no longer be trusted. The loop goes on with ordinary steps and records the reason.
    With a timeout the draft runs in a thread of its own, which is left behind if it never returns.
    """

    drafter: Drafter
    device: torch.device
    vocab: int
    timeout: float | None = None
    broken: str = ""  # why the draft is out of service; empty while it works

    def start(self, batch: int) -> None:
        try:
            self.drafter.start(batch)
        except Exception as error:
            self.broken = _in_words("draft raised at the start", error)

    def propose(self, sequences: Sequence[Sequence[int]], room: Sequence[int], u: Tensor) -> Proposal:
        """A proposal that is safe to verify; an empty one where the draft is broken or has nothing."""
        if not self.broken:
            try:
                proposal = self._call(sequences, room, u)
                self.broken = self._fault(proposal, room)
                if not self.broken:
                    return proposal
            except Exception as error:
                self.broken = _in_words("draft raised", error)
        return Proposal.nothing(len(room), self.device, self.broken)

    def commit(self, lengths: Sequence[int]) -> None:
        if not self.broken:
            try:
                self.drafter.commit(lengths)
            except Exception as error:
                self.broken = _in_words("draft raised on commit", error)

    def _call(self, sequences: Sequence[Sequence[int]], room: Sequence[int], u: Tensor) -> Proposal:
        if self.timeout is None:
            return self.drafter.propose(sequences, room, u)
        result: list[Proposal] = []
        raised: list[Exception] = []

        def work() -> None:
            try:
                with torch.inference_mode():
                    result.append(self.drafter.propose(sequences, room, u))
            except Exception as error:
                raised.append(error)

        begun = time.perf_counter()
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(self.timeout)
        if raised:
            raise raised[0]
        if not result:
            raise TimeoutError(f"no block after {time.perf_counter() - begun:.1f} s, {self.timeout} s allowed")
        return result[0]

    def _fault(self, proposal: Proposal, room: Sequence[int]) -> str:
        """What is wrong with the shape of a proposal, in words; empty when it can be verified. Reads no device."""
        batch, widest = len(room), max(room)
        tokens, q = proposal.tokens, proposal.q
        if tokens.ndim != 2 or tokens.shape[0] != batch or tokens.shape[1] > widest or tokens.dtype != torch.int64:
            asked = f"at most ({batch}, {widest}) int64 was asked"
            return f"draft returned tokens {tuple(tokens.shape)} {str(tokens.dtype).removeprefix('torch.')}, {asked}"
        if tuple(proposal.lengths.shape) != (batch,):
            return f"draft returned lengths {tuple(proposal.lengths.shape)}, ({batch},) was asked"
        if q is not None and tuple(q.shape) != (*tokens.shape, self.vocab):
            return f"draft returned q {tuple(q.shape)}, {(*tokens.shape, self.vocab)} was asked"
        if tokens.shape[1] == 0 and not proposal.note:
            proposal.note = EMPTY_BLOCK
        return ""


def _in_words(what: str, error: Exception) -> str:
    return f"{what}: {type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no message'}"
