"""The public face: a pair of models, one call to decode with it, and what comes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict, Unpack, cast

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
from .errors import SpecDecError, choice, listed, number, whole
from .loop import Request, Settings, capacity, ordinary_decoding, speculative_decoding
from .processors import Processing, from_generation_config
from .record import StepRecord
from .sampling import RequestRandom, SamplingPolicy
from .stops import Stops
from .verify import BLOCK, TOKEN

DRAFTERS = ("prompt_lookup", "suffix", "model", "composite", "early_exit", "self")
CONTROLS: dict[str, Callable[[int], BlockLength]] = {
    "fixed": Fixed,
    "heuristic": Heuristic,
    "adaptive": lambda gamma: Adaptive(start=gamma),
    "fallback": lambda gamma: Fallback(Adaptive(start=gamma)),
}
Prompt = str | Sequence[int] | Sequence[dict[str, str]]


@dataclass
class Pair:
    """A target, its tokenizer, perhaps a draft, and what is logged about them.

    ``draft_tokenizer`` is set where it differs from the target's: the draft is then translated, token by token.
    ``exit_layers``: where drafter ``early_exit`` leaves the target; None is after half of its layers. ``options``:
    what a call takes where it does not say otherwise.
    """

    name: str
    target: PreTrainedModel = field(repr=False)
    tokenizer: PreTrainedTokenizerBase = field(repr=False)
    draft: PreTrainedModel | None = field(default=None, repr=False)
    drafter: str = "prompt_lookup"
    draft_tokenizer: PreTrainedTokenizerBase | None = field(default=None, repr=False)
    exit_layers: int | None = None
    options: Options = field(default_factory=lambda: Options())
    lineage: dict[str, Any] = field(default_factory=dict)

    @property
    def vocab(self) -> int:
        """Size of the target's law (its output head, which may be padded beyond the tokenizer)."""
        return int(self.target.config.get_text_config(decoder=True).vocab_size)

    def make_drafter(self, kind: str, policy: SamplingPolicy, **options: Any) -> Drafter:
        """A fresh drafter of one of ``DRAFTERS``; ``options`` are ``model_gamma`` and those of a
        :class:`~specdec_core.drafters.ModelDrafter`. ``self`` uses the target as its own draft (the 100 % check)."""
        most = options.pop("model_gamma", None)
        choice("drafter", kind, DRAFTERS, ", or an object of a class derived from specdec_core.Drafter")
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
        if self.draft_tokenizer is None:
            model: Drafter = ModelDrafter(self.draft, policy, self.vocab, **options)
        else:
            tokenizers = self.draft_tokenizer, self.tokenizer
            model = TranslatedDrafter(self.draft, policy, self.vocab, *tokenizers, **options)
        if kind == "model":
            return model
        # A single token is found nearly everywhere and says less than the model does.
        return CompositeDrafter(PromptLookupDrafter(self.target.device, ngram_min=2), model, most=most)


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
    """The options of :func:`generate_batch`, which says what they mean and their defaults."""

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
    model_gamma: int | None
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
            looks up two tokens and more first and asks the model where the text does not repeat itself. A name gives a
            fresh drafter: pass a ``SuffixDrafter`` of your own to have it remember the outputs of earlier calls.
        speculate: False runs ordinary decoding, the baseline, on the same cache and stops.
        stop: the text ends before these strings. eos: token ids that end it; None takes the model's own.
        chat: wrap a text prompt in the tokenizer's chat template; None does so where there is one.
        confidence: see :class:`~specdec_core.drafters.ModelDrafter`. draft_timeout: seconds a draft may take.
        diagnostics: keep p, q, entropies and the target's preference in the records (default).
        rule: ``token`` (default when sampling) or ``block``; greedy decoding has its own.
        candidates: tokens for each position, 1 by default; more need a drafter that is a model, and the token rule.
        model_gamma: the longest block that the model of a ``composite`` drafts; None for ``gamma``, which the lookup
            takes, at no cost.
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
        if rest := self.output.text[given:]:  # cancelled: what was held back is all there will be
            yield rest

    def _settled(self, text: str) -> int:
        text = text.rstrip("\ufffd")
        begun = [s[:n] for s in self._prepared.stops.strings for n in range(1, len(s))]
        return len(text) - max((len(b) for b in begun if text.endswith(b)), default=0)

    def cancel(self) -> None:
        self.request.cancel()

    @property
    def tokens(self) -> list[int]:
        """Committed so far."""
        return self.request.output

    @property
    def output(self) -> Output:
        return self._prepared.outputs()[0]


