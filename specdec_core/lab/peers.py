"""Other engines beside ours, all asked for the same texts: the same token ids in, the same end, time taken alike.

An engine is a function of a prompt's token ids and a seed. It says which tokens came and when: the first mark is when
the first of them were there, so that the prefill can be told from the decoding, whoever did it.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Unpack

import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from ..api import Options, Pair, prepare
from ..errors import SpecDecError

if TYPE_CHECKING:
    from ..record import StepRecord

Mark = tuple[float, int]  # seconds since the call, tokens there by then


class Timed(NamedTuple):
    """A text and when its tokens were there; ``records`` are those of our own loop."""

    tokens: list[int]
    marks: list[Mark]
    records: Sequence[StepRecord] = ()

    @property
    def prefill(self) -> float:
        """Seconds to the first tokens."""
        return self.marks[0][0]

    @property
    def seconds(self) -> float:
        """Seconds from the first tokens to the last."""
        return self.marks[-1][0] - self.marks[0][0]

    @property
    def after(self) -> int:
        """Tokens that came in these seconds."""
        return self.marks[-1][1] - self.marks[0][1]


Engine = Callable[[Sequence[int], int], Timed]


def ours(pair: Pair, tokens: int, **options: Unpack[Options]) -> Engine:
    """Our loop, or our ordinary decoding with ``speculate=False``; options as for ``generate_batch``.

    A draft reads the prompt after the first mark, so its prefill counts as decoding.
    """

    def run(prompt: Sequence[int], seed: int) -> Timed:
        begun, marks, records = time.perf_counter(), list[Mark](), list["StepRecord"]()
        asked: Options = {**options, "max_new_tokens": tokens, "seed": seed, "diagnostics": False}
        prepared = prepare(pair, [list(prompt)], **asked)
        (request,) = prepared.requests
        for step in prepared.steps:
            records += step
            marks.append((time.perf_counter() - begun, len(request.output)))
        return Timed(list(request.output), marks, records)

    return run


class _Marks(StoppingCriteria):
    """Notes when tokens are there; stops nothing."""

    def __init__(self, prompt: int):
        self.begun, self.prompt, self.marks = time.perf_counter(), prompt, list[Mark]()

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> Any:
        self.marks.append((time.perf_counter() - self.begun, input_ids.shape[1] - self.prompt))
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def hugging_face(pair: Pair, tokens: int, temperature: float = 0.0, **options: Any) -> Engine:
    """``generate`` of transformers with the pair's own target; ``options`` such as ``prompt_lookup_num_tokens``."""
    sampling: dict[str, Any] = {"do_sample": False, "temperature": None, "top_k": None, "top_p": None}
    if temperature:
        sampling = {"do_sample": True, "temperature": temperature, "top_k": 0, "top_p": 1.0}

    @torch.inference_mode()
    def run(prompt: Sequence[int], seed: int) -> Timed:
        torch.manual_seed(seed)
        ids, marks = torch.tensor([list(prompt)], device=pair.target.device), _Marks(len(prompt))
        stopping, end = StoppingCriteriaList([marks]), pair.tokenizer.eos_token_id
        out: Any = pair.target.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=tokens, stopping_criteria=stopping,
            pad_token_id=end, **sampling, **options,
        )  # fmt: skip
        return Timed(out[0, len(prompt) :].tolist(), marks.marks)

    return run


def assisted(pair: Pair, draft: PreTrainedModel, tokens: int, gamma: int, temperature: float = 0.0) -> Engine:
    """Assisted generation of transformers: the draft gives ``gamma`` tokens each time, whatever it thinks of them."""
    draft.generation_config.num_assistant_tokens = gamma
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0
    return hugging_face(pair, tokens, temperature, assistant_model=draft)


def _installed(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError:
        package = module.partition(".")[0]
        raise SpecDecError(f"{package} is not installed: install specdec-core[peers], or do without it.") from None


def flashspec(pair: Pair, draft: PreTrainedModel, tokens: int) -> Engine:
    """FlashSpec (PyPI ``flashspec``) with its default strategy: lookup, else the draft. Greedy."""
    whole, parts = _installed("flashspec"), _installed("flashspec.engine")
    device, dtype = pair.target.device, pair.target.dtype
    target = parts.TargetModel("target", device, dtype, model=pair.target)
    config = whole.FlashSpecConfig(device=str(device), compile=False, sampling=whole.SamplingConfig(temperature=0.0))
    drafter = parts.HuggingFaceDrafter("draft", device, dtype, model=draft)
    engine = whole.SpeculativeEngine(config, [drafter], target)
    ends = pair.target.generation_config.eos_token_id  # type: ignore[union-attr]
    ends = [] if ends is None else [ends] if isinstance(ends, int) else ends

    @torch.inference_mode()
    def run(prompt: Sequence[int], seed: int) -> Timed:
        passes: list[float] = []
        hook = pair.target.register_forward_hook(lambda *_: passes.append(time.perf_counter()))
        begun = time.perf_counter()
        try:
            ids = torch.tensor([list(prompt)], device=device)
            result = engine.generate(ids, max_new_tokens=tokens, eos_token_ids=ends)
        finally:
            hook.remove()
        count = int(result.n_tokens_generated)
        # Its first pass reads the prompt and gives out nothing.
        marks = [(passes[0] - begun, 0), (time.perf_counter() - begun, count)]
        return Timed(result.output_ids[0, :count].tolist(), marks)

    return run


def llama_cpp(gguf: Path, tokens: int, threads: int, context: int = 4096) -> Engine:
    """llama.cpp (PyPI ``xllamacpp``, its HTTP server in this process) on a GGUF file. Greedy, ordinary decoding.

    It reports when its prompt was read and how long it wrote; its first token belongs to the former.
    """
    xllamacpp = _installed("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup = str(gguf), context, 1, True
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.verbosity = 0
    server = xllamacpp.Server(params)

    def run(prompt: Sequence[int], seed: int) -> Timed:
        asked = {"prompt": list(prompt), "n_predict": tokens, "temperature": 0, "cache_prompt": False, "seed": seed}
        said = server.handle_completions(asked | {"return_tokens": True, "timings_per_token": True})
        if "timings" not in said:
            raise SpecDecError(f"llama.cpp gave no timings ({str(said)[:120]}): take another version of xllamacpp.")
        timing, out = said["timings"], [int(t) for t in said.get("tokens") or []]
        first, writing = timing["prompt_ms"] / 1e3, timing["predicted_ms"] / 1e3
        return Timed(out, [(first, 1), (first + writing, int(timing["predicted_n"]))])

    return run
