"""Time, measured so that it can be judged: arms interleaved in one run, order rotated, ratios by prompt."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np
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


def ratios_by_prompt(times: pd.DataFrame, arm: str, baseline: str, column: str = "seconds") -> np.ndarray:
    """(tokens per second of ``arm``) / (that of ``baseline``), one number a prompt, in the order of prompts."""
    wide = times.assign(pace=times[column] / times["tokens"]).pivot(index="prompt", columns="arm", values="pace")
    return np.asarray(wide[baseline] / wide[arm])


def speed_ratio(times: pd.DataFrame, arm: str, baseline: str, column: str = "seconds") -> Interval:
    """Geometric mean over prompts of :func:`ratios_by_prompt`, with its interval."""
    logs = [[math.log(r), 1.0] for r in ratios_by_prompt(times, arm, baseline, column)]
    return bootstrap(logs, lambda s: math.exp(s[0] / s[1]))


def verdict(ratio: Interval) -> str:
    """What a speed ratio allows one to say."""
    if ratio.low > 1:
        return "Speculation pays"
    return "Speculation does not pay" if ratio.high < 1 else "Undecided whether speculation pays"


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
