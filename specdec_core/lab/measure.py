"""Time and energy, measured so that they can be judged: arms interleaved in one run, order rotated, ratios by
prompt."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

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
        A table (prompt, arm, seconds of the whole call, decode seconds after the prefill, tokens, and joules of the
        whole machine, NaN where it does not count them) and the outputs.
    """
    names, rows = list(arms), []
    outputs: dict[str, list[Output]] = {name: [] for name in names}
    for i, prompt in enumerate(prompts):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            if progress is not None:
                progress(f"{name}, prompt {i + 1} of {len(prompts)}")
            _settle()
            spent, begun = joules(), time.perf_counter()
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
                    "joules": joules() - spent,
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


RAPL = Path("/sys/class/powercap")


def joules() -> float:
    """What the machine has counted so far: packages by Intel's RAPL, GPUs by NVML; NaN where it counts nothing that may
    be read. A counter that starts again in between gives a negative difference: leave such a row out."""
    counted = []
    with suppress(OSError, ValueError):
        counted += [int((p / "energy_uj").read_text()) / 1e6 for p in sorted(RAPL.glob("intel-rapl:[0-9]"))]
    if torch.cuda.is_available():
        with suppress(Exception):  # NVML raises kinds of its own
            nvml = importlib.import_module("pynvml")
            nvml.nvmlInit()
            devices = (nvml.nvmlDeviceGetHandleByIndex(i) for i in range(torch.cuda.device_count()))
            counted += [nvml.nvmlDeviceGetTotalEnergyConsumption(d) / 1e3 for d in devices]
    return sum(counted) if counted else math.nan


def energy_ratio(times: pd.DataFrame, arm: str, baseline: str) -> Interval | None:
    """Geometric mean over prompts of the joules a token of ``arm`` over ``baseline``; None where none were read."""
    some = times[times["arm"].isin([arm, baseline])]
    if not (some["joules"] > 0).all():
        return None
    logs = [[-math.log(r), 1.0] for r in ratios_by_prompt(some, arm, baseline, "joules")]
    return bootstrap(logs, lambda s: math.exp(s[0] / s[1]))


def _settle() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
