"""Controls on a simulated clock: costs and acceptance are set, so what a control does to the time can be added up.

Nothing here measures: `specdec bench` does that on real models.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from kit import ScriptedDrafter, block, decode, noisy_copy, tiny_llama

from specdec_core import Adaptive, Fallback, Fixed, Heuristic, SamplingPolicy, SpecDecError
from specdec_core.control import Acceptance, Costs, Observation
from specdec_core.drafters import ModelDrafter
from specdec_core.lab.theory import best_gamma, expected_tokens, walltime_factor
from specdec_core.loop import Settings
from specdec_core.record import STAGES


@dataclass
class World:
    """A target that takes ``slope`` more per further token of a pass, a draft of ``c`` a token, an acceptance rate that
    may change with the position in the text, all in units of one ordinary pass."""

    c: float = 0.1
    slope: float = 0.05
    alpha: object = 0.8
    batch: int = 1
    noise: float = 0.0
    seed: int = 0
    log: list = field(default_factory=list)

    def run(self, control, tokens):
        """Seconds for so many tokens under the control; ``log`` holds (position, plan, accepted)."""
        rng, at, clock = random.Random(self.seed), 0, 0.0
        while at < tokens:
            plan = control.plan(self.batch)
            alpha = self.alpha(at) if callable(self.alpha) else self.alpha
            gamma = min(plan.gamma, tokens - at - 1)
            accepted = next((i for i in range(gamma) if rng.random() >= alpha), gamma)
            target = 1.0 + self.slope * gamma
            wobble = 1 + self.noise * (rng.random() - 0.5)
            seconds = dict.fromkeys(STAGES, 0.0) | {"draft": self.c * gamma * wobble, "score": target * wobble}
            rows = [(gamma, accepted, accepted + 1, at + accepted + 1 >= tokens)] * self.batch
            control.observe(Observation(self.batch, 1 + gamma, gamma, rows, seconds))
            self.log.append((at, plan, accepted))
            at += accepted + 1
            clock += self.c * gamma + target
        return clock


def speed(world, control, tokens):
    return tokens / world.run(control, tokens)


# --- block length -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("alpha", "c"), [(0.6, 0.05), (0.6, 0.1), (0.8, 0.05), (0.8, 0.1), (0.8, 0.5), (0.9, 0.1)])
def test_the_adaptive_policy_comes_near_the_best_gamma_of_theory(alpha, c):
    best, factor = best_gamma(alpha, c, 12)
    world = World(c=c, slope=0.0, alpha=alpha)
    got = speed(world, Adaptive(most=12), 20_000)
    assert got > 0.97 * factor
    late = [plan.gamma for at, plan, _ in world.log if at > 10_000]
    assert abs(sum(late) / len(late) - best) < 0.35 * best + 1


def test_the_adaptive_policy_beats_every_fixed_gamma_when_half_of_the_texts_are_hard():
    def alpha(at):
        return 0.9 if at // 400 % 2 else 0.2

    fixed = {g: speed(World(c=0.2, alpha=alpha), Fixed(g), 20_000) for g in range(1, 11)}
    assert speed(World(c=0.2, alpha=alpha), Adaptive(most=10), 20_000) > max(fixed.values())


def test_one_ordinary_pass_comes_first_where_its_cost_is_unknown_and_none_where_costs_are_given():
    assert Adaptive().plan(1).gamma == 0
    assert "learn its cost" in Adaptive().plan(1).reason
    costs = Costs({("target", 1, 1): 1.0, ("target", 1, 5): 1.2, ("draft", 1, 1): 0.1, ("draft", 1, 4): 0.4})
    assert Adaptive(costs=costs).plan(1).gamma > 0


def test_the_heuristic_schedule_grows_by_two_and_shrinks_by_one():
    control = Heuristic(gamma=5, most=8)
    gammas = []
    for kept in (True, True, False, False):
        gamma = control.plan(1).gamma
        control.observe(Observation(1, gamma + 1, gamma, [(gamma, gamma if kept else 0, 1, False)], {}))
        gammas.append(control.gamma)
    assert gammas == [7, 8, 7, 6]
    control.observe(Observation(1, 3, 2, [(2, 1, 2, True)], {}))
    assert control.gamma == 6, "a block cut short by a stop says nothing"


# --- what is known ----------------------------------------------------------------------------------------


def test_costs_are_medians_and_lie_on_the_line_between_measured_sizes():
    costs = Costs()
    for seconds in (1.0, 1.1, 9.0):
        costs.add("target", 1, 1, seconds)
    costs.add("target", 1, 5, 1.5)
    assert costs.get("target", 1, 1) == 1.1
    assert costs.get("target", 1, 3) == pytest.approx(1.3)
    assert costs.get("target", 1, 7) == pytest.approx(1.7)
    assert costs.get("target", 4, 1) is None, "another batch size is another curve"
    costs.add("target", 4, 1, 2.2)
    assert costs.get("target", 4, 5) == pytest.approx(3.0), "of which the shape is known"
    assert costs.get("draft", 1, 1) is None


def test_given_costs_are_not_changed_by_what_is_measured():
    costs = Costs({("target", 1, 1): 1.0})
    costs.add("target", 1, 1, 50.0)
    assert costs.get("target", 1, 1) == 1.0


def test_the_estimate_of_acceptance_is_censored_and_finds_alpha():
    rng, acceptance = random.Random(1), Acceptance(memory=5000, surprise=1e-9)
    for _ in range(3000):
        accepted = next((i for i in range(5) if rng.random() >= 0.7), 5)
        acceptance.add(5, accepted, stopped=False)
    assert acceptance.alpha == pytest.approx(0.7, abs=0.03)
    assert acceptance.tokens(5)[5] == pytest.approx(expected_tokens(0.7, 5), rel=0.04)
    assert acceptance.spread < 0.01


def test_a_block_cut_by_a_stop_counts_what_was_kept_and_no_rejection():
    acceptance = Acceptance()
    acceptance.add(4, 2, stopped=True)
    assert (sum(acceptance.kept), sum(acceptance.judged)) == (2, 2)


def test_a_streak_of_rejections_too_rare_to_be_chance_makes_it_forget():
    acceptance = Acceptance()
    for _ in range(50):
        acceptance.add(4, 4, stopped=False)
    before = acceptance.alpha
    for _ in range(3):
        acceptance.add(4, 0, stopped=False)
    assert before > 0.9
    assert acceptance.alpha < 0.5


def test_costs_between_and_beyond_the_known_sizes_are_never_nothing():
    costs = Costs()
    for batch, n, seconds in ((2, 4, 0.001), (2, 8, 0.003), (1, 2, 0.001)):
        costs.add("draft", batch, n, seconds)
    assert costs.get("draft", 1, 1) > 0
    assert costs.get("draft", 2, 1) == pytest.approx(0.00025)


def test_given_costs_serve_a_batch_size_that_they_do_not_name_and_a_draft_that_they_leave_out_is_free():
    costs = Costs({("target", 1, 1): 1.0, ("target", 1, 5): 1.1})
    assert costs.get("target", 2, 1) == 1.0
    assert costs.get("draft", 2, 4) == 0.0
    control = Adaptive(costs=costs)
    assert control.plan(2).gamma > 0
    dear = Fallback(Adaptive(costs=Costs({("target", 1, 1): 1.0, ("target", 1, 5): 50.0})))
    world = World(alpha=0.5, slope=12.0)
    world.run(dear, 60)
    assert "off" in {plan.control for _, plan, _ in world.log}


def test_several_candidates_are_charged_for_the_columns_they_take():
    control = Adaptive(costs=Costs({("target", 1, 1): 1.0, ("target", 1, 13): 2.0, ("draft", 1, 4): 0.1}))
    seconds = dict.fromkeys(STAGES, 0.1)
    control.observe(Observation(1, 13, 4, [(4, 4, 5, False)], seconds, width=4))
    assert control.candidates == 3
    assert control._cost(1, 4) == pytest.approx(0.1 + 2.0)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Fixed(-3),
        lambda: Fixed("x"),
        lambda: Heuristic("a"),
        lambda: Adaptive(most=0),
        lambda: Adaptive(costs={}),
        lambda: Fallback(inner=None),
        lambda: Fallback(overhead=0),
        lambda: Fallback(probe=0),
        lambda: Fallback(deviations=float("nan")),
        lambda: Costs({("x", 1, 1): 1.0}),
        lambda: Costs({("target", "1", 1): 1.0}),
        lambda: Costs({("target", 1, 1): 0.0}),
        lambda: Costs({("target", 1, 1): float("nan")}),
        lambda: Costs({("draft", 1, 1): 1.0}),
        lambda: Costs({}),
    ],
)
def test_a_control_that_makes_no_sense_is_refused_in_one_line(make):
    with pytest.raises(SpecDecError) as error:
        make()
    assert "\n" not in str(error.value)


# --- two-way fallback -------------------------------------------------------------------------------------


@pytest.mark.parametrize("c", [0.02, 0.1, 0.3])
@pytest.mark.parametrize("tokens", [128, 256, 1024])
@pytest.mark.parametrize("seed", range(3))
def test_an_adversarial_draft_costs_at_most_five_percent(c, tokens, seed):
    world = World(c=c, slope=0.1, alpha=0.0, noise=0.2, seed=seed)
    assert speed(world, Fallback(), tokens) > 0.95
    assert speed(World(c=c, slope=0.1, alpha=0.0), Fixed(4), tokens) < 0.75


@pytest.mark.parametrize("alpha", [0.7, 0.8, 0.9])
def test_where_speculation_pays_the_fallback_takes_nearly_all_of_it(alpha):
    factor = best_gamma(alpha, 0.1, 8)[1]
    got = [speed(World(c=0.1, slope=0.0, alpha=alpha, seed=s), Fallback(Adaptive(most=8)), 4000) for s in range(5)]
    assert min(got) > 0.9 * factor


# Target passes, each of one token then, within which a fall of acceptance from .9 to 0 must be noticed: a draft that
# costs next to nothing pays at an acceptance of .1 already, and to tell 0 from that takes longer (and costs less).
DETECTION = {0.05: 20, 0.2: 9}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("c", DETECTION)
def test_g4_acceptance_falls_to_nothing_in_the_middle_and_the_whole_request_is_no_slower_than_promised(seed, c):
    world = World(c=c, slope=0.05, alpha=lambda at: 0.9 if at < 200 else 0.0, seed=seed)
    control = Fallback()
    seconds = world.run(control, 400)
    after = [(at, plan) for at, plan, _ in world.log if at >= 200]
    off = next(i for i, (_, plan) in enumerate(after) if plan.control == "off")
    assert off <= DETECTION[c]
    cost = sum(plan.gamma * (c + 0.05) for _, plan in after[:off])  # of detection: what those passes took in vain
    assert cost < 9
    assert seconds <= 400 / 0.95 + cost
    assert seconds < 400, "here the good half pays for it"


def test_g4_acceptance_that_returns_is_found_by_a_probe():
    world = World(c=0.1, alpha=lambda at: 0.0 if at < 300 else 0.9)
    control = Fallback()
    world.run(control, 1500)
    assert control.mode == "speculate"
    on = next(at for at, plan, _ in world.log if at > 300 and plan.control == "speculate")
    assert on < 300 + 600
    controls = [plan.control for _, plan, _ in world.log]
    assert {"off", "probe", "speculate"} <= set(controls)


def test_probes_in_vain_grow_rarer():
    world = World(c=0.3, slope=0.1, alpha=0.0)
    world.run(Fallback(), 4000)
    starts = [at for at, plan, _ in world.log if plan.control == "probe" and plan.reason]
    gaps = [b - a for a, b in pairwise(starts)]
    assert max(gaps[:3]) < min(gaps[-3:])
    assert gaps[-1] > 2 * gaps[0]


def test_g1_each_batch_size_is_judged_by_its_own_costs():
    """A pass over more tokens is nearly free for one row and dear for many: the switch-off point lies between."""
    modes = {}
    for batch, slope in ((1, 0.02), (2, 0.05), (8, 0.5), (32, 1.0)):
        world = World(c=0.05, slope=slope, alpha=0.5, batch=batch)
        control = Fallback()
        got = speed(world, control, 3000)
        modes[batch] = sum(plan.gamma > 0 for _, plan, _ in world.log) / len(world.log)
        assert got > 0.95
    assert modes[1] > 0.9
    assert modes[32] < 0.15


def test_g3_under_load_the_break_even_moves_and_the_control_follows():
    control = Fallback(Adaptive(most=6))
    idle, busy = World(c=0.05, slope=0.02, alpha=0.7, batch=1), World(c=0.05, slope=0.8, alpha=0.7, batch=16)
    for world, pays in ((idle, True), (busy, False), (idle, True)):
        world.log.clear()
        world.run(control, 1500)
        late = [plan.gamma > 0 for at, plan, _ in world.log if at > 700]
        assert (sum(late) / len(late) > 0.5) == pays


def test_near_break_even_it_does_not_flutter():
    alpha = next(a / 1000 for a in range(1000) if max(walltime_factor(a / 1000, g, 0.3) for g in (1, 2, 3)) > 1.0)
    world = World(c=0.3, slope=0.0, alpha=alpha)
    world.run(Fallback(), 5000)
    changes = sum(bool(plan.reason) for _, plan, _ in world.log)
    assert changes < 5000 / 50


# --- in the loop ------------------------------------------------------------------------------------------

PROMPT = [3, 3, 4, 5]


def wrong(step, sequences, room):
    return block(*[[63] * r for r in room])


@pytest.mark.parametrize("make", [Heuristic, Adaptive, Fallback])
@pytest.mark.parametrize("draft", ["wrong", "noisy", "itself"])
def test_greedy_tokens_are_those_of_ordinary_decoding_under_every_control(make, draft):
    target = tiny_llama()
    (base,) = decode(target, [PROMPT], tokens=120)
    policy = SamplingPolicy()
    drafter = {
        "wrong": lambda: ScriptedDrafter(wrong),
        "noisy": lambda: ModelDrafter(noisy_copy(target), policy, 64),
        "itself": lambda: ModelDrafter(target, policy, 64),
    }[draft]()
    (ours,) = decode(target, [PROMPT], drafter, 120, Settings(control=make()))
    assert ours.output == base.output


def test_every_change_of_control_is_in_the_record_with_its_reason():
    target = tiny_llama()
    costs = Costs({("target", 1, 1): 1.0, ("target", 1, 9): 2.0, ("draft", 1, 1): 0.2, ("draft", 1, 8): 1.6})
    control = Fallback(Adaptive(costs=costs))
    (request,) = decode(target, [PROMPT], ScriptedDrafter(wrong), 200, Settings(control=control))
    seen = [(r.control, r.reason) for r in request.records[1:]]
    changes = [b for a, b in pairwise(seen) if a[0] != b[0] and b[0] != "idle"]
    assert {c for c, _ in changes} >= {"off", "probe"}
    assert all(reason for _, reason in changes)
    assert all("\n" not in reason for _, reason in changes)
    off = next(reason for c, reason in changes if c == "off")
    assert "predicted 0." in off
    assert "α̂" in off
    quiet = [r for r in request.records if r.control == "off"]
    assert all(r.drafted == r.verified == 0 and r.kind == "ordinary" for r in quiet)
    assert len(quiet) > 100


def test_with_given_costs_a_seeded_text_under_control_is_the_same_twice():
    target = tiny_llama(scale=0.05)
    policy = SamplingPolicy(1.0)
    texts = []
    for _ in range(2):
        costs = Costs({("target", 1, 1): 1.0, ("target", 1, 9): 1.5, ("draft", 1, 1): 0.1, ("draft", 1, 8): 0.8})
        control = Fallback(Adaptive(costs=costs))
        draft = ModelDrafter(noisy_copy(target), policy, 64)
        (request,) = decode(target, [PROMPT], draft, 60, Settings(policy=policy, control=control), seed=7)
        texts.append((request.output, [r.gamma for r in request.records]))
    assert texts[0] == texts[1]


def test_with_speculation_off_the_drafter_is_not_called_at_all():
    class Off(Fixed):
        def plan(self, batch):
            from specdec_core.control import Plan

            return Plan(0, "off", "")

    def never(step, sequences, room):
        raise AssertionError("asked although it is off")

    drafter = ScriptedDrafter(never)
    (request,) = decode(tiny_llama(), [PROMPT], drafter, 20, Settings(control=Off(4)))
    assert {r.control for r in request.records[1:]} == {"off"}
    assert drafter.step == 0


def test_costs_of_anything_but_a_table_are_refused_by_name() -> None:
    with pytest.raises(SpecDecError, match=r"Costs\(3\) is not possible: give a table"):
        Costs(3)  # type: ignore[arg-type]


def test_the_reason_names_the_cost_of_the_pass_that_was_judged_branches_included() -> None:
    costs = Costs({("target", 1, 1): 1.0, ("target", 1, 2): 2.0, ("target", 1, 3): 8.0, ("draft", 1, 1): 0.5})
    control = Fallback(Adaptive(most=1, costs=costs))
    for _ in range(30):  # two candidates at one position: the target is fed three tokens
        control.observe(Observation(1, 3, 1, [(1, 0, 1, False)], {"draft": 0.5, "score": 8.0}, 1))
        if "target" in (reason := control.plan(1).reason):
            break
    assert "target 8000.0 against 1000.0 ms" in reason
