"""Texts that a target wrote by itself, to distil a draft from: its own questions, and its answers to them.

Nothing but a chat prefix and the first words of a question is given to it, so no data from outside is needed
(Xu et al. 2024, Magpie, arXiv 2406.08464, section 2, for aligned models in general). A draft is judged on the target's
own texts, so these are also the right ones to learn from (Zhou et al. 2023, DistillSpec, arXiv 2310.08461, section 4).
A shard depends on the weights, their number format, the settings and its number alone; one that is there is not
written again.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
import yaml
from torch import Tensor
from tqdm.auto import tqdm

from ..api import Pair
from ..caches import ModelCache
from ..errors import SpecDecError
from ..sampling import likeliest
from .convert import cache_dir

TEMPERATURES = (0.0, 0.0, 0.7)  # of answers, in turn
QUESTION = 0.8  # temperature of questions


@dataclass(frozen=True)
class Text:
    """One conversation: ``tokens [n]`` int64, of which the target wrote those from ``start`` on; ``answer`` is where
    its answer begins."""

    tokens: np.ndarray[Any, np.dtype[np.int64]]
    start: int
    answer: int
    temperature: float
    kind: str


def openings() -> list[tuple[str, str]]:
    """(kind, first words of a question), every kind equally often; the free one as often as all others together."""
    given = yaml.safe_load(resources.files(__package__).joinpath("data/openings.yaml").read_text(encoding="utf-8"))
    free, kinds = given.pop("free"), list(given)
    longest = max(len(each) for each in given.values())
    told = [(kind, given[kind][i % len(given[kind])]) for i in range(longest) for kind in kinds]
    return [pair for each in told for pair in (each, ("free", free[0]))]


def write(
    pair: Pair, folder: Path, shards: int, *, batch: int = 160, question: int = 96, answer: int = 192, seed: int = 0
) -> list[Path]:
    """Write ``shards`` files of ``batch`` conversations each; those that are there stay.

    ``question`` and ``answer`` are the most tokens of each. Killed at any moment, it goes on where it was.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"shard-{seed:03d}-{i:04d}.npz" for i in range(shards)]
    bar = tqdm(paths, desc="the target writes", unit="shard")
    for i, path in enumerate(bar):
        if not path.exists():
            texts = _conversations(pair, i, batch, question, answer, seed)
            _save(path, texts)
            bar.set_postfix(tokens=sum(len(t.tokens) for t in texts))
    return paths


def folder_for(pair: Pair, batch: int, question: int, answer: int) -> Path:
    """Where texts of this target and these settings are kept between runs, by all that they depend on."""
    known = [pair.lineage[key] for key in ("target_weights_sha256", "target_tokenizer_sha256", "dtype")]
    what = json.dumps([*known, openings(), TEMPERATURES, QUESTION])
    return cache_dir() / "corpora" / f"{hashlib.sha256(what.encode()).hexdigest()[:12]}-{batch}-{question}-{answer}"


def read(paths: Sequence[Path]) -> Iterator[Text]:
    """The texts of these shards, in order."""
    for path in paths:
        try:
            with np.load(path) as held:
                flat, ends, numbers = held["tokens"], held["ends"], held["numbers"]
                temperatures, kinds = held["temperatures"], held["kinds"]
        except (OSError, ValueError, KeyError, BadZipFile) as error:
            raise SpecDecError(f"{path.name} is no shard of texts ({error}): remove it and write it again.") from None
        for i, tokens in enumerate(np.split(flat.astype(np.int64), ends[:-1])):
            yield Text(tokens, int(numbers[i, 0]), int(numbers[i, 1]), float(temperatures[i]), str(kinds[i]))


def digest(paths: Sequence[Path]) -> str:
    """SHA-256 over the tokens of these shards, in order."""
    sha = hashlib.sha256()
    for text in read(paths):
        sha.update(text.tokens.astype("<i8").tobytes())
    return sha.hexdigest()


def _save(path: Path, texts: Sequence[Text]) -> None:
    """All of a shard or nothing of it."""
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        np.savez_compressed(
            file,
            tokens=np.concatenate([t.tokens for t in texts]).astype(np.int32),
            ends=np.cumsum([len(t.tokens) for t in texts]),
            numbers=np.array([(t.start, t.answer) for t in texts]),
            temperatures=np.array([t.temperature for t in texts]),
            kinds=np.array([t.kind for t in texts]),
        )
    os.replace(part, path)


