"""Speculative decoding in five stages - draft, score, accept, resample, repeat - and ordinary decoding beside it.

This is the only place where models, drafters, rules and caches meet. Rows of a batch run in lockstep, each with its
own length, coins and stop. A step makes one target pass and one device-to-host read.

Leviathan, Kalman, Matias: Fast Inference from Transformers via Speculative Decoding, ICML 2023, algorithm 1.
Chen et al.: Accelerating Large Language Model Decoding with Speculative Sampling, 2023, algorithm 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .caches import ModelCache
from .control import EMPTY_BLOCK, Guard
from .drafters.base import Drafter, Proposal
from .errors import SpecDecError
from .record import Clock, LastToken, StepRecord
from .sampling import RequestRandom, SamplingPolicy, distribution, draw, invalid_rows
from .stops import Stops
from .verify import GREEDY, TOKEN, Rule, accept, first_invalid, next_law


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


@dataclass(frozen=True)
class Settings:
    """How to decode: block length, sampling, rule, ends. ``rule=None`` takes the exact one for the policy."""

    gamma: int = 4
    policy: SamplingPolicy = field(default_factory=SamplingPolicy)
    stops: Stops = field(default_factory=Stops)
    rule: Rule | None = None
    draft_timeout: float | None = None
    diagnostics: bool = True  # entropies and the target's preference in the records; costs two softmaxes a step

    @property
    def verification(self) -> Rule:
        return self.rule or (GREEDY if self.policy.greedy else TOKEN)


@dataclass
class Decoding:
    """The state that the stages share: requests still running, and the target's cache that holds all their committed
    tokens but the last (the pending one, which the next pass feeds first)."""

    requests: list[Request]
    settings: Settings
    cache: ModelCache
    clock: Clock
    coins: Tensor | None = None  # [B, 2 + gamma] float64 of this step: accept, resample, then the draft's

    @property
    def device(self) -> torch.device:
        return self.cache.model.device

    @property
    def running(self) -> bool:
        return any(r.stop is None for r in self.requests)

    def toss(self, gamma: int) -> None:
        """New coins for every row, always the same count, so that a row's stream does not depend on its neighbours."""
        rows = [r.random.uniforms(2 + gamma) if r.stop is None else [0.0] * (2 + gamma) for r in self.requests]
        self.coins = torch.tensor(rows, dtype=torch.float64).to(self.device)

    def room(self, request: Request) -> int | None:
        limit = self.settings.stops.context
        return None if limit is None else limit - request.length


@torch.inference_mode()
def speculative_decoding(
    target: PreTrainedModel, requests: list[Request], drafter: Drafter, settings: Settings
) -> Iterator[list[StepRecord]]:
    """Decode with a draft. Yields the records of each target pass as its tokens are committed."""
    state = Decoding(requests, settings, ModelCache(target, len(requests)), Clock(target.device))
    guard = Guard(
        drafter, target.device, target.config.get_text_config(decoder=True).vocab_size, settings.draft_timeout
    )
    guard.start(len(requests))
    yield prefill(state)
    while state.running:
        block = draft(state, guard)
        scores = score(state, block)
        count = accept_prefix(state, block, scores)
        token = resample(state, block, scores, count)
        yield repeat(state, block, scores, count, token, guard)


@torch.inference_mode()
def ordinary_decoding(
    target: PreTrainedModel, requests: list[Request], settings: Settings
) -> Iterator[list[StepRecord]]:
    """The baseline: the same cache and sampling, one token a pass, nothing drafted."""
    state = Decoding(requests, settings, ModelCache(target, len(requests)), Clock(target.device))
    nothing = Block.empty(len(requests), target.device)
    yield prefill(state)
    while state.running:
        state.toss(0)
        scores = score(state, nothing)
        count = torch.zeros(len(requests), dtype=torch.int64, device=target.device)
        token = resample(state, nothing, scores, count)
        yield repeat(state, nothing, scores, count, token, None)


# --- the stages -------------------------------------------------------------------------------------------


@dataclass
class Block:
    """A drafted block on its way through a step: the proposal, and what of it may be verified."""

    proposal: Proposal
    asked: list[int]
    tokens: Tensor  # [B, g]
    lengths: Tensor  # [B], the proposal's lengths cut at its first invalid row
    q: Tensor  # [B, g, V]
    control: str
    reason: str

    @staticmethod
    def empty(batch: int, device: torch.device) -> Block:
        nothing = Proposal.nothing(batch, device, "")
        return Block(
            nothing, [0] * batch, nothing.tokens, nothing.lengths, nothing.tokens.unsqueeze(-1), "baseline", ""
        )


@dataclass
class Scores:
    """The target's judgement of a block: ``logits [B, g+1, V]`` and the law ``p`` made of them (None when greedy,
    where the logits' order says it all)."""

    logits: Tensor
    p: Tensor | None

    @property
    def ranking(self) -> Tensor:
        return self.logits if self.p is None else self.p


