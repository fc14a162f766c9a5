"""What only a GPU can show. Skipped, saying so, where there is none."""

from __future__ import annotations

import pytest
import torch
from kit import decode, noisy_copy, tiny_llama

from specdec_core import SamplingPolicy
from specdec_core.caches import ModelCache
from specdec_core.drafters import ModelDrafter, PromptLookupDrafter
from specdec_core.lab.identity import first_divergence
from specdec_core.loop import Settings
from specdec_core.record import seconds_by_stage
from specdec_core.verify import BLOCK

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


@pytest.mark.parametrize("policy", [GREEDY, SamplingPolicy(0.8)])
def test_passes_captured_as_graphs_give_the_tokens_of_passes_that_are_not(policy):
    target = tiny_llama(3).cuda()
    draft = noisy_copy(target)
    plain = decode(target, PROMPTS, ModelDrafter(draft, policy, 64), 30, Settings(gamma=3, policy=policy))
    for most in (None, 2):
        settings = Settings(gamma=3, policy=policy, fixed_shapes=True, max_batch=most)
        fixed = decode(target, PROMPTS, ModelDrafter(draft, policy, 64, capacity=64), 30, settings)
        assert [r.output for r in fixed] == [r.output for r in plain]


def test_a_captured_pass_is_one_graph_for_each_width_and_gives_the_same_logits():
    target = tiny_llama(3).cuda()
    fixed, plain = ModelCache(target, 2, capacity=32), ModelCache(target, 2)
    with torch.inference_mode():
        for width in (3, 2, 3, 2, 1):
            tokens = torch.randint(0, 64, (2, width), device="cuda")
            assert torch.allclose(fixed.extend(tokens), plain.extend(tokens), atol=1e-4)
    assert sorted(fixed.graphs) == [1, 2, 3]
    assert all(captured.graph is not None for captured in fixed.graphs.values())


@pytest.mark.parametrize("rule", [None, BLOCK])
def test_verification_reads_nothing_from_the_device(rule):
    """Between the drafted block and the step's one read, torch is told to fail at any wait for the GPU."""
    from specdec_core.sampling import draw
    from specdec_core.verify import TOKEN, accept, first_invalid, next_law, try_branches

    chosen = rule or TOKEN
    p, q = torch.rand(4, 4, 50, device="cuda").softmax(-1), torch.rand(4, 3, 50, device="cuda").softmax(-1)
    tokens, lengths = torch.randint(0, 50, (4, 3), device="cuda"), torch.full((4,), 3, device="cuda")
    u = torch.rand(4, dtype=torch.float64, device="cuda")
    branches = torch.randint(0, 50, (4, 2), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        known = first_invalid(q, tokens, lengths)
        count = accept(chosen, p, q, tokens, known, u)
        law = next_law(chosen, p, q, tokens, known, count)
        _, left = try_branches(TOKEN, law, q[:, 0], tokens[:, 0], branches, u)
        draw(left, u)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_several_candidates_and_ragged_rows_run_in_every_dtype_and_attention(implementation, dtype):
    target = tiny_llama(3, attn_implementation=implementation).to("cuda", dtype)
    drafter = ModelDrafter(noisy_copy(target), GREEDY, 64, candidates=2)
    rows = decode(target, PROMPTS, drafter, 30, Settings(gamma=3, max_batch=2))
    for row, prompt in zip(rows, PROMPTS, strict=True):
        (base,) = decode(target, [prompt], tokens=30)
        split = first_divergence(target, prompt, base.output, row.output)
        assert split is None or split.ulps <= 4, split
