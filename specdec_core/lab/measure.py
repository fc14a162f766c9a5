"""Time, measured so that it can be judged: arms interleaved in one run, order rotated, ratios by prompt."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import pandas as pd
import torch

from ..api import Output
from ..record import seconds_by_stage, tokens_emitted
from .stats import Interval, bootstrap

Arm = Callable[[str], Output]


def interleaved(
    arms: Mapping[str, Arm], prompts: Sequence[str], progress: Callable[[str], None] | None = None
) -> tuple[pd.DataFrame, dict[str, list[Output]]]:
    """Run every arm on every prompt, one after the other, starting with another arm at each prompt.

    No arm meets a prompt twice, so none is timed warm. Warm-up is the caller's, with a prompt that is not among these.

    Returns:
        A table (prompt, arm, seconds of the whole call, decode seconds after the prefill, tokens) and the outputs.
    """
    names, rows = list(arms), []
    outputs: dict[str, list[Output]] = {name: [] for name in names}
    for i, prompt in enumerate(prompts):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            if progress is not None:
                progress(f"{name}, prompt {i + 1} of {len(prompts)}")
            _settle()
            begun = time.perf_counter()
            output = arms[name](prompt)
            _settle()
            seconds = time.perf_counter() - begun
            outputs[name].append(output)
            rows.append(
                {
                    "prompt": i,
                    "arm": name,
                    "seconds": seconds,
                    "decode_seconds": sum(seconds_by_stage(output.records).values()),
                    "tokens": tokens_emitted(output.records),
                }
            )
    return pd.DataFrame(rows), outputs


def speed_ratio(times: pd.DataFrame, arm: str, baseline: str, column: str = "seconds") -> Interval:
    """Geometric mean over prompts of (tokens per second of ``arm``) / (that of ``baseline``), with its interval."""
    wide = times.assign(pace=times[column] / times["tokens"]).pivot(index="prompt", columns="arm", values="pace")
    logs = [[math.log(b / a), 1.0] for a, b in zip(wide[arm], wide[baseline], strict=True)]
    return bootstrap(logs, lambda s: math.exp(s[0] / s[1]))


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
