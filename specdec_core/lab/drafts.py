"""Drafts that ship: a folder without the tensors that the target has too, made whole in the cache on first use.

``shared.json`` names the target and the tensors that are its own. The whole is an ordinary Hugging Face folder, so that
every other engine can load the very same draft.
"""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from filelock import FileLock

from ..errors import SpecDecError
from .convert import cache_dir, file_sha256

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SHARED = "shared.json"


def save_draft(model: PreTrainedModel, folder: Path, target: str, target_weights: str) -> None:
    """Write a draft in bfloat16 without what it shares with the target named ``target``, whose weights file has this
    SHA-256: its embeddings and output head, which training left alone."""
    import torch
    from safetensors.torch import save_file

    own = {name: w.detach().to("cpu", torch.bfloat16) for name, w in model.named_parameters() if w.requires_grad}
    fixed = sorted(name for name, w in model.named_parameters() if not w.requires_grad)
    if not own or not fixed:
        raise SpecDecError("The draft shares nothing with its target, or has nothing of its own: save it as it is.")
    folder.mkdir(parents=True, exist_ok=True)
    save_file(own, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors writes for the owner only
    model.config.save_pretrained(folder)
    shared = {"target": target, "target_weights_sha256": target_weights, "tensors": fixed}
    (folder / SHARED).write_text(json.dumps(shared, indent=2) + "\n", encoding="utf-8")


def whole(folder: Path, target: Path) -> Path:
    """The draft of ``folder`` with the tensors of ``target`` beside its own: a complete model folder in the cache.

    Raises SpecDecError where the target is not the one that the draft was made from.
    """
    shared = read_shared(folder)
    found = file_sha256(target / "model.safetensors")
    if found != shared["target_weights_sha256"]:
        raise SpecDecError(
            f"Draft {folder.name} was distilled from a target with other weights ({found[:12]} here, "
            f"{shared['target_weights_sha256'][:12]} asked): distil one for this target, or take prompt_lookup."
        )
    key = file_sha256(folder / "model.safetensors")[:16]
    final = cache_dir() / "drafts" / f"{folder.name}-{key}"
    final.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(final.parent / f".{final.name}.lock"):
        if not final.is_dir():
            part = final.parent / f".{final.name}.part"
            shutil.rmtree(part, ignore_errors=True)
            _put_together(folder, target, shared["tensors"], part)
            os.replace(part, final)
    return final


def _put_together(folder: Path, target: Path, tensors: list[str], out: Path) -> None:
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    out.mkdir()
    weights = load_file(folder / "model.safetensors")
    with safe_open(target / "model.safetensors", "pt") as theirs:
        for name in tensors:
            weights[name] = theirs.get_tensor(name).to(torch.bfloat16)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    for path in target.glob("*"):  # the tokenizer and how to generate
        if path.suffix in (".json", ".jinja", ".txt", ".model") and path.name != "config.json":
            shutil.copy(path, out / path.name)
    shutil.copy(folder / "config.json", out / "config.json")


def read_shared(folder: Path) -> dict[str, Any]:
    """What the draft of ``folder`` takes from its target. Raises SpecDecError for a file that does not say it."""
    try:
        shared = json.loads((folder / SHARED).read_text(encoding="utf-8"))
        if {"target", "target_weights_sha256", "tensors"} <= shared.keys():
            return dict(shared)
    except (OSError, ValueError, AttributeError):
        pass
    raise SpecDecError(f"{folder / SHARED} does not say what the draft shares with its target: fetch the folder again.")


def share_embeddings(draft: PreTrainedModel, target: PreTrainedModel) -> None:
    """One embedding in memory for both, where the draft's is the target's (to the rounding it was stored with)."""
    import torch

    theirs = target.get_input_embeddings()
    mine, shared = (cast("torch.Tensor", m.weight) for m in (draft.get_input_embeddings(), theirs))
    if mine.shape == shared.shape and mine.dtype == shared.dtype and torch.equal(mine.bfloat16(), shared.bfloat16()):
        draft.set_input_embeddings(theirs)
        if draft.config.get_text_config(decoder=True).tie_word_embeddings:
            draft.get_output_embeddings().weight = theirs.weight
