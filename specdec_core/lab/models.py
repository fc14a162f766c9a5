"""Models and pairs: from a name, a folder, a hub id or a pair file to loaded, frozen, identified models."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import psutil
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from ..errors import SpecDecError
from .convert import (
    DEFAULT_MODEL,
    LICENCE,
    cache_dir,
    check_folder,
    default_gguf,
    fetch_default,
    file_sha256,
    model_dir,
)
from .drafts import SHARED, read_shared, share_embeddings, whole
from .store import code_root, project_root

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from ..api import Options, Pair

__all__ = [
    "DEFAULT_MODEL",
    "PairSpec",
    "cache_dir",
    "check_folder",
    "check_same_tokenizer",
    "default_gguf",
    "fetch_default",
    "file_sha256",
    "load_model",
    "load_pair",
    "load_tokenizer",
    "model_dir",
    "pair_names",
    "read_pair",
]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "merges.txt")
Dtype = Literal["float32", "bfloat16", "float16", "auto"]
Device = Literal["auto", "cpu", "cuda"]
Attention = Literal["sdpa", "eager", "flash_attention_2"]
Integers = Literal["int8", "int4"]
DrafterName = Literal["prompt_lookup", "suffix", "model", "composite", "early_exit", "self"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelRef(_Strict):
    """One model: the default's name, a local folder or a hub id; a plain string means ``{ref: string}``."""

    ref: str = Field(min_length=1)
    revision: str | None = None
    gated: bool = False
    licence: str | None = None


class Decoding(_Strict):
    """Options of ``generate_batch`` that a pair may set."""

    gamma: int | None = Field(default=None, ge=1, le=1024)
    control: Literal["fixed", "heuristic", "adaptive", "fallback"] | None = None
    confidence: float | None = Field(default=None, ge=0, lt=1)
    candidates: int | None = Field(default=None, ge=1, le=64)
    model_gamma: int | None = Field(default=None, ge=1, le=1024)


class Needs(_Strict):
    """What the pair asks of a machine; ``memory_gb`` is GPU memory if ``gpu`` is set, else main memory."""

    memory_gb: float = Field(gt=0)
    gpu: bool = False
    note: str = ""


