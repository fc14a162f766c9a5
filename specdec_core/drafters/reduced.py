"""A draft that computes the logits of frequent tokens alone (Zhao et al. 2025, "FR-Spec", arXiv 2502.14856)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..errors import SpecDecError, whole
from .early_exit import shell


class ReducedHead(nn.Module):
    """The rows ``ids`` of an output head; all other logits are -inf, which makes q = 0 there under any policy."""

    ids: Tensor

    def __init__(self, head: nn.Linear, ids: Sequence[int]):
        super().__init__()
        self.register_buffer("ids", torch.tensor(ids, device=head.weight.device))
        self.vocab = head.out_features
        self.linear: nn.Module = nn.Linear(head.in_features, len(ids), bias=head.bias is not None, device="meta")
        for name, weight in head.named_parameters():
            setattr(self.linear, name, nn.Parameter(weight.detach()[self.ids], requires_grad=False))

    def forward(self, hidden: Tensor) -> Tensor:
        some: Tensor = self.linear(hidden)
        return some.new_full((*some.shape[:-1], self.vocab), -torch.inf).index_copy_(-1, self.ids, some)


def reduced_head(model: PreTrainedModel, ids: Sequence[int]) -> PreTrainedModel:
    """``model`` with a head for the tokens ``ids`` alone. Their rows are copied, all else is shared with ``model``.

    Raises:
        SpecDecError: for ids that are none, named twice or out of range, and for a model whose head cannot be cut.
    """
    reduced = shell(model)
    kind, head = model.config.model_type, reduced.get_output_embeddings()
    if not isinstance(head, nn.Linear) or not head.weight.is_floating_point():
        raise SpecDecError(f"Model type '{kind}' has no plain linear head to cut: use the whole model as draft.")
    kept = sorted(whole("ids: token id", i, 0, head.out_features - 1) for i in ids)
    if not kept or len(set(kept)) < len(kept):
        raise SpecDecError("ids is empty or names a token twice: give each token of the smaller vocabulary once.")
    reduced.set_output_embeddings(ReducedHead(head, kept))
    with torch.inference_mode():
        logits = reduced(input_ids=torch.tensor([kept[:1]], device=model.device), use_cache=False).logits
    if torch.isfinite(logits[0, -1]).nonzero().flatten().tolist() != kept:
        raise SpecDecError(
            f"Model type '{kind}' changes the logits behind its head (soft-capping?), where -inf becomes a number: use "
            "the whole model as draft."
        )
    return reduced


def most_frequent(tokens: Iterable[int], k: int, vocab: int, always: Iterable[int] = ()) -> list[int]:
    """``always`` and the most frequent of ``tokens``, ``k`` ids in rising order. Of equally frequent ones, those that
    never occur included, the lowest are taken: tokenizers number common tokens first."""
    must = {whole("always: token id", i, 0, vocab - 1) for i in always}
    whole("k", k, max(1, len(must)), vocab)
    counts = Counter(tokens)
    return sorted(sorted(range(vocab), key=lambda i: (i not in must, -counts[i], i))[:k])
