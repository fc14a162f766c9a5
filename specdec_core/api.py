"""The public face: a pair of models, one call to decode with it, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import Any, TypedDict, Unpack

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import record
from .caches import context_limit
from .control import Adaptive, BlockLength, Fallback, Fixed, Heuristic
from .drafters import (
    CompositeDrafter,
    Drafter,
    EarlyExitDrafter,
    ModelDrafter,
    PromptLookupDrafter,
    SuffixDrafter,
    TranslatedDrafter,
)
from .errors import SpecDecError, number, whole
from .loop import Request, Settings, capacity, ordinary_decoding, speculative_decoding
from .processors import Processing, from_generation_config
from .record import StepRecord
from .sampling import RequestRandom, SamplingPolicy
from .stops import Stops
from .verify import BLOCK, TOKEN, Rule

DRAFTERS = ("prompt_lookup", "suffix", "model", "composite", "early_exit", "self")
Prompt = str | Sequence[int] | Sequence[dict[str, str]]


@dataclass
class Pair:
    """A target, its tokenizer, perhaps a draft, and what is logged about them.

    ``draft_tokenizer`` is set where it differs from the target's: the draft is then translated, token by token.
    ``exit_layers``: where drafter ``early_exit`` leaves the target; None is after half of its layers.
    """

    name: str
    target: PreTrainedModel = field(repr=False)
    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    draft: PreTrainedModel | None = field(default=None, repr=False)
    drafter: str = "prompt_lookup"
    draft_tokenizer: PreTrainedTokenizerBase | None = field(default=None, repr=False)
    exit_layers: int | None = None
    lineage: dict[str, Any] = field(default_factory=dict)

    @property
    def vocab(self) -> int:
        """Size of the target's law (its output head, which may be padded beyond the tokenizer)."""
        return int(self.target.config.get_text_config(decoder=True).vocab_size)

    def make_drafter(self, kind: str, policy: SamplingPolicy, **options: Any) -> Drafter:
        """A fresh drafter of one of ``DRAFTERS``; ``options`` are those of a
        :class:`~specdec_core.drafters.ModelDrafter`. ``self`` uses the target as its own draft (the 100 % check)."""
        if kind not in DRAFTERS:
            raise SpecDecError(f"drafter='{kind}' is unknown: choose one of {', '.join(DRAFTERS)}.")
        if kind in ("prompt_lookup", "suffix"):
            if options.get("candidates", 1) > 1:
                raise SpecDecError(f"drafter='{kind}' has one candidate a position: give candidates=1, or a model.")
            return (PromptLookupDrafter if kind == "prompt_lookup" else SuffixDrafter)(self.target.device)
        if kind == "self":
            return ModelDrafter(self.target, policy, self.vocab, **options)
        if kind == "early_exit":
            depth = self.target.config.get_text_config(decoder=True).num_hidden_layers
            return EarlyExitDrafter(self.target, self.exit_layers or depth // 2, policy, self.vocab, **options)
        if self.draft is None:
            raise SpecDecError(
                f"Pair '{self.name}' names no draft model: set 'draft' in its YAML, or drafter=prompt_lookup."
            )
        if self.draft_tokenizer is not None:
            of_model: Drafter = TranslatedDrafter(
                self.draft, policy, self.vocab, self.draft_tokenizer, self.tokenizer, **options
            )
        else:
            of_model = ModelDrafter(self.draft, policy, self.vocab, **options)
        return of_model if kind == "model" else CompositeDrafter(PromptLookupDrafter(self.target.device), of_model)


@dataclass
class Output:
    """What one request produced: ``tokens`` is everything emitted, EOS included; ``text`` ends before a stop string."""

    prompt: str = field(repr=False)
    prompt_tokens: list[int] = field(repr=False)
    text: str
    tokens: list[int] = field(repr=False)
    stop: str | None
    records: list[StepRecord] = field(repr=False)

    @property
    def metrics(self) -> dict[str, float | None]:
        return record.summary(self.records)


class Options(TypedDict, total=False):
    """What :func:`generate` and :func:`generate_batch` take, with their defaults and meaning."""

    max_new_tokens: int
    gamma: int
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int | Sequence[int | None] | None
    drafter: str | Drafter | None
    speculate: bool
    stop: str | Sequence[str]
    eos: Sequence[int] | None
    chat: bool | None
    confidence: float
    draft_timeout: float | None
    diagnostics: bool
    rule: str | None
    candidates: int
    control: str | BlockLength
    processing: Processing | None
    max_batch: int | None
    fixed_shapes: bool


def generate(pair: Pair, prompt: Prompt, **options: Unpack[Options]) -> Output:
    """Decode one prompt: text, chat messages (dicts with ``role`` and ``content``) or token ids.

    Example: ``generate(pair, "Why is the sky blue?", max_new_tokens=64, gamma=4, temperature=0.7, seed=0)``. Every
    option is one of :func:`generate_batch`, with the same default.
    """
    return generate_batch(pair, [prompt], **options)[0]


def generate_batch(pair: Pair, prompts: Sequence[Prompt], **options: Unpack[Options]) -> list[Output]:
    """Decode prompts together; each row's tokens are those it would have alone.

    Args:
        max_new_tokens: exactly so many tokens are emitted unless a stop comes first. Default 128.
        gamma: block length, tokens drafted per target pass. Default 4.
        temperature: 0 (default) is greedy. top_k, top_p, min_p: see :class:`~specdec_core.sampling.SamplingPolicy`.
        seed: an int (default 0) seeds row i by (seed, i); a list seeds each row on its own, so that a row is the same
            in any batch. None takes fresh entropy.
        drafter: one of ``DRAFTERS``, or a :class:`~specdec_core.drafters.Drafter`; None takes the pair's. ``composite``
            looks up first and asks the model where the text does not repeat itself. A name gives a fresh drafter: pass
            a ``SuffixDrafter`` of your own to have it remember the outputs of earlier calls.
        speculate: False runs ordinary decoding, the baseline, on the same cache and stops.
        stop: the text ends before these strings. eos: token ids that end it; None takes the model's own.
        chat: wrap a text prompt in the tokenizer's chat template; None does so where there is one.
        confidence: see :class:`~specdec_core.drafters.ModelDrafter`. draft_timeout: seconds a draft may take.
        diagnostics: keep p, q, entropies and the target's preference in the records (default).
        rule: ``token`` (default when sampling) or ``block``; greedy decoding has its own.
        candidates: tokens for each position, 1 by default; more need a drafter that is a model, and the token rule.
        control: ``fixed`` (default), ``heuristic``, ``adaptive``, ``fallback`` or a
            :class:`~specdec_core.control.BlockLength`, which keeps what it learned for the next call.
        processing: penalties, bad words, forced tokens and so on; None takes what the model's generation_config asks of
            Hugging Face ``generate``, ``Processing()`` none.
        max_batch: rows that run at once; the other prompts wait for a place.
        fixed_shapes: allocate all at once, so that on a GPU the passes are CUDA graphs.

    Raises:
        SpecDecError: with one line that says what is wrong and how to mend it.
    """
    decoding = prepare(pair, prompts, **options)
    for _ in decoding.steps:
        pass
    return decoding.outputs()


def stream(pair: Pair, prompt: Prompt, **options: Unpack[Options]) -> Stream:
    """Decode one prompt and hand its tokens out as they are committed; options as for :func:`generate_batch`.

    Example: ``for piece in stream(pair, "Count to ten."): print(piece, end="")``. The pieces add up to the text of
    ``.output``, which is there when the last piece is; ``.cancel()`` ends the text after the present pass. (Where a
    tokenizer writes unknown characters byte by byte, an unfinished one at the end can change the one before.)
    """
    return Stream(prepare(pair, [prompt], **options))


@dataclass
class Prepared:
    """A decoding that has not begun: its requests, and the passes to be drawn from ``steps``."""

    pair: Pair
    requests: list[Request]
    steps: Iterator[list[StepRecord]]
    stops: Stops

    def outputs(self) -> list[Output]:
        text = self.pair.tokenizer.decode
        return [
            Output(str(text(r.prompt)), r.prompt, self.stops.text(r.output), r.output, r.stop, r.records)
            for r in self.requests
        ]


class Stream:
    """Pieces of one text. A character whose tokens are not all there, and what may become a stop string, is held."""

    def __init__(self, prepared: Prepared):
        self._prepared = prepared
        (self.request,) = prepared.requests

    def __iter__(self) -> Iterator[str]:
        given = 0
        for _ in self._prepared.steps:
            text = self._prepared.stops.text(self.request.output)
            sure = len(text) if self.request.stop else self._settled(text)
            if sure > given:
                yield text[given:sure]
                given = sure
        text = self.output.text
        if len(text) > given:  # cancelled: what was held back is all there will be
            yield text[given:]

    def _settled(self, text: str) -> int:
        sure = len(text.rstrip("\ufffd"))
        for s in self._prepared.stops.strings:
            for n in range(min(len(s) - 1, sure), 0, -1):
                if text[:sure].endswith(s[:n]):
                    sure -= n
                    break
        return sure

    def cancel(self) -> None:
        self.request.cancel()

    @property
    def tokens(self) -> list[int]:
        """Committed so far."""
        return self.request.output

    @property
    def output(self) -> Output:
        return self._prepared.outputs()[0]


@dataclass(frozen=True)
class _Asked:
    """The options of :func:`generate_batch` with their defaults."""

    max_new_tokens: int = 128
    gamma: int = 4
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | Sequence[int | None] | None = 0
    drafter: str | Drafter | None = None
    speculate: bool = True
    stop: str | Sequence[str] = ()
    eos: Sequence[int] | None = None
    chat: bool | None = None
    confidence: float = 0.0
    draft_timeout: float | None = None
    diagnostics: bool = True
    rule: str | None = None
    candidates: int = 1
    control: str | BlockLength = "fixed"
    processing: Processing | None = None
    max_batch: int | None = None
    fixed_shapes: bool = False

    def __post_init__(self) -> None:
        for name in ("speculate", "diagnostics", "fixed_shapes"):
            if not isinstance(getattr(self, name), bool):
                raise SpecDecError(f"{name}={getattr(self, name)!r} is not possible: give True or False.")
        if self.chat is not None and not isinstance(self.chat, bool):
            raise SpecDecError(f"chat={self.chat!r} is not possible: give True, False or None.")
        if self.processing is not None and not isinstance(self.processing, Processing):
            raise SpecDecError(f"processing={self.processing!r} is not possible: give a Processing, or None.")
        whole("max_new_tokens", self.max_new_tokens, 0, 2**31)
        whole("gamma", self.gamma, 1, 1024)
        whole("candidates", self.candidates, 1, 64)
        number("confidence", self.confidence, lambda c: 0 <= c < 1, "a probability below 1, where 0 is off")
        if self.draft_timeout is not None:
            number("draft_timeout", self.draft_timeout, lambda s: 0 < s < 1e6, "seconds from 0 to a million, or None")
        if self.max_batch is not None:
            whole("max_batch", self.max_batch, 1, 2**31)


def prepare(pair: Pair, prompts: Sequence[Prompt], **options: Unpack[Options]) -> Prepared:
    """Check every option of :func:`generate_batch` and set the decoding up."""
    if unknown := sorted(options.keys() - _Asked.__dataclass_fields__.keys()):
        allowed = ", ".join(_Asked.__dataclass_fields__)
        raise SpecDecError(f"There is no option '{unknown[0]}': choose from {allowed}.")
    asked = _Asked(**options)
    policy = SamplingPolicy(asked.temperature, asked.top_k, asked.top_p, asked.min_p)
    stops = make_stops(pair, asked.stop, asked.eos)
    processing = asked.processing
    if processing is None:
        config = pair.target.generation_config
        processing = from_generation_config(config, sorted(stops.eos), asked.max_new_tokens)
    settings = Settings(
        gamma=asked.gamma,
        policy=policy,
        stops=stops,
        rule=_rule(asked.rule, policy, asked.candidates),
        draft_timeout=asked.draft_timeout,
        diagnostics=asked.diagnostics,
        processing=processing,
        control=_control(asked.control, asked.gamma),
        max_batch=asked.max_batch,
        fixed_shapes=asked.fixed_shapes,
    )
    requests = make_requests(pair, prompts, asked.max_new_tokens, asked.seed, asked.chat)
    if not asked.speculate:
        return Prepared(pair, requests, ordinary_decoding(pair.target, requests, settings), stops)
    drafter = _drafter(pair, asked, requests, settings)
    return Prepared(pair, requests, speculative_decoding(pair.target, requests, drafter, settings), stops)


def _drafter(pair: Pair, asked: _Asked, requests: list[Request], settings: Settings) -> Drafter:
    chosen = asked.drafter if asked.drafter is not None else pair.drafter
    if isinstance(chosen, str):
        return pair.make_drafter(
            chosen,
            settings.policy,
            confidence=asked.confidence,
            candidates=asked.candidates,
            processing=settings.processing,
            capacity=None if not asked.fixed_shapes else _slots(pair, asked, requests, settings),
        )
    if not isinstance(chosen, Drafter):
        raise SpecDecError(
            f"drafter={chosen!r} is no drafter: give one of {', '.join(DRAFTERS)}, or an object of a class derived "
            "from specdec_core.Drafter."
        )
    return chosen


def _slots(pair: Pair, asked: _Asked, requests: list[Request], settings: Settings) -> int:
    control = settings.control or Fixed(settings.gamma)
    return capacity(requests, control, asked.candidates, context_limit(pair.target))


def _rule(name: str | None, policy: SamplingPolicy, candidates: int) -> Rule | None:
    exact = {"token": TOKEN, "block": BLOCK}
    if name is not None and (not isinstance(name, str) or name not in exact):
        raise SpecDecError(f"rule={name!r} is not possible: give token or block (temperature 0 has its own).")
    if candidates > 1 and name == "block":
        raise SpecDecError("rule='block' judges one candidate a position: use rule='token', or candidates=1.")
    return None if policy.greedy or name is None else exact[name]


def _control(control: str | BlockLength, gamma: int) -> BlockLength:
    made: dict[str, Callable[[], BlockLength]] = {
        "fixed": lambda: Fixed(gamma),
        "heuristic": lambda: Heuristic(gamma),
        "adaptive": lambda: Adaptive(start=gamma),
        "fallback": lambda: Fallback(Adaptive(start=gamma)),
    }
    if isinstance(control, BlockLength):
        return control
    if not isinstance(control, str) or control not in made:
        raise SpecDecError(f"control={control!r} is unknown: choose one of {', '.join(made)}, or a BlockLength.")
    return made[control]()


def make_stops(pair: Pair, strings: str | Sequence[str] = (), eos: Sequence[int] | None = None) -> Stops:
    """The stops of a pair: its EOS ids, stop strings, and the target's context."""
    if eos is None:
        own = getattr(pair.target.generation_config, "eos_token_id", None)
        eos = [] if own is None else [own] if isinstance(own, int) else list(own)
    if isinstance(eos, (str, bytes, dict)) or not isinstance(eos, Iterable):
        raise SpecDecError(f"eos={eos!r} is not possible: give a list of token ids, [] for none.")
    eos = [whole("eos", i, 0, 2**31) for i in eos]
    texts = (strings,) if isinstance(strings, str) else tuple(strings) if isinstance(strings, Iterable) else (None,)
    if not all(isinstance(t, str) for t in texts):
        raise SpecDecError(f"stop={strings!r} is not possible: give a text, or a list of texts.")
    if "" in texts:
        raise SpecDecError("stop='' would end every text at once: give a stop string with at least one character.")
    decode: Callable[[Sequence[int]], str] = lambda ids: str(pair.tokenizer.decode(list(ids), skip_special_tokens=True))  # noqa: E731
    return Stops(frozenset(eos), texts, context_limit(pair.target), decode)


def make_requests(
    pair: Pair,
    prompts: Sequence[Prompt],
    max_new_tokens: int,
    seed: int | Sequence[int | None] | None = 0,
    chat: bool | None = None,
) -> list[Request]:
    """Tokenised requests, each with its own random stream; refuses empty and overlong prompts."""
    if isinstance(prompts, (str, bytes)) or not isinstance(prompts, Sequence):
        raise SpecDecError(f"prompts is a {type(prompts).__name__}: give a list with one prompt for each row.")
    if seed is None or isinstance(seed, Integral):
        randoms = [RequestRandom(_seed(seed), i) for i in range(len(prompts))]
    elif isinstance(seed, (str, bytes)) or not isinstance(seed, Sequence):
        raise SpecDecError(
            f"seed={seed!r} is not possible: give a whole number, None, or a list with one for each prompt."
        )
    elif len(seed) == len(prompts):
        randoms = [RequestRandom(_seed(s)) for s in seed]
    else:
        raise SpecDecError(f"{len(seed)} seeds for {len(prompts)} prompts: give one seed, or one for each prompt.")
    limit = context_limit(pair.target)
    requests = []
    for i, (prompt, random) in enumerate(zip(prompts, randoms, strict=True)):
        ids = encode(pair, prompt, chat)
        if limit is not None and len(ids) >= limit:
            raise SpecDecError(
                f"Prompt {i} has {len(ids)} tokens, the target holds {limit}: shorten it to at most {limit - 1}."
            )
        requests.append(Request(i, ids, max_new_tokens, random))
    return requests


def encode(pair: Pair, prompt: Prompt, chat: bool | None = None) -> list[int]:
    """Prompt -> token ids, through the chat template where asked for or present."""
    if isinstance(prompt, str):
        if not prompt.strip():
            raise SpecDecError("The prompt is empty: give at least one word.")
        if not (bool(pair.tokenizer.chat_template) if chat is None else chat):
            return _ids(pair, pair.tokenizer(_text(prompt))["input_ids"])
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, (bytes, dict)) or not isinstance(prompt, Sequence):
        raise SpecDecError(
            f"The prompt is a {type(prompt).__name__}: give a text, a list of messages, or a list of token ids."
        )
    items: list[Any] = list(prompt)
    if items and isinstance(items[0], dict):
        return _ids(pair, pair.tokenizer(_chat_text(pair, items), add_special_tokens=False)["input_ids"])
    return _ids(pair, items)


