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

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .caches import ModelCache
from .commit import commit, join_branches, observed, read, record
from .drafters.base import Drafter, Proposal
from .guard import EMPTY_BLOCK, Guard
from .record import StepRecord
from .sampling import distribution, draw, likeliest
from .state import Block, Decoding, Kept, Request, Scores, Settings, branch_column, capacity, comb, one_hot
from .verify import GREEDY, accept, first_invalid, next_law, try_branches

__all__ = ["Request", "Settings", "capacity", "ordinary_decoding", "speculative_decoding"]


@torch.inference_mode()
def speculative_decoding(
    target: PreTrainedModel, requests: list[Request], drafter: Drafter, settings: Settings
) -> Iterator[list[StepRecord]]:
    """Decode with a draft. Yields the records of each target pass as its tokens are committed."""
    state = Decoding(target, requests, settings, drafter.candidates)
    state.synthetic = bool(drafter.synthetic)
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
        guard.join([list(r.prompt) for r in state.rows])
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
        known = (proposal.tokens == tokens).int().cumprod(1).sum(1)  # tokens before the first outside the vocabulary
        most = torch.tensor(asked, device=state.device).clamp(max=tokens.shape[1])
        proposal.lengths = torch.minimum(proposal.lengths, most).clamp(min=0)
        lengths, q = torch.minimum(proposal.lengths, known), proposal.q
        if q is None and state.settings.verification is not GREEDY:  # which reads none
            q = one_hot(tokens, guard.vocab)
        if q is not None:
            lengths = first_invalid(q, proposal.tokens, lengths)
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
        q = None if block.proposal.q is None else block.proposal.q[row, at]
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
            column = branch_column(block, kept)
            after = scores.ranking[torch.arange(len(law), device=law.device), column].double()
            law = torch.where((kept.branch < block.branches.shape[2]).unsqueeze(1), after, law)
        return likeliest(law) if state.settings.policy.greedy else draw(law, state.coins[:, 1])


def repeat(
    state: Decoding, block: Block, scores: Scores, kept: Kept, token: Tensor, guard: Guard | None
) -> list[StepRecord]:
    """Stage 5. Commit: the one host read, the stops, both caches rewound to what is committed.

    Validity: afterwards the target's cache holds exactly the committed tokens but the last.
    """
    columns, commits = scores.logits.shape[1], []
    with state.clock("repeat"):
        rows = read(state, block, scores, kept, token)
        agreed = [r.length + row.count for r, row in zip(state.rows, rows, strict=True)]  # the drafter's own tokens
        for request, row in zip(state.rows, rows, strict=True):
            if request.stop is None:
                commits.append(commit(state, request, row))
        join_branches(state, block, rows, columns)
        state.cache.rewind([r.length - 1 for r in state.rows])
        if guard is not None:
            guard.commit(agreed)
    started, seconds = state.clock.started, state.clock.seconds()
    if guard is not None:
        state.control.observe(observed(block, scores, commits, seconds))
    return [record(block, c, started, seconds, len(commits), state.synthetic) for c in commits]


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
