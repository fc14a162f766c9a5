"""Processors: the same as ordinary decoding's at every position, and nothing else let in (conditions F1, F3)."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessor
from transformers.generation import logits_process

from specdec_core.errors import SpecDecError
from specdec_core.processors import Processing, check_pure, from_generation_config

V = 12
EOS = (3, 5)
# Few ids, so that tokens and n-grams recur.
TEXT = st.lists(st.integers(0, 5), min_size=4, max_size=14)

SETTINGS: list[dict[str, Any]] = [
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6},
    {"no_repeat_ngram_size": 1},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"bad_words_ids": [[7], [1, 2], [0, 1, 4], [2, 2]]},
    {"bad_words_ids": [[3], [2, 3]]},  # EOS alone is dropped, EOS after another token is not
    {"min_length": 7},
    {"min_new_tokens": 3},
    {"min_length": 40, "min_new_tokens": 0},  # the latter overrides the former
    {"suppress_tokens": [0, 9]},
    {"begin_suppress_tokens": [2, 3]},
    {"forced_eos_token_id": 5, "max_new_tokens": 4},
    {"sequence_bias": [[[4], 2.5], [[1, 0], -3.0]], "no_repeat_ngram_size": 2},
    {"renormalize_logits": False, "guidance_scale": 1, "encoder_repetition_penalty": 1.0},
    {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[1, 2], [8]],
        "min_new_tokens": 3,
        "suppress_tokens": [0],
        "begin_suppress_tokens": [4],
        "forced_eos_token_id": 3,
        "max_new_tokens": 4,
    },
]


@pytest.fixture(scope="module")
def llama() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config: Any = LlamaConfig(**sizes, vocab_size=V, eos_token_id=None, initializer_range=0.6)  # type: ignore[arg-type]
    return LlamaForCausalLM(config).eval()


def logits_for(*shape: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(*shape, V, generator=torch.Generator().manual_seed(seed))


def after(processing: Processing, logits: Tensor, text: Sequence[int], prompt: int) -> Tensor:
    return processing.process(logits, [torch.tensor(text, dtype=torch.int64)], [prompt])


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


# --- as Hugging Face does it ------------------------------------------------------------------------------


@pytest.mark.parametrize("asked", SETTINGS, ids=lambda asked: "+".join(asked))
@given(text=TEXT, prompt=st.integers(1, 4), seed=st.integers(0, 9))
@settings(max_examples=6, deadline=None)
def test_every_position_is_processed_as_generate_would(
    llama: Any, asked: dict[str, Any], text: list[int], prompt: int, seed: int
) -> None:
    config = GenerationConfig(**asked, eos_token_id=list(EOS))
    ours = from_generation_config(config, EOS, asked.get("max_new_tokens"))
    ours.check(V)
    llama._prepare_special_tokens(config, device="cpu")
    config.max_length = prompt + asked.get("max_new_tokens", 100)
    if asked.get("min_new_tokens") is not None:  # as _prepare_generated_length does
        config.min_length = prompt + asked["min_new_tokens"]
    theirs = llama._get_logits_processor(config, input_ids_seq_length=prompt, device="cpu")
    for end in range(prompt, len(text) + 1):
        logits = logits_for(1, seed=seed + end)
        expected = theirs(torch.tensor([text[:end]]), logits.clone())
        assert same(after(ours, logits, text[:end], prompt), expected)


@pytest.mark.parametrize("asked", SETTINGS, ids=lambda asked: "+".join(asked))
def test_greedy_decoding_with_processing_is_that_of_generate(llama: Any, asked: dict[str, Any]) -> None:
    config = GenerationConfig(**{"max_new_tokens": 12} | asked, eos_token_id=list(EOS), pad_token_id=0, do_sample=False)
    prompt = [1, 2, 0, 1]
    given_ids = torch.tensor([prompt])
    # Without a mask generate would hide the prompt's 0, for it is the id of padding too.
    expected = llama.generate(given_ids, attention_mask=torch.ones_like(given_ids), generation_config=config)[
        0
    ].tolist()
    ours, text = from_generation_config(config, EOS, config.max_new_tokens), list(prompt)
    while len(text) < len(prompt) + int(config.max_new_tokens or 0) and (text == prompt or text[-1] not in EOS):
        with torch.no_grad():
            logits = llama(torch.tensor([text])).logits[:, -1]
        text.append(int(after(ours, logits, text, len(prompt)).argmax()))
    assert text == expected


def test_a_plain_generation_config_asks_for_nothing() -> None:
    assert not from_generation_config(GenerationConfig(), ()).active
    assert not from_generation_config(GenerationConfig(temperature=0.3, top_k=5, do_sample=True), EOS).active
    assert not from_generation_config(SimpleNamespace(eos_token_id=None), EOS).active


def test_the_settings_of_a_generation_config_arrive() -> None:
    config = GenerationConfig(**SETTINGS[-1])
    want = Processing(
        repetition_penalty=1.3,
        no_repeat_ngram=2,
        bad_words=((1, 2), (8,)),
        min_new_tokens=3,
        eos=EOS,
        suppress=(0,),
        begin_suppress=(4,),
        forced=((3, 3),),
    )
    assert from_generation_config(config, EOS, 4) == want


@pytest.mark.parametrize(
    "asked",
    [
        {"guidance_scale": 1.5},
        {"encoder_repetition_penalty": 1.2},
        {"encoder_no_repeat_ngram_size": 2},
        {"exponential_decay_length_penalty": (3, 1.1)},
        {"watermarking_config": {"bias": 2.0}},
        {"forced_bos_token_id": 1},
        {"remove_invalid_values": True},
        {"forced_eos_token_id": 3},
        {"forced_eos_token_id": [3, 5]},
        {"sequence_bias": [[[4], 2.5]], "repetition_penalty": 1.2},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_a_setting_that_cannot_be_applied_is_refused_by_name(asked: dict[str, Any]) -> None:
    with pytest.raises(SpecDecError, match=next(iter(asked))) as refusal:
        from_generation_config(GenerationConfig(**asked), EOS)
    assert "\n" not in str(refusal.value)


# --- F1: once per token, also when a block is judged in one pass ------------------------------------------

ALL = Processing(
    repetition_penalty=1.4,
    presence_penalty=0.6,
    frequency_penalty=0.3,
    min_new_tokens=4,
    min_length=6,
    eos=EOS,
    suppress=(9,),
    begin_suppress=(4,),
    bad_words=((1, 2), (0, 0)),
    no_repeat_ngram=3,
    forced=((2, 7), (6, 3)),
    extra=(transformers.TopKLogitsWarper(9),),
)


@given(
    rows=st.lists(st.tuples(TEXT, st.integers(1, 4)), min_size=1, max_size=3),
    drafted=st.lists(st.integers(0, V - 1), min_size=12, max_size=12),
    processing=st.sampled_from(
        [
            ALL,
            Processing(repetition_penalty=1.4),
            Processing(presence_penalty=0.5, frequency_penalty=-0.2),
            Processing(min_new_tokens=6, eos=EOS),
        ]
    ),
)
@settings(max_examples=25, deadline=None)
def test_a_block_of_four_is_processed_as_five_single_tokens_would_be(
    rows: list[tuple[list[int], int]], drafted: list[int], processing: Processing
) -> None:
    texts, prompts = [text for text, _ in rows], [prompt for _, prompt in rows]
    block = torch.tensor(drafted[: 4 * len(rows)]).view(len(rows), 4)
    logits = logits_for(len(rows), 5)
    scored = processing.process_block(logits, texts, prompts, block)
    for b, (text, prompt) in enumerate(rows):
        for j in range(5):
            grown = [*text, *block[b, :j].tolist()]
            assert same(scored[b, j : j + 1], after(processing, logits[b, j : j + 1], grown, prompt))
    for i in range(4):  # a draft that sees the same logits makes the same law, so q cannot differ from p by processing
        drafting = processing.process_block(logits[:, i : i + 1], texts, prompts, block[:, :i])
        assert same(drafting, scored[:, i : i + 1])


def test_penalties_follow_their_definitions() -> None:
    prompt, output = [1, 1, 2], [2, 4, 4, 4]
    logits = logits_for(1)
    got = after(Processing(presence_penalty=0.5, frequency_penalty=0.25), logits, prompt + output, 3)
    for token in range(V):
        count = output.count(token)
        assert float(got[0, token]) == pytest.approx(float(logits[0, token]) - 0.25 * count - 0.5 * (count > 0))
    got = after(Processing(repetition_penalty=2.0), logits, prompt + output, 3)
    for token in range(V):
        x = float(logits[0, token])
        assert float(got[0, token]) == (x if token not in prompt + output else x / 2 if x > 0 else x * 2)


def test_the_minimum_length_counts_each_row_from_its_own_prompt() -> None:
    processing = Processing(min_new_tokens=2, eos=EOS)
    texts, prompts = [[1, 2, 4], [1]], [3, 1]
    got = processing.process_block(logits_for(2, 4), texts, prompts, torch.tensor([[0, 0, 0], [0, 0, 0]]))
    held = got[..., list(EOS)].isneginf().all(-1)
    assert held.tolist() == [[True, True, False, False]] * 2


def test_forced_tokens_come_at_their_output_position_alone() -> None:
    processing = Processing(forced=((1, 7),), min_new_tokens=5, eos=(7,), bad_words=((7,),))
    got = processing.process_block(logits_for(1, 4), [[1, 2]], [2], torch.tensor([[7, 7, 7]]))
    certain = torch.isfinite(got[0]).sum(-1) == 1
    assert certain.tolist() == [False, True, False, False]
    assert int(got[0, 1].argmax()) == 7


def test_rows_with_ragged_prompts_do_not_influence_each_other() -> None:
    texts, prompts = [[0, 1, 2, 0, 1], [4], [1, 1, 1, 5, 5, 5, 2]], [3, 1, 7]
    block, logits = torch.tensor([[0, 1, 2, 0], [4, 4, 4, 4], [0, 0, 1, 1]]), logits_for(3, 5)
    together = ALL.process_block(logits, texts, prompts, block)
    for b in range(3):
        alone = ALL.process_block(logits[b : b + 1], texts[b : b + 1], prompts[b : b + 1], block[b : b + 1])
        assert same(together[b : b + 1], alone)
    back = ALL.process_block(logits.flip(0), texts[::-1], prompts[::-1], block.flip(0)).flip(0)
    assert same(together, back)


def test_padding_and_ids_beyond_the_vocabulary_do_no_harm() -> None:
    logits, good = logits_for(1, 5), torch.tensor([[1, 2, 0, 0]])
    bad = torch.tensor([[1, 2, -1, V + 90]])
    texts = [[0, 1, V + 4]]  # a prompt may hold ids that the output head lacks
    got, want = (ALL.process_block(logits, texts, [3], block) for block in (bad, good))
    assert same(got[:, :3], want[:, :3])
    penalised = after(Processing(presence_penalty=1.0, repetition_penalty=1.5), logits[0, :1], [V + 1, 0, V + 3], 1)
    assert (penalised != logits[0, :1]).nonzero()[:, 1].tolist() == [0]


def test_what_goes_in_is_not_written_to_and_the_answer_is_the_same_bit_for_bit() -> None:
    class Scribbler(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores.mul_(2.0)

    processing = Processing(extra=(Scribbler(),), repetition_penalty=1.2, no_repeat_ngram=2)
    processing.check(V)
    for chosen in (processing, Processing(extra=(Scribbler(),)), Processing()):
        logits, text, block = logits_for(1, 3), [1, 2, 1], torch.tensor([[2, 2]])
        before = logits.clone(), list(text), block.clone()
        first = chosen.process_block(logits, [text], [2], block)
        first_again = first.clone()
        chosen.process_block(logits_for(1, 3, seed=5), [[4, 4, 4]], [1], block)
        assert same(chosen.process_block(logits, [text], [2], block), first_again)
        first.zero_()
        assert same(logits, before[0])
        assert text == before[1]
        assert same(block, before[2])


def test_half_precision_is_processed_in_float32_and_no_rows_give_no_rows() -> None:
    logits = logits_for(2).bfloat16()
    texts = [torch.tensor([1, 2]), torch.tensor([2])]
    assert same(ALL.process(logits, texts, [1, 1]), ALL.process(logits.float(), texts, [1, 1]))
    assert ALL.process(logits[:0], [], []).shape == (0, V)


def test_one_processing_serves_models_of_different_size() -> None:
    processing = Processing(bad_words=((1,), (2, 3)), suppress=(0,))
    for vocab in (8, 16, 8):
        got = processing.process(torch.zeros(1, vocab), [torch.tensor([2])], [1])
        assert got.isneginf().nonzero()[:, 1].tolist() == [0, 1, 3]


# --- F3: what cannot be applied per position raises -------------------------------------------------------


class CountsCalls(LogitsProcessor):
    calls = 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.calls += 1
        return scores


class RemembersLastText(LogitsProcessor):
    last: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        grown = self.last is not None and input_ids.shape[1] > self.last.shape[1]
        self.last = input_ids
        return scores + 1.0 if grown else scores


class TakesFirstTextForPrompt(LogitsProcessor):
    """The usual way to learn the prompt's length; it looks like a lazily filled cache."""

    start: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.start = input_ids.shape[1] if self.start is None else self.start
        return scores * (1 + input_ids.shape[1] - self.start)