class PairSpec(_Strict):
    """A pair file of ``params/models``. ``draft: self`` makes the target its own draft (the 100 % check).

    A draft with another tokenizer is translated, token by token. ``draft_head`` names a JSON file with the token ids
    whose rows of the draft's output head are computed; ``exit_layers`` says where drafter ``early_exit`` leaves the
    target; ``options`` are what decoding with this pair does where a call says nothing else.

    ``quantize`` ("int8" or "int4", on a CPU, in bfloat16) gives the target integer weights (`lab.quantize`). That is
    another target than the unquantised one: its rounding changes the law, so tokens and acceptance may be compared
    among runs with the same kind only. ``draft_quantize`` does so to the draft on a CPU (elsewhere it does nothing),
    whatever the target's number format: it changes how often the draft agrees, and never the law. ``pack`` joins the
    products of Llama layers (`lab.lean`) and keeps a second copy of their weights in oneDNN's order (`lab.packing`), on
    a CPU; elsewhere it does nothing: the same law, faster passes, more memory. ``compile`` runs both models through
    torch.compile (of use with fixed shapes).
    """

    name: str
    target: ModelRef
    draft: ModelRef | Literal["self"] | None = None
    drafter: DrafterName = "prompt_lookup"
    draft_head: str | None = None
    exit_layers: int | None = Field(default=None, ge=1)
    options: Decoding = Field(default_factory=lambda: Decoding())
    quantize: Integers | None = None
    draft_quantize: Integers | None = None
    pack: bool = False
    compile: bool = False
    dtype: Dtype = "auto"
    device: Device = "auto"
    attn_implementation: Attention = "sdpa"
    threads: int | None = Field(default=None, ge=1)
    needs: Needs | None = None

    @field_validator("target", "draft", mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:
        return {"ref": value} if isinstance(value, str) and value != "self" else value

    @model_validator(mode="after")
    def _drafter_has_a_draft(self) -> PairSpec:
        if self.drafter in ("model", "composite") and self.draft is None:
            raise ValueError(f"drafter '{self.drafter}' needs a draft: give one, or draft: self")
        if self.draft_head and not isinstance(self.draft, ModelRef):
            raise ValueError("draft_head needs a draft that is a model of its own")
        if self.pack and self.compile:
            raise ValueError("pack and compile both choose how weights lie in memory: take one of them")
        return self


class Located(NamedTuple):
    """A model's files on this machine; ``revision`` is the hub commit, None for other sources."""

    folder: Path
    revision: str | None


# --- where a model's files are --------------------------------------------------------------------------------------


def locate(ref: str, revision: str | None = None) -> Located:
    """Find or fetch the files of ``ref``: the default's name, a local folder, or a hub id.

    Raises SpecDecError if there is no such model, no hub can be reached or the model is gated.
    """
    if ref == DEFAULT_MODEL:
        return Located(fetch_default(), None)
    for folder in (Path(ref).expanduser(), *(root / ref for root in _roots())):
        if folder.is_dir():
            if not (folder / "config.json").is_file():
                raise SpecDecError(f"{ref} is a folder without config.json: give a Hugging Face model folder.")
            if (folder / SHARED).is_file():
                folder = whole(folder, locate(read_shared(folder)["target"]).folder)
            return Located(folder.resolve(), None)
    if Path(ref).is_absolute() or ref.startswith((".", "~")) or ref.count("/") > 1:
        raise SpecDecError(f"There is no model folder {ref}: check the path (it is read from the current folder).")
    folder = _hub_snapshot(ref, revision)
    return Located(folder, folder.name)


def _hub_snapshot(ref: str, revision: str | None) -> Path:
    """The hub's files for ``ref`` in the local hub cache: configuration, tokenizer and safetensors only."""
    from huggingface_hub import errors, snapshot_download

    patterns = ["*.json", "*.safetensors", "*.txt", "*.model", "*.jinja"]
    known = f"give a model folder, '{DEFAULT_MODEL}' or an existing hub id"
    try:
        return Path(snapshot_download(ref, revision=revision, allow_patterns=patterns, ignore_patterns=["*/*"]))
    except errors.GatedRepoError:
        reason = "is gated: accept its licence on the hub, then log in with `hf auth login` or set HF_TOKEN"
    except errors.RevisionNotFoundError:
        reason = f"has no revision {revision!r}: correct or drop it"
    except (errors.RepositoryNotFoundError, errors.HFValidationError):
        reason = f"does not exist on the hub, or is private: {known}"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        hub = "HF_HUB_OFFLINE is set" if os.environ.get("HF_HUB_OFFLINE") else "no hub can be reached"
        reason = f"is not on this machine and {hub}: {known}"
    except (OSError, errors.HfHubHTTPError) as error:
        reason = f"could not be fetched ({_first_line(error)}): {known}"
    raise SpecDecError(f"Model {ref!r} {reason}.")


def hashes(folder: Path) -> dict[str, str | None]:
    """SHA-256 of ``weights``, ``tokenizer`` and ``config`` of a model folder; None where there is no such file.

    One file gives its own digest, several give the digest of their sorted names and digests.
    """
    groups = {
        "weights": sorted(folder.glob("*.safetensors")),
        "tokenizer": [folder / name for name in TOKENIZER_FILES if (folder / name).is_file()][:1],
        "config": [path for path in [folder / "config.json"] if path.is_file()],
    }
    if groups["tokenizer"] and groups["tokenizer"][0].name == "vocab.json":  # byte-level BPE in two files
        groups["tokenizer"] = [folder / name for name in ("merges.txt", "vocab.json") if (folder / name).is_file()]
    return {what: _digest(paths) for what, paths in groups.items()}


def _digest(paths: list[Path]) -> str | None:
    digests = {path.name: file_sha256(path) for path in paths}
    if len(digests) <= 1:
        return next(iter(digests.values()), None)
    return hashlib.sha256("".join(f"{name} {digest}\n" for name, digest in digests.items()).encode()).hexdigest()


# --- loading --------------------------------------------------------------------------------------------------------


def resolve_device(device: str = "auto") -> torch.device:
    """``auto`` is a CUDA GPU if there is one, else the CPU. Raises SpecDecError for ``cuda`` without a GPU."""
    import torch

    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise SpecDecError(f"device {device!r}: torch sees no CUDA GPU here; use device: cpu (see `specdec doctor`).")
    return torch.device(device)


def _check_attention(name: str, device: torch.device) -> None:
    if name == "flash_attention_2" and not (device.type == "cuda" and importlib.util.find_spec("flash_attn")):
        raise SpecDecError(
            "attn_implementation 'flash_attention_2' needs a CUDA GPU and the package flash-attn: use sdpa."
        )


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype:
    """``auto`` is float32 on a CPU (the reference), bfloat16 on a GPU that has it, else float16."""
    import torch

    if dtype == "auto":
        if device.type == "cpu":
            return torch.float32
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise SpecDecError(f"dtype {dtype!r} is unknown: use float32, bfloat16, float16 or auto.")
    return found


def load_model(
    ref: str,
    *,
    dtype: str = "auto",
    device: str = "auto",
    attn_implementation: str = "sdpa",
    revision: str | None = None,
) -> PreTrainedModel:
    """Load a causal language model for inference: evaluation mode, no gradients, on its device.

    ``ref`` as in `locate`. Raises SpecDecError with one line where it cannot be found or loaded.
    """
    from transformers import AutoModelForCausalLM

    where = resolve_device(device)
    _check_attention(attn_implementation, where)
    folder = locate(ref, revision).folder
    weights = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if not weights:
        raise SpecDecError(f"Model {ref!r} has no safetensors weights: convert it with save_pretrained first.")
    try:
        with _quiet(weights < 1e9):
            model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
                folder,
                dtype=resolve_dtype(dtype, where),
                attn_implementation=attn_implementation,
                local_files_only=True,
            )
    except Exception as error:  # from_pretrained raises many kinds; all mean the same to a user
        hint = "check dtype, device and attn_implementation, then its files"
        raise SpecDecError(f"Model {ref!r} cannot be loaded ({_first_line(error)}): {hint}.") from error
    model.to(where)  # type: ignore[arg-type]
    model.eval().requires_grad_(False)
    return model


