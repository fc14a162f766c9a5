"""A causal LM whose every probability is known: the target on which the whole loop can be held against exact laws."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput


class TableConfig(PreTrainedConfig):
    model_type = "table"

    def __init__(self, vocab_size: int = 2, max_position_embeddings: int = 512, **kwargs: Any):
        super().__init__(**kwargs)
        self.vocab_size, self.max_position_embeddings = vocab_size, max_position_embeddings
        self.num_hidden_layers = 1


class TableModel(PreTrainedModel):
    """Reads the next-token law from ``table [V, V]`` (row: last token) or ``by_position [N, V]`` (row: its position).

    Logits are logarithms of the table, so at temperature 1 the law is the table itself.
    """

    config_class = TableConfig

    def __init__(self, table: Tensor | None = None, by_position: Tensor | None = None, context: int = 512):
        law = table if table is not None else by_position
        if law is None:
            raise ValueError("give a table, by last token or by position")
        super().__init__(TableConfig(vocab_size=law.shape[-1], max_position_embeddings=context))
        self.by_position = table is None
        self.logits_of = torch.nn.Parameter(law.double().log().float(), requires_grad=False)

    def forward(self, input_ids: Tensor, position_ids: Tensor | None = None, **_: Any) -> CausalLMOutput:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids)
        return CausalLMOutput(logits=self.logits_of[position_ids if self.by_position else input_ids])  # type: ignore[arg-type]


def iid(law: Sequence[float], context: int = 512) -> TableModel:
    """A model that says ``law`` whatever came before."""
    return TableModel(torch.tensor([list(law)] * len(law), dtype=torch.float64), context=context)
