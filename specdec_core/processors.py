"""What acts on logits before temperature and filters, for each position of a block as ordinary decoding would apply it.

A processor looks at the text before a position. In a block that text holds drafted tokens which may yet be thrown away,
so every processor must be a pure function of (text, logits). Ours are; those of others are put to the test.
"""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    NoBadWordsLogitsProcessor,
    NoRepeatNGramLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
)

from .errors import SpecDecError, listed, number, whole

_MOST = 2**31


@dataclass(frozen=True)
class Processing:
    """The processors of a run; as constructed it does nothing. Lists are taken for tuples.

    They act in the order of the list, which is that of Hugging Face ``generate`` (the two penalties that it lacks stand
    where vLLM has them); then come temperature and the filters of :class:`~specdec_core.sampling.SamplingPolicy`.

    Attributes:
        repetition_penalty: logits of all tokens in prompt and output are divided by it where positive, multiplied
            where negative, once per token however often it occurs (Keskar et al. 2019, CTRL).
        frequency_penalty, presence_penalty: subtracted from a logit for each time, and once if at all, that its token
            occurs in the output; the prompt does not count (the definition of OpenAI and vLLM).
        no_repeat_ngram: no sequence of so many tokens occurs twice in prompt and output.
        bad_words: sequences of token ids that are never completed. Hugging Face lets EOS pass even if it is listed as
            a word of its own; here it is held back too (``from_generation_config`` drops it as Hugging Face does).
        min_length, min_new_tokens: no EOS before prompt and output, or the output, have so many tokens.
        eos: the ids those two hold back.
        forced: (output position from 0, token id) pairs: that token and no other. Stronger than all of the above.
        suppress, begin_suppress: ids that are never output, and never output first.
        extra: Hugging Face processors of any kind that pass :func:`check_pure`. Warpers (TopK, Typical, Eta, ...) pass
            too; here they act before the temperature, whereas ``generate`` puts its own behind it.
    """

    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    min_new_tokens: int = 0
    eos: tuple[int, ...] = ()
    suppress: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    no_repeat_ngram: int = 0
    forced: tuple[tuple[int, int], ...] = ()
    extra: tuple[LogitsProcessor, ...] = ()
    min_length: int = 0
    begin_suppress: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        above = "a number above 0, where 1 is off"
        penalty = number("repetition_penalty", self.repetition_penalty, lambda x: 0 < x < math.inf, above)
        object.__setattr__(self, "repetition_penalty", penalty)
        for name in ("presence_penalty", "frequency_penalty"):
            value = number(name, getattr(self, name), math.isfinite, "a finite number, where 0 is off")
            object.__setattr__(self, name, value)
        for name in ("min_new_tokens", "min_length", "no_repeat_ngram"):
            whole(name, getattr(self, name), 0, _MOST)
        for name, depth in (("eos", 1), ("suppress", 1), ("begin_suppress", 1), ("bad_words", 2), ("forced", 2)):
            object.__setattr__(self, name, _ids(name, getattr(self, name), depth))
        if not all(self.bad_words):
            raise SpecDecError("bad_words holds an empty word: give at least one token id in each.")
        if any(len(pair) != 2 for pair in self.forced) or len(dict(self.forced)) < len(self.forced):
            raise SpecDecError(
                f"forced={self.forced} is not possible: give pairs, output position and one token for it."
            )
        for position, token in self.forced:
            if token in self.suppress or (position == 0 and token in self.begin_suppress):
                raise SpecDecError(f"Token {token} is both forced and suppressed: take it out of one of the two.")
        object.__setattr__(self, "extra", tuple(listed("extra", self.extra, "a list of LogitsProcessor objects")))
        for processor in self.extra:
            _check_kind(processor)

    @cached_property
    def active(self) -> bool:
        """Whether anything acts at all; EOS ids alone do nothing."""
        return any(getattr(self, f.name) != f.default for f in fields(self) if f.name != "eos")

    def check(self, vocab: int, device: torch.device | str = "cpu") -> None:
        """Refuse what does not fit a model of ``vocab`` tokens on ``device``; to be called before the first token."""
        held_back = self.eos if self.min_new_tokens or self.min_length else ()
        named = [("eos", held_back), ("suppress", self.suppress), ("begin_suppress", self.begin_suppress)]
        named += [("bad_words", word) for word in self.bad_words]
        named += [("forced", (token,)) for _, token in self.forced]
        for name, token in ((name, token) for name, ids in named for token in ids):
            whole(f"{name}: token id", token, 0, vocab - 1)
        for processor in self.extra:
            check_pure(processor, vocab, device)

    def process(self, logits: Tensor, histories: Sequence[Tensor], prompts: Sequence[int]) -> Tensor:
        """``[N, V]`` logits -> ``[N, V]`` float32. Row i was judged after the text ``histories[i]`` (int64, on the
        same device), of which the first ``prompts[i]`` tokens are the prompt. Rows do not see each other."""
        copies = logits.detach().to(torch.float32, copy=True).unsqueeze(1)  # processors may write into them
        rows = [self._row(*row) for row in zip(copies, histories, prompts, strict=True)]
        return torch.cat(rows) if rows else logits.float()

    def process_block(
        self, logits: Tensor, sequences: Sequence[Sequence[int]], prompts: Sequence[int], drafted: Tensor
    ) -> Tensor:
        """``[B, m, V]`` -> ``[B, m, V]``: the last m of the d + 1 positions that ``drafted [B, d]`` makes.

        Position j of row b was judged after ``sequences[b]`` and ``drafted[b, : d - m + 1 + j]``. To score a block of
        g tokens d = g and m = g + 1; to draft token i (from 0) d = i and m = 1.
        """
        batch, m, vocab = logits.shape
        # Padding and tokens outside the vocabulary are never accepted: any id will do for the positions behind them.
        safe = drafted.clamp(0, vocab - 1)
        known = [torch.tensor(s, dtype=torch.int64, device=logits.device) for s in sequences]
        texts = [torch.cat(pair) for pair in zip(known, safe, strict=True)]
        histories = [text[: len(text) - m + 1 + j] for text in texts for j in range(m)]
        each = [prompt for prompt in prompts for _ in range(m)]
        return self.process(logits.flatten(0, 1), histories, each).view(batch, m, vocab)

    def _row(self, x: Tensor, text: Tensor, prompt: int) -> Tensor:
        ids, out, vocab, device = text.unsqueeze(0), len(text) - prompt, x.shape[-1], x.device
        if self.repetition_penalty != 1:
            x = RepetitionPenaltyLogitsProcessor(float(self.repetition_penalty))(ids, x)
        if self.frequency_penalty or self.presence_penalty:
            x = self._penalise(x, text[prompt:])
        if self.no_repeat_ngram:
            x = NoRepeatNGramLogitsProcessor(int(self.no_repeat_ngram))(ids, x)
        if self.bad_words:
            x = _never(self.bad_words, vocab, device)(ids, x)
        if self.eos and len(text) < max(self.min_length, prompt + self.min_new_tokens):
            x[:, list(self.eos)] = -math.inf
        if (token := dict(self.forced).get(out)) is not None:
            x = torch.full_like(x, -math.inf)
            x[:, token] = 0
        if suppressed := self.suppress + (self.begin_suppress if out == 0 else ()):
            x[:, list(suppressed)] = -math.inf
        for processor in self.extra:
            x = processor(ids, x)
        return x.float()

    def _penalise(self, x: Tensor, output: Tensor) -> Tensor:
        # Counted by scatter: bincount would wait for a GPU. The spare column takes ids beyond the output head.
        counts = x.new_zeros(x.shape[-1] + 1)
        counts = counts.scatter_add_(0, output.clamp(max=x.shape[-1]), x.new_ones(len(output)))[:-1]
        return x - self.frequency_penalty * counts - self.presence_penalty * (counts > 0)


