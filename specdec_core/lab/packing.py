"""Weights in the order in which oneDNN reads them, for models on a CPU.

``nn.Linear`` hands its weights over as they lie, and products of a few rows, of which a pass over a block consists, are
then far from the speed at which memory is read. With a second copy of the weights in oneDNN's own order, made once (as
torch.compile does when it freezes a model), a block of four or five tokens costs little more than one token in float32
too. Products in bfloat16 were the same bit for bit on every machine seen; those in float32 differ in rounding, as those
of one and of several rows do anyway.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..drafters.early_exit import shell
from ..drafters.reduced import ReducedHead

ROWS = 5  # the order is chosen for so many rows: a block of four and the pending token; it takes any number
FEW = 4  # fewer rows than these are faster on plain weights in float32, on some machines by a third


class BlockedLinear(nn.Linear):
    """An ``nn.Linear`` with its weights in oneDNN's order beside them: [..., in] -> [..., out].

    The second copy is made anew where the weights have changed: by another tensor, another number format, or a write
    that torch counts (one through ``.data``, NumPy or into an inference tensor it does not: pack again after it). With
    gradients, under autocast, on another device or in another number format it is a plain ``nn.Linear``.
    """

    def __init__(self, linear: nn.Linear):
        super().__init__(linear.in_features, linear.out_features, bias=False, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self._block()

    def _block(self) -> None:
        self.blocked = torch.ops.mkldnn._reorder_linear_weight(self.weight.detach(), ROWS)
        self.made_of = self._state()

    def _state(self) -> tuple[int, int, torch.dtype]:
        """Changes with the weights: another tensor, one written to, or another number format."""
        weight = self.weight
        return weight.data_ptr(), 0 if weight.is_inference() else weight._version, weight.dtype

    def forward(self, hidden: Tensor) -> Tensor:
        if (
            torch.is_grad_enabled()
            or torch.is_autocast_enabled("cpu")
            or not hidden.device.type == self.weight.device.type == "cpu"
        ):
            return super().forward(hidden)
        few = hidden.numel() < FEW * self.in_features
        if self.weight.dtype != torch.bfloat16 and (self.weight.dtype != torch.float32 or few):
            return super().forward(hidden)
        if self._state() != self.made_of:
            self._block()
        out: Tensor = torch.ops.mkldnn._linear_pointwise(hidden, self.blocked, self.bias, "none", [], "")
        return out

    def _apply(self, fn: Any, recurse: bool = True) -> BlockedLinear:
        """Moved or cast: the new weights may lie where the old ones did, so what was made of those is forgotten."""
        super()._apply(fn, recurse)
        self.made_of = (0, 0, torch.float32)
        return self

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "blocked"}  # oneDNN's, not to be stored

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.blocked, self.made_of = torch.empty(0), (0, 0, torch.float32)

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockedLinear:
        """As any module, but for the second copy: shared where the weights are, and else made anew."""
        other = type(self).__new__(type(self))
        other.__dict__.update({k: copy.copy(v) if isinstance(v, dict) else v for k, v in vars(self).items()})
        other._parameters = {name: copy.deepcopy(w, memo) for name, w in self._parameters.items()}
        return other


def possible(model: PreTrainedModel) -> bool:
    """Whether oneDNN is there and takes the model's number format."""
    if model.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if model.dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return model.dtype == torch.float32


def pack(model: PreTrainedModel) -> PreTrainedModel:
    """``model`` with a second copy of its weights in oneDNN's order; everything else is shared with it.

    Layers that are no plain ``nn.Linear`` stay as they are, such as quantised ones. Where it is not `possible` the
    model itself comes back.
    """
    if not possible(model):
        return model
    packed = shell(model)
    decoder = packed.get_decoder()
    for name, linear in [(name, m) for name, m in decoder.named_modules() if type(m) is nn.Linear]:
        decoder.set_submodule(name, BlockedLinear(linear))
    head = packed.get_output_embeddings()
    if isinstance(head, ReducedHead) and type(head.linear) is nn.Linear:
        head.linear = BlockedLinear(head.linear)
    elif type(head) is nn.Linear:
        packed.set_output_embeddings(BlockedLinear(head))
    return packed