class AddsNoise(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.randn_like(scores)


class DrawsButSeldomUses(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + float(torch.rand(()) < 1e-9)


class OwnGenerator(LogitsProcessor):
    def __init__(self) -> None:
        self.rng = torch.Generator().manual_seed(0)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + float(torch.rand((), generator=self.rng) < 1e-9)


class CountsInsideATensor(LogitsProcessor):
    def __init__(self) -> None:
        self.nested = {"deep": [torch.zeros(3)]}

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.nested["deep"][0][1] += 1
        return scores


class CountsInASlot(LogitsProcessor):
    class Counter:
        __slots__ = ("n",)

        def __init__(self) -> None:
            self.n = 0

    def __init__(self) -> None:
        self.counter = self.Counter()

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.counter.n += 1
        return scores


class KeepsRowsOfTheBatch(LogitsProcessor):
    rows: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        self.rows = scores if self.rows is None or len(self.rows) != len(scores) else self.rows
        return scores + self.rows


class SubtractsTheBatchMean(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores - scores.mean(0, keepdim=True)


class FavoursTheFirstRow(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + torch.arange(len(scores)).unsqueeze(1)


class WritesIntoTheText(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        input_ids[:, 0] = 1
        return scores


class AddsAColumn(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return torch.cat([scores, scores[:, :1]], 1)


class ReturnsNothing(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> None:
        return None


class Raises(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        raise KeyError("no grammar\nhere")


class WantsMoreArguments(LogitsProcessor):
    def __call__(self, input_ids: Tensor, scores: Tensor, model: Any) -> Tensor:
        return scores


class HoldsAGenerator(LogitsProcessor):
    def __init__(self) -> None:
        self.steps = (i for i in range(9))


def constrained(num_beams: int = 1) -> LogitsProcessor:
    def allowed(row: int, ids: Tensor) -> list[int]:
        return [int(ids[-1]), 0]

    return transformers.PrefixConstrainedLogitsProcessor(allowed, num_beams)


LENGTHS: list[int] = []


class RemembersInTheModule(LogitsProcessor):
    """Its memory is out of sight: only its answers give it away."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        LENGTHS.append(input_ids.shape[1])
        return scores + float(sum(LENGTHS[-2:]))


def counts_in_a_local_class() -> LogitsProcessor:
    class Late(LogitsProcessor):
        def __init__(self) -> None:
            self.counts = torch.zeros(5000)  # too long for its repr to show every number

        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            self.counts[2500] += 1
            return scores + float(self.counts[2500] > 40) * torch.arange(scores.shape[-1])

    return Late()


NASTY = [
    counts_in_a_local_class,
    RemembersInTheModule,
    CountsCalls,
    RemembersLastText,
    TakesFirstTextForPrompt,
    AddsNoise,
    DrawsButSeldomUses,
    OwnGenerator,
    CountsInsideATensor,
    CountsInASlot,
    KeepsRowsOfTheBatch,
    SubtractsTheBatchMean,
    FavoursTheFirstRow,
    WritesIntoTheText,
    AddsAColumn,
    ReturnsNothing,
    Raises,
    WantsMoreArguments,
    HoldsAGenerator,
    LogitsProcessor,
    lambda: constrained(num_beams=2),
    lambda: transformers.RepetitionPenaltyLogitsProcessor(1.2, torch.tensor([0, 3, 1])),
]


@pytest.mark.parametrize("make", NASTY)
def test_a_processor_that_is_no_function_of_text_and_logits_is_refused(make: Callable[[], LogitsProcessor]) -> None:
    processor = make()
    with pytest.raises(SpecDecError, match=type(processor).__name__) as refusal:
        Processing(extra=(processor,)).check(V)
    assert "\n" not in str(refusal.value)


UNFIT: list[Callable[[], LogitsProcessor]] = [
    lambda: logits_process.UnbatchedClassifierFreeGuidanceLogitsProcessor(1.5, None),
    lambda: logits_process.ClassifierFreeGuidanceLogitsProcessor(1.5),
    lambda: logits_process.DiaClassifierFreeGuidanceLogitsProcessor(1.5),
    lambda: logits_process.DiaEOSChannelFilterLogitsProcessor(1, 2),
    lambda: logits_process.DiaEOSDelayPatternLogitsProcessor([0], 2, 9),
    lambda: logits_process.BarkEosPrioritizerLogitsProcessor(2, 0.5),
    lambda: logits_process.AlternatingCodebooksLogitsProcessor(2, 3, 4),
    lambda: logits_process.EncoderNoRepeatNGramLogitsProcessor(2, torch.tensor([[1, 2]])),  # type: ignore[arg-type]
    lambda: logits_process.EncoderRepetitionPenaltyLogitsProcessor(1.2, torch.tensor([[1, 2]])),  # type: ignore[arg-type]
    lambda: logits_process.WhisperNoSpeechDetection(2, 1),
    lambda: logits_process.SynthIDTextWatermarkLogitsProcessor(3, [1, 2, 3], 64, 0, 8, torch.device("cpu")),
    lambda: logits_process.WatermarkLogitsProcessor(V, "cpu"),
    lambda: logits_process.MinNewTokensLengthLogitsProcessor(3, 4, 2),
    lambda: logits_process.SuppressTokensAtBeginLogitsProcessor([1], 3),
    lambda: logits_process.ExponentialDecayLengthPenalty((2, 1.1), 2, 3),
]


@pytest.mark.parametrize("make", UNFIT)
def test_hugging_faces_own_that_need_more_than_a_row_are_refused_at_once(make: Callable[[], LogitsProcessor]) -> None:
    processor = make()
    with pytest.raises(SpecDecError, match=type(processor).__name__):
        Processing(extra=(processor,))
    heir: Any = type("Heir", (type(processor),), {})
    with pytest.raises(SpecDecError, match="Heir"):
        Processing(extra=(heir.__new__(heir),))


def test_a_name_alone_condemns_nobodys_own_processor() -> None:
    class WatermarkOfMine(LogitsProcessor):
        def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
            return scores + input_ids[:, -1:]

    Processing(extra=(WatermarkOfMine(),)).check(V)


class FillsACache(LogitsProcessor):
    bias: Tensor | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.bias is None:
            self.bias = torch.linspace(0, 1, scores.shape[-1])
        return scores + self.bias


@functools.lru_cache
def doubled(length: int) -> int:
    return 2 * length


class CallsAFunction(LogitsProcessor):
    def __init__(self, function: Callable[[int], float]) -> None:
        self.function, self.me, self.net = function, self, torch.nn.Linear(2, 2)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores + self.function(input_ids.shape[1])


PURE: list[Callable[[], LogitsProcessor]] = [
    FillsACache,
    lambda: CallsAFunction(doubled),
    lambda: CallsAFunction(functools.partial(pow, 2)),
    constrained,
    lambda: transformers.SequenceBiasLogitsProcessor([[[1], 2.0], [[1, 2], -1.0]]),
    lambda: transformers.NoBadWordsLogitsProcessor([[1], [2, 0]]),
    lambda: transformers.RepetitionPenaltyLogitsProcessor(1.3),
    lambda: transformers.RepetitionPenaltyLogitsProcessor(1.3, 2),
    lambda: transformers.NoRepeatNGramLogitsProcessor(2),
    lambda: transformers.MinLengthLogitsProcessor(9, [2]),
    lambda: transformers.ForcedEOSTokenLogitsProcessor(10, 2),
    lambda: transformers.SuppressTokensLogitsProcessor([1]),
    lambda: transformers.InfNanRemoveLogitsProcessor(),
    lambda: transformers.LogitNormalization(),
    lambda: transformers.TemperatureLogitsWarper(0.7),
    lambda: transformers.TopKLogitsWarper(3),
    lambda: transformers.TopPLogitsWarper(0.8),
    lambda: transformers.MinPLogitsWarper(0.1),
    lambda: logits_process.TopHLogitsWarper(0.4),
    lambda: transformers.TypicalLogitsWarper(0.8),
    lambda: transformers.EpsilonLogitsWarper(0.02),
    lambda: transformers.EtaLogitsWarper(0.02),
]


@pytest.mark.parametrize("make", PURE)
def test_pure_processors_pass_untouched_and_act_per_position(make: Callable[[], LogitsProcessor]) -> None:
    processor = make()
    before = {key: repr(value) for key, value in vars(processor).items()}
    state = torch.get_rng_state()
    for vocab in (V, 200, V):  # the probe runs on copies: a cache made for another vocabulary does not stick
        check_pure(processor, vocab)
    assert {key: repr(value) for key, value in vars(processor).items()} == before
    assert torch.equal(torch.get_rng_state(), state)
    logits, text = logits_for(1, 4), [0, 1, 2, 0, 1, 2]
    got = Processing(extra=(processor,)).process_block(logits, [text[:3]], [2], torch.tensor([text[3:]]))
    for j in range(4):
        assert same(got[:, j], make()(torch.tensor([text[: 3 + j]]), logits[:, j].clone()))


def test_processors_in_extra_act_last_and_in_their_order() -> None:
    double, shift = transformers.TemperatureLogitsWarper(0.5), transformers.SequenceBiasLogitsProcessor([[[1], 1.0]])
    logits = torch.ones(1, 3)
    assert after(Processing(extra=(double, shift), suppress=(0,)), logits, [0], 1).tolist() == [[-math.inf, 3, 2]]
    assert after(Processing(extra=(shift, double), suppress=(0,)), logits, [0], 1).tolist() == [[-math.inf, 4, 2]]


# --- refusals and lineage ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("repetition_penalty", math.nan),
        ("repetition_penalty", "1.2"),
        ("repetition_penalty", True),
        ("presence_penalty", math.nan),
        ("presence_penalty", None),
        ("frequency_penalty", -math.inf),
        ("min_new_tokens", -1),
        ("min_new_tokens", 2.0),
        ("min_length", "3"),
        ("no_repeat_ngram", -2),
        ("no_repeat_ngram", True),
        ("eos", 2),
        ("eos", (2, "3")),
        ("eos", "23"),
        ("suppress", (-1,)),
        ("suppress", (1.5,)),
        ("suppress", {1: 2}),
        ("begin_suppress", None),
        ("bad_words", (1, 2)),
        ("bad_words", ((),)),
        ("bad_words", ("ab",)),
        ("forced", ((0, 1, 2),)),
        ("forced", ((0, -1),)),
        ("forced", ((0, 1), (0, 2))),
        ("forced", (3,)),
        ("extra", transformers.TopKLogitsWarper(3)),
        ("extra", (transformers.TopKLogitsWarper,)),
        ("extra", (lambda ids, scores: scores,)),
    ],
)
def test_bad_values_are_refused_by_name_in_one_line(name: str, value: Any) -> None:
    with pytest.raises(SpecDecError, match=name) as refusal:
        Processing(**{name: value})
    assert "\n" not in str(refusal.value)


def test_a_token_cannot_be_forced_and_suppressed() -> None:
    for clash in ({"suppress": (4,)}, {"begin_suppress": (4,)}):
        with pytest.raises(SpecDecError, match="forced and suppressed"):
            Processing(forced=((0, 4),), **clash)  # type: ignore[arg-type]
    Processing(forced=((1, 4),), begin_suppress=(4,))


@pytest.mark.parametrize(
    "settings",
    [
        {"suppress": (1, V)},
        {"begin_suppress": (V,)},
        {"bad_words": ((1,), (2, V))},
        {"forced": ((0, 1), (1, V))},
        {"eos": (V,), "min_new_tokens": 1},
        {"eos": (V,), "min_length": 1},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_ids_outside_the_vocabulary_are_refused_by_name(settings: dict[str, Any]) -> None:
    processing = Processing(**settings)
    processing.check(V + 1)
    with pytest.raises(SpecDecError, match=f"{next(iter(settings))}.*{V}") as refusal:
        processing.check(V)
    assert "\n" not in str(refusal.value)


def test_only_what_acts_makes_it_active() -> None:
    assert not Processing().active
    assert not Processing(eos=EOS).active
    assert Processing(repetition_penalty=1.1).active
    assert Processing(forced=((0, 1),)).active
    assert ALL.active


def test_lists_are_taken_for_tuples() -> None:
    made = Processing(suppress=[1, 2], bad_words=[[1], [2, 3]], forced=[[0, 4]], extra=[])  # type: ignore[arg-type]
    assert made == Processing(suppress=(1, 2), bad_words=((1,), (2, 3)), forced=((0, 4),))
    assert hash(made) == hash(Processing(suppress=(1, 2), bad_words=((1,), (2, 3)), forced=((0, 4),)))
