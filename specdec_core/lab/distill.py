"""Distil a draft from a target: a few of its layers, taught by the target's own judgement of its own texts.

The student is the target with fewer layers: same tokenizer, same embeddings, which stay as they are. Its loss reads the
target's whole distribution at every position (Hinton et al. 2015, arXiv 1503.02531; DistillSpec, arXiv 2310.08461). The
acceptance rate at a position is 1 - TV(p, q) (Leviathan et al. 2023, corollary 3.6), so the total variation is the loss
that counts, and the others are ways to get there.

Only the rows of the output head for the tokens that the target uses most are computed, while training as while
drafting (``draft_head``); elsewhere q is 0.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pandas as pd
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear
from tqdm.auto import tqdm
from transformers import PreTrainedModel

from ..api import Pair
from ..drafters.reduced import most_frequent, reduced_head
from ..errors import SpecDecError
from . import corpus
from .drafts import save_draft, share_embeddings

# --- what the target thinks of its texts ------------------------------------------------------------------


def teach(pair: Pair, shards: Sequence[Path], rows: int = 16) -> list[Path]:
    """For each shard of texts a file with the target's last hidden state at every position and the logarithm of its
    normaliser, from which its law over any part of the vocabulary follows. Those that are there stay."""
    paths = [shard.with_suffix(".safetensors") for shard in shards]
    for shard, path in zip(tqdm(shards, desc="the target reads", unit="shard"), paths, strict=True):
        if not path.exists():
            texts = list(corpus.read([shard]))
            part = path.with_suffix(".part")
            save_file(_judged(pair.target, texts, rows), part)
            os.replace(part, path)
    return paths


@torch.inference_mode()
def _judged(target: PreTrainedModel, texts: Sequence[corpus.Text], rows: int) -> dict[str, Tensor]:
    order = sorted(range(len(texts)), key=lambda i: len(texts[i].tokens))
    hidden, normaliser = [torch.empty(0)] * len(texts), [torch.empty(0)] * len(texts)
    head = target.get_output_embeddings().weight
    for at in range(0, len(order), rows):
        some = order[at : at + rows]
        states = target.base_model(_padded([texts[i] for i in some]).to(target.device)).last_hidden_state
        for i, state in zip(some, states, strict=True):
            hidden[i] = state[: len(texts[i].tokens)].to("cpu", torch.bfloat16)
            logits = linear(state[: len(texts[i].tokens)].to(head.dtype), head)
            normaliser[i] = logits.float().logsumexp(-1).cpu()
    return {"hidden": torch.cat(hidden).contiguous(), "normaliser": torch.cat(normaliser)}


def _padded(texts: Sequence[corpus.Text]) -> Tensor:
    width = max(len(t.tokens) for t in texts)
    ids = torch.zeros(len(texts), width, dtype=torch.int64)
    for row, text in zip(ids, texts, strict=True):
        row[: len(text.tokens)] = torch.from_numpy(text.tokens)
    return ids


@dataclass
class Lesson:
    """One text with what the target thinks of it: ``hidden [n, d]``, ``normaliser [n]``."""

    text: corpus.Text
    hidden: Tensor
    normaliser: Tensor


def lessons(shards: Sequence[Path]) -> list[Lesson]:
    """Every text of these shards, beside what `teach` wrote of it."""
    found = []
    for shard in shards:
        taught = load_file(shard.with_suffix(".safetensors"))
        at = 0
        for text in corpus.read([shard]):
            end = at + len(text.tokens)
            found.append(Lesson(text, taught["hidden"][at:end], taught["normaliser"][at:end]))
            at = end
    return found


def split(taught: Sequence[Lesson], one_in: int) -> tuple[list[Lesson], list[Lesson]]:
    """To learn from, and held out: by the hash of the text, so that a text is always on one side."""
    held = [int(hashlib.sha256(x.text.tokens.tobytes()).hexdigest()[:8], 16) % one_in == 0 for x in taught]
    learned = [x for x, out in zip(taught, held, strict=True) if not out]
    kept = [x for x, out in zip(taught, held, strict=True) if out]
    if not learned or not kept:
        raise SpecDecError(f"{len(taught)} texts are too few to learn from and to hold some out: write more shards.")
    return learned, kept


def written(taught: Sequence[Lesson]) -> list[int]:
    """Every token that the target wrote."""
    return [int(token) for x in taught for token in x.text.tokens[x.text.start :]]


def covered(taught: Sequence[Lesson], held_out: Sequence[Lesson], sizes: Sequence[int], vocab: int) -> list[float]:
    """The share of tokens in held-out texts that are among the most frequent of the others, for each number kept."""
    seen, tokens = written(taught), written(held_out)
    return [
        sum(t in kept for t in tokens) / len(tokens) for kept in (set(most_frequent(seen, k, vocab)) for k in sizes)
    ]


SLICE = 256  # positions whose laws are made at once


# --- the student ------------------------------------------------------------------------------------------


def student(target: PreTrainedModel, layers: Sequence[int]) -> PreTrainedModel:
    """A float32 copy of the target with these of its layers; embeddings and output head are the target's and fixed."""
    depth = int(target.config.get_text_config(decoder=True).num_hidden_layers)
    if not layers or any(not 0 <= i < depth for i in layers):
        raise SpecDecError(f"layers={list(layers)} are not possible: name some of 0 to {depth - 1}.")
    config = copy.deepcopy(target.config)
    config.num_hidden_layers = len(layers)
    if getattr(config, "layer_types", None):
        config.layer_types = [target.config.layer_types[i] for i in layers]
    model: PreTrainedModel = type(target)(config).float()  # type: ignore[arg-type]
    theirs = target.state_dict()
    chosen = {f".layers.{new}.": f".layers.{old}." for new, old in enumerate(layers)}
    names = list(model.state_dict())
    sources = [next((name.replace(new, old, 1) for new, old in chosen.items() if new in name), name) for name in names]
    if not theirs.keys() >= set(sources):
        raise SpecDecError("The target's weights are joined or integers: load its pair with pack=False, no quantize.")
    model.load_state_dict({name: theirs[source].float() for name, source in zip(names, sources, strict=True)})
    model.requires_grad_(True)
    model.get_input_embeddings().requires_grad_(False)
    model.get_output_embeddings().requires_grad_(False)
    model.to(target.device)  # type: ignore[arg-type]
    return model


