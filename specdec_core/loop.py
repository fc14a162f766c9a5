"""Speculative decoding in five stages - draft, score, accept, resample, repeat - and ordinary decoding beside it.

This is the only place where models, drafters, rules and caches meet. Rows of a batch run in lockstep, each with its
own length, coins and stop; a finished row leaves and a waiting request takes its place. A step makes one target pass
and one device-to-host read.

Leviathan, Kalman, Matias: Fast Inference from Transformers via Speculative Decoding, ICML 2023, algorithm 1.
Chen et al.: Accelerating Large Language Model Decoding with Speculative Sampling, 2023, algorithm 2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .caches import ModelCache, Tree
from .control import BlockLength, Fixed, Observation
from .drafters.base import Drafter, Proposal
from .errors import SpecDecError
from .guard import EMPTY_BLOCK, Guard
from .processors import Processing
from .record import Clock, LastToken, StepRecord
from .sampling import RequestRandom, SamplingPolicy, distribution, draw, invalid_rows
from .stops import Stops
from .verify import GREEDY, TOKEN, Rule, accept, first_invalid, next_law, try_branches


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
        self.vocab = int(target.config.get_text_config(decoder=True).vocab_size)
        self.rows: list[Request] = []
        self.newcomers: list[Request] = []
        self.waiting = deque(requests)
        self.control = settings.control or Fixed(settings.gamma)
        self.capacity = capacity(requests, settings.gamma) if settings.fixed_shapes else None
        self.cache = ModelCache(target, 0, self.capacity)  # refuses a model that would not be exact, before any token
        self.cache.allow(min(len(requests), settings.max_batch or len(requests)), candidates)
        settings.processing.check(self.vocab, target.device)
        if candidates > 1 and not settings.verification.branches:
            raise SpecDecError(f"rule '{settings.verification.name}' judges one candidate a position: use rule token.")
        self.coins = torch.zeros(0)

    @property
    def device(self) -> torch.device:
        return self.target.device

    def toss(self, count: int) -> None:
        """New coins ``[B, count]`` float64 for every row, always as many for each, so that a row's stream does not
        depend on its neighbours."""
        rows = [r.random.uniforms(count) if r.stop is None else [0.0] * count for r in self.rows]
        self.coins = torch.tensor(rows, dtype=torch.float64).to(self.device)

    def room(self, request: Request) -> int | None:
        limit = self.settings.stops.context
        return None if limit is None else limit - request.length


def capacity(requests: list[Request], gamma: int) -> int:
    """Slots a row needs for the longest of these requests and a block behind it."""
    return max(len(r.prompt) + r.max_new_tokens for r in requests) + gamma + 2


@torch.inference_mode()
def speculative_decoding(
    target: PreTrainedModel, requests: list[Request], drafter: Drafter, settings: Settings
) -> Iterator[list[StepRecord]]:
    """Decode with a draft. Yields the records of each target pass as its tokens are committed."""
    state = Decoding(target, requests, settings, drafter.candidates)
    guard = Guard(drafter, target.device, state.vocab, settings.draft_timeout)
    while admit(state, guard):
        if state.newcomers:
            yield prefill(state, guard)
            continue
        block = draft(state, guard)
        scores = score(state, block)
        kept = accept_prefix(state, block, scores)
        token = resample(state, block, scores, kept)
        yield repeat(state, block, scores, kept, token, guard)


@torch.inference_mode()
def ordinary_decoding(
    target: PreTrainedModel, requests: list[Request], settings: Settings
) -> Iterator[list[StepRecord]]:
    """The baseline: the same cache, sampling and processors, one token a pass, nothing drafted."""
    state = Decoding(target, requests, settings)
    while admit(state, None):
        if state.newcomers:
            yield prefill(state, None)
            continue
        state.toss(2)
        nothing = Block.empty(len(state.rows), state.device)
        scores = score(state, nothing)
        kept = accept_prefix(state, nothing, scores)
        token = resample(state, nothing, scores, kept)
        yield repeat(state, nothing, scores, kept, token, None)


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
    def empty(batch: int, device: torch.device, control: str = "baseline", reason: str = "") -> Block:
        none = Proposal.nothing(batch, device, reason)
        return Block(none, [0] * batch, none.tokens, none.lengths, none.tokens.unsqueeze(-1), control, reason)

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


def admit(state: Decoding, guard: Guard | None) -> bool:
    """Between passes: finished rows leave and free their place, waiting requests take it. False when all are done."""
    settings = state.settings
    stay = [b for b, r in enumerate(state.rows) if r.stop is None]
    if len(stay) < len(state.rows) and not (settings.fixed_shapes and stay):
        state.rows = [state.rows[b] for b in stay]
        state.cache.keep(stay)
        if guard:
            guard.keep(stay)
    for r in state.waiting:
        if r.max_new_tokens == 0:
            r.stop = r.stop or "budget"
    state.waiting = deque(r for r in state.waiting if r.stop is None)
    free = (settings.max_batch or len(state.rows) + len(state.waiting)) - len(state.rows)
    if settings.fixed_shapes and state.rows:
        free = 0
    state.newcomers = [state.waiting.popleft() for _ in range(min(free, len(state.waiting)))]
    return bool(state.rows or state.newcomers)


def prefill(state: Decoding, guard: Guard | None) -> list[StepRecord]:
    """Feed the prompts of the newcomers, commit the first token of each, and let them join the running rows."""
    running, state.rows, state.newcomers = state.rows, state.newcomers, []
    before = state.cache
    state.cache = ModelCache(state.target, len(state.rows), state.capacity)
    width = max(len(r.prompt) for r in state.rows)
    padded = torch.tensor([r.prompt + [0] * (width - len(r.prompt)) for r in state.rows], device=state.device)
    state.toss(2)
    nothing = Block.empty(len(state.rows), state.device)
    with state.clock("score"):
        logits = state.cache.extend(padded, [len(r.prompt) for r in state.rows], keep="last")
        scores = _judged(state, logits, nothing)
    kept = accept_prefix(state, nothing, scores)
    records = repeat(state, nothing, scores, kept, resample(state, nothing, scores, kept), None)
    if guard:
        guard.join([r.prompt for r in state.rows])
    if running:
        before.append(state.cache)
        state.cache, state.rows = before, running + state.rows
    return records


def draft(state: Decoding, guard: Guard) -> Block:
    """Stage 1. Consumes the committed tokens and the draft's coins; changes the drafter's own cache only.

    The control says how long a block may be; no more is asked for than can still be emitted: with one token of budget
    or context left nothing is drafted. Validity: every token drawn from the q row that comes with it; rows that cannot
    be a law are cut off.
    """
    plan = state.control.plan(len(state.rows))
    k = guard.drafter.candidates
    state.toss(2 + plan.gamma * k + (k > 1))
    if plan.gamma == 0:
        return Block.empty(len(state.rows), state.device, plan.control, plan.reason)
    asked = []
    for r in state.rows:
        limits = [plan.gamma, r.max_new_tokens - len(r.output) - 1]
        room = state.room(r)
        asked.append(0 if r.stop else max(0, min(limits if room is None else [*limits, room - 1])))
    with state.clock("draft"):
        if max(asked) == 0:
            proposal = Proposal.nothing(len(asked), state.device, "no room for a block: budget or context nearly used")
        else:
            proposal = guard.propose([r.committed for r in state.rows], asked, state.coins[:, 2 + (k > 1) :])
        tokens = proposal.tokens.clamp(0, guard.vocab - 1)
        q = one_hot(tokens, guard.vocab) if proposal.q is None else proposal.q
        proposal.lengths = torch.minimum(proposal.lengths, torch.tensor(asked, device=state.device)).clamp(min=0)
        lengths = first_invalid(q, proposal.tokens, proposal.lengths)
    failed = max(asked) > 0 and (bool(guard.broken) or proposal.note == EMPTY_BLOCK)
    control = "degraded" if failed else plan.control if tokens.shape[1] else "idle"
    return Block(proposal, asked, tokens, lengths, q, control, proposal.note or plan.reason)


def score(state: Decoding, block: Block) -> Scores:
    """Stage 2. Feeds the pending token and the block to the target in one pass; its cache then holds all of them.

    Validity: position i of the result conditions on the committed tokens and the first i drafted ones, nothing else;
    a branch on those before its position and on itself.
    """
    with state.clock("score"):
        pending = torch.tensor([[(r.output or r.prompt)[-1]] for r in state.rows], device=state.device)
        tokens, tree = torch.cat([pending, block.tokens], 1), None
        if block.branches is not None:
            g, more = block.branches.shape[1:]
            tokens = torch.cat([tokens, block.branches.flatten(1).clamp(0, state.vocab - 1)], 1)
            tree = comb(g, more, str(state.device))
        return _judged(state, state.cache.extend(tokens, tree=tree), block)


def accept_prefix(state: Decoding, block: Block, scores: Scores) -> Kept:
    """Stage 3. How many tokens of the block each row keeps, and whether another candidate of the position where it
    stopped is kept instead. Consumes p, q, the tokens and one coin a row (two with branches)."""
    with state.clock("accept"):
        rule, g = state.settings.verification, block.tokens.shape[1]
        p, tokens, lengths = scores.ranking[:, : g + 1], block.tokens, block.lengths
        count = accept(rule, p, block.q, tokens, lengths, state.coins[:, 0])
        law = next_law(rule, p, block.q, tokens, lengths, count)
        if block.branches is None:
            return Kept(count, None, law)
        row, at = torch.arange(len(count), device=count.device), count.clamp(max=g - 1)
        q = None if block.proposal.q is None else block.q[row, at]
        branch, left = try_branches(rule, law, q, tokens[row, at], block.branches[row, at], state.coins[:, 2])
        whole = count >= lengths
        none = block.branches.shape[2]
        return Kept(count, branch.masked_fill(whole, none), torch.where(whole.unsqueeze(1), law, left))


def resample(state: Decoding, block: Block, scores: Scores, kept: Kept) -> Tensor:
    """Stage 4. The token after what is kept, ``[B]``: from the residual where a token was turned down, from p where
    the whole block was kept (the bonus token), a branch was, or nothing was drafted."""
    with state.clock("resample"):
        law = kept.law
        if block.branches is not None and kept.branch is not None:
            column = _branch_column(block, kept).clamp(max=scores.ranking.shape[1] - 1)
            after = scores.ranking[torch.arange(len(law), device=law.device), column].double()
            law = torch.where((kept.branch < block.branches.shape[2]).unsqueeze(1), after, law)
        return law.argmax(-1) if state.settings.policy.greedy else draw(law, state.coins[:, 1])


def repeat(
    state: Decoding, block: Block, scores: Scores, kept: Kept, token: Tensor, guard: Guard | None
) -> list[StepRecord]:
    """Stage 5. Commit: the one host read, the stops, both caches rewound to what is committed.

    Validity: afterwards the target's cache holds exactly the committed tokens but the last.
    """
    columns, commits = scores.logits.shape[1], []
    with state.clock("repeat"):
        rows = _read(state, block, scores, kept, token)
        agreed = [r.length + row.count for r, row in zip(state.rows, rows, strict=True)]  # the drafter's own tokens
        for request, row in zip(state.rows, rows, strict=True):
            if request.stop is None:
                commits.append(_commit(state, request, row))
        _join_branches(state, block, rows, columns)
        state.cache.rewind([r.length - 1 for r in state.rows])
        if guard is not None:
            guard.commit(agreed)
    started, seconds = state.clock.started, state.clock.seconds()
    if guard is not None:
        state.control.observe(_observed(block, scores, commits, seconds))
    synthetic = guard is not None and guard.drafter.synthetic
    return [_record(block, c, started, seconds, len(commits), synthetic) for c in commits]


# --- details ----------------------------------------------------------------------------------------------


def _judged(state: Decoding, logits: Tensor, block: Block) -> Scores:
    """Logits through the processors, each column with its own text, and the law that the policy makes of them."""
    processing, g = state.settings.processing, block.tokens.shape[1]
    logits = logits.float()
    if processing.active:
        texts, prompts = [r.committed for r in state.rows], [len(r.prompt) for r in state.rows]
        parts = [processing.process_block(logits[:, : g + 1], texts, prompts, block.tokens)]
        more = 0 if block.branches is None else block.branches.shape[2]
        for i, j in ((i, j) for i in range(g) for j in range(more)):
            assert block.branches is not None
            path = torch.cat([block.tokens[:, :i], block.branches[:, i, j : j + 1]], 1)
            column = 1 + g + i * more + j
            parts.append(processing.process_block(logits[:, column : column + 1], texts, prompts, path))
        logits = torch.cat(parts, 1)
    policy = state.settings.policy
    return Scores(logits, None if policy.greedy else distribution(logits, policy))


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


def _branch_column(block: Block, kept: Kept) -> Tensor:
    """Where each row's kept branch stands among the columns of the pass; meaningless where none is kept."""
    assert block.branches is not None
    assert kept.branch is not None
    g, more = block.branches.shape[1:]
    return 1 + g + kept.count.clamp(max=g - 1) * more + kept.branch.clamp(max=more - 1)