def load_tokenizer(ref: str, revision: str | None = None) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, ``ref`` as in `locate`; ``name_or_path`` is set to ``ref`` for messages."""
    from transformers import AutoTokenizer

    folder = locate(ref, revision).folder
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise SpecDecError(
            f"Model {ref!r} has no tokenizer that can be loaded ({_first_line(error)}): add its tokenizer files."
        ) from error
    tokenizer.name_or_path = ref
    return tokenizer


def check_same_tokenizer(
    target: PreTrainedTokenizerBase,
    draft: PreTrainedTokenizerBase,
    sizes: tuple[int, int] | None = None,
) -> int:
    """Return how many logits both models share; raise SpecDecError unless every token id means the same to both.

    ``sizes`` are the models' vocab_size. Models pad their embedding rows differently (Qwen2.5, Pythia); rows beyond
    the tokenizer stand for no token, so the smaller size is common to both. Which token ends a text may differ:
    the loop stops by the target's rules alone.
    """
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours != theirs:
        entries = ours.keys() | theirs.keys()
        differ = sum(ours.get(token) != theirs.get(token) for token in entries)
        raise SpecDecError(
            f"Draft {draft.name_or_path!r} and target {target.name_or_path!r} have different tokenizers: {differ} of "
            f"{len(entries)} entries differ. Choose a draft of the target's family, or the prompt_lookup drafter."
        )
    size = min(sizes) if sizes else len(ours)
    if size <= max(ours.values()):
        raise SpecDecError(
            f"A model of this pair has {size} logits, its tokenizer uses ids up to {max(ours.values())}: "
            "take the tokenizer that belongs to the model."
        )
    return size


@contextmanager
def _quiet(silent: bool) -> Iterator[None]:
    """Hide the progress bar of loads that take a second; a bar that flashes is noise in a notebook."""
    from transformers.utils import logging

    if not silent or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _first_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return text[:200].rstrip(".:")


# --- pairs ----------------------------------------------------------------------------------------------------------


def pair_names() -> list[str]:
    """Names of the pair files in ``params/models``."""
    return sorted({path.stem for root in _roots() for path in (root / "params" / "models").glob("*.yaml")})


def _roots() -> list[Path]:
    """Folders that relative names are tried from, after the current one: the project, then the code's checkout."""
    return list(dict.fromkeys((project_root(), code_root())))


def read_pair(path_or_name: str | Path, **overrides: Any) -> PairSpec:
    """Read and check a pair file; an override that is None leaves the file's value.

    Looks for the path as given, then from the project root, then for the bare name in ``params/models``.
    Raises SpecDecError that names the file, the key and what is allowed.
    """
    if not isinstance(path_or_name, (str, Path)):
        raise SpecDecError(f"The pair is a {type(path_or_name).__name__}: give a YAML file, or the name of one.")
    path = _pair_path(path_or_name)
    try:
        loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise SpecDecError(f"{path} cannot be read as YAML ({' '.join(str(error).split())[:160]}): mend it.") from None
    if not isinstance(loaded, dict):
        raise SpecDecError(f"{path} holds no keys: a pair needs at least name and target.")
    try:
        return PairSpec.model_validate(loaded | {k: v for k, v in overrides.items() if v is not None})
    except ValidationError as error:
        raise SpecDecError(f"{path.name}: {_explain(error)}") from None