# --- losses: log p, log q [n, K] -> [n] -------------------------------------------------------------------


def forward_kl(p: Tensor, q: Tensor) -> Tensor:
    """Σ p log p/q: covers all that the target may say."""
    law = p.exp()
    return cast(Tensor, torch.linalg.vecdot(law, p) - torch.linalg.vecdot(law, q))


def reverse_kl(p: Tensor, q: Tensor) -> Tensor:
    """Σ q log q/p: keeps to what the target says most."""
    return (q.exp() * (q - p)).sum(-1)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """1 - Σ min(p, q): what is not accepted."""
    return 1 - torch.minimum(p.exp(), q.exp()).sum(-1)


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": forward_kl,
    "reverse_kl": reverse_kl,
    "total_variation": total_variation,
}


@dataclass(frozen=True)
class Course:
    """How to train. ``losses`` are taken one after the other for equal numbers of steps, by name of ``LOSSES``."""

    steps: int = 200
    tokens: int = 4096  # a step
    rate: float = 1e-2  # the highest learning rate; it rises over the first steps and falls to nothing as a cosine
    warm: int = 50
    losses: tuple[str, ...] = ("forward_kl", "total_variation")
    temperature: float = 1.0  # of both laws
    seed: int = 0
    every: int = 100  # steps between checkpoints and looks at the held-out texts

    def __post_init__(self) -> None:
        if unknown := [name for name in self.losses if name not in LOSSES]:
            raise SpecDecError(f"loss {unknown[0]!r} is unknown: choose from {', '.join(LOSSES)}.")

    def loss(self, step: int) -> str:
        return self.losses[min(step * len(self.losses) // max(self.steps, 1), len(self.losses) - 1)]

    def rate_at(self, step: int) -> float:
        rise = min((step + 1) / max(self.warm, 1), 1.0)
        return self.rate * rise * (0.5 + 0.5 * math.cos(math.pi * step / max(self.steps, 1)))


def folder_for(place: Path, course: Course, layers: Sequence[int], ids: Sequence[int], texts: str) -> Path:
    """Where the checkpoints of this training lie: the same course over the same texts goes on where it was."""
    what = json.dumps([asdict(course), list(layers), list(ids), texts])
    return place / f"training-{hashlib.sha256(what.encode()).hexdigest()[:12]}"


@dataclass
class Progress:
    """Where a training stands; ``history`` has a row for each look at the held-out texts."""

    step: int = 0
    history: list[dict[str, Any]] = field(default_factory=list)


class Trainer:
    """Trains a student and can be stopped at any moment: it goes on from its last checkpoint in ``folder``."""

    def __init__(self, model: PreTrainedModel, ids: Sequence[int], course: Course, folder: Path):
        self.model, self.course, self.folder, self.progress = model, course, folder, Progress()
        self.ids = torch.tensor(list(ids), device=model.device)
        self.rows = cast(Tensor, model.get_output_embeddings().weight)[self.ids]
        own = [w for w in model.parameters() if w.requires_grad]
        matrices, others = [w for w in own if w.ndim == 2], [w for w in own if w.ndim != 2]
        # Each step turns a matrix by the same amount in all directions (Jordan et al. 2024, "Muon"), scaled to the size
        # of AdamW's steps (Liu et al. 2025, arXiv 2502.16982, section 2.2). Seen here: in 80 steps α .24, AdamW .15.
        how: dict[str, Any] = {"lr": course.rate, "weight_decay": 0.01}
        self.optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, adjust_lr_fn="match_rms_adamw", **how),
            torch.optim.AdamW(others, betas=(0.9, 0.95), **how),
        ]
        folder.mkdir(parents=True, exist_ok=True)

    def train(
        self, taught: Sequence[Lesson], held_out: Sequence[Lesson], log: Callable[[dict[str, Any], int], None]
    ) -> Progress:
        self._resume()
        course, model = self.course, self.model
        batches = self._batches(taught, skip=self.progress.step)
        bar = tqdm(total=course.steps, initial=self.progress.step, desc="the draft learns", unit="step")
        seen: list[float] = []
        while self.progress.step < course.steps:
            step = self.progress.step
            for group in (group for optimizer in self.optimizers for group in optimizer.param_groups):
                group["lr"] = course.rate_at(step)
            model.train()
            model.zero_grad()
            seen.append(self._learn(next(batches), course.loss(step)))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in self.optimizers:
                optimizer.step()
            self.progress.step += 1
            bar.update()
            if self.progress.step % course.every == 0 or self.progress.step == course.steps:
                row = self.look(held_out) | {"loss": sum(seen) / len(seen), "learns": course.loss(step)}
                self.progress.history.append({"step": self.progress.step, **row})
                log({k: v for k, v in row.items() if isinstance(v, float)}, self.progress.step)
                bar.set_postfix(loss=f"{row['loss']:.3f}", alpha=f"{row['alpha']:.3f}", greedy=f"{row['greedy']:.3f}")
                seen = []
                self._keep()
        return self.progress

    def look(self, held_out: Sequence[Lesson]) -> dict[str, float]:
        """Acceptance on texts that were not learned from, where the target wrote (see `acceptance`)."""
        table = self.acceptance(held_out)
        weights = table["tokens"] / table["tokens"].sum()
        return {name: float((table[name] * weights).sum()) for name in ("greedy", "alpha", "alpha_07")}

    @torch.inference_mode()
    def acceptance(self, held_out: Sequence[Lesson]) -> pd.DataFrame:
        """A row a text: its kind, temperature and tokens; ``greedy``, the share of positions where both prefer the same
        token; ``alpha`` and ``alpha_07``, mean Σ min(p, q) at temperature 1 and 0.7. All over the target's answer."""
        self.model.eval()
        found = []
        for lesson in held_out:
            some = slice(lesson.text.answer - 1, len(lesson.text.tokens) - 1)  # the positions that write the answer
            if some.start >= some.stop:
                continue
            p, q = self._laws(*self._states([lesson]))
            p, q = p[some], q[some]
            row = {"greedy": (p.argmax(-1) == q.argmax(-1)).float().mean().item()}
            row["alpha"] = torch.minimum(p.exp(), q.exp()).sum(-1).mean().item()
            cool = [(x / 0.7).softmax(-1) for x in (p, q)]
            row["alpha_07"] = torch.minimum(*cool).sum(-1).mean().item()
            known = {"kind": lesson.text.kind, "temperature": lesson.text.temperature, "tokens": len(p)}
            found.append(known | row)
        return pd.DataFrame(found)

    def _states(self, batch: Sequence[Lesson]) -> tuple[Tensor, Tensor, Tensor]:
        """For every real position of the batch: the student's last hidden state and the target's, ``[n, d]``, and the
        logarithm of the target's normaliser, ``[n]``."""
        device = self.model.device
        with torch.autocast(device.type, torch.bfloat16, enabled=self.model.training):
            states = self.model.base_model(_padded([x.text for x in batch]).to(device)).last_hidden_state
            own = torch.cat([s[: len(x.text.tokens)] for s, x in zip(states, batch, strict=True)])
        hidden, normaliser = (torch.cat([getattr(x, of) for x in batch]) for of in ("hidden", "normaliser"))
        return own, hidden.to(device), normaliser.to(device)

    def _laws(self, own: Tensor, hidden: Tensor, normaliser: Tensor) -> tuple[Tensor, Tensor]:
        """log p and log q over the chosen tokens, ``[n, K]``."""
        with torch.autocast(own.device.type, torch.bfloat16, enabled=self.model.training):
            logits = linear(own, self.rows)
            theirs = linear(hidden.to(logits.dtype), self.rows.to(logits.dtype))
        return theirs.float() - normaliser.unsqueeze(1), logits.float().log_softmax(-1)

    def _learn(self, batch: Sequence[Lesson], name: str) -> float:
        """Gradients of the mean loss, which is returned. The laws are made a few hundred positions at a time: those of
        a whole batch would be written to memory and read back many times over, and took two thirds of a step."""
        own, hidden, normaliser = self._states(batch)
        parts = [part.requires_grad_() for part in own.detach().split(SLICE)]
        total = 0.0
        for part, h, n in zip(parts, hidden.split(SLICE), normaliser.split(SLICE), strict=True):
            loss = LOSSES[name](*self._laws(part, h, n)).sum() / len(own)
            loss.backward()
            total += loss.item()
        own.backward(torch.cat([cast(Tensor, part.grad) for part in parts]))
        return total

    def _batches(self, taught: Sequence[Lesson], skip: int) -> Iterator[list[Lesson]]:
        """Batches of texts of like length, in an order that the seed and the epoch decide."""
        epoch = 0
        while True:
            random = torch.Generator().manual_seed(self.course.seed * 1000 + epoch)
            jitter = torch.rand(len(taught), generator=random).tolist()
            order = sorted(range(len(taught)), key=lambda i: len(taught[i].text.tokens) + 32 * jitter[i])
            batches: list[list[Lesson]] = [[]]
            for i in order:
                if (len(batches[-1]) + 1) * len(taught[i].text.tokens) > self.course.tokens and batches[-1]:
                    batches.append([])
                batches[-1].append(taught[i])
            for i in torch.randperm(len(batches), generator=random).tolist():
                if skip:
                    skip -= 1
                else:
                    yield batches[i]
            epoch += 1

    # --- checkpoints ------------------------------------------------------------------------------------------

    def _keep(self) -> None:
        optimizers = [optimizer.state_dict() for optimizer in self.optimizers]
        state = {"model": self._own(), "optimizers": optimizers, "progress": asdict(self.progress)}
        part = self.folder / "checkpoint.part"
        torch.save(state | {"course": asdict(self.course)}, part)
        os.replace(part, self.folder / "checkpoint.pt")

    def _own(self) -> dict[str, Tensor]:
        return {name: w for name, w in self.model.named_parameters() if w.requires_grad}

    def _resume(self) -> None:
        path = self.folder / "checkpoint.pt"
        if not path.exists():
            return
        state = torch.load(path, map_location=self.model.device, weights_only=True)
        if state["course"] != asdict(self.course):
            raise SpecDecError(f"{path} is of another course: give another folder, or remove it.")
        self.model.load_state_dict(state["model"], strict=False)
        for optimizer, held in zip(self.optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(held)
        self.progress = Progress(**state["progress"])


# --- what comes of it -------------------------------------------------------------------------------------


def with_draft(pair: Pair, model: PreTrainedModel, ids: Sequence[int]) -> Pair:
    """The pair with a student as its draft: in the target's number format, its head cut to ``ids``."""
    draft = copy.deepcopy(model).to(pair.target.dtype).eval().requires_grad_(False)  # type: ignore[arg-type]
    share_embeddings(draft, pair.target)
    return replace(pair, draft=reduced_head(draft, ids), drafter="composite")


def card(name: str, facts: Mapping[str, Any], by_kind: Mapping[str, float]) -> str:
    """The model card that stands beside a shipped draft: where it came from and how often it agrees, by kind."""
    lines = [f"# {name}", "", "A draft for speculative decoding, distilled from its target's own texts.", ""]
    lines += ["| what | |", "|---|---|", *(f"| {key} | {value} |" for key, value in facts.items()), ""]
    lines += ["Held-out texts, share of tokens where draft and target prefer the same one:", ""]
    lines += [
        "| kind | agreement |",
        "|---|---|",
        *(f"| {kind} | {value:.2f} |" for kind, value in by_kind.items()),
        "",
    ]
    lines += ["The tensors that it shares with its target are not in this folder (see `shared.json`).", ""]
    return "\n".join(lines)


def save(trainer: Trainer, pair: Pair, folder: Path, facts: Mapping[str, Any], by_kind: Mapping[str, float]) -> None:
    """Everything that ships: weights of its own, the ids of its output head, and the card."""
    ref, sha = str(pair.lineage["target_ref"]), str(pair.lineage["target_weights_sha256"])
    save_draft(trainer.model, folder, ref, sha)
    (folder / "head.json").write_text(json.dumps(trainer.ids.tolist()) + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card(folder.name, facts, by_kind), encoding="utf-8")
