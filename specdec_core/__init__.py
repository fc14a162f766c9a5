"""specdec_core: a speculative decoding loop that can be read in one sitting, and the evidence around it.

    from specdec_core import load_pair, generate

The core (this package without ``lab``) imports torch and transformers only. Names are imported when first asked for,
so that a command that needs no model does not wait for torch. ``load_pair`` lives in ``lab.models``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from .errors import SpecDecError

if TYPE_CHECKING:
    from .api import DRAFTERS, Output, Pair, Stream, generate, generate_batch, stream
    from .control import Adaptive, BlockLength, Costs, Fallback, Fixed, Heuristic
    from .drafters import Drafter
    from .lab.models import load_pair
    from .processors import Processing
    from .record import StepRecord
    from .sampling import SamplingPolicy

__version__ = "0.1.0"
__all__ = [
    "DRAFTERS",
    "Adaptive",
    "BlockLength",
    "Costs",
    "Drafter",
    "Fallback",
    "Fixed",
    "Heuristic",
    "Output",
    "Pair",
    "Processing",
    "SamplingPolicy",
    "SpecDecError",
    "StepRecord",
    "Stream",
    "generate",
    "generate_batch",
    "load_pair",
    "stream",
]
_HOME = {
    "load_pair": ".lab.models",
    "StepRecord": ".record",
    "SamplingPolicy": ".sampling",
    "Processing": ".processors",
    "Drafter": ".drafters",
    **dict.fromkeys(("Adaptive", "BlockLength", "Costs", "Fallback", "Fixed", "Heuristic"), ".control"),
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'specdec_core' has no attribute {name!r}")
    return getattr(import_module(_HOME.get(name, ".api"), __name__), name)
