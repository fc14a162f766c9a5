"""The guard around a draft that breaks: nothing a drafter does can change the output or stop the run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from .drafters.base import Drafter, Proposal

T = TypeVar("T")
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

    def __post_init__(self) -> None:
        self._safely("start", self.drafter.start)

    def join(self, prompts: Sequence[Sequence[int]]) -> None:
        self._safely("join", lambda: self.drafter.join(prompts))

    def keep(self, rows: Sequence[int]) -> None:
        self._safely("keep", lambda: self.drafter.keep(rows))

    def propose(self, sequences: Sequence[Sequence[int]], room: Sequence[int], u: Tensor) -> Proposal:
        """A proposal that is safe to verify; an empty one where the draft is broken or has nothing."""
        proposal = self._safely("propose", lambda: self.drafter.propose(sequences, list(room), u))
        if not self.broken:
            self.broken = self._fault(proposal, room)
        if proposal is None or self.broken:
            return Proposal.nothing(len(room), self.device, self.broken)
        return proposal

    def commit(self, lengths: Sequence[int]) -> None:
        self._safely("commit", lambda: self.drafter.commit(lengths))

    def _safely(self, what: str, call: Callable[[], T]) -> T | None:
        """The result of a call into the drafter, or None with ``broken`` set; None at once where it was set before."""
        if self.broken:
            return None
        try:
            return call() if self.timeout is None else self._within_time(call)
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # a draft may not end the run, whatever it raises
            self.broken = f"draft raised in {what}: {type(error).__name__}: {_first_line(error)}"
            return None

    def _within_time(self, call: Callable[[], T]) -> T:
        result: list[T] = []
        raised: list[BaseException] = []

        def work() -> None:
            try:
                with torch.inference_mode():
                    result.append(call())
            except BaseException as error:
                raised.append(error)

        begun = time.perf_counter()
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        thread.join(self.timeout)
        if raised:
            raise raised[0]
        if not result:
            raise TimeoutError(f"no answer after {time.perf_counter() - begun:.1f} s, {self.timeout} s allowed")
        return result[0]

    def _fault(self, proposal: object, room: Sequence[int]) -> str:
        """What is wrong with a proposal, in words; empty when it can be verified. Looks at no value on the device."""
        if not isinstance(proposal, Proposal):
            return f"draft returned {type(proposal).__name__}, a Proposal was asked"
        batch, widest = len(room), max(room)
        tokens, q, belief = proposal.tokens, proposal.q, proposal.belief
        wrong = self._not("tokens", tokens, 2, torch.int64) or self._not("lengths", proposal.lengths, 1, torch.int64)
        if not wrong and (tokens.shape[0] != batch or tokens.shape[1] > widest or len(proposal.lengths) != batch):
            wrong = (
                f"tokens {tuple(tokens.shape)} for {len(proposal.lengths)} rows, ({batch}, {widest}) at most was asked"
            )
        more, k = proposal.branches, self.drafter.candidates
        if not wrong and more is not None:
            wrong = self._not("branches", more, 3, torch.int64)
            if not wrong and tuple(more.shape) != (*tokens.shape, k - 1):
                wrong = f"branches {tuple(more.shape)}, {(*tokens.shape, k - 1)} was asked"
            if not wrong:
                proposal.branches = more.clamp(0, self.vocab - 1) if more.numel() else None
        for name, law in (("q", q), ("belief", belief)):
            if not wrong and law is not None:
                wrong = self._not(name, law, 3, None)
                if not wrong and tuple(law.shape) != (*tokens.shape, self.vocab):
                    wrong = f"{name} {tuple(law.shape)}, {(*tokens.shape, self.vocab)} was asked"
        if not wrong and not _are_counts(proposal.drafted, batch):
            wrong = f"drafted={proposal.drafted!r}, {batch} counts were asked"
        if not wrong and not isinstance(proposal.note, str):
            wrong = f"note={proposal.note!r}, words were asked"
        if not wrong and tokens.shape[1] == 0 and not proposal.note:
            proposal.note = EMPTY_BLOCK
        return f"draft returned {wrong}" if wrong else ""

    def _not(self, name: str, value: object, ndim: int, dtype: torch.dtype | None) -> str:
        """Why ``value`` is not a plain tensor of that kind (dtype None: any float) on the target's device."""
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return f"{name} of type {type(value).__name__}, a dense tensor was asked"
        kind = str(value.dtype).removeprefix("torch.")
        if value.dtype != dtype if dtype is not None else value.dtype not in _FLOATS:
            return f"{name} {tuple(value.shape)} {kind}, {'a float type' if dtype is None else 'int64'} was asked"
        if value.ndim != ndim:
            return f"{name} {tuple(value.shape)}, {ndim} dimensions were asked"
        if value.device.type != self.device.type:
            return f"{name} on {value.device}, {self.device} was asked"
        return ""


_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _first_line(error: BaseException) -> str:
    try:
        return str(error).splitlines()[0] if str(error) else "no message"
    except Exception:
        return "no message that can be read"


def _are_counts(value: object, batch: int) -> bool:
    return isinstance(value, list) and len(value) == batch and all(type(n) is int and n >= 0 for n in value)