@lru_cache(maxsize=64)
def _never(words: tuple[tuple[int, ...], ...], vocab: int, device: torch.device) -> LogitsProcessor:
    """Kept, since at its first call it makes a tensor of the vocabulary's size on the device."""
    return NoBadWordsLogitsProcessor([list(word) for word in words])


# --- what a model's generation_config asks for ------------------------------------------------------------

# What no pure function of one row's text can do, or needs what is not known here; with the value that is off, beside
# None. ``remove_invalid_values`` would hide a NaN, which this loop reports.
_INEXPRESSIBLE: dict[str, Any] = {
    "guidance_scale": 1,
    "encoder_repetition_penalty": 1,
    "encoder_no_repeat_ngram_size": 0,
    "exponential_decay_length_penalty": None,
    "forced_bos_token_id": None,
    "remove_invalid_values": False,
    "watermarking_config": None,
}


def from_generation_config(config: Any, eos: Sequence[int], max_new_tokens: int | None = None) -> Processing:
    """The processing that Hugging Face ``generate`` takes from a ``GenerationConfig``.

    Temperature and filters (top_k, top_p, min_p, top_h, typical_p, ...) belong to the sampling policy and are passed
    over, as is ``renormalize_logits``, which changes no law. ``max_new_tokens`` is needed for ``forced_eos_token_id``.

    Raises:
        SpecDecError: names a setting that cannot be applied per position.
    """

    def get(name: str, off: Any = None) -> Any:
        value = getattr(config, name, None)
        return off if value is None else value

    wrong = [f"{name}={get(name)!r}" for name, off in _INEXPRESSIBLE.items() if get(name, off) != off]
    last, bias, penalty = get("forced_eos_token_id", []), get("sequence_bias"), get("repetition_penalty", 1.0)
    last = last if isinstance(last, (list, tuple)) else [last]
    if last and (len(last) > 1 or max_new_tokens is None):
        wrong.append(f"forced_eos_token_id={last} without one id and max_new_tokens")
    if bias and penalty != 1:  # Hugging Face adds the bias before the penalty multiplies; all else commutes with it
        wrong.append(f"sequence_bias={bias!r} beside repetition_penalty")
    if wrong:
        raise SpecDecError(f"The generation_config sets {wrong[0]}, which cannot be applied here: set it to None.")
    return Processing(
        repetition_penalty=penalty,
        no_repeat_ngram=get("no_repeat_ngram_size", 0),
        bad_words=tuple(word for word in get("bad_words_ids", ()) if list(word) not in [[i] for i in eos]),
        min_length=get("min_length", 0) if get("min_new_tokens") is None else 0,  # the latter overrides, even as 0
        min_new_tokens=get("min_new_tokens", 0),
        eos=tuple(eos),
        forced=tuple((max_new_tokens - 1, token) for token in last if max_new_tokens),
        suppress=get("suppress_tokens", ()),
        begin_suppress=get("begin_suppress_tokens", ()),
        extra=(SequenceBiasLogitsProcessor(bias),) if bias else (),
    )