def _pair_path(path_or_name: str | Path) -> Path:
    given = Path(path_or_name).expanduser()
    candidates = [given, *(root / given for root in _roots())]
    if given.parent == Path():
        candidates += [root / "params" / "models" / f"{given.name.removesuffix('.yaml')}.yaml" for root in _roots()]
    for path in candidates:
        if path.is_file():
            return path
    raise SpecDecError(f"There is no pair {str(path_or_name)!r}: give a YAML file or one of {', '.join(pair_names())}.")


def _explain(error: ValidationError) -> str:
    """The first complaint of pydantic as one line: the key, what is wrong, and for unknown keys the allowed ones."""
    first = min(error.errors(), key=lambda each: each["type"] != "extra_forbidden")  # a misspelt key explains the rest
    # a union's location also names the member that was tried; only real keys help a reader
    keys = [str(part) for part in first["loc"] if part not in ("ModelRef", "literal['self']")]
    if not keys:  # a rule about the whole file, worded by us
        return f"{first['msg'].removeprefix('Value error, ')}."
    if keys[-1] in ("target", "draft") and first["type"] != "missing":
        return f"{keys[-1]} must be a name, a folder, a hub id or a mapping with ref, not {first['input']!r}."
    if first["type"] == "extra_forbidden":
        inner: dict[str, type[BaseModel]] = {"target": ModelRef, "draft": ModelRef, "needs": Needs, "options": Decoding}
        model: type[BaseModel] = inner[keys[0]] if len(keys) > 1 else PairSpec
        return f"unknown key {'.'.join(keys)!r}; allowed are {', '.join(model.model_fields)}."
    got = "" if first["type"] == "missing" else f", not {first['input']!r}"
    return f"{'.'.join(keys)}: {first['msg'][:1].lower()}{first['msg'][1:]}{got}."


def load_pair(path_or_name: str | Path, **overrides: Any) -> Pair:
    """Load target, tokenizer and draft of a pair file; ``overrides`` are keys of `PairSpec`.

    The pair's ``lineage`` says what was loaded: references, SHA-256 of weights and tokenizers, number format, kind of
    quantisation, device, attention implementation, threads. Raises SpecDecError before loading anything that cannot
    work here.
    """
    import torch

    from ..api import Pair
    from ..caches import ModelCache
    from .quantize import check

    spec = read_pair(path_or_name, **overrides)
    device = resolve_device(spec.device)
    _check_machine(spec, device)
    if spec.quantize:
        check(spec.quantize, device, resolve_dtype(spec.dtype, device))
    if spec.threads:
        torch.set_num_threads(spec.threads)
    how: dict[str, str] = {
        "dtype": spec.dtype,
        "device": spec.device,
        "attn_implementation": spec.attn_implementation,
    }
    target = load_model(spec.target.ref, revision=spec.target.revision, **how)
    target = _for_speed(target, spec.quantize, spec.pack)
    tokenizer = load_tokenizer(spec.target.ref, spec.target.revision)
    draft, draft_ref, draft_tokenizer = _load_draft(spec, target, tokenizer, how)
    if spec.compile:
        for model in {id(m): m for m in (target, draft) if m is not None}.values():
            ModelCache(model, 0)  # its self-check takes many shapes, which would use up what torch compiles at most
            model.compile()
    return Pair(
        name=spec.name,
        target=target,
        tokenizer=tokenizer,
        draft=draft,
        drafter=spec.drafter,
        draft_tokenizer=draft_tokenizer,
        exit_layers=spec.exit_layers,
        options=cast("Options", spec.options.model_dump(exclude_none=True)),
        lineage=_lineage(spec, target, draft, draft_ref, draft_tokenizer is not None),
    )


