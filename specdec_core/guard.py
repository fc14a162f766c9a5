"""The guard around a draft that breaks: nothing a drafter does can change the output or stop the run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
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
        if proposal.branches is not None:
            proposal.branches = proposal.branches.clamp(0, self.vocab - 1) if proposal.branches.numel() else None
        if proposal.tokens.shape[1] == 0:
            proposal.note = proposal.note or EMPTY_BLOCK
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
        answer: Future[T] = Future()

        def work() -> None:
            try:
                with torch.inference_mode():
                    answer.set_result(call())
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=work, daemon=True).start()
        if not wait([answer], self.timeout).done:
            raise TimeoutError(f"no answer after {self.timeout} s")
        return answer.result()

    def _fault(self, proposal: object, room: Sequence[int]) -> str:
        """What is wrong with a proposal, in words; empty when it can be verified. Looks at no value on the device."""
        if not isinstance(proposal, Proposal):
            return f"draft returned {type(proposal).__name__}, a Proposal was asked"
        batch, width, tokens = len(room), max(room), proposal.tokens
        if isinstance(tokens, Tensor) and tokens.ndim == 2:
            width = min(width, tokens.shape[1])
        fields: dict[str, tuple[tuple[int, ...], tuple[torch.dtype, ...]]] = {
            "tokens": ((batch, width), (torch.int64,)),
            "lengths": ((batch,), (torch.int64,)),
            "branches": ((batch, width, self.drafter.candidates - 1), (torch.int64,)),
            "q": ((batch, width, self.vocab), _FLOATS),
            "belief": ((batch, width, self.vocab), _FLOATS),
        }
        for name, (shape, kinds) in fields.items():
            value = getattr(proposal, name)
            if value is None and name in ("branches", "q", "belief"):
                continue
            if not isinstance(value, Tensor) or value.layout != torch.strided:
                return f"draft returned {name} of type {type(value).__name__}, a dense tensor was asked"
            if (*value.shape,) != shape or value.dtype not in kinds or value.device.type != self.device.type:
                found = f"{tuple(value.shape)} {value.dtype} on {value.device}"
                return f"draft returned {name} {found}, {shape} {kinds[0]} on {self.device} was asked"
        drafted = proposal.drafted
        if not isinstance(drafted, list) or len(drafted) != batch or any(type(n) is not int or n < 0 for n in drafted):
            return f"draft returned drafted={drafted!r}, {batch} counts were asked"
        if not isinstance(proposal.note, str):
            return f"draft returned note={proposal.note!r}, words were asked"
        return ""


_FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def _first_line(error: BaseException) -> str:
    try:
        return str(error).splitlines()[0]
    except Exception:  # it has no words, or raises again when asked for them
        return "no message"