# --- condition F3: a processor that cannot be applied per position raises ---------------------------------

# Beginnings of the names of Hugging Face's own that work with a model, an encoder, several codebooks or a whole batch,
# that are made for one prompt length, or (watermarks) must act behind all filters. Some of them would pass the test.
_UNFIT: tuple[str, ...] = ("AlternatingCodebooks", "Bark", "ClassifierFree", "Dia", "Encoder", "ExponentialDecay")
_UNFIT += ("MinNewTokens", "SuppressTokensAtBegin", "SynthID", "UnbatchedClassifierFree", "Watermark", "Whisper")


def _check_kind(processor: Any) -> None:
    name = type(processor).__name__
    if not isinstance(processor, LogitsProcessor):
        raise SpecDecError(f"extra holds a {name}, which is no LogitsProcessor: give objects of such classes.")
    if any(k.__module__.startswith("transformers.") and k.__name__.startswith(_UNFIT) for k in type(processor).__mro__):
        raise SpecDecError(
            f"extra holds {name}, which needs more than a row's text and logits: leave it out, or use "
            "min_new_tokens, begin_suppress or another setting that does the same."
        )


def check_pure(processor: LogitsProcessor, vocab: int, device: torch.device | str = "cpu") -> None:
    """Refuse a processor that is not seen to be a pure function of (text, logits).

    Two copies of it are called on texts that grow, shrink and change, in opposite orders and each text twice; the
    processor itself is left alone. Same text, same answer, bit for bit, from either copy. The first call may fill a
    cache, later ones may change nothing in the object or in torch's random state. Two rows in a batch must come out as
    each does alone (to rounding). What is kept outside the object (in its class, a closure, a module) is seen only
    where an answer depends on it; what an attribute that cannot be pickled keeps, only as far as it prints it.
    """
    try:
        with torch.no_grad():
            fault = _fault(processor, vocab, torch.device(device))
    except Exception as error:  # whatever others' code raises
        line = next(iter(str(error).strip().splitlines()), "")
        fault = f"cannot be put to the test ({type(error).__name__}: {line})"
    if fault:
        raise SpecDecError(
            f"extra holds {type(processor).__name__}, which {fault}: give one that depends on text and logits alone."
        )


