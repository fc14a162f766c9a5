"""Every engine on the same tiny model: the same tokens, and marks from which prefill and decoding can be told."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from kit import noisy_copy, pair_of, tiny_llama

from specdec_core import Pair
from specdec_core.control import Costs
from specdec_core.errors import SpecDecError
from specdec_core.lab import calibrate, peers

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]


@pytest.fixture(scope="module")
def pair() -> Pair:
    target = tiny_llama()
    given = target.generation_config
    found = pair_of(target, noisy_copy(tiny_llama()))
    target.generation_config = given
    target.generation_config.eos_token_id = None
    found.tokenizer = SimpleNamespace(eos_token_id=0, decode=lambda ids, **_: "", chat_template=None)  # type: ignore[assignment]
    return found


def test_engines_write_the_same_greedy_text_and_tell_the_prefill_from_the_rest(pair: Pair) -> None:
    assert pair.draft is not None
    engines = {
        "ordinary": peers.ours(pair, 12, speculate=False),
        "model": peers.ours(pair, 12, gamma=3),
        "generate": peers.hugging_face(pair, 12),
        "lookup": peers.hugging_face(pair, 12, prompt_lookup_num_tokens=3),
        "assisted": peers.assisted(pair, pair.draft, 12, 3),
    }
    timed = {name: engine(PROMPT, 0) for name, engine in engines.items()}
    for name, each in timed.items():
        assert each.tokens == timed["ordinary"].tokens, name
        assert [n for _, n in each.marks] == sorted({n for _, n in each.marks}), name
        assert each.marks[-1][1] == len(each.tokens) == 12, name
        assert each.after == 12 - each.marks[0][1], name
        assert 0 < each.prefill < each.prefill + each.seconds, name
    assert len(timed["ordinary"].marks) == len(timed["generate"].marks) == 12
    assert timed["model"].records
    assert not timed["generate"].records


def test_a_seed_decides_a_sampled_text(pair: Pair) -> None:
    for engine in (peers.ours(pair, 12, temperature=1.5), peers.hugging_face(pair, 12, 1.5)):
        assert engine(PROMPT, 1).tokens == engine(PROMPT, 1).tokens
        assert len({tuple(engine(PROMPT, seed).tokens) for seed in range(4)}) > 1


@pytest.mark.parametrize("package", ["flashspec", "xllamacpp"])
def test_an_engine_that_is_not_installed_says_how_to_get_it(
    pair: Pair, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    assert pair.draft is not None
    draft = pair.draft
    make = {"flashspec": lambda: peers.flashspec(pair, draft, 4), "xllamacpp": lambda: peers.llama_cpp(Path(), 4, 1)}
    with pytest.raises(SpecDecError, match=rf"{package} is not installed: install specdec-core\[peers\]"):
        make[package]()


# --- what passes cost -------------------------------------------------------------------------------------


def test_calibration_measures_every_size_of_target_and_draft(pair: Pair) -> None:
    found = calibrate.calibrate(pair, [PROMPT, PROMPT[:3]], most=3, rounds=2)
    assert set(found) == {("target", 2, n) for n in (1, 2, 3, 4)} | {("draft", 2, n) for n in (1, 2, 3)}
    assert all(seconds > 0 for seconds in found.values())
    alone = calibrate.calibrate(Pair("x", pair.target, pair.tokenizer), [PROMPT], most=2, rounds=1)
    assert {n for kind, _, n in alone if kind == "target"} == {1, 2, 3}


def test_a_table_of_costs_can_be_logged_and_read_back() -> None:
    measured: dict[calibrate.Key, float] = {("target", 1, 1): 0.04, ("target", 1, 5): 0.05, ("draft", 1, 4): 0.01}
    costs = calibrate.costs_of(calibrate.frame(measured))
    assert isinstance(costs, Costs)
    assert [costs.get(*key) for key in measured] == list(measured.values())


def test_block_lengths_are_cycled_so_that_all_sizes_meet_the_same_moods() -> None:
    cycle = calibrate.Cycle(2)
    assert [cycle.plan(1).gamma for _ in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_a_filler_fills_every_block() -> None:
    sequences: Sequence[Sequence[int]] = [[1, 2], [3]]
    found = calibrate.Filler().propose(sequences, [3, 2], torch.zeros(2, 3))
    assert found.tokens.tolist() == [[2, 2, 2], [3, 3, 0]]
    assert found.lengths.tolist() == [3, 2]