@torch.inference_mode()
def _conversations(pair: Pair, shard: int, batch: int, question: int, answer: int, seed: int) -> list[Text]:
    """All rows go on together, at the same length whatever they are at, so that no pass needs a mask. They end when
    nine in ten have answered; the rest, which mostly repeat themselves, are kept as far as they are."""
    device, random = pair.target.device, torch.Generator(pair.target.device).manual_seed(1_000_003 * seed + shard)
    before, between = _template(pair)
    known, ends = openings(), ends_of(pair)
    rows = []
    for i in range(batch):
        kind, words = known[(shard * batch + i) % len(known)]
        given = pair.tokenizer.encode(words, add_special_tokens=False)
        rows.append(_Row(kind, TEMPERATURES[i % len(TEMPERATURES)], [*before, *given], list(given), between, ends))
    cache, tokens = ModelCache(pair.target, batch), torch.tensor([before] * batch, device=device)
    while sum(row.over for row in rows) <= 0.9 * batch:
        logits = cache.extend(tokens, keep="last")[:, 0]
        heat = torch.tensor([row.heat for row in rows], device=device)
        drawn = _drawn(logits, heat, random).tolist()
        fed = [row.take(token, question, answer) for row, token in zip(rows, drawn, strict=True)]
        tokens = torch.tensor(fed, device=device).unsqueeze(1)
    return [Text(np.array(r.text), r.start, r.answer or len(r.text), r.temperature, r.kind) for r in rows]


class _Row:
    """A conversation that is being written: first words, question, what stands between, answer."""

    def __init__(
        self, kind: str, temperature: float, text: list[int], given: list[int], between: list[int], ends: set[int]
    ):
        self.kind, self.temperature, self.text, self.between, self.ends = kind, temperature, text, between, ends
        self.due = given  # tokens that are fed next, whatever the target would say
        self.start, self.answer, self.over = len(text), 0, False

    @property
    def heat(self) -> float:
        return self.temperature if self.answer else QUESTION

    def take(self, drawn: int, question: int, answer: int) -> int:
        """The token to feed next: one that is due, else the drawn one, which joins the text."""
        asking = not self.due and not self.over and not self.answer
        if asking and (drawn in self.ends or len(self.text) - self.start >= question):
            self.text += self.between
            self.due, self.answer = list(self.between), len(self.text)
        if self.due:
            return self.due.pop(0)
        if not self.over:
            self.text.append(drawn)
            self.over = bool(self.answer) and (drawn in self.ends or len(self.text) - self.answer >= answer)
        return drawn


def _template(pair: Pair) -> tuple[list[int], list[int]]:
    """Token ids of a chat before the user's words, and between them and the answer."""
    mark = "QUESTION-GOES-HERE"
    chat = pair.tokenizer.apply_chat_template(
        [{"role": "user", "content": mark}], tokenize=False, add_generation_prompt=True
    )
    if not isinstance(chat, str) or chat.count(mark) != 1:
        raise SpecDecError("The target's chat template does not hold the user's words as they are: it cannot be asked.")
    before, between = chat.split(mark)
    encode = pair.tokenizer.encode
    return list(encode(before, add_special_tokens=False)), list(encode(between, add_special_tokens=False))


def ends_of(pair: Pair) -> set[int]:
    """Tokens that end a turn."""
    config, own = pair.target.generation_config, pair.tokenizer.eos_token_id
    given = getattr(config, "eos_token_id", None)
    ids = {own} | set(given if isinstance(given, (list, tuple)) else [given])
    return {int(i) for i in ids if i is not None}


def _drawn(logits: Tensor, heat: Tensor, random: torch.Generator) -> Tensor:
    """A token a row ``[B]``: the likeliest where the temperature is 0, else by inverse transform. Its float32 sums and
    one coin a row are five times as fast as a race of 49,152 exponentials, and exact enough for texts to learn from."""
    token, hot = likeliest(logits), heat > 0
    if hot.any():
        sums = (logits[hot].float() / heat[hot].unsqueeze(1)).softmax(-1).cumsum(-1)
        coins = torch.rand(len(sums), 1, generator=random, device=sums.device) * sums[:, -1:]
        token[hot] = torch.searchsorted(sums, coins, right=True).clamp(max=sums.shape[1] - 1).squeeze(1)
    return token