def prepare(pair: Pair, prompts: Sequence[Prompt], **options: Unpack[Options]) -> Prepared:
    """Check every option of :func:`generate_batch` and set the decoding up."""
    if not isinstance(pair, Pair):
        raise SpecDecError(f"pair={pair!r:.60} is no pair: give what load_pair returned.")
    options = _over(pair, options)
    for name in options:
        choice("option", name, Options.__annotations__)
    for name in ("speculate", "diagnostics", "fixed_shapes", "chat"):
        value = options.get(name, True)
        if not isinstance(value, bool) and not (name == "chat" and value is None):
            raise SpecDecError(f"{name}={value!r} is not possible: give True or False.")
    whole("candidates", options.get("candidates", 1), 1, 64)
    if options.get("model_gamma") is not None:
        whole("model_gamma", options["model_gamma"], 1, 1024)
    chance = "a probability below 1, where 0 is off"
    number("confidence", options.get("confidence", 0.0), lambda c: 0 <= c < 1, chance)
    max_new_tokens = whole("max_new_tokens", options.get("max_new_tokens", 128), 0, 2**31)
    stops = _stops(pair, options.get("stop", ()), options.get("eos"))
    settings = _settings(pair, stops, max_new_tokens, options)
    randoms = _randoms(options.get("seed", 0), len(listed("prompts", prompts, "a list with one for each row")))
    texts = [encode(pair, prompt, options.get("chat")) for prompt in prompts]
    for i, ids in enumerate(texts):
        if stops.context is not None and len(ids) >= stops.context:
            most = f"the target holds {stops.context}: shorten it to at most {stops.context - 1}"
            raise SpecDecError(f"Prompt {i} has {len(ids)} tokens, {most}.")
    requests = [Request(i, ids, max_new_tokens, randoms[i]) for i, ids in enumerate(texts)]
    if options.get("speculate", True):
        drafter = _drafter(pair, requests, settings, options)
        steps = speculative_decoding(pair.target, requests, drafter, settings)
    else:
        steps = ordinary_decoding(pair.target, requests, settings)
    return Prepared(pair, requests, steps, stops)


def _over(pair: Pair, options: Options) -> Options:
    """The call's options over the pair's, whose ``candidates`` are for its own kind of drafter and the token rule."""
    own = dict(pair.options)
    if (options.get("drafter") or pair.drafter) in ("prompt_lookup", "suffix") or options.get("rule") == "block":
        own.pop("candidates", None)
    return cast(Options, {**own, **options})


def _settings(pair: Pair, stops: Stops, max_new_tokens: int, options: Options) -> Settings:
    policy = SamplingPolicy(
        options.get("temperature", 0.0), options.get("top_k", 0), options.get("top_p", 1.0), options.get("min_p", 0.0)
    )
    rules, rule = {"token": TOKEN, "block": BLOCK}, options.get("rule")
    if rule is not None:
        choice("rule", rule, rules)
    timeout, most = options.get("draft_timeout"), options.get("max_batch")
    if timeout is not None:
        number("draft_timeout", timeout, lambda s: 0 < s < 1e6, "seconds from 0 to a million, or None")
    processing = options.get("processing")
    if processing is None:
        processing = from_generation_config(pair.target.generation_config, sorted(stops.eos), max_new_tokens)
    elif not isinstance(processing, Processing):
        raise SpecDecError(f"processing={processing!r} is not possible: give a Processing, or None.")
    gamma, control = whole("gamma", options.get("gamma", 4), 1, 1024), options.get("control", "fixed")
    if not isinstance(control, BlockLength):
        control = CONTROLS[choice("control", control, CONTROLS, ", or a BlockLength")](gamma)
    return Settings(
        gamma=gamma,
        policy=policy,
        stops=stops,
        rule=None if policy.greedy or rule is None else rules[rule],
        draft_timeout=timeout,
        diagnostics=options.get("diagnostics", True),
        processing=processing,
        control=control,
        max_batch=most if most is None else whole("max_batch", most, 1, 2**31),
        fixed_shapes=options.get("fixed_shapes", False),
    )