def _chat_text(pair: Pair, messages: list[Any]) -> str:
    for i, m in enumerate(messages):
        if not isinstance(m, dict) or not all(isinstance(m.get(key), str) for key in ("role", "content")):
            raise SpecDecError(f"Message {i} of the prompt is {m!r}: give a dict with the texts 'role' and 'content'.")
    if not pair.tokenizer.chat_template:
        raise SpecDecError(f"The tokenizer of '{pair.name}' has no chat template: give a plain text, or chat=False.")
    try:
        text = pair.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise what their authors liked
        raise SpecDecError(
            f"The chat template refuses these messages ({error}): check their roles and order."
        ) from error
    return _text(str(text))


def _text(text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SpecDecError(f"The prompt is no valid Unicode at character {error.start}: give UTF-8 text.") from None
    return text


def _ids(pair: Pair, raw: Any) -> list[int]:
    if not raw:
        raise SpecDecError("The prompt has no tokens: give at least one.")
    for i in raw:
        if isinstance(i, bool) or not isinstance(i, Integral) or not 0 <= int(i) < pair.vocab:
            raise SpecDecError(
                f"The prompt holds {i!r} where a token id from 0 to {pair.vocab - 1} belongs: is the tokenizer right?"
            )
    return [int(i) for i in raw]


def _seed(value: Any) -> int | None:
    return None if value is None else whole("seed", value, 0, 2**64 - 1)
