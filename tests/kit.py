"""Small models and drafters whose every probability is known."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

from specdec_core import Pair
from specdec_core.drafters import Proposal
from specdec_core.loop import Request, Settings, ordinary_decoding, speculative_decoding
from specdec_core.sampling import RequestRandom


class TableConfig(PretrainedConfig):
    model_type = "table"

    def __init__(self, vocab_size: int = 2, max_position_embeddings: int = 512, **kwargs: Any):
        super().__init__(**kwargs)
        self.vocab_size, self.max_position_embeddings = vocab_size, max_position_embeddings
        self.num_hidden_layers = 1


class TableModel(PreTrainedModel):
    """A causal LM whose next-token law is read from ``table [V, V]`` (row: last token) or, with ``by_position [N, V]``,
    from the position alone. Logits are logarithms, so at temperature 1 the law is the table itself."""

    config_class = TableConfig

    def __init__(self, table: Tensor | None = None, by_position: Tensor | None = None, context: int = 512):
        law = table if table is not None else by_position
        assert law is not None
        super().__init__(TableConfig(vocab_size=law.shape[-1], max_position_embeddings=context))
        self.by_position = by_position is not None
        self.logits_of = torch.nn.Parameter(law.double().log().float(), requires_grad=False)
        self.passes = 0

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **_: Any) -> CausalLMOutput:
        self.passes += 1
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).expand_as(input_ids)
        return CausalLMOutput(logits=self.logits_of[position_ids if self.by_position else input_ids])


def iid(law: Sequence[float], **kwargs: Any) -> TableModel:
    """A model that says ``law`` whatever came before."""
    return TableModel(torch.tensor([list(law)] * len(law), dtype=torch.float64), **kwargs)


def tiny_llama(
    seed: int = 0, vocab: int = 64, context: int = 256, scale: float = 0.25, **kwargs: Any
) -> LlamaForCausalLM:
    """A random Llama with a cache that matters; ``scale`` sets how sure of itself it is."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=context,
        initializer_range=scale,
        eos_token_id=None,
        bos_token_id=None,
        **kwargs,
    )
    return LlamaForCausalLM(config).eval()


class NoTokenizer:
    """Stands in where a test speaks token ids only."""

    chat_template = None

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(chr(97 + i % 26) for i in ids)


def pair_of(target: PreTrainedModel, draft: PreTrainedModel | None = None) -> Pair:
    target.generation_config = SimpleNamespace(eos_token_id=None)  # type: ignore[assignment]
    return Pair("test", target, NoTokenizer(), draft, "model" if draft is not None else "prompt_lookup")  # type: ignore[arg-type]


class ScriptedDrafter:
    """Proposes what a function says: ``script(step, sequences, room) -> Proposal``."""

    name = "scripted"

    def __init__(self, script: Any):
        self.script, self.step, self.committed = script, 0, []  # type: ignore[var-annotated]

    def start(self, batch: int) -> None:
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
) -> list[Request]:
    """Run the loop (or, without a drafter, ordinary decoding) to its end and give the requests back."""
    requests = [Request(i, list(p), tokens, RequestRandom(seed, i)) for i, p in enumerate(prompts)]
    settings = settings or Settings()
    steps = (
        ordinary_decoding(target, requests, settings)
        if drafter is None
        else speculative_decoding(target, requests, drafter, settings)
    )
    for _ in steps:
        pass
    return requests
