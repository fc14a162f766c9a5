"""The five stages of one pass as an instrument: read forwards it explains a token, backwards a slow or odd result."""

from __future__ import annotations

import pandas as pd

from ..api import Output, Pair
from ..record import StepRecord


def telling_pass(output: Output) -> StepRecord:
    """The pass worth showing: the first that accepted some tokens and turned one down, else the first speculative one,
    else the first of all."""
    for wanted in (lambda r: r.accepted and r.rejected, lambda r: r.verified, lambda r: r.kind != "prefill"):
        found = next((r for r in output.records if wanted(r)), None)
        if found is not None:
            return found
    return output.records[0]


def stage_table(output: Output, pair: Pair, r: StepRecord, greedy: bool) -> pd.DataFrame:
    """For each stage of pass ``r``: what it consumed, what state it changed, what shows that the change was valid."""
    word = lambda t: repr(str(pair.tokenizer.decode([t])))  # noqa: E731
    words = lambda ts: " ".join(word(t) for t in ts) or "nothing"  # noqa: E731
    at = r.accepted
    turned = f"turned {word(r.draft_tokens[at])} down" if r.rejected else "turned nothing down"
    total = sum(len(x.emitted) for x in output.records[: r.step + 1])
    held = len(output.prompt_tokens) + total - 1
    rule = "equal to the target's likeliest token" if greedy else "with probability min(1, p/q)"
    inputs = "the target's likeliest tokens" if greedy else "p, q, one random number"
    rows = [
        ("draft", f"{r.context} committed tokens, γ = {r.gamma}", f"proposed {words(r.draft_tokens)}",
         f"each token comes with the law q it was drawn from; q of it: {_list(r.q)}"),
        ("score", f"the pending token and {len(r.draft_tokens)} drafted ones, in one pass",
         f"target's cache now holds {r.context + len(r.draft_tokens)} tokens",
         f"a target law before each token and after the last; p of the drafted: {_list(r.p)}"),
        ("accept", f"the drafted tokens, {inputs}", f"kept {words(r.emitted[:at])}; {turned}",
         f"{at} of {r.verified} kept: each {rule}, in order, until one fails"),
        ("resample", _law_of(r, greedy), _origin(r, word), _why_valid(r, greedy)),
        ("repeat", f"{len(r.emitted)} tokens to commit", f"text is {total} tokens long; caches rewound to {held}",
         f"cache length {held} = prompt {len(output.prompt_tokens)} + output {total} - 1 pending token"),
    ]  # fmt: skip
    columns = ["stage", "consumed", "changed", "shows that it was valid"]
    table = pd.DataFrame(rows, columns=columns)
    table["ms"] = [f"{1e3 * r.seconds[stage]:.2f}" for stage in table["stage"]]
    return table


def read_backwards(output: Output, pair: Pair) -> str:
    """From the pass that cost most time for each token it gave, back to the earliest stage that allowed it."""
    passes = [r for r in output.records if r.kind != "prefill"]
    if not passes:
        return "Only the prefill ran: there is no pass to question."
    slow = max(passes, key=lambda r: sum(r.seconds.values()) / len(r.emitted))
    spent, tokens = 1e3 * sum(slow.seconds.values()), len(slow.emitted)
    start = f"Pass {slow.step} gave least for its time: {spent:.0f} ms for {tokens} token{'s' if tokens > 1 else ''}. "
    word = lambda t: repr(str(pair.tokenizer.decode([t])))  # noqa: E731
    if slow.control == "degraded":
        return start + f"Cause, in stage *draft*: {slow.reason}."
    if not slow.verified:
        why = slow.reason or "nothing was drafted"
        return start + f"Cause, in stage *draft*: {why}; so the pass was ordinary decoding."
    if slow.rejected:
        at = slow.accepted
        facts = f" (p = {slow.p[at]:.3g}, q = {slow.q[at]:.3g})" if slow.p else ""
        instead = f", where the target preferred {word(slow.preferred[at])}" if slow.preferred else ""
        return start + (
            f"Cause, in stage *draft*: token {at + 1} of its block, {word(slow.draft_tokens[at])}{facts}, was turned "
            f"down{instead}; {slow.verified - at - 1} tokens behind it had been scored for nothing."
        )
    return start + "Nothing was turned down; the time went into stage *score*, the target's pass itself."


def _list(values: tuple[float, ...]) -> str:
    return ", ".join(f"{v:.3g}" for v in values) or "none"


def _law_of(r: StepRecord, greedy: bool) -> str:
    if greedy:
        return "the target's logits after the kept prefix"
    return "the residual law (p - q)+, one random number" if r.rejected else "the target's law p, one random number"


def _why_valid(r: StepRecord, greedy: bool) -> str:
    if greedy:
        return "the target's likeliest token there, as in ordinary decoding"
    if r.rejected:
        return "the residual (p - q)+ gives back exactly what acceptance took too little of"
    return "drawn from the target's own law"


def _origin(r: StepRecord, word: object) -> str:
    assert callable(word)
    if r.last == "accepted":
        return "nothing: the text ended inside the accepted prefix"
    name = {"resampled": "resampled", "bonus": "bonus token", "ordinary": "ordinary token", "prefill": "first token"}[
        r.last
    ]
    return f"{name} {word(r.emitted[-1])}"
