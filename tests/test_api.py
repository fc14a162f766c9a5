"""The public API refuses what it cannot honour, by name and in one line."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from kit import NoTokenizer, ScriptedDrafter, block, pair_of, tiny_llama
from transformers import GenerationConfig

import specdec_core
from specdec_core import Processing, SamplingPolicy, SpecDecError, generate, generate_batch, stream
from specdec_core.drafters import ModelDrafter

PROMPT = [3, 3, 4, 5]


@pytest.fixture(scope="module")
def pair():
    return pair_of(tiny_llama())


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("temperature", "0.7"),
        ("temperature", None),
        ("temperature", 1e-40),
        ("temperature", True),
        ("temperature", float("inf")),
        ("top_k", 5.0),
        ("top_k", float("inf")),
        ("top_k", "5"),
        ("top_k", None),
        ("top_k", -1),
        ("top_p", "x"),
        ("min_p", 1.0),
        ("gamma", 0),
        ("gamma", 10**7),
        ("gamma", 2.0),
        ("gamma", True),
        ("max_new_tokens", -1),
        ("max_new_tokens", 3.5),
        ("seed", "a"),
        ("seed", 1.5),
        ("seed", ["x"]),
        ("seed", True),
        ("seed", -1),
        ("seed", [1, 2]),
        ("eos", 2),
        ("eos", "</s>"),
        ("eos", [1.5]),
        ("stop", 3),
        ("stop", None),
        ("stop", [3]),
        ("stop", b"x"),
        ("stop", ""),
        ("drafter", 3),
        ("drafter", "medusa"),
        ("drafter", ModelDrafter),
        ("drafter", "model"),
        ("confidence", -1),
        ("confidence", "x"),
        ("confidence", 5.0),
        ("draft_timeout", -1),
        ("draft_timeout", "x"),
    ],
)
def test_an_option_of_the_wrong_kind_is_refused_by_name(pair, option, value):
    with pytest.raises(SpecDecError) as error:
        generate(pair, PROMPT, **{"max_new_tokens": 2, option: value})
    assert "\n" not in str(error.value)
    assert option in str(error.value) or "draft model" in str(error.value) or "seeds for 1 prompts" in str(error.value)


@pytest.mark.parametrize(
    "prompt",
    [
        None,
        3,
        "",
        "  \n",
        [],
        b"hi",
        [[1, 2]],
        ["a", "b"],
        {"role": "user", "content": "x"},
        [{"role": "user"}],
        [{"content": "x"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": "x"}, 3],
        [1, "x"],
        [1.7, 2.2],
        [True, False],
        ["1", "2"],
        [-1],
        [64],
        [{"role": "user", "content": "x"}],
    ],
)
def test_a_prompt_that_is_none_is_refused_in_one_line(pair, prompt):
    with pytest.raises(SpecDecError) as error:
        generate(pair, prompt, max_new_tokens=2)
    assert "\n" not in str(error.value)


def test_a_text_is_no_batch(pair):
    with pytest.raises(SpecDecError, match="give a list"):
        generate_batch(pair, "abc", max_new_tokens=2)


def test_lone_surrogates_are_refused_before_the_tokenizer_sees_them(pair):
    with pytest.raises(SpecDecError, match="no valid Unicode at character 1"):
        generate(pair, "a\udcff b", max_new_tokens=2, chat=False)


def test_numpy_numbers_are_numbers(pair):
    ids = np.array(PROMPT)
    a = generate(
        pair, list(ids), max_new_tokens=np.int64(6), gamma=np.int64(2), temperature=np.float32(1.0), seed=np.int64(3)
    )
    b = generate(pair, PROMPT, max_new_tokens=6, gamma=2, temperature=1.0, seed=3)
    assert a.tokens == b.tokens


def test_a_batch_of_none_is_no_output(pair):
    assert generate_batch(pair, []) == []


def test_what_the_models_own_generation_config_asks_is_applied_as_hugging_face_does_and_can_be_left_out():
    target = tiny_llama()
    pair = pair_of(target)
    pair.target.generation_config = GenerationConfig(repetition_penalty=1.5, suppress_tokens=[5, 6], top_k=50)
    theirs = target.generate(torch.tensor([PROMPT]), do_sample=False, max_new_tokens=20, pad_token_id=0)
    want = theirs[0, len(PROMPT) :].tolist()
    for speculate in (True, False):
        assert generate(pair, PROMPT, max_new_tokens=20, speculate=speculate).tokens == want
    plain = generate(pair, PROMPT, max_new_tokens=20, processing=Processing()).tokens
    assert plain == generate(pair_of(tiny_llama()), PROMPT, max_new_tokens=20).tokens != want


def test_a_generation_config_that_cannot_be_applied_is_refused_in_one_line():
    pair = pair_of(tiny_llama())
    pair.target.generation_config = GenerationConfig(guidance_scale=2.0)
    with pytest.raises(SpecDecError, match="guidance_scale"):
        generate(pair, PROMPT, max_new_tokens=2)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 3}, {"stop": "9:", "max_new_tokens": 60}])
def test_streamed_pieces_add_up_to_the_text_and_a_stop_string_never_shows(pair, options):
    options = {"max_new_tokens": 30, **options}
    whole = generate(pair, PROMPT, **options)
    flow = stream(pair, PROMPT, **options)
    pieces = list(flow)
    assert "".join(pieces) == whole.text == flow.output.text
    assert flow.tokens == whole.tokens
    assert len(pieces) > 3 or options.get("stop")


def test_a_streamed_text_ends_after_the_pass_in_which_it_was_cancelled(pair):
    flow = stream(pair, PROMPT, max_new_tokens=60, gamma=3)
    pieces = []
    for n, piece in enumerate(flow):
        pieces.append(piece)
        if n == 2:
            flow.cancel()
    assert flow.output.stop == "cancelled"
    assert 3 <= len(flow.tokens) <= 12
    assert "".join(pieces) == flow.output.text


def test_a_character_whose_tokens_are_not_all_there_is_held_back():
    class Halves(NoTokenizer):
        """Two tokens make a character; a single one at the end decodes to the replacement sign."""

        def decode(self, ids, **_):
            whole = "".join(chr(200 + a) for a, _ in zip(ids[::2], ids[1::2], strict=False))
            return whole + "\ufffd" * (len(ids) % 2)

    pair = pair_of(tiny_llama())
    pair.tokenizer = Halves()
    pieces = list(stream(pair, PROMPT, max_new_tokens=9))
    assert "\ufffd" not in "".join(pieces[:-1])
    assert "".join(pieces) == generate(pair, PROMPT, max_new_tokens=9).text


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"rule": "typical", "temperature": 1.0}, "rule"),
        ({"rule": "block", "candidates": 2, "temperature": 1.0, "drafter": "self"}, "block"),
        ({"control": "magic"}, "control"),
        ({"max_batch": 0}, "max_batch"),
        ({"candidates": 0}, "candidates"),
        ({"model_gamma": 0}, "model_gamma"),
        ({"gama": 4}, "gama"),
        ({"processing": "x"}, "processing"),
        ({"rule": ["token"], "temperature": 1.0}, "rule"),
        ({"control": ["fixed"]}, "control"),
        ({"speculate": "no"}, "speculate"),
        ({"chat": "x"}, "chat"),
        ({"eos": b"ab"}, "eos"),
        ({"draft_timeout": float("inf")}, "draft_timeout"),
        ({"temperature": 10**400}, "temperature"),
        ({"candidates": 2, "drafter": "suffix"}, "candidates"),
    ],
)
def test_an_impossible_rule_control_or_batch_is_refused_by_name(pair, options, word):
    with pytest.raises(SpecDecError, match=word):
        generate(pair, PROMPT, max_new_tokens=4, **options)


def test_a_composites_model_drafts_shorter_blocks_than_its_lookup_may(pair):
    drafting = replace(pair, draft=pair.target)
    options = {"max_new_tokens": 64, "drafter": "composite", "gamma": 6}
    found = generate(drafting, PROMPT, model_gamma=2, **options)
    assert {r.drafted for r in found.records[1:-1]} >= {2, 6}, "the model's blocks and the lookup's"
    assert found.tokens == generate(drafting, PROMPT, **options).tokens
    with pytest.raises(SpecDecError, match="drafter"):
        generate(drafting, PROMPT, **options | {"drafter": "medusa"}, model_gamma=2)


def test_a_row_of_a_batch_has_its_whole_wall_time_and_the_batch_counts_a_pass_once(pair):
    from specdec_core.record import seconds_by_stage, tokens_per_second

    rows = generate_batch(pair, [PROMPT] * 4, max_new_tokens=20, gamma=3)
    one = seconds_by_stage(rows[0].records)
    together = seconds_by_stage([r for row in rows for r in row.records])
    assert together == pytest.approx(one), "four equal rows go through the same passes"
    assert tokens_per_second(rows[0].records) == pytest.approx(19 / sum(one.values()))


def test_a_smaller_draft_vocabulary_leaves_rows_that_outgrow_it_to_the_target():
    target, small = tiny_llama(0, scale=0.05), tiny_llama(1, vocab=8, scale=0.05)
    options = {"max_new_tokens": 30, "temperature": 1.3, "gamma": 3}
    policy = SamplingPolicy(1.3)
    make = lambda: ModelDrafter(small, policy, 64)  # noqa: E731
    prompts = [[1, 2, 3], [60, 2], [4, 5]]
    rows = generate_batch(pair_of(target), prompts, seed=[1, 2, 3], drafter=make(), **options)
    for row, (prompt, seed) in zip(rows, zip(prompts, (1, 2, 3), strict=True), strict=True):
        (alone,) = generate_batch(pair_of(target), [prompt], seed=[seed], drafter=make(), **options)
        assert row.tokens == alone.tokens
        assert all(r.control != "degraded" for r in row.records)
        outgrown = [r for r in row.records if r.step and max([*prompt, *row.tokens][: r.context]) >= 8]
        assert all(r.verified == 0 for r in outgrown)


def test_stop_strings_are_seen_across_tokens_that_take_no_text():
    from specdec_core.stops import Stops

    silent = 99
    stops = Stops(strings=("ab",), decode=lambda ids: "".join("" if i == silent else chr(97 + i) for i in ids))
    kept, why = stops.cut([0] + [silent] * 40, [1, 5], 10, None)
    assert (kept, why) == ([1], "stop_string")
    assert stops.text([2, 0, *[silent] * 40, 1]) == "c"


def test_names_are_imported_when_first_asked_for():
    assert specdec_core.load_pair.__module__ == "specdec_core.lab.models"
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = specdec_core.nonsense


def test_a_custom_drafter_is_any_object_with_the_protocol(pair):
    base = generate(pair, PROMPT, max_new_tokens=9, speculate=False)
    mine = ScriptedDrafter(lambda step, seqs, room: block(base.tokens[len(seqs[0]) - len(PROMPT) :][: room[0]]))
    out = generate(pair, PROMPT, max_new_tokens=9, drafter=mine, gamma=4)
    assert out.tokens == base.tokens
    assert out.metrics["alpha_hat"] == 1


def test_a_cancel_that_comes_while_a_pass_commits_is_not_lost(pair):
    from specdec_core.stops import Stops

    flow = stream(pair, PROMPT, max_new_tokens=30, gamma=3)
    plain = Stops.cut

    def cancelling(self, output, *rest):
        if len(output) > 5:
            flow.cancel()
        return plain(self, output, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Stops, "cut", cancelling)
        list(flow)
    assert flow.output.stop == "cancelled"
    assert len(flow.tokens) < 15


def test_whether_a_model_can_branch_is_found_out_once(monkeypatch):
    from specdec_core import caches

    asked = []
    find = caches.branch_error
    monkeypatch.setattr(caches, "branch_error", lambda model: asked.append(model) or find(model))
    pair = pair_of(tiny_llama(7))
    for _ in range(3):
        generate(pair, PROMPT, max_new_tokens=4, drafter="self", candidates=2)
    assert len(asked) == 1


def test_a_message_is_one_line_whatever_it_quotes() -> None:
    pair = pair_of(tiny_llama())
    with pytest.raises(SpecDecError) as error:
        generate(pair, torch.tensor([[1, 2], [3, 4]]))  # type: ignore[arg-type]
    assert "prompt=" in str(error.value)
    assert "\n" not in str(error.value)


def test_a_pair_that_is_none_is_named() -> None:
    with pytest.raises(SpecDecError, match="pair='smollm2' is no pair: give what load_pair returned"):
        generate("smollm2", [1, 2])  # type: ignore[arg-type]


def test_seeds_may_be_any_sequence_and_numbers_any_real_ones() -> None:
    pair = pair_of(tiny_llama())
    listed = generate_batch(pair, [[1, 2], [3]], max_new_tokens=5, temperature=0.5, seed=[0, 1], drafter="self")
    ranged = generate_batch(
        pair, [[1, 2], [3]], max_new_tokens=5, temperature=Fraction(1, 2), seed=range(2), drafter="self"
    )
    assert [o.tokens for o in listed] == [o.tokens for o in ranged]