def _lineage(
    spec: PairSpec, target: PreTrainedModel, draft: PreTrainedModel | None, draft_ref: ModelRef | None, translated: bool
) -> dict[str, Any]:
    """What was loaded, for the record of every run."""
    import torch

    from .quantize import size

    return {
        "pair": spec.name,
        **_identity("target", spec.target, size(target)),
        **(_identity("draft", draft_ref, size(draft)) if draft_ref and draft is not None else {}),
        "draft_is_target": draft is target,
        "drafter": spec.drafter,
        "draft_head_sha256": file_sha256(_head_file(spec.draft_head)) if spec.draft_head else None,
        "draft_translated": translated,
        "exit_layers": spec.exit_layers,
        "pack": spec.pack and target.device.type == "cpu",
        "compile": spec.compile,
        "dtype": str(target.dtype).removeprefix("torch."),
        "quantize": spec.quantize or "none",
        "draft_quantize": (spec.draft_quantize if target.device.type == "cpu" else None) or "none",
        "options": spec.options.model_dump(exclude_none=True),
        "device": str(target.device),
        "attn_implementation": spec.attn_implementation,
        "threads": torch.get_num_threads(),
    }


def _load_draft(
    spec: PairSpec, target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, how: dict[str, str]
) -> tuple[PreTrainedModel | None, ModelRef | None, PreTrainedTokenizerBase | None]:
    """The draft, where it came from, and its tokenizer where that is another than the target's."""
    if spec.draft == "self" or spec.drafter == "self":
        return target, spec.target, None  # the same object: weights once in memory, each role keeps its own cache
    if spec.draft is None:
        return None, None, None
    theirs = load_tokenizer(spec.draft.ref, spec.draft.revision)
    packed = spec.draft_quantize if target.device.type == "cpu" else None
    how = how | ({"dtype": "bfloat16"} if packed else {})
    draft = load_model(spec.draft.ref, revision=spec.draft.revision, **how)
    share_embeddings(draft, target)
    translated = tokenizer.get_vocab() != theirs.get_vocab()
    if not translated:
        sizes = [int(model.config.get_text_config(decoder=True).vocab_size) for model in (target, draft)]
        check_same_tokenizer(tokenizer, theirs, (sizes[0], sizes[1]))
    if spec.draft_head:
        from ..drafters import reduced_head

        draft = reduced_head(draft, _read_head(_head_file(spec.draft_head)))
    return _for_speed(draft, packed, spec.pack), spec.draft, theirs if translated else None


def _for_speed(model: PreTrainedModel, quantize: Integers | None, pack: bool) -> PreTrainedModel:
    """The model as it is run: products are joined first, so that what is joined gets integers, or another order, as
    one."""
    from . import lean, packing
    from .quantize import quantize as with_integers

    if pack:
        model = lean.lean(model)
    if quantize:
        return with_integers(model, quantize)
    return packing.pack(model) if pack else model


def _head_file(name: str) -> Path:
    for path in (Path(name).expanduser(), *(root / name for root in _roots())):
        if path.is_file():
            return path
    raise SpecDecError(f"There is no draft_head file {name!r}: give a JSON file that holds a list of token ids.")


def _read_head(path: Path) -> list[int]:
    try:
        ids = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecDecError(f"{path.name} cannot be read as JSON ({error}): give a list of token ids.") from None
    if not isinstance(ids, list) or not all(type(i) is int for i in ids):
        raise SpecDecError(f"{path.name} holds no list of token ids: give one, such as [0, 1, 2].")
    return ids


def _identity(role: str, ref: ModelRef, parameters: int) -> dict[str, Any]:
    """What is logged of one model: reference, hub commit, licence, digests and number of parameters."""
    found = locate(ref.ref, ref.revision)
    licence = ref.licence or (LICENCE if ref.ref == DEFAULT_MODEL else None)
    known = {f"{role}_ref": ref.ref, f"{role}_revision": found.revision, f"{role}_licence": licence}
    digests = {f"{role}_{what}_sha256": digest for what, digest in hashes(found.folder).items()}
    return known | digests | {f"{role}_parameters": parameters}


def _check_machine(spec: PairSpec, device: torch.device) -> None:
    """Refuse a pair that cannot fit before minutes of download are spent on it."""
    import torch

    if spec.needs is None:
        return
    if spec.needs.gpu and device.type == "cpu":
        raise SpecDecError(
            f"Pair {spec.name!r} needs a GPU with {spec.needs.memory_gb:g} GB and none is in use: take the pair "
            "'smollm2', or set needs.gpu to false in a copy of the file to try it on the CPU."
        )
    gpu = device.type == "cuda"
    have = torch.cuda.get_device_properties(device).total_memory if gpu else psutil.virtual_memory().total
    if have < spec.needs.memory_gb * 1e9:
        raise SpecDecError(
            f"Pair {spec.name!r} needs {spec.needs.memory_gb:g} GB of {'GPU ' if gpu else ''}memory and this machine "
            f"has {have / 1e9:.1f}: take a smaller pair, such as 'smollm2'."
        )
