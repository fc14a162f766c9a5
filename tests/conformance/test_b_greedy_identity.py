"""Conditions B: at temperature 0 the output is that of ordinary decoding, token for token."""

from __future__ import annotations

import pytest
import torch
from kit import TableModel, decode, tiny_llama

from specdec_core import SamplingPolicy
from specdec_core.drafters import ModelDrafter, PromptLookupDrafter
from specdec_core.lab.identity import first_divergence
from specdec_core.loop import Settings

GREEDY = SamplingPolicy()
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9, 7, 8], [3, 3, 4, 5, 6, 7, 8, 9, 10]]


def alpha(request):
    return sum(r.accepted for r in request.records), sum(r.rejected for r in request.records)


@pytest.mark.parametrize("gamma", [1, 2, 4, 8])
def test_b1_a_draft_equal_to_the_target_is_identical_and_never_rejected(gamma):
    target = tiny_llama()
    for prompt in PROMPTS:
        (base,) = decode(target, [prompt], tokens=40)
        (ours,) = decode(target, [prompt], ModelDrafter(target, GREEDY, 64), 40, Settings(gamma=gamma))
        assert ours.output == base.output
        assert alpha(ours)[1] == 0
        assert len(ours.records) == 1 + -(-39 // (gamma + 1))


@pytest.mark.parametrize("gamma", [1, 3, 5])
def test_b1_a_foreign_draft_and_lookup_are_identical_too(gamma):
    target, other = tiny_llama(), tiny_llama(5)
    for drafter in (ModelDrafter(other, GREEDY, 64), PromptLookupDrafter()):
        for prompt in PROMPTS:
            (base,) = decode(target, [prompt], tokens=40)
            (ours,) = decode(target, [prompt], drafter, 40, Settings(gamma=gamma))
            assert ours.output == base.output


def test_b1_ordinary_decoding_is_hugging_face_generate():
    target = tiny_llama(3)
    for prompt in PROMPTS:
        theirs = target.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=40, pad_token_id=0)
        assert decode(target, [prompt], tokens=40)[0].output == theirs[0, len(prompt) :].tolist()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_b1_in_half_precision_a_divergence_has_a_margin_of_a_few_units_in_the_last_place(dtype):
    target = tiny_llama(1).to(dtype)
    for prompt in PROMPTS:
        (base,) = decode(target, [prompt], tokens=60)
        (ours,) = decode(target, [prompt], ModelDrafter(target, GREEDY, 64), 60, Settings(gamma=4))
        split = first_divergence(target, prompt, base.output, ours.output)
        assert split is None or split.ulps <= 4, split


def test_b1_a_planted_divergence_is_found_with_its_margin():
    target = tiny_llama(1)
    (base,) = decode(target, [PROMPTS[0]], tokens=10)
    other = list(base.output)
    other[4] = (other[4] + 1) % 64
    split = first_divergence(target, PROMPTS[0], base.output, other)
    assert split is not None
    assert (split.position, split.a, split.b) == (4, base.output[4], other[4])
    assert split.ulps > 4, "a token that the target did not prefer cannot hide behind rounding"


def test_b2_one_token_completion():
    target = tiny_llama()
    (base,) = decode(target, [PROMPTS[0]], tokens=1)
    (ours,) = decode(target, [PROMPTS[0]], ModelDrafter(target, GREEDY, 64), 1, Settings(gamma=4))
    assert ours.output == base.output
    assert len(ours.records) == 1


@pytest.mark.parametrize("gap", [0.0, 1e-7, 1e-6])
def test_b2_logits_that_tie_or_nearly_tie_are_settled_as_in_ordinary_decoding(gap):
    logits = torch.zeros(6, 6)
    for last in range(6):
        logits[last, (last + 1) % 6] = 2.0
        logits[last, (last + 4) % 6] = 2.0 + gap
    target = TableModel(torch.ones(6, 6))
    target.logits_of.copy_(logits)
    (base,) = decode(target, [[0]], tokens=30)
    for drafter in (ModelDrafter(target, GREEDY, 6), PromptLookupDrafter()):
        (ours,) = decode(target, [[0]], drafter, 30, Settings(gamma=3))
        assert ours.output == base.output
