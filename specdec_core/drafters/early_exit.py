"""The target's own first layers as draft (Zhang et al. 2023, "Draft & Verify"; Elhoushi et al. 2024, "LayerSkip")."""

from __future__ import annotations

import copy
from typing import Any

from torch.nn import ModuleList
from transformers import PreTrainedModel

from ..errors import SpecDecError, whole
from ..sampling import SamplingPolicy
from .model import ModelDrafter


def shell(model: PreTrainedModel) -> PreTrainedModel:
    """Modules and configuration of ``model`` anew, around the same weights: changing the one leaves the other alone."""
    if any("forward" in vars(module) for module in model.modules()):
        raise SpecDecError(
            f"The forward of this '{model.config.model_type}' is wrapped (compiled, or spread over devices), so a part "
            "of it cannot be taken: load it plainly."
        )
    weights = [*model.parameters(), *model.buffers()]
    return copy.deepcopy(model, {id(tensor): tensor for tensor in weights})


def early_exit(model: PreTrainedModel, layers: int) -> PreTrainedModel:
    """The first ``layers`` layers of ``model`` with its own final norm and head; no weight is copied.

    Raises:
        SpecDecError: for a model whose layers are not one plain list, and ``layers`` that leave out none or all.
    """
    exit_model = shell(model)
    config: Any = exit_model.config.get_text_config(decoder=True)
    depth = config.num_hidden_layers
    stacks = [m for m in exit_model.get_decoder().children() if isinstance(m, ModuleList) and len(m) == depth]
    if len(stacks) != 1 or depth < 2 or getattr(config, "num_kv_shared_layers", None):
        raise SpecDecError(
            f"Model type '{config.model_type}' is no plain stack of several layers, so it cannot be left early: use a "
            "draft model, or drafter=prompt_lookup."
        )
    whole("layers", layers, 1, depth - 1)
    del stacks[0][layers:]
    each = {k: v for k, v in vars(config).items() if "layer" in k and isinstance(v, list) and len(v) == depth}
    for name, value in each.items():  # layer_types and its like
        setattr(config, name, value[:layers])
    config.num_hidden_layers = layers
    return exit_model


class EarlyExitDrafter(ModelDrafter):
    """A :class:`ModelDrafter` whose model is the target up to layer ``layers``; it keeps a cache of its own."""

    name = "early_exit"

    def __init__(self, target: PreTrainedModel, layers: int, policy: SamplingPolicy, vocab: int, **kwargs: Any):
        super().__init__(early_exit(target, layers), policy, vocab, **kwargs)
