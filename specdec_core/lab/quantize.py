"""A target with integer weights, packed for the matrix products that torch has for them on a CPU.

A pass over few tokens takes as long as its weights take to be read: int8 halves the bytes of bfloat16, int4 leaves a
third. The arithmetic remains, for four tokens at a time: a block of four costs little more than one token, a block of
five a good deal more, and a long prompt more than in bfloat16. Each token's products are the same, bit for bit, in a
block of any length; attention's are not, so rounding can still part two equally good tokens.

The grids are those of llama.cpp's Q4_1 (32 weights, 16 levels from the smallest to the largest) and of its Q8_0 with
one scale a row. Weights that were Q4_1 before, as the default target's, come out as they were to bfloat16's rounding.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..drafters.early_exit import shell
from ..drafters.reduced import ReducedHead
from ..errors import SpecDecError, choice

KINDS = ("int8", "int4")
GROUP = 32  # weights that share a scale and a zero, as in Q4_1; the smallest that the kernel takes
TINY = 1e-12  # the step of weights that are all alike: any number that is not 0 in bfloat16


def int8_grid(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers q [out, in], int8, and scales [out], bfloat16: q * scale is next to ``weight`` [out, in]."""
    weight = weight.detach().float()
    scale = (weight.abs().amax(1) / 127).clamp(min=TINY).bfloat16()
    return (weight / scale[:, None]).round().clamp(-128, 127).to(torch.int8), scale


def int4_grid(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers q [out, in], int32 in 0..15, and scales and zeros [in / 32, out, 2], bfloat16.

    (q - 8) * scale + zero is next to ``weight`` [out, in], with a scale and a zero for each 32 inputs of an output.
    """
    groups = weight.detach().float().unflatten(1, (-1, GROUP))
    low, high = groups.aminmax(dim=2, keepdim=True)
    step = (high - low) / 15
    scale, zero = step.clamp(min=TINY).bfloat16(), (low + 8 * step).bfloat16()
    q = ((groups - zero) / scale).round().clamp(-8, 7).to(torch.int32) + 8  # for the grid as it is stored
    return q.flatten(1), torch.cat([scale, zero], 2).transpose(0, 1).contiguous()


class PackedLinear(nn.Module):
    """Stands where an ``nn.Linear`` stood: [..., in] -> [..., out], both bfloat16, summed in float32. No gradients.

    Packed weights are buffers, which `shell` shares; they are no parameters, so ``num_parameters`` leaves them out.
    """

    multiples: tuple[int, int]  # what in and out must be multiples of
    packed: Tensor
    scales: Tensor

    def __init__(self, linear: nn.Linear):
        super().__init__()
        self.in_features, self.out_features, self.bias = linear.in_features, linear.out_features, linear.bias

    def product(self, rows: Tensor) -> Tensor:
        """[n, in] -> [n, out]"""
        raise NotImplementedError

    def forward(self, hidden: Tensor) -> Tensor:
        rows = hidden.reshape(-1, self.in_features).contiguous()  # the kernels take nothing else
        out = self.product(rows).view(*hidden.shape[:-1], self.out_features)
        return out if self.bias is None else out + self.bias

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"


class Int8Linear(PackedLinear):
    """Integers of 8 bits, a scale for each output."""

    multiples = (16, 1)  # the kernel reads 16 aligned inputs at a time, unchecked: anything else crashes the process

    def __init__(self, linear: nn.Linear):
        super().__init__(linear)
        q, scales = int8_grid(linear.weight)
        self.register_buffer("packed", q)
        self.register_buffer("scales", scales)

    def product(self, rows: Tensor) -> Tensor:
        aligned = rows if rows.storage_offset() % 16 == 0 else rows.clone()
        return torch._weight_int8pack_mm(aligned, self.packed, self.scales)


class Int4Linear(PackedLinear):
    """Integers of 4 bits, two in a byte; a scale and a zero for each 32 inputs of an output."""

    multiples = (GROUP, 16)

    def __init__(self, linear: nn.Linear):
        super().__init__(linear)
        q, scales = int4_grid(linear.weight)
        self.register_buffer("packed", torch._convert_weight_to_int4pack_for_cpu(q, 1))  # the 1 means nothing on CPUs
        self.register_buffer("scales", scales)

    def product(self, rows: Tensor) -> Tensor:
        return torch._weight_int4pack_mm_for_cpu(rows, self.packed, GROUP, self.scales)


def size(model: PreTrainedModel) -> int:
    """Weights of a model, packed ones included, which are no parameters; a head that is its embedding counts once."""
    tied = model.config.get_text_config(decoder=True).tie_word_embeddings
    some = [*model.get_decoder().modules(), *([] if tied else [model.get_output_embeddings()])]
    integers = sum(m.in_features * m.out_features for m in some if isinstance(m, PackedLinear))
    return int(model.num_parameters()) + integers


def check(kind: str, device: torch.device, dtype: torch.dtype) -> None:
    """Refuse what no model can be packed with: SpecDecError for an unknown kind, a GPU, another dtype than bfloat16."""
    choice("quantize", kind, KINDS)
    if device.type != "cpu":
        raise SpecDecError(f"quantize='{kind}' packs weights for a CPU, not for '{device}': give device='cpu'.")
    if dtype != torch.bfloat16:  # the kernels take float32 and float16 too, one number at a time
        have = str(dtype).removeprefix("torch.")
        raise SpecDecError(f"quantize='{kind}' needs a model in bfloat16, not {have}: give dtype='bfloat16'.")


def quantize(model: PreTrainedModel, kind: str) -> PreTrainedModel:
    """``model`` with integer weights: every ``nn.Linear`` of its decoder as ``kind``, its output head as int8.

    ``kind`` is one of ``KINDS``. ``model`` stays as it was; embeddings, norms and biases are shared with it, so a tied
    head is packed beside an embedding that keeps its values. The head is int8 in both kinds, as GGUF files have it: in
    int4 the default target's head alone changes one token in twelve, to save a tenth of a pass at most.

    The result is another model, whose law is not that of ``model``.

    Raises:
        SpecDecError: for an unknown kind, a model that is not on the CPU, not in bfloat16 or without ``nn.Linear``
            layers, and for widths that the kernel does not take.
    """
    check(kind, model.device, model.dtype)
    packed = shell(model)
    cls: type[PackedLinear] = Int8Linear if kind == "int8" else Int4Linear
    decoder, head = packed.get_decoder(), packed.get_output_embeddings()
    layers = {name: m for name, m in decoder.named_modules() if type(m) is nn.Linear}  # a subclass may compute else
    if not layers:
        raise SpecDecError(
            f"Model type '{model.config.model_type}' has no nn.Linear in its layers (or is quantised already): load it "
            "without quantize."
        )
    for name, linear in layers.items():
        decoder.set_submodule(name, _packed(name, linear, cls))
    if isinstance(head, ReducedHead):
        head.linear = _packed("output head", cast(nn.Linear, head.linear), Int8Linear)
    elif type(head) is nn.Linear:
        packed.set_output_embeddings(_packed("output head", head, Int8Linear))
    return packed


def _packed(name: str, linear: nn.Linear, cls: type[PackedLinear]) -> PackedLinear:
    inputs, outputs = cls.multiples
    if linear.in_features % inputs or linear.out_features % outputs:
        widths = f"{linear.in_features} inputs and {linear.out_features} outputs"
        raise SpecDecError(
            f"{cls.__name__} cannot hold '{name}' of {widths}, which must be multiples of {inputs} and {outputs}: take "
            "another kind, or load the model without quantize."
        )
    return cls(linear)