def prefill(state: Decoding) -> list[StepRecord]:
    """Feed the prompts and commit the first token of each. A request with no budget ends here, with no pass made."""
    for r in state.requests:
        if r.max_new_tokens == 0:
            r.stop = "budget"
    if not state.running:
        return []
    width = max(len(r.prompt) for r in state.requests)
    padded = torch.tensor([r.prompt + [0] * (width - len(r.prompt)) for r in state.requests], device=state.device)
    state.toss(0)
    with state.clock("score"):
        logits = state.cache.extend(padded, [len(r.prompt) for r in state.requests], keep="last")
        scores = _judged(logits, state.settings.policy)
    nothing = Block.empty(len(state.requests), state.device)
    count = torch.zeros(len(state.requests), dtype=torch.int64, device=state.device)
    token = resample(state, nothing, scores, count)
    return repeat(state, nothing, scores, count, token, None)


def draft(state: Decoding, guard: Guard) -> Block:
    """Stage 1. Consumes the committed tokens and the draft's coins; changes the drafter's own cache only.

    Asks for no more than can still be emitted: with one token of budget or context left nothing is drafted.
    Validity: every token drawn from the q row that comes with it; rows that cannot be a law are cut off.
    """
    gamma = state.settings.gamma
    state.toss(gamma)
    assert state.coins is not None
    asked = []
    for r in state.requests:
        limits = [gamma, r.max_new_tokens - len(r.output) - 1]
        room = state.room(r)
        asked.append(0 if r.stop else max(0, min(limits if room is None else [*limits, room - 1])))
    with state.clock("draft"):
        if max(asked) == 0:
            proposal = Proposal.nothing(len(asked), state.device, "no room for a block: budget or context nearly used")
        else:
            proposal = guard.propose([r.committed for r in state.requests], asked, state.coins[:, 2:])
        tokens = proposal.tokens.clamp(0, guard.vocab - 1)
        q = one_hot(tokens, guard.vocab) if proposal.q is None else proposal.q
        proposal.lengths = torch.minimum(proposal.lengths, torch.tensor(asked, device=state.device)).clamp(min=0)
        lengths = first_invalid(q, proposal.tokens, proposal.lengths)
    failed = max(asked) > 0 and (bool(guard.broken) or proposal.note == EMPTY_BLOCK)
    control = "degraded" if failed else "speculate" if tokens.shape[1] else "idle"
    return Block(proposal, asked, tokens, lengths, q, control, proposal.note)


def score(state: Decoding, block: Block) -> Scores:
    """Stage 2. Feeds the pending token and the block to the target in one pass; its cache then holds all of them.

    Validity: position i of the result conditions on the committed tokens and the first i drafted ones, nothing else.
    """
    with state.clock("score"):
        pending = torch.tensor([[(r.output or r.prompt)[-1]] for r in state.requests], device=state.device)
        logits = state.cache.extend(torch.cat([pending, block.tokens], 1))
        return _judged(logits, state.settings.policy)


def accept_prefix(state: Decoding, block: Block, scores: Scores) -> Tensor:
    """Stage 3. How many tokens of the block each row keeps, ``[B]``. Consumes p, q, the tokens and one coin a row."""
    assert state.coins is not None
    with state.clock("accept"):
        rule = state.settings.verification
        return accept(rule, scores.ranking, block.q, block.tokens, block.lengths, state.coins[:, 0])


def resample(state: Decoding, block: Block, scores: Scores, count: Tensor) -> Tensor:
    """Stage 4. The token after the kept prefix, ``[B]``: from the residual where a token was turned down, from p
    where the whole block was kept (the bonus token) or nothing was drafted."""
    assert state.coins is not None
    with state.clock("resample"):
        rule = state.settings.verification
        law = next_law(rule, scores.ranking, block.q, block.tokens, block.lengths, count)
        return law.argmax(-1) if state.settings.policy.greedy else draw(law, state.coins[:, 1])


def repeat(
    state: Decoding, block: Block, scores: Scores, count: Tensor, token: Tensor, guard: Guard | None
) -> list[StepRecord]:
    """Stage 5. Commit: the one host read, the stops, both caches rewound to what is committed.

    Validity: afterwards the target's cache holds exactly the committed tokens but the last.
    """
    commits = []
    with state.clock("repeat"):
        for b, row in enumerate(_read(state, block, scores, count, token)):
            request = state.requests[b]
            if request.stop is None:
                commits.append(_commit(state, request, row))
        state.cache.rewind([r.length - 1 for r in state.requests])
        if guard is not None:
            guard.commit([r.length for r in state.requests])
    started, seconds = state.clock.started, state.clock.seconds()
    return [_record(block, c, started, seconds, len(commits)) for c in commits]


# --- details ----------------------------------------------------------------------------------------------


def _judged(logits: Tensor, policy: SamplingPolicy) -> Scores:
    return Scores(logits.float(), None if policy.greedy else distribution(logits, policy))


