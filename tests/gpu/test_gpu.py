"""What only a GPU can show. Skipped, saying so, where there is none."""

from __future__ import annotations

import pytest
import torch
from kit import decode, noisy_copy, tiny_llama

from specdec_core import SamplingPolicy
from specdec_core.drafters import ModelDrafter, PromptLookupDrafter
from specdec_core.identity import first_divergence
from specdec_core.loop import Settings
from specdec_core.record import seconds_by_stage

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

GREEDY = SamplingPolicy()
PROMPTS = [[1, 2, 3, 4, 5], [7, 8, 9], [3, 3, 4, 5, 6, 7, 8, 9, 10]]


@pytest.mark.parametrize("gamma", [1, 4, 8])
def test_greedy_output_on_the_gpu_equals_ordinary_decoding_there(gamma):
    target = tiny_llama(3).cuda()
    for drafter in (ModelDrafter(noisy_copy(target), GREEDY, 64), PromptLookupDrafter("cuda")):
        base = [decode(target, [p], tokens=40)[0].output for p in PROMPTS]
        rows = decode(target, PROMPTS, drafter, 40, Settings(gamma=gamma))
        assert [r.output for r in rows] == base


def test_stage_times_come_from_events_and_are_positive():
    target = tiny_llama(3).cuda()
    (request,) = decode(target, PROMPTS[:1], ModelDrafter(target, GREEDY, 64), 40, Settings(gamma=4))
    seconds = seconds_by_stage(request.records)
    assert seconds["draft"] > 0
    assert seconds["score"] > 0


def test_bfloat16_divergence_is_within_rounding():
    target = tiny_llama(1).to("cuda", torch.bfloat16)
    for prompt in PROMPTS:
        (base,) = decode(target, [prompt], tokens=60)
        (ours,) = decode(target, [prompt], ModelDrafter(target, GREEDY, 64), 60, Settings(gamma=4))
        split = first_divergence(target, prompt, base.output, ours.output)
        assert split is None or split.ulps <= 4, split


def test_sampling_gives_the_same_tokens_for_the_same_seed():
    target, policy = tiny_llama(3).cuda(), SamplingPolicy(1.0)
    settings = Settings(gamma=3, policy=policy)
    a, b = (decode(target, PROMPTS, ModelDrafter(target, policy, 64), 20, settings, seed=7) for _ in range(2))
    assert [r.output for r in a] == [r.output for r in b]
