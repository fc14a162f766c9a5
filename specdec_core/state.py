"""What the stages of the loop share: requests, settings, the decoding under way, and a block on its way through."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .caches import ModelCache, Tree, context_limit
from .control import BlockLength, Fixed
from .drafters.base import Proposal
from .errors import SpecDecError, whole
from .processors import Processing
from .record import Clock, StepRecord
from .sampling import RequestRandom, SamplingPolicy
from .stops import Stops
from .verify import GREEDY, TOKEN, Rule


@dataclass
class Request:
    """One row: what was asked, what is committed, what happened."""

    id: int
    prompt: list[int]
    max_new_tokens: int
    random: RequestRandom
    output: list[int] = field(default_factory=list)
    stop: str | None = None
    records: list[StepRecord] = field(default_factory=list)

    @property
    def committed(self) -> list[int]:
        return self.prompt + self.output

    @property
    def length(self) -> int:
        """Committed tokens."""
        return len(self.prompt) + len(self.output)

    def cancel(self) -> None:
        """End it between two passes; its neighbours are not touched (condition C9)."""
        self.stop = self.stop or "cancelled"


@dataclass(frozen=True)
class Settings:
    """How to decode: block length, sampling, rule, ends. ``rule=None`` takes the exact one for the policy.

    ``control`` chooses the block length of each pass in place of ``gamma``; ``max_batch`` rows run at once and the
    other requests wait; ``fixed_shapes`` allocates everything at once, for CUDA graphs (finished rows then stay until
    the last of them is done).
    """

    gamma: int = 4
    policy: SamplingPolicy = field(default_factory=SamplingPolicy)
    stops: Stops = field(default_factory=Stops)
    rule: Rule | None = None
    draft_timeout: float | None = None
    diagnostics: bool = True  # entropies and the target's preference in the records; costs two softmaxes a step
    processing: Processing = field(default_factory=Processing)
    control: BlockLength | None = None
    max_batch: int | None = None
    fixed_shapes: bool = False

    @property
    def verification(self) -> Rule:
        return self.rule or (GREEDY if self.policy.greedy else TOKEN)


class Decoding:
    """The state that the stages share: the running rows, those that wait, and the target's cache, which holds all
    committed tokens of each row but the last (the pending one, which the next pass feeds first)."""

    def __init__(self, target: PreTrainedModel, requests: list[Request], settings: Settings, candidates: int = 1):
        self.target, self.settings, self.clock = target, settings, Clock(target.device)
        self.device = target.device
        self.vocab = int(target.config.get_text_config(decoder=True).vocab_size)
        self.rows: list[Request] = []
        self.newcomers: list[Request] = []
        self.waiting = deque(requests)
        self.control = settings.control or Fixed(settings.gamma)
        whole("candidates", candidates, 1, min(self.vocab, 64))
        limit = context_limit(target)
        self.capacity = capacity(requests, self.control, candidates, limit) if settings.fixed_shapes else None
        self.cache = ModelCache(target, 0, self.capacity)  # refuses a model that would not be exact, before any token
        self.cache.allow(min(len(requests), settings.max_batch or len(requests)), candidates)
        settings.processing.check(self.vocab, target.device)
        if candidates > 1 and not settings.verification.branches:
            raise SpecDecError(f"rule '{settings.verification.name}' judges one candidate a position: use rule token.")
        self.coins = torch.zeros(0)
        self.synthetic = False  # whether the draft is; every record says so

    def toss(self, count: int) -> None:
        """New coins ``[B, count]`` float64 for every row, always as many for each, so that a row's stream does not
        depend on its neighbours."""
        rows = [r.random.uniforms(count) if r.stop is None else [0.0] * count for r in self.rows]
        self.coins = torch.tensor(rows, dtype=torch.float64).to(self.device)

    def room(self, request: Request) -> int | None:
        limit = self.settings.stops.context
        return None if limit is None else limit - request.length


def capacity(requests: list[Request], control: BlockLength, candidates: int, limit: int | None) -> int:
    """Slots a row needs for the longest of these requests and the widest block behind it, branches included."""
    longest = max((len(r.prompt) + r.max_new_tokens for r in requests), default=0)
    return (longest if limit is None else min(longest, limit)) + control.widest * candidates + 2


# --- a block on its way through a step --------------------------------------------------------------------


@dataclass
class Block:
    """A drafted block on its way through a step: the proposal, and what of it may be verified."""

    proposal: Proposal
    asked: list[int]
    tokens: Tensor  # [B, g]
    lengths: Tensor  # [B], the proposal's lengths cut at its first invalid row
    q: Tensor | None  # [B, g, V]; None for chosen tokens under the greedy rule, which reads none
    control: str
    reason: str

    @staticmethod
    def empty(batch: int, device: torch.device, control: str = "baseline", reason: str = "") -> Block:
        none = Proposal.nothing(batch, device, reason)
        return Block(none, [0] * batch, none.tokens, none.lengths, None, control, reason)

    @property
    def branches(self) -> Tensor | None:
        return self.proposal.branches


@dataclass
class Scores:
    """The target's judgement of a block: ``logits [B, n, V]`` and the law ``p`` made of them (None when greedy, where
    the logits' order says it all). Columns: the pending token, the block, then the branches of each position."""

    logits: Tensor
    p: Tensor | None

    @property
    def ranking(self) -> Tensor:
        return self.logits if self.p is None else self.p


@dataclass
class Kept:
    """What a step keeps of a block: ``count [B]`` tokens, which branch behind them ``[B]`` (k-1: none), and the
    weights ``[B, V]`` of the token that follows where no branch is kept."""

    count: Tensor
    branch: Tensor | None
    law: Tensor


def one_hot(tokens: Tensor, vocab: int) -> Tensor:
    """The law of tokens that were chosen, not drawn: ``[B, g]`` -> ``[B, g, vocab]`` float32."""
    return torch.zeros(*tokens.shape, vocab, device=tokens.device).scatter_(-1, tokens.unsqueeze(-1), 1.0)


@lru_cache(maxsize=64)
def comb(g: int, more: int, device: str) -> Tree:
    """The block's shape with ``more`` branches at each position: the pending token, a spine of g, and the branches as
    leaves; a branch sees the spine before its position and itself."""
    spine = 1 + g
    depth = torch.cat([torch.arange(spine), torch.arange(1, spine).repeat_interleave(more)])
    sees = torch.eye(len(depth), dtype=torch.bool)
    sees[:, :spine] |= torch.arange(spine) < depth.unsqueeze(1)
    return Tree(depth.to(device), sees.to(device))


def branch_column(block: Block, kept: Kept) -> Tensor:
    """Where each row's kept branch stands among the columns of the pass; meaningless where none is kept."""
    assert block.branches is not None
    assert kept.branch is not None
    g, more = block.branches.shape[1:]
    return 1 + g + kept.count.clamp(max=g - 1) * more + kept.branch.clamp(max=more - 1)