def _fault(processor: Callable[..., Tensor], vocab: int, device: torch.device) -> str:
    """What shows that the processor is not pure, in words; empty if nothing does."""
    rng = torch.Generator().manual_seed(0)
    few = torch.randint(min(vocab, 5), (1, 12), generator=rng).to(device)  # so that tokens and n-grams come again
    other = torch.randint(vocab, (1, 8), generator=rng).to(device)
    texts = [few[:, :8], other, few[:, :9], few, few[:, :4]]
    logits = [3 * torch.randn(1, vocab, generator=rng).to(device) for _ in texts]
    answers: dict[int, Tensor] = {}
    for order in (range(len(texts)), range(len(texts))[::-1]):
        copied, states = copy.deepcopy(processor), set()
        for i in (*order, *order):
            text = texts[i].clone()
            answer = copied(text, logits[i].clone())
            if not torch.equal(text, texts[i]) or answer.shape != logits[i].shape:
                return "changes the text, or the number of logits"
            if not torch.allclose(answer, answers.setdefault(i, answer.clone()), 0, 0, equal_nan=True):
                return "answers the same text differently at another time"
            states.add((_state(copied), torch.get_rng_state().numpy().tobytes()))
        if len(states) > 1:
            return "changes itself, or torch's random state, from call to call"
    both = copied(torch.cat(texts[:2]), torch.cat(logits[:2]))
    alone = torch.cat([answers[0], answers[1]])
    return "" if torch.allclose(both, alone, 1e-4, 1e-4, equal_nan=True) else "mixes the rows of a batch"


def _state(processor: object) -> tuple[bytes, ...]:
    """What an object holds, to be compared with what it holds later: attribute by attribute, since an object of a local
    class cannot be pickled as a whole."""
    return tuple(_bytes(value) for value in [*vars(processor).items()])


def _bytes(value: object) -> bytes:
    held = io.BytesIO()
    try:
        torch.save(value, held)  # pickles, and tensors by their content
    except Exception:
        return repr(value).encode()
    return held.getvalue()


def _ids(name: str, value: Any, depth: int) -> Any:
    """Lists nested ``depth`` times, with whole numbers in them, as tuples."""
    if depth == 0:
        return whole(name, value, 0, _MOST)
    return tuple(_ids(name, item, depth - 1) for item in listed(name, value, "a list of token ids"))