def _drafter(pair: Pair, requests: list[Request], settings: Settings, options: Options) -> Drafter:
    chosen = options.get("drafter")
    if isinstance(chosen, Drafter):
        return chosen
    confidence, candidates, slots = options.get("confidence", 0.0), options.get("candidates", 1), None
    if settings.fixed_shapes and settings.control is not None:
        slots = capacity(requests, settings.control, candidates, settings.stops.context)
    how: dict[str, Any] = {"confidence": confidence, "candidates": candidates, "capacity": slots}
    how |= {"processing": settings.processing, "model_gamma": options.get("model_gamma")}
    return pair.make_drafter(pair.drafter if chosen is None else chosen, settings.policy, **how)


def _stops(pair: Pair, strings: str | Sequence[str], eos: Sequence[int] | None) -> Stops:
    """The stops of a pair: its EOS ids, stop strings, and the target's context."""
    if eos is None:
        own = getattr(pair.target.generation_config, "eos_token_id", None)
        eos = [] if own is None else [own] if isinstance(own, int) else own
    ids = [whole("eos", i, 0, 2**31) for i in listed("eos", eos, "a list of token ids, [] for none")]
    texts = [strings] if isinstance(strings, str) else listed("stop", strings, "a text, or a list of texts")
    if not all(isinstance(t, str) and t for t in texts):
        raise SpecDecError(f"stop={strings!r} is not possible: give texts of at least one character.")

    def decode(ids: Sequence[int]) -> str:
        return str(pair.tokenizer.decode(list(ids), skip_special_tokens=True))

    return Stops(frozenset(ids), tuple(texts), context_limit(pair.target), decode)


def _randoms(seed: int | Sequence[int | None] | None, count: int) -> list[RequestRandom]:
    """A random stream for each row."""
    pairs: list[tuple[Any, int]] = [(seed, i) for i in range(count)]
    if isinstance(seed, Sequence) and not isinstance(seed, (str, bytes)):
        pairs = [(own, 0) for own in seed]
    if len(pairs) != count:
        raise SpecDecError(f"{len(pairs)} seeds for {count} prompts: give one seed, or one for each prompt.")
    return [RequestRandom(None if s is None else whole("seed", s, 0, 2**64 - 1), i) for s, i in pairs]


def encode(pair: Pair, prompt: Prompt, chat: bool | None = None) -> list[int]:
    """Prompt -> token ids, through the chat template where asked for or present."""
    if isinstance(prompt, str) and not prompt.strip():
        raise SpecDecError("The prompt is empty: give at least one word.")
    if isinstance(prompt, str) and (pair.tokenizer.chat_template if chat is None else chat):
        prompt = [{"role": "user", "content": prompt}]
    if isinstance(prompt, str):
        items = _tokenized(pair, prompt)
    else:
        items = listed("prompt", prompt, "a text, a list of messages, or a list of token ids")
    if items and isinstance(items[0], dict):
        items = _tokenized(pair, _chat_text(pair, items), add_special_tokens=False)
    if not items:
        raise SpecDecError("The prompt has no tokens: give at least one.")
    return [whole("prompt: token id", i, 0, pair.vocab - 1) for i in items]


def _chat_text(pair: Pair, messages: list[Any]) -> str:
    for i, m in enumerate(messages):
        if not isinstance(m, dict) or not all(isinstance(m.get(key), str) for key in ("role", "content")):
            raise SpecDecError(f"Message {i} of the prompt is {m!r}: give a dict with the texts 'role' and 'content'.")
    if not pair.tokenizer.chat_template:
        raise SpecDecError(f"The tokenizer of '{pair.name}' has no chat template: give a plain text, or chat=False.")
    try:
        return str(pair.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # templates raise what their authors liked
        raise SpecDecError(
            f"The chat template refuses these messages ({error}): check their roles and order."
        ) from error


def _tokenized(pair: Pair, text: str, **how: Any) -> list[Any]:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise SpecDecError(f"The prompt is no valid Unicode at character {error.start}: give UTF-8 text.") from None
    return list(pair.tokenizer(text, **how)["input_ids"])
