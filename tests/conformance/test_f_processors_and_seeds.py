"""Conditions F: processors act per position of a block as they would one token at a time; rows keep their seeds."""

from __future__ import annotations

import pytest
import torch
from kit import decode, noisy_copy, pair_of, tiny_llama
from transformers import LogitsProcessor, TopKLogitsWarper

from specdec_core import Processing, SamplingPolicy, SpecDecError, generate, generate_batch
from specdec_core.drafters import ModelDrafter, PromptLookupDrafter
from specdec_core.loop import Settings

PROMPT = [3, 3, 4, 5]
GREEDY = SamplingPolicy()
CHAINS = {
    "repetition": Processing(repetition_penalty=1.3),
    "frequency and presence": Processing(frequency_penalty=0.4, presence_penalty=0.3),
    "minimum length": Processing(min_new_tokens=9, eos=tuple(range(0, 64, 3))),
    "bad words": Processing(bad_words=((7,), (8, 9)), no_repeat_ngram=2),
    "forced": Processing(forced=((2, 11), (5, 12)), suppress=(1, 2, 3)),
    "any of Hugging Face": Processing(extra=(TopKLogitsWarper(20),)),
}


class OneAtATime:
    """Ordinary decoding spelled out: a plain pass for each token, processors called on the text so far."""

    def __init__(self, target, processing):
        self.target, self.processing = target, processing

    def greedy(self, prompt, count):
        text = list(prompt)
        for _ in range(count):
            logits = self.target(torch.tensor([text]), use_cache=False).logits[:, -1]
            if self.processing.active:
                logits = self.processing.process(logits, [torch.tensor(text)], [len(prompt)])
            text.append(int(logits.argmax()))
        return text[len(prompt) :]


@pytest.mark.parametrize("chain", CHAINS)
@pytest.mark.parametrize("gamma", [1, 4])
def test_f1_processors_act_once_per_token_also_when_four_are_accepted_at_once(chain, gamma):
    target = tiny_llama()
    processing = CHAINS[chain]
    want = OneAtATime(target, processing).greedy(PROMPT, 30)
    settings = Settings(gamma=gamma, processing=processing)
    drafters = {
        "itself": ModelDrafter(target, GREEDY, 64, processing=processing),
        "noisy": ModelDrafter(noisy_copy(target), GREEDY, 64, processing=processing),
        "candidates": ModelDrafter(noisy_copy(target), GREEDY, 64, candidates=3, processing=processing),
        "unaware": ModelDrafter(target, GREEDY, 64),
        "lookup": PromptLookupDrafter(),
    }
    assert decode(target, [PROMPT], tokens=30, settings=settings)[0].output == want
    for name, drafter in drafters.items():
        (ours,) = decode(target, [PROMPT], drafter, 30, settings)
        assert ours.output == want, name
        if name == "itself":
            assert sum(r.rejected for r in ours.records) == 0
            assert max(r.accepted for r in ours.records) == gamma


@pytest.mark.parametrize("chain", CHAINS)
def test_f1_in_a_ragged_batch_each_row_has_its_own_history(chain):
    target = tiny_llama(scale=0.1)
    policy, prompts = SamplingPolicy(1.0), [PROMPT, [9] * 12, [1, 2]]
    settings = Settings(gamma=3, policy=policy, processing=CHAINS[chain])
    make = lambda: ModelDrafter(noisy_copy(target), policy, 64, processing=CHAINS[chain])  # noqa: E731
    together = decode(target, prompts, make(), 20, settings)
    for i, prompt in enumerate(prompts):
        assert together[i].output == decode(target, [prompt], make(), 20, settings, first_id=i)[0].output


class CountsCalls(LogitsProcessor):
    """Its answer depends on how often it was called: four times for a block where ordinary decoding calls it once."""

    calls = 0

    def __call__(self, input_ids, scores):
        self.calls += 1
        return scores - self.calls


class Remembers(LogitsProcessor):
    """Forbids what it saw last time, be it drafted and thrown away."""

    last = None

    def __call__(self, input_ids, scores):
        before, self.last = self.last, input_ids[:, -1].clone()
        return scores if before is None else scores.scatter(1, before.unsqueeze(1), -torch.inf)


@pytest.mark.parametrize("processor", [CountsCalls, Remembers])
@pytest.mark.parametrize("speculate", [True, False])
def test_f3_a_processor_that_cannot_be_applied_per_position_raises_before_the_first_token(processor, speculate):
    pair = pair_of(tiny_llama())
    with pytest.raises(SpecDecError, match=processor.__name__):
        generate(pair, PROMPT, max_new_tokens=5, processing=Processing(extra=(processor(),)), speculate=speculate)


def test_f4_the_token_after_a_fully_accepted_block_is_counted_once():
    target = tiny_llama()
    (request,) = decode(target, [PROMPT], ModelDrafter(target, GREEDY, 64), 31, Settings(gamma=4))
    whole = [r for r in request.records if r.last == "bonus"]
    assert whole
    assert all(len(r.emitted) == r.accepted + 1 == 5 for r in whole)
    assert sum(len(r.emitted) for r in request.records) == len(request.output) == 31


@pytest.mark.parametrize("drafter", ["prompt_lookup", "self"])
def test_f5_a_seeded_row_is_the_same_in_any_batch(drafter):
    pair = pair_of(tiny_llama(scale=0.1))
    options = {"max_new_tokens": 20, "temperature": 1.0, "drafter": drafter, "gamma": 3}
    prompts = [PROMPT, [9, 9], [1, 2, 3, 4, 5]]
    first = generate_batch(pair, prompts, seed=[1, None, 2], **options)
    again = generate_batch(pair, prompts, seed=[1, None, 2], **options)
    turned = generate_batch(pair, prompts[::-1], seed=[2, None, 1], max_batch=2, **options)
    for row in (0, 2):
        assert first[row].tokens == again[row].tokens == turned[2 - row].tokens
    assert generate(pair, prompts[2], seed=[2], **options).tokens == first[2].tokens
    assert first[1].tokens != again[1].tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_f8_a_mask_that_forbids_the_bonus_token_is_obeyed(temperature, gamma):
    """After each position of the block another token is forbidden: the one that the target likes best there."""
    target = tiny_llama(scale=0.3)
    policy = SamplingPolicy(temperature)
    free = decode(target, [PROMPT], tokens=20)[0].output

    class Forbid(LogitsProcessor):
        """At every (gamma + 1)th position the token that ordinary greedy decoding put there is forbidden."""

        def __call__(self, input_ids, scores):
            at = input_ids.shape[1] - len(PROMPT)
            if 0 <= at < 20 and at % (gamma + 1) == 0:
                scores = scores.clone()
                scores[:, free[at]] = -torch.inf
            return scores

    processing = Processing(extra=(Forbid(),))
    settings = Settings(gamma=gamma, policy=policy, processing=processing)
    drafter = ModelDrafter(target, policy, 64, processing=processing)
    for seed in range(5):
        (request,) = decode(target, [PROMPT], drafter, 20, settings, seed=seed)
        assert all(request.output[at] != free[at] for at in range(0, 20, gamma + 1))
        assert any(r.last == "bonus" for r in request.records)
        assert sum(r.rejected for r in request.records) == 0
