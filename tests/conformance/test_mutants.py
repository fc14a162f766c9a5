"""Every planted fault is caught by the check that names it, and the loop as it is passes that check."""

from __future__ import annotations

import contextlib
import math
import sys
from dataclasses import replace

import pytest
import torch
import typer

from specdec_core.lab import mutants
from specdec_core.lab.lossy import LOSSY
from specdec_core.lab.mutants import A2, MUTANTS, P, Q, Wrong
from specdec_core.lab.stats import power_against
from specdec_core.lab.theory import output_law, target_law
from specdec_core.verify import BLOCK, TOKEN

NAMES = [m.name for m in MUTANTS]
BY_NAME = {m.name: m for m in MUTANTS}


def everything():
    """All that the package's modules and their classes hold."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        if name.startswith("specdec_core") and module is not None:
            for key, value in vars(module).items():
                found[name, key] = value
                if isinstance(value, type) and value.__module__ == name:
                    found |= {(name, key, attribute): held for attribute, held in vars(value).items()}
    return found


def differences(before, after):
    keys = before.keys() | after.keys()
    return [k for k in keys if k not in before or k not in after or before[k] is not after[k]]


@pytest.mark.parametrize("name", NAMES)
def test_a_planted_fault_is_caught_by_name_and_the_healthy_loop_passes(name):
    mutant = BY_NAME[name]
    mutant.check()
    with mutant.plant(), pytest.raises(Wrong) as caught:
        mutant.check()
    assert len(str(caught.value).splitlines()) == 1
    assert mutants.outcome(mutant.check) == (True, False, "nothing wrong"), "the loop is healthy again"


@pytest.mark.parametrize("name", NAMES)
def test_a_plant_changes_one_thing_and_puts_it_back_even_after_an_error(name):
    before = everything()
    with contextlib.suppress(ZeroDivisionError), BY_NAME[name].plant():
        assert len(differences(before, everything())) == 1
        raise ZeroDivisionError
    assert differences(before, everything()) == []


def test_names_are_distinct_and_the_kinds_of_condition_are_there():
    assert len(set(NAMES)) == len(NAMES) >= 16
    assert {"A", "C", "D", "E", "F"} <= {m.condition[0] for m in MUTANTS}
    assert {"A1", "A2", "A6", "A7", "A9", "A10", "A11", "C1", "C2", "C3", "C5", "D1", "D4", "D7", "F1", "F4"} <= {
        m.condition for m in MUTANTS
    }


def test_mutants_that_claim_the_same_share_one_check():
    for claim in {m.claims for m in MUTANTS}:
        assert len({m.check for m in MUTANTS if m.claims == claim}) == 1


def by_position(table):
    return lambda prefix: table[1 + len(prefix)]


@pytest.mark.parametrize(
    ("rule", "tokens"),
    [
        (LOSSY["one_hot_residual"], 3),
        (LOSSY["resample_from_p"], 3),
        (LOSSY["greedy_at_t"], 3),
        (replace(BLOCK, residual=TOKEN.residual), 2),
    ],
    ids=["one-hot residual", "p for residual", "greedy rule", "token residual"],
)
def test_the_sampled_checks_have_the_power_to_notice_these_rules(rule, tokens):
    want = target_law(by_position(P), tokens)
    got = output_law(by_position(P), by_position(Q), rule, 2, tokens)
    law, other = list(want.values()), [got.get(text, 0.0) for text in want]
    assert power_against(law, other, mutants.ROWS, mutants.FALSE_ALARM) > 0.999


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_every_text_is_expected_often_enough_for_the_chi_square_test(temperature):
    rarest = math.prod(float((row.log() / temperature).softmax(-1).min()) for row in P[1:4])
    assert rarest * mutants.ROWS >= 5


def test_the_numbers_of_condition_a2():
    p, raw = (by_position(table) for table in A2)
    drawn = lambda prefix: torch.tensor([0.201, 0.6, 0.0], dtype=torch.float64) / 0.801  # noqa: E731
    wrong = output_law(p, raw, TOKEN, 1, 1, drawn=drawn)
    assert wrong[(0,)] == pytest.approx(0.531, abs=2e-3)
    assert power_against([0.625, 0.375], [wrong[(0,)], wrong[(1,)]], mutants.ROWS, mutants.FALSE_ALARM) > 0.999


def only(monkeypatch, mutant):
    monkeypatch.setattr(mutants, "MUTANTS", (mutant,))


def test_the_table_says_so_when_a_fault_is_not_caught(monkeypatch, capsys):
    only(monkeypatch, replace(BY_NAME["one too many"], plant=contextlib.nullcontext))
    (row,) = mutants.run().to_dict("records")
    assert (row["passes when healthy"], row["caught"], row["evidence"]) == (True, False, "nothing wrong")
    with pytest.raises(typer.Exit) as left:
        mutants.command()
    assert left.value.exit_code == 1
    assert "NOT CAUGHT" in (said := capsys.readouterr().out)
    assert said.splitlines()[-1] == "0 of 1 faults caught by name; 1 not as it should be."


def test_the_table_says_so_when_the_loop_as_it_is_fails_a_check(monkeypatch, capsys):
    def fails():
        raise Wrong("the sky is green")

    only(monkeypatch, replace(BY_NAME["one too many"], check=fails))
    (row,) = mutants.run().to_dict("records")
    assert (row["passes when healthy"], row["caught"]) == (False, True)
    assert row["evidence"] == "on the loop as it is: the sky is green; with the fault: the sky is green"
    with pytest.raises(typer.Exit) as left:
        mutants.command()
    assert left.value.exit_code == 1
    assert "FALSE ALARM" in capsys.readouterr().out


def test_a_crash_is_no_finding(monkeypatch):
    def crashes():
        raise AssertionError("not one\nof ours")

    only(monkeypatch, replace(BY_NAME["one too many"], check=crashes))
    (row,) = mutants.run().to_dict("records")
    assert (row["passes when healthy"], row["caught"]) == (False, False)
    assert "crashed: not one of ours" in row["evidence"]


def test_progress_hears_every_name_and_the_command_ends_well_when_all_is_well(monkeypatch, capsys):
    monkeypatch.setattr(mutants, "MUTANTS", tuple(BY_NAME[n] for n in ("greedy keeps all", "one too many")))
    heard = []
    table = mutants.run(heard.append)
    assert heard == ["greedy keeps all", "one too many"]
    assert list(table) == ["condition", "fault", "check", "passes when healthy", "caught", "evidence"]
    with pytest.raises(typer.Exit) as left:
        mutants.command()
    assert left.value.exit_code == 0
    assert capsys.readouterr().out.splitlines()[-1] == "2 of 2 faults caught by name; 0 not as it should be."
