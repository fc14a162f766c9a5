"""The default pair, with real weights: greedy identity, bounded divergence in bfloat16, stops, the public API.

``SPECDEC_FULL=1`` runs the identity on 60 questions of Spec-Bench, which takes about half an hour on two idle cores;
otherwise a few built-in prompts are taken. ``SPECDEC_DATA`` names the folder that holds spec_bench_open.jsonl.
"""

from __future__ import annotations

import copy
import os
from dataclasses import replace

import pytest
import torch

from specdec_core import SamplingPolicy, generate, generate_batch, load_pair
from specdec_core.lab import workloads
from specdec_core.lab.identity import first_divergence
from specdec_core.lab.law import pair_law
from specdec_core.lab.lossy import LOSSY
from specdec_core.verify import BLOCK, TOKEN

FULL = os.environ.get("SPECDEC_FULL") == "1"
TOKENS = 48 if FULL else 24

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair():
    return load_pair("smollm2")


def questions():
    data = workloads.data_dir()
    if FULL:
        if data is None:
            pytest.skip("SPECDEC_FULL=1 needs SPECDEC_DATA, a folder with spec_bench_open.jsonl")
        return workloads.prompts(data / "spec_bench_open.jsonl", limit=60)
    return workloads.prompts("builtin", limit=4)


def hugging_face(pair, ids, tokens):
    inputs = torch.tensor([ids])
    options = {"do_sample": False, "max_new_tokens": tokens, "attention_mask": torch.ones_like(inputs)}
    with torch.inference_mode():
        return pair.target.generate(inputs, **options)[0, len(ids) :].tolist()


def test_greedy_output_is_ordinary_decoding_which_is_hugging_face_generate(pair):
    """float32, prompt lookup and self-draft, γ in {1, 3, 5}: token for token."""
    for row in questions().itertuples():
        base = generate(pair, row.turns[0], max_new_tokens=TOKENS, speculate=False)
        assert base.tokens == hugging_face(pair, base.prompt_tokens, TOKENS), row.id
        for gamma in (1, 3, 5):
            for drafter in ("prompt_lookup", "self"):
                ours = generate(pair, base.prompt_tokens, max_new_tokens=TOKENS, gamma=gamma, drafter=drafter)
                assert ours.tokens == base.tokens, (row.id, drafter, gamma)
                if drafter == "self":
                    assert ours.metrics["alpha_hat"] in (1.0, None), (row.id, gamma)


@pytest.fixture(scope="module")
def drafting(pair):
    """The pair with a draft that agrees now and then: the target with noise on its weights. The wheel has no draft."""
    torch.manual_seed(0)
    draft = copy.deepcopy(pair.target)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += 0.08 * weight.std() * torch.randn_like(weight) if weight.ndim > 1 else 0
    return replace(pair, draft=draft)


@pytest.mark.parametrize("drafter", ["prompt_lookup", "model", "composite"])
@pytest.mark.parametrize("options", [{}, {"temperature": 0.8, "top_p": 0.95}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("batch", [1, 2, 4, 8] if FULL else [2])
def test_rows_of_a_ragged_batch_equal_their_own_runs(drafting, drafter, options, batch):
    """float32, prompts of different length, rows that end at different times and, from 4 on, wait for a place."""
    questions_ = [row.turns[0] for row in questions().itertuples()]
    prompts = questions_[:: len(questions_) // batch][:batch]
    common = {"gamma": 3, "drafter": drafter, "max_new_tokens": 24 if FULL else 12, **options}
    seeds = list(range(5, 5 + batch))
    together = generate_batch(drafting, prompts, seed=seeds, max_batch=max(batch - 1, 1), **common)
    for row, prompt, seed in zip(together, prompts, seeds, strict=True):
        (alone,) = generate_batch(drafting, [prompt], seed=[seed], **common)
        assert row.tokens == alone.tokens
        if not options:
            assert row.tokens == generate(drafting, prompt, speculate=False, max_new_tokens=len(row.tokens)).tokens
    if drafter != "prompt_lookup":
        records = [r for row in together for r in row.records]
        assert sum(r.rejected for r in records) > 0
        assert sum(r.accepted for r in records) > 0


@pytest.mark.parametrize("rule", [TOKEN, BLOCK] if FULL else [TOKEN], ids=lambda r: r.name)
def test_the_sampled_law_of_the_real_pair_is_the_targets_and_a_wrong_rule_is_caught(drafting, rule, capsys):
    policy, rows = SamplingPolicy(1.0, top_p=0.98), 4000 if FULL else 150
    prompt = drafting.tokenizer("My favourite colour is").input_ids  # short: every row has a prefill of its own
    make = lambda: drafting.make_drafter("model", policy)  # noqa: E731
    right = pair_law(drafting, prompt, make(), policy, rows, rule)
    wrong = pair_law(drafting, prompt, make(), policy, rows, LOSSY["always_accept"]) if rule is TOKEN else None
    with capsys.disabled():
        print(f"\n{rule.name} rule: {right}")
    assert right.kept
    assert right.detectable < (0.12 if FULL else 0.4)
    assert 0.1 < right.accepted < 0.95
    assert wrong is None or not wrong.kept or wrong.distance < right.detectable


def test_in_bfloat16_any_divergence_lies_within_a_few_units_in_the_last_place():
    pair = load_pair("smollm2", dtype="bfloat16")
    for row in workloads.prompts("builtin", limit=3).itertuples():
        base = generate(pair, row.turns[0], max_new_tokens=32, speculate=False)
        ours = generate(pair, row.turns[0], max_new_tokens=32, gamma=4)
        split = first_divergence(pair.target, base.prompt_tokens, base.tokens, ours.tokens)
        assert split is None or split.ulps <= 4, split


def test_a_sampled_text_is_the_same_for_the_same_seed_and_another_for_another(pair):
    options = {"max_new_tokens": 16, "temperature": 1.0, "gamma": 3}
    prompt = "Tell me about lighthouses."
    a, b, c = (generate(pair, prompt, seed=s, **options) for s in (1, 1, 2))
    assert a.tokens == b.tokens != c.tokens


def test_a_stop_string_of_the_real_tokenizer_ends_the_text_before_it(pair):
    prompt = "Count from 1 to 20, separated by commas."
    base = generate(pair, prompt, max_new_tokens=30, speculate=False)
    stop = "\n4"
    assert stop in base.text
    assert stop not in [pair.tokenizer.decode([t]) for t in base.tokens], "the string spans two tokens"
    out = generate(pair, prompt, max_new_tokens=30, stop=stop, drafter="self", gamma=5)
    assert out.text == base.text[: base.text.index(stop)]
    assert out.stop == "stop_string"
    assert out.tokens == base.tokens[: len(out.tokens)]


def test_the_models_own_eos_ends_the_text(pair):
    out = generate(pair, "Answer with one word only: what colour is snow?", max_new_tokens=60)
    assert out.stop == "eos"
    assert out.tokens[-1] == pair.target.generation_config.eos_token_id
    assert "<|im_end|>" not in out.text
