"""The end of a step: its one read from the device, what it adds to each text, and the record of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .control import Observation
from .errors import SpecDecError
from .record import LastToken, StepRecord
from .sampling import entropy, invalid_rows, likeliest
from .state import Block, Decoding, Kept, Request, Scores, branch_column


@dataclass
class Row:
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


def read(state: Decoding, block: Block, scores: Scores, kept: Kept, token: Tensor) -> list[Row]:
    """Everything the host needs of a step, packed in one float64 tensor (exact for token ids) and read once."""
    g = block.tokens.shape[1]
    broken = invalid_rows(scores.ranking)
    sound = (~broken[:, : g + 1]).int().cumprod(1).sum(1)  # rows of the target before the first broken one
    branch = column = torch.full_like(kept.count, -1)
    if block.branches is not None and kept.branch is not None:
        more, row = block.branches.shape[2], torch.arange(len(kept.count), device=token.device)
        taken, column = kept.branch < more, branch_column(block, kept)
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
        rows.append(Row(*head_of_row, texts[0], p, q, p_entropy, q_entropy, texts[1]))
    return rows


def _diagnostics(block: Block, scores: Scores) -> list[Tensor]:
    """p and q at the drafted tokens, both entropies and the target's preference, in the order of ``read``."""
    at, g = block.tokens.unsqueeze(-1), block.tokens.shape[1]
    law = scores.logits[:, : g + 1].log_softmax(-1) if scores.p is None else scores.p[:, : g + 1].log()
    q = block.q if scores.p is not None or block.proposal.belief is None else block.proposal.belief
    q = None if q is None else q.float()  # of 16 bits an entropy would have two digits
    p_at = law[:, :g].gather(-1, at).squeeze(-1).exp() if g else block.tokens
    if q is None:  # chosen: one-hot
        q_at, q_entropy = torch.ones_like(block.tokens), torch.zeros_like(block.tokens)
    else:
        q_at, q_entropy = q.gather(-1, at).squeeze(-1), entropy(q.log())
    return [x.double() for x in (p_at, q_at, entropy(law), q_entropy, likeliest(scores.ranking[:, : g + 1]))]


@dataclass
class Commit:
    """What a pass added to one request."""

    request: Request
    row: Row
    kept: list[int]

    @property
    def accepted(self) -> int:
        """Drafted tokens that stay, a branch included, none beyond a stop."""
        return min(self.row.count + (self.row.branch >= 0), len(self.kept))


def commit(state: Decoding, request: Request, row: Row) -> Commit:
    """Append what belongs to the text; refuse a target whose judgement is no number."""
    if row.sound <= row.count:  # a position that this pass emits rests on it
        raise SpecDecError(
            f"The target's logits at position {request.length + row.sound} of request {request.id} hold NaN or "
            "nothing finite: load its weights again, use float32, or loosen the processors that forbid every token."
        )
    new = [*row.tokens[: row.count], *([row.branch] if row.branch >= 0 else []), row.token]
    budget = request.max_new_tokens - len(request.output)
    kept, stop = state.settings.stops.cut(request.output, new, budget, state.room(request))
    request.stop = request.stop or stop  # cancelled meanwhile, by another thread: that stands
    request.output += kept
    return Commit(request, row, kept)


def join_branches(state: Decoding, block: Block, rows: list[Row], columns: int) -> None:
    """A kept branch's keys and values move behind the kept prefix, where the text has it."""
    if any(row.branch >= 0 for row in rows):
        start = [n - columns for n in state.cache.lengths]
        source = [s + row.column if row.branch >= 0 else s for s, row in zip(start, rows, strict=True)]
        place = [s + 1 + row.count if row.branch >= 0 else s for s, row in zip(start, rows, strict=True)]
        state.cache.move(source, place)


def observed(block: Block, scores: Scores, commits: list[Commit], seconds: dict[str, float]) -> Observation:
    # What follows a kept branch was not judged, no more than what follows a stop.
    cut = [c.request.stop is not None or c.row.branch >= 0 for c in commits]
    rows = [(c.row.verified, c.accepted, len(c.kept), x) for c, x in zip(commits, cut, strict=True)]
    columns, width = scores.logits.shape[1], block.tokens.shape[1]
    return Observation(len(block.asked), columns, max(block.proposal.drafted), rows, seconds, width)


def record(
    block: Block, commit: Commit, started: float, seconds: dict[str, float], batch: int, synthetic: bool
) -> StepRecord:
    request, row, kept = commit.request, commit.row, commit.kept
    first = not request.records
    control, reason = block.control, block.reason
    if row.verified < row.proposed:
        control = "degraded"
        reason = f"draft row {row.verified + 1} of the block is not a law over its token: emitted from the target"
    elif row.proposed == 0 < block.proposal.drafted[row.index] and not reason:
        reason = "draft kept its block back: not sure enough, no law, or a token that it does not know"
    v = row.verified
    record = StepRecord(
        request=request.id,
        step=len(request.records),
        kind="prefill" if first else "speculative" if v else "ordinary",
        gamma=block.asked[row.index],
        drafted=max(block.proposal.drafted[row.index], v),
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


def _last_token(first: bool, row: Row, kept: int) -> LastToken:
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