@dataclass
class _Row:
    """One row of the step's host read."""

    index: int
    count: int
    token: int
    sound: int
    proposed: int
    verified: int
    branch: int  # the token of the kept branch, -1: none
    column: int  # of that branch in the pass
    tokens: list[int]
    p: list[float]
    q: list[float]
    p_entropy: list[float]
    q_entropy: list[float]
    preferred: list[int]


def _read(state: Decoding, block: Block, scores: Scores, kept: Kept, token: Tensor) -> list[_Row]:
    """Everything the host needs of a step, packed in one float64 tensor (exact for token ids) and read once."""
    g = block.tokens.shape[1]
    broken = invalid_rows(scores.ranking)
    sound = (~broken[:, : g + 1]).int().cumprod(1).sum(1)  # rows of the target before the first broken one
    branch = column = torch.full_like(kept.count, -1)
    if block.branches is not None and kept.branch is not None:
        more, row = block.branches.shape[2], torch.arange(len(kept.count), device=token.device)
        taken, column = kept.branch < more, _branch_column(block, kept)
        chosen = block.branches[row, kept.count.clamp(max=g - 1), kept.branch.clamp(max=more - 1)]
        branch = chosen.masked_fill(~taken, -1)
        sound = torch.where(taken & broken[row, column], torch.minimum(sound, kept.count), sound)
    head = [kept.count, token, sound, block.proposal.lengths, block.lengths, branch, column]
    parts = [torch.stack([c.double() for c in head], 1), block.tokens.double()]
    if state.settings.diagnostics:
        parts += _diagnostics(block, scores)
    rows = []
    for b, values in enumerate(torch.cat(parts, 1).tolist()):
        pieces, at = [], 0
        for size in (len(head), g, g, g, g + 1, g, g + 1):
            pieces.append(values[at : at + size])
            at += size
        numbers, ids, p, q, p_entropy, q_entropy, preferred = pieces
        n, next_token, good, proposed, verified, branch_token, at_column = (int(x) for x in numbers)
        head_of_row = (b, n, next_token, good, proposed, verified, branch_token, at_column)
        texts = [int(t) for t in ids], [int(t) for t in preferred]
        rows.append(_Row(*head_of_row, texts[0], p, q, p_entropy, q_entropy, texts[1]))
    return rows


