"""Small models and drafters whose every probability is known."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from specdec_core import Pair
from specdec_core.drafters import Drafter, Proposal
from specdec_core.lab.table_model import TableModel, iid
from specdec_core.loop import Request, Settings, ordinary_decoding, speculative_decoding
from specdec_core.sampling import RequestRandom


def tiny_llama(
    seed: int = 0, vocab: int = 64, context: int = 256, scale: float = 0.25, **kwargs: Any
) -> LlamaForCausalLM:
    """A random Llama with a cache that matters; ``scale`` sets how sure of itself it is."""
    torch.manual_seed(seed)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    ids = {"eos_token_id": None, "bos_token_id": None}
    sizes = {"num_key_value_heads": 2, "vocab_size": vocab, "max_position_embeddings": context}
    return LlamaForCausalLM(LlamaConfig(**(shape | sizes | ids | {"initializer_range": scale} | kwargs))).eval()


__all__ = [
    "NoTokenizer",
    "ScriptedDrafter",
    "TableModel",
    "Words",
    "block",
    "decode",
    "iid",
    "noisy_copy",
    "pair_of",
    "tiny_llama",
]


def noisy_copy(model: LlamaForCausalLM, noise: float = 0.03, seed: int = 0) -> LlamaForCausalLM:
    """A draft that agrees now and then."""
    torch.manual_seed(seed)
    draft = copy.deepcopy(model)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += noise * torch.randn_like(weight)
    return draft


class NoTokenizer:
    """Stands in where a test speaks token ids only."""

    chat_template = None

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(48 + i) for i in ids)


class Words(NoTokenizer):
    """Some words of a text as token ids."""

    def __call__(self, text: str, **_: object) -> dict[str, list[int]]:
        return {"input_ids": [sum(word.encode()) % 64 for word in text.split()[:12]]}


def pair_of(target: PreTrainedModel, draft: PreTrainedModel | None = None) -> Pair:
    target.generation_config = SimpleNamespace(eos_token_id=None)  # type: ignore[assignment]
    return Pair("test", target, NoTokenizer(), draft, "model" if draft is not None else "prompt_lookup")  # type: ignore[arg-type]


class ScriptedDrafter(Drafter):
    """Proposes what a function says: ``script(step, sequences, room) -> Proposal``."""

    name = "scripted"

    def __init__(self, script: Any):
        self.script, self.step, self.committed = script, 0, []  # type: ignore[var-annotated]

    def start(self) -> None:
        self.step = 0

    def propose(self, sequences: Sequence[Sequence[int]], room: Sequence[int], u: Tensor) -> Proposal:
        self.step += 1
        return self.script(self.step, sequences, room)  # type: ignore[no-any-return]

    def commit(self, lengths: Sequence[int]) -> None:
        self.committed.append(list(lengths))


def block(*rows: Sequence[int], note: str = "") -> Proposal:
    """A one-hot proposal of these tokens."""
    width = max(len(r) for r in rows)
    padded = torch.tensor([list(r) + [0] * (width - len(r)) for r in rows], dtype=torch.int64).reshape(len(rows), width)
    counts = [len(r) for r in rows]
    return Proposal(padded, torch.tensor(counts), None, counts, note=note)


def decode(
    target: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    drafter: Any = None,
    tokens: int = 12,
    settings: Settings | None = None,
    seed: int = 0,
    first_id: int = 0,
) -> list[Request]:
    """Run the loop (or, without a drafter, ordinary decoding) to its end and give the requests back."""
    requests = [Request(i, list(p), tokens, RequestRandom(seed, i)) for i, p in enumerate(prompts, first_id)]
    settings = settings or Settings()
    steps = (
        ordinary_decoding(target, requests, settings)
        if drafter is None
        else speculative_decoding(target, requests, drafter, settings)
    )
    for _ in steps:
        pass
    if type(drafter).__module__.startswith("specdec_core."):  # the guard hides what breaks: not here
        assert all(r.control != "degraded" for request in requests for r in request.records), "a shipped drafter broke"
    return requests
