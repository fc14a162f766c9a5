"""Faults planted in the loop, one at a time, each once somebody's real one, and the check that catches it by name.

A plant replaces one thing of the package and puts it back. Its check runs the real loop and passes on it as it is."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import cycle
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pandas as pd
import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel

from .. import commit, layout, loop, state
from ..caches import ModelCache
from ..control import Plan
from ..drafters import Drafter, ModelDrafter, Proposal
from ..layers import States
from ..loop import Request, Settings
from ..processors import Processing
from ..sampling import RequestRandom, SamplingPolicy, distribution
from ..state import Decoding
from ..stops import Stops
from ..verify import BLOCK, TOKEN
from .architectures import PROMPTS, VOCAB, Reference, examine, tiny
from .lossy import LOSSY
from .proof import p_text
from .stats import detectable_distance, law_test
from .table_model import TableModel
from .theory import target_law

FALSE_ALARM, ROWS = 1e-6, 2500
GREEDY, SAMPLED, TOP_2 = SamplingPolicy(), SamplingPolicy(1.0), SamplingPolicy(1.0, top_k=2)


class Wrong(AssertionError):
    """What a check found, in one line that names it. Anything else that is raised is a crash, and no finding."""


@dataclass(frozen=True)
class Mutant:
    """A fault: under ``plant()`` the package has it. ``check`` raises :class:`Wrong` where the loop is not as it
    ``claims``."""

    name: str
    condition: str
    fault: str
    plant: Callable[[], AbstractContextManager[object]]
    claims: str
    check: Callable[[], None]


_model = cache(tiny)
# The Llama's greedy text after the second prompt, by plain passes: neither loop nor cache of this package is in it.
_text = cache(lambda: Reference.of(_model("llama"), PROMPTS[1:2], 60).texts[0][len(PROMPTS[1]) :])


def _decode(
    model: PreTrainedModel, drafter: Drafter, settings: Settings, budget: int, prompts: Mapping[int, Sequence[int]]
) -> list[Request]:
    """The real loop to its end, for prompts by request id."""
    requests = [Request(i, list(prompt), budget, RequestRandom(0, i)) for i, prompt in prompts.items()]
    list(loop.speculative_decoding(model, requests, drafter, settings))
    return requests


def _self_drafted(budget: int, candidates: int = 1, same: bool = True, **how: Any) -> Request:
    """One greedy text of the Llama, with itself as draft and, where ``same``, with the same processors."""
    settings = Settings(**{"gamma": 4} | how)
    processing = settings.processing if same else None
    drafter = ModelDrafter(_model("llama"), GREEDY, VOCAB, candidates=candidates, processing=processing)
    return _decode(_model("llama"), drafter, settings, budget, {0: PROMPTS[1]})[0]


class _Always(Drafter):
    """Chooses one token for every position; ``q`` is what it says of its law, if anything."""

    def __init__(self, token: int, q: Tensor | None = None):
        self.token, self.q = token, q

    def propose(self, sequences: Sequence[Sequence[int]], room: Sequence[int], u: Tensor) -> Proposal:
        proposal = Proposal.chosen([[self.token] * r for r in room], u.device, "no room")
        proposal.q = None if self.q is None else self.q.repeat(*proposal.tokens.shape, 1)
        return proposal


def _demand(holds: bool, otherwise: str) -> None:
    if not holds:
        raise Wrong(otherwise)


def _same(got: Sequence[int], want: Sequence[int], whose: str) -> None:
    at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
    ours, right = (x[at] if at < len(x) else "the end" for x in (got, want))
    _demand(list(got) == list(want), f"{whose}: token {at + 1} is {ours} and should be {right}")


def _table(*laws: Sequence[float]) -> Tensor:
    """A law for each position of a text, the last one for all further ones."""
    return torch.tensor([*laws, *[laws[-1]] * (16 - len(laws))], dtype=torch.float64)


def _law(policy: SamplingPolicy, p: Tensor, drafter: Drafter | Tensor, tokens: int = 3, **how: Any) -> None:
    """The tokens behind the prefill's, over :data:`ROWS` runs on a target with the laws ``p``, must have the product of
    these as their law (chi-square). A table as drafter is that of a draft model."""
    if isinstance(drafter, Tensor):
        model, candidates = TableModel(by_position=drafter), how.pop("candidates", 1)
        drafter = ModelDrafter(model, policy, p.shape[1], candidates=candidates)
    law, settings = distribution(p.log(), policy), Settings(2, policy, diagnostics=False, **how)
    want = target_law(lambda prefix: law[1 + len(prefix)], tokens)
    rows = _decode(TableModel(by_position=p), drafter, settings, min(tokens, 2) + 2, {i: [0] for i in range(ROWS)})
    seen = Counter(tuple(r.output[1 : tokens + 1]) for r in rows)
    _demand(seen.keys() <= want.keys(), f"{[*(seen.keys() - want.keys())][:1]} came out, and has probability 0")
    chances = list(want.values())
    value, limit = law_test([seen[text] for text in want], chances), detectable_distance(chances, ROWS, FALSE_ALARM)
    power = f"power 0.999 at a total variation of {limit:.2f}"
    _demand(value > FALSE_ALARM, f"not the target's law: p-value {p_text(value)} over {ROWS} texts ({power})")


def _nan_target() -> None:
    model = TableModel(by_position=_table([1 / 3] * 3).index_fill(0, torch.tensor(5), torch.nan))
    said = outcome(lambda: _decode(model, _Always(1), Settings(2, SAMPLED), 9, {0: [0]}))[2]
    _demand("position 6 of request 0" in said, f"the loop says '{said}' of a NaN at position 6 of request 0")


def _as_plain_passes(model_type: str) -> None:
    logging.getLogger("transformers.integrations.hub_kernels").setLevel(logging.ERROR)  # tiny models need no kernels
    found = examine(_model(model_type), 20)
    if found.verdict not in ("exact", "silently wrong"):
        raise RuntimeError(f"{found.verdict}: {found.detail}")
    _demand(found.verdict == "exact", found.detail)


def _accepted() -> None:
    for gamma in (1, 2, 4, 8):
        records = _self_drafted(40, gamma=gamma).records
        kept, judged = sum(r.accepted for r in records), sum(r.accepted + r.rejected for r in records)
        _demand(kept == judged > 0, f"acceptance of a draft equal to the target is {kept}/{judged} at γ = {gamma}")


def _accepted_again() -> None:
    """One token is forced, which the draft does not foresee. An ordinary pass follows each block."""
    turns = map(Plan, cycle((4, 0)))
    pauses = SimpleNamespace(plan=lambda batch: next(turns), observe=lambda seen: None)
    records = _self_drafted(40, same=False, control=pauses, processing=Processing(forced=((9, 1),))).records
    blocks = [r for r in records if r.kind == "speculative"]
    at = next(i for i, r in enumerate(blocks) if r.rejected)
    kept, judged = sum(r.accepted for r in blocks[at + 1 :]), sum(r.verified for r in blocks[at + 1 :])
    _demand(kept == judged > 0, f"after one rejection acceptance of a draft equal to the target is {kept}/{judged}")


def _any_batch() -> None:
    drafter, prompts = ModelDrafter(_model("llama", 1), SAMPLED, VOCAB), dict(enumerate(PROMPTS))
    for r in _decode(_model("llama"), drafter, Settings(3, SAMPLED), 16, prompts):
        (alone,) = _decode(_model("llama"), drafter, Settings(3, SAMPLED), 16, {r.id: r.prompt})
        _same(r.output, alone.output, f"row {r.id} with its own seed, in a batch")


def _ends() -> None:
    text, spelt = _text(), lambda ids: bytes(ids).decode()
    ends = {
        "EOS as third token": (Stops(eos=frozenset({text[2]})), 3),
        "a stop string over tokens 4 and 5": (Stops(strings=(bytes(text[3:5]).decode(),), decode=spelt), 5),
        "a context of 30": (Stops(context=30), 30 - len(PROMPTS[1])),
    }
    for what, (stops, length) in ends.items():
        _same(_self_drafted(40, gamma=5, stops=stops).output, text[:length], f"a text with {what}")
    for budget in (0, 1, 2, 4, 5):
        _same(_self_drafted(budget).output, text[:budget], f"a text with a budget of {budget}")


def _counts() -> None:
    emitted = [len(r.emitted) for r in _self_drafted(26).records]
    _demand(emitted == [1, 5, 5, 5, 5, 5], f"whole blocks of 4 count {emitted} tokens, and [1, 5, 5, 5, 5, 5] is right")
    last = _self_drafted(20, gamma=5, stops=Stops(eos=frozenset({_text()[3]}))).records[-1]
    counts = [last.drafted, last.verified, last.accepted, len(last.emitted)]
    what = "drafted, verified, accepted, emitted of a block with EOS as third of five"
    _demand(counts == [5, 3, 3, 3], f"{what} are {counts}, and [5, 3, 3, 3] is right")


def _processed(candidates: int = 1) -> None:
    """Against a draft whose every token is masked, so that only first positions of blocks count. With two candidates
    the draft knows no processors, and it is often the second that is kept."""
    processing = Processing(repetition_penalty=1.3, frequency_penalty=1.0, suppress=tuple(range(0, VOCAB, 2)))
    output = _self_drafted(24, candidates, candidates == 1, processing=processing).output
    masked = [t for t in output if t in processing.suppress]
    _demand(not masked, f"masked tokens were emitted: {masked}")
    (plain,) = _decode(_model("llama"), _Always(0), Settings(1, processing=processing), 24, {0: PROMPTS[1]})
    _same(output, plain.output, "a text with penalties")


P = _table([1 / 3] * 3, [0.55, 0.225, 0.225], [0.35, 0.55, 0.1], [0.3, 0.3, 0.4])
Q = _table([1 / 3] * 3, [0.95, 0.025, 0.025], [0.02, 0.33, 0.65], [0.2, 0.5, 0.3])
A7, A12 = (SAMPLED, P, _Always(2, torch.full((3,), torch.nan))), (SamplingPolicy(0.7), P, Q)
A2, A10 = (_table([0.625, 0.375, 0.0]), _table([0.201, 0.6, 0.199])), _table([0.51, 0.49])
LAW = "sampled texts have the target's law", partial(_law, SAMPLED, P, Q)
RAGGED = "rows of a ragged batch equal plain passes", partial(_as_plain_passes, "llama")
ENDS, COUNTS = ("a text ends where it must", _ends), ("each pass counts what it emitted", _counts)
PROCESSED = "processors act at every position", _processed


def _swap(owner: object, name: str, wrong: Callable[[Any], Any]) -> Callable[[], AbstractContextManager[object]]:
    """Plants ``wrong(f)`` in place of ``owner.name``, which is ``f``."""
    return lambda: patch.object(owner, name, wrong(getattr(owner, name)))


def _rule(name: str, at: str = "TOKEN") -> Callable[[], AbstractContextManager[object]]:
    return _swap(state, at, lambda f: LOSSY[name])


# fmt: off
MUTANTS = (
    Mutant("argmax draft", "A1", "the draft takes its argmax and reports its softmax", _swap(
        ModelDrafter, "_pick", lambda f: lambda self, law, *a: law.argmax(-1, keepdim=True)), *LAW),
    Mutant("unfiltered q", "A2", "the draft reports its law from before the top-k", _swap(
        ModelDrafter, "propose", lambda f: lambda *a: replace(x := f(*a), q=x.belief)),
        "the law is kept behind a top-k", partial(_law, TOP_2, *A2, 1)),
    Mutant("greedy keeps all", "A5", "at temperature 0 all tokens are kept", _rule("always_accept", "GREEDY"), *RAGGED),
    Mutant("NaN passes", "A6", "a row of NaN from the target passes in silence", _swap(commit, "invalid_rows",
        lambda f: lambda x: x.new_zeros(x.shape[:-1]).bool()), "a NaN of the target is named", _nan_target),
    Mutant("NaN cleaned", "A7", "a draft row of NaN is set to 0, and its token kept", _swap(loop, "first_invalid",
        lambda f: lambda q, x, n: (q.nan_to_num_(), n)[1]), "a NaN draft row keeps the law", partial(_law, *A7)),
    Mutant("token residual", "A9", "the block rule goes on with the token rule's residual", _swap(loop, "next_law",
        lambda f: lambda rule, *a: f(TOKEN if rule is BLOCK else rule, *a)),
        "the block rule keeps the law", partial(_law, SAMPLED, P, Q, 2, rule=BLOCK)),
    Mutant("top two", "A10", "the draft's top two are verified as if drawn", _swap(
        ModelDrafter, "_pick", lambda f: lambda self, law, *a: law.topk(self.candidates).indices),
        "two candidates keep the law", partial(_law, SAMPLED, A10, A10, 1, candidates=2)),
    Mutant("one-hot residual", "A11", "the residual is made as if q were one-hot", _rule("one_hot_residual"), *LAW),
    Mutant("p for residual", "A11", "after a rejection p stands in for (p - q)+", _rule("resample_from_p"), *LAW),
    Mutant("greedy rule", "A12", "the greedy rule judges a sampled draft", _rule("greedy_at_t"), *LAW),
    Mutant("no temperature", "A12", "the target's law forgets the temperature", _swap(loop, "distribution", lambda f:
        lambda x, policy: f(x, replace(policy, temperature=1))), "the temperature's law is kept", partial(_law, *A12)),
    Mutant("mask one off", "C1", "in a ragged batch a position sees the one behind it", _swap(
        ModelCache, "_masks", lambda f: lambda self, start, slots, *a: f(self, start, slots + 1, *a)), *RAGGED),
    Mutant("mask of another row", "C1", "every row's mask has the length of the longest", _swap(ModelCache, "_masks",
        lambda f: lambda self, start, slots, *a: f(self, start, slots.amax(0).expand_as(slots), *a)), *RAGGED),
    Mutant("bonus hole", "C2", "a whole block's last token never reaches the draft", _swap(ModelDrafter, "_feed",
        lambda f: lambda self, cache, new: f(self, cache, [x[-1:] if len(x) == 2 else x for x in new])),
        "a draft equal to the target is always accepted", _accepted),
    Mutant("target not rewound", "C3", "one rejected token stays in the target's cache", _swap(ModelCache, "rewind",
        lambda f: lambda self, n: f(self, [min(x + 1, h) for x, h in zip(n, self.lengths, strict=True)])), *RAGGED),
    Mutant("draft not rewound", "C3", "rejected tokens stay in the draft's cache", _swap(ModelDrafter, "commit",
        lambda f: lambda self, lengths: None), "after one rejection acceptance returns to 1", _accepted_again),
    Mutant("branch not moved", "C3", "a kept branch's keys stay where they were", _swap(loop, "join_branches",
        lambda f: lambda *a: None), "two candidates leave the greedy text", partial(_processed, 2)),
    Mutant("state not restored", "C5", "a recurrent state keeps the rejected tokens", _swap(
        States, "rewind", lambda f: lambda self, lengths: self.kept.clear()),
        "rows with a recurrent state equal plain passes", partial(_as_plain_passes, "mamba2")),
    Mutant("no window", "C5", "a ragged mask leaves the window out", _swap(layout, "_windows", lambda f: lambda *a:
        dict.fromkeys(f(*a))), "rows with a window equal plain passes", partial(_as_plain_passes, "mistral")),
    Mutant("wrong row stays", "C9", "when a row leaves, another's keys stay in its place", _swap(ModelCache, "keep",
        lambda f: lambda self, rows: (n := [self.lengths[b] for b in rows], f(self, range(len(n))),
            self.rows.__setattr__("lengths", n))), *RAGGED),
    Mutant("tokens after EOS", "D1", "EOS ends a text only as the last token of a pass", _swap(Stops, "cut",
        lambda f: lambda s, text, new, *a: f(s if new[-1] in s.eos else replace(s, eos=()), text, new, *a)), *ENDS),
    Mutant("one too many", "D4", "a token above the budget is emitted", _swap(
        Stops, "cut", lambda f: lambda self, text, new, budget, room: f(self, text, new, budget + 1, room)), *ENDS),
    Mutant("context exceeded", "D5", "a full context does not end the text", _swap(
        Decoding, "room", lambda f: lambda self, request: None), *ENDS),
    Mutant("stop string", "D7", "a stop string is looked for in the newest token alone", _swap(
        Stops, "_string_in", lambda f: lambda self, output: f(self, output[-1:])), *ENDS),
    Mutant("counted behind a stop", "E1", "accepted tokens behind a stop are counted", _swap(
        commit.Commit, "accepted", lambda f: property(lambda self: self.row.count)), *COUNTS),
    Mutant("penalties of the block", "F1", "a whole block has the penalties of its first position", _swap(
        Processing, "process_block", lambda f: lambda self, logits, texts, prompts, drafted: torch.cat(
            [f(self, x, texts, prompts, drafted[:, :0]) for x in logits.split(1, 1)], 1)), *PROCESSED),
    Mutant("bonus of another row", "F4", "the token behind a whole block has the law of the row before", _swap(
        loop, "next_law", lambda f: lambda rule, p, q, x, lengths, n: torch.where((n == lengths).unsqueeze(1),
            p[torch.arange(len(n)), (n - 1).clamp(min=0)].double(), f(rule, p, q, x, lengths, n))), *LAW),
    Mutant("counted twice", "F4", "the token after a whole block is counted twice", _swap(loop, "record",
        lambda f: lambda x, c, *a: f(x, replace(c, kept=c.kept + c.kept[-1:] * (c.accepted == 4)), *a)), *COUNTS),
    Mutant("shared coins", "F5", "all rows draw from one stream", _swap(RequestRandom, "uniforms",
        lambda f: (lambda one: lambda self, count: f(one, count))(RequestRandom(0))),
        "a row with its own seed is the same in any batch", _any_batch),
    Mutant("bonus unmasked", "F8", "a mask is not applied at the bonus position", _swap(Processing, "process_block",
        lambda f: lambda self, x, *a: torch.cat([f(self, x, *a)[:, : len(x[0]) - 1 or 1], x[:, len(x[0]) - 1 or 1 :]],
            1)), *PROCESSED),
)
# fmt: on


def outcome(check: Callable[[], object]) -> tuple[bool, bool, str]:
    """Whether a check passes, whether it names a fault, and its words. A crash is neither."""
    try:
        check()
    except Exception as error:
        words = " ".join(str(error).split())
        return False, isinstance(error, Wrong), words if isinstance(error, Wrong) else f"crashed: {words[:160]}"
    return True, False, "nothing wrong"


def run(progress: Callable[[str], None] = lambda name: None) -> pd.DataFrame:
    """Every mutant: its check on the loop as it is and with the fault planted; ``progress`` hears each name."""
    rows, healthy = [], cache(outcome)
    for m in MUTANTS:
        progress(m.name)
        passes, _, why = healthy(m.check)
        with m.plant():
            _, caught, evidence = outcome(m.check)
        evidence = evidence if passes else f"on the loop as it is: {why}; with the fault: {evidence}"
        rows.append((m.condition, m.fault, m.claims, passes, caught, evidence))
    return pd.DataFrame(rows, columns=["condition", "fault", "check", "passes when healthy", "caught", "evidence"])


def command() -> None:
    """Plant known faults in the loop, one at a time, and show which check catches each."""
    console = Console(highlight=False)
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("", total=len(MUTANTS))
        found = run(lambda name: bar.update(task, advance=1, description=name))
    shown = Table("", "fault", "check", "evidence", title="Faults planted in the loop", show_lines=True)
    for code, fault, claim, healthy, caught, evidence in found.itertuples(index=False):
        mark = "[green]caught[/]" if healthy and caught else "[red]NOT CAUGHT[/]" if healthy else "[red]FALSE ALARM[/]"
        shown.add_row(f"{code} {mark}", fault, claim, escape(evidence))
    console.print(shown)
    good = found["passes when healthy"] & found["caught"]
    console.print(f"{good.sum()} of {len(found)} faults caught by name; {len(found) - good.sum()} not as it should be.")
    raise typer.Exit(int(not good.all()))