def _diagnostics(block: Block, scores: Scores) -> list[Tensor]:
    """p and q at the drafted tokens, both entropies and the target's preference, in the order of ``_read``."""
    at, g = block.tokens.unsqueeze(-1), block.tokens.shape[1]
    p = scores.p[:, : g + 1] if scores.p is not None else scores.logits[:, : g + 1].softmax(-1)
    q = block.q if scores.p is not None or block.proposal.belief is None else block.proposal.belief
    p_at, q_at = ((law.gather(-1, at).squeeze(-1) if g else block.tokens) for law in (p[:, :g], q))
    p_entropy, q_entropy = (torch.special.entr(law).sum(-1) for law in (p, q))
    return [x.double() for x in (p_at, q_at, p_entropy, q_entropy, p.argmax(-1))]


@dataclass
class _Commit:
    """What a pass added to one request."""

    request: Request
    row: _Row
    kept: list[int]

    @property
    def accepted(self) -> int:
        """Drafted tokens that stay, a branch included, none beyond a stop."""
        return min(self.row.count + (self.row.branch >= 0), len(self.kept))


def _commit(state: Decoding, request: Request, row: _Row) -> _Commit:
    """Append what belongs to the text; refuse a target whose judgement is no number."""
    if row.sound <= row.count:  # a position that this pass emits rests on it
        raise SpecDecError(
            f"The target's logits at position {request.length + row.sound} of request {request.id} hold NaN or "
            "nothing finite: load its weights again, or use float32."
        )
    new = [*row.tokens[: row.count], *([row.branch] if row.branch >= 0 else []), row.token]
    budget = request.max_new_tokens - len(request.output)
    kept, request.stop = state.settings.stops.cut(request.output, new, budget, state.room(request))
    request.output += kept
    return _Commit(request, row, kept)