def one_hot(tokens: Tensor, vocab: int) -> Tensor:
    """The law of tokens that were chosen, not drawn: ``[B, g]`` -> ``[B, g, vocab]`` float32."""
    return torch.zeros(*tokens.shape, vocab, device=tokens.device).scatter_(-1, tokens.unsqueeze(-1), 1.0)


@dataclass
class _Row:
    """One row of the step's host read."""

    index: int
    count: int
    token: int
    sound: int
    proposed: int
    verified: int
    tokens: list[int]
    p: list[float]
    q: list[float]
    p_entropy: list[float]
    q_entropy: list[float]
    preferred: list[int]


def _read(state: Decoding, block: Block, scores: Scores, count: Tensor, token: Tensor) -> list[_Row]:
    """Everything the host needs of a step, packed in one float64 tensor (exact for token ids) and read once."""
    g = block.tokens.shape[1]
    sound = (~invalid_rows(scores.ranking)).int().cumprod(1).sum(1)  # rows of the target before the first broken one
    head = [count, token, sound, block.proposal.lengths, block.lengths]
    parts = [torch.stack([c.double() for c in head], 1), block.tokens.double()]
    if state.settings.diagnostics:
        parts += _diagnostics(block, scores)
    rows = []
    for b, values in enumerate(torch.cat(parts, 1).tolist()):
        pieces, at = [], 0
        for size in (5, g, g, g, g + 1, g, g + 1):
            pieces.append(values[at : at + size])
            at += size
        (n, next_token, good, proposed, verified), ids, p, q, p_entropy, q_entropy, preferred = pieces
        numbers = (int(n), int(next_token), int(good), int(proposed), int(verified))
        rows.append(_Row(b, *numbers, [int(t) for t in ids], p, q, p_entropy, q_entropy, [int(t) for t in preferred]))
    return rows


def _diagnostics(block: Block, scores: Scores) -> list[Tensor]:
    """p and q at the drafted tokens, both entropies and the target's preference, in the order of ``_read``."""
    at, g = block.tokens.unsqueeze(-1), block.tokens.shape[1]
    p = scores.p if scores.p is not None else scores.logits.softmax(-1)
    q = block.q if scores.p is not None or block.proposal.belief is None else block.proposal.belief
    p_at, q_at = ((law.gather(-1, at).squeeze(-1) if g else block.tokens) for law in (p[:, :g], q))
    entropies = (torch.special.entr(law).sum(-1) for law in (p, q))
    p_entropy, q_entropy = entropies
    return [x.double() for x in (p_at, q_at, p_entropy, q_entropy, p.argmax(-1))]


@dataclass
class _Commit:
    """What a pass added to one request."""

    request: Request
    row: _Row
    kept: list[int]


def _commit(state: Decoding, request: Request, row: _Row) -> _Commit:
    """Append what belongs to the text; refuse a target whose judgement is no number."""
    if row.sound <= row.count:  # a position that this pass emits rests on it
        raise SpecDecError(
            f"The target's logits at position {request.length + row.sound} of request {request.id} hold NaN or "
            "nothing finite: load its weights again, or use float32."
        )
    new = [*row.tokens[: row.count], row.token]
    budget = request.max_new_tokens - len(request.output)
    kept, request.stop = state.settings.stops.cut(request.output, new, budget, state.room(request))
    request.output += kept
    return _Commit(request, row, kept)


def _record(block: Block, commit: _Commit, started: float, seconds: dict[str, float], batch: int) -> StepRecord:
    request, row, kept = commit.request, commit.row, commit.kept
    first = not request.records
    control, reason = block.control, block.reason
    if row.verified < row.proposed:
        control = "degraded"
        reason = f"draft row {row.verified + 1} of the block is not a law over its token: emitted from the target"
    v = row.verified
    record = StepRecord(
        request=request.id,
        step=len(request.records),
        kind="prefill" if first else "speculative" if v else "ordinary",
        gamma=block.asked[row.index],
        drafted=block.proposal.drafted[row.index],
        verified=min(v, len(kept)) if request.stop else v,
        accepted=min(row.count, len(kept)),
        emitted=tuple(kept),
        last=_last_token(first, row, len(kept)),
        stop=request.stop,
        draft_tokens=tuple(row.tokens[:v]),
        p=tuple(row.p[:v]),
        q=tuple(row.q[:v]),
        p_entropy=tuple(row.p_entropy[: v + 1]),
        q_entropy=tuple(row.q_entropy[:v]),
        preferred=tuple(row.preferred[: v + 1]),
        seconds=seconds,
        started=started,
        control=control,
        reason=reason,
        context=request.length - len(kept),
        batch=batch,
    )
    request.records.append(record)
    return record


def _last_token(first: bool, row: _Row, kept: int) -> LastToken:
    if first:
        return "prefill"
    if kept <= row.count:
        return "accepted"  # a stop inside the accepted prefix
    if row.count < row.verified:
        return "resampled"
    # After a block that was cut at an unsound row the next token is the target's own, and no bonus.
    return "bonus" if 0 < row.verified == row.proposed else "ordinary"
