"""specdec_core: a speculative decoding loop that can be read in one sitting, and the evidence around it.

    from specdec_core import load_pair, generate

The core (this package without ``lab``) imports torch and transformers only. ``load_pair`` lives in ``lab.models`` and
is imported when first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .api import DRAFTERS, Output, Pair, generate, generate_batch
from .errors import SpecDecError
from .record import StepRecord
from .sampling import SamplingPolicy

if TYPE_CHECKING:
    from .lab.models import load_pair

__version__ = "0.1.0"
__all__ = [
    "DRAFTERS",
    "Output",
    "Pair",
    "SamplingPolicy",
    "SpecDecError",
    "StepRecord",
    "generate",
    "generate_batch",
    "load_pair",
]


def __getattr__(name: str) -> Any:
    if name == "load_pair":
        from .lab.models import load_pair

        return load_pair
    raise AttributeError(f"module 'specdec_core' has no attribute {name!r}")