def _join_branches(state: Decoding, block: Block, rows: list[_Row], columns: int) -> None:
    """A kept branch's keys and values move behind the kept prefix, where the text has it."""
    if any(row.branch >= 0 for row in rows):
        start = [n - columns for n in state.cache.lengths]
        source = [s + row.column if row.branch >= 0 else s for s, row in zip(start, rows, strict=True)]
        place = [s + 1 + row.count if row.branch >= 0 else s for s, row in zip(start, rows, strict=True)]
        state.cache.move(source, place)


def _observed(block: Block, scores: Scores, commits: list[_Commit], seconds: dict[str, float]) -> Observation:
    rows = [(c.row.verified, c.accepted, len(c.kept), c.request.stop is not None) for c in commits]
    return Observation(len(block.asked), scores.logits.shape[1], max(block.proposal.drafted), rows, seconds)


def _record(
    block: Block, commit: _Commit, started: float, seconds: dict[str, float], batch: int, synthetic: bool
) -> StepRecord:
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
        accepted=commit.accepted,
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
        branch=row.branch if row.branch >= 0 and len(kept) > row.count else None,
        synthetic=synthetic,
    )
    request.records.append(record)
    return record


def _last_token(first: bool, row: _Row, kept: int) -> LastToken:
    if first:
        return "prefill"
    if kept <= row.count + (row.branch >= 0):
        return "accepted"  # a stop inside the accepted prefix
    if row.branch >= 0:
        return "bonus"
    if row.count < row.verified:
        return "resampled"
    # After a block that was cut at an unsound row the next token is the target's own, and no bonus.
    return "bonus" if 0 < row.verified == row.proposed else "ordinary"
