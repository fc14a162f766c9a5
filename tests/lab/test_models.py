"""Converting, finding, loading and identifying models. Only the tests of `default` touch the real one."""

from __future__ import annotations

import errno
import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import httpx
import numpy as np
import pytest
import torch
import yaml
from huggingface_hub import errors as hub_errors
from kit import tiny_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec_core import SamplingPolicy, SpecDecError, caches
from specdec_core.lab import convert
from specdec_core.lab import models as lab_models
from specdec_core.lab.models import fetch_default, load_model, load_pair, load_tokenizer, read_pair
from specdec_core.lab.packing import BlockedLinear
from specdec_core.lab.store import code_root

WORDS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "c", "1", "2", "Ġ", "ab", "Ġa", "Ġab"]
PHASES = ("_download", "_take_gguf", "convert_gguf", "_save_weights", "_write_manifest")


def one_line(error: pytest.ExceptionInfo[SpecDecError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    assert text.endswith(".")
    return text


# --- tiny stand-ins -------------------------------------------------------------------------------------------------


def tiny_model(vocab: int = 12, seed: int = 0) -> LlamaForCausalLM:
    return tiny_llama(seed, vocab, scale=0.02, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=2)


def tiny_folder(folder: Path, words: list[str] | None = None, vocab: int = 12, seed: int = 0) -> Path:
    """A model folder with a word-level tokenizer."""
    words = words or WORDS
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tiny_model(vocab, seed).save_pretrained(folder)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token=words[0], eos_token=words[2]).save_pretrained(folder)
    return folder


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """What llama.cpp's converter does to the rows of query and key weights."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).swapaxes(1, 2).reshape(weight.shape)


def write_gguf(path: Path, model: LlamaForCausalLM) -> None:
    """A GGUF as llama.cpp writes it: fp32, but Q8_0 embeddings and Q4_1 `ffn_gate`."""
    writer = gguf.GGUFWriter(path, "llama")
    config = model.config
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(WORDS)
    writer.add_token_types([3, 3, 3] + [1] * (len(WORDS) - 3))
    writer.add_token_merges(["a b", "Ġ a", "Ġ ab"])
    for name, token in (("bos", 1), ("eos", 2), ("unk", 0), ("pad", 2)):
        getattr(writer, f"add_{name}_token_id")(token)
    writer.add_chat_template("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, value in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        data = value.numpy()
        if "q_proj" in name or "k_proj" in name:
            data = interleaved(data, config.num_attention_heads if "q_proj" in name else config.num_key_value_heads)
        kinds = {"embed_tokens": gguf.GGMLQuantizationType.Q8_0, "gate_proj": gguf.GGMLQuantizationType.Q4_1}
        kind = next((kind for part, kind in kinds.items() if part in name), None)
        target = names.get_name(name, try_suffixes=(".weight",))
        writer.add_tensor(target, gguf.quants.quantize(data, kind) if kind else data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="session")
def tiny_wheel(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """(a wheel with a tiny GGUF, SHA-256 of the GGUF)"""
    folder = tmp_path_factory.mktemp("wheel")
    write_gguf(folder / "tiny.gguf", tiny_model())
    with zipfile.ZipFile(folder / "tiny.whl", "w") as archive:
        archive.write(folder / "tiny.gguf", "llm/tiny.gguf")
    return folder / "tiny.whl", hashlib.sha256((folder / "tiny.gguf").read_bytes()).hexdigest()


def use_tiny(wheel: tuple[Path, str], cache: Path, log: Path | None = None) -> None:
    """Make `fetch_default` convert the tiny wheel into ``cache``; each download adds a line to ``log``."""

    def download(folder: Path) -> Path:
        if log:
            with log.open("a") as file:
                file.write("download\n")
        return Path(shutil.copy(wheel[0], folder))

    os.environ["SPECDEC_CACHE"] = str(cache)
    convert._download = download
    convert.GGUF_SHA256 = wheel[1]


@pytest.fixture
def tiny_default(tiny_wheel: tuple[Path, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The default model is tiny for this test; gives its folder, which does not exist yet."""
    for name in ("_download", "GGUF_SHA256"):
        monkeypatch.setattr(convert, name, getattr(convert, name))
    monkeypatch.setenv("SPECDEC_CACHE", "")
    use_tiny(tiny_wheel, tmp_path / "cache")
    return convert.model_dir()


def hidden(folder: Path) -> list[str]:
    return [path.name for path in folder.parent.iterdir() if ".tmp-" in path.name]


# --- conversion -----------------------------------------------------------------------------------------------------


def test_conversion_gives_the_weights_that_went_in(tiny_default: Path) -> None:
    folder = fetch_default(progress=False)
    want, have = tiny_model(), AutoModelForCausalLM.from_pretrained(folder)
    for name, value in have.state_dict().items():
        exact = want.state_dict()[name]
        rough = "embed_tokens" in name or "lm_head" in name or "gate_proj" in name
        assert torch.allclose(value, exact, atol=0.01 if rough else 0.0, rtol=0.0), name
    tokenizer = load_tokenizer(lab_models.DEFAULT_MODEL)
    assert tokenizer.tokenize("ab ab12<|im_end|>") == ["ab", "Ġab", "1", "2", "<|im_end|>"]
    assert hidden(folder) == []


def test_conversion_is_the_same_every_time(tiny_default: Path) -> None:
    first = json.loads((fetch_default(progress=False) / "manifest.json").read_text())
    assert json.loads((fetch_default(progress=False, force=True) / "manifest.json").read_text()) == first


def fetch_and_stop_in(phase: str, wheel: tuple[Path, str], cache: Path, reached: Path, force: bool) -> None:
    use_tiny(wheel, cache)
    real = getattr(convert, phase)

    def stop(*args: Any) -> None:
        if phase != "_download":
            real(*args)  # killed after its work, before the next phase
        reached.touch()
        time.sleep(60)

    setattr(convert, phase, stop)
    fetch_default(progress=False, force=force)


def fetch_and_log(wheel: tuple[Path, str], cache: Path, log: Path) -> None:
    use_tiny(wheel, cache, log)
    fetch_default(progress=False)


@pytest.fixture(scope="module")
def children() -> Any:
    """Starts processes quickly: they are forked from a server that has imported torch and done nothing with it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["specdec_core.lab.convert", "gguf", "transformers.models.llama.modeling_llama"])
    return context


@pytest.mark.parametrize("phase", PHASES)
def test_a_killed_conversion_leaves_nothing_that_counts(
    phase: str, children: Any, tiny_wheel: tuple[Path, str], tiny_default: Path, tmp_path: Path
) -> None:
    kill_in(phase, children, tiny_wheel, tmp_path)
    assert not tiny_default.exists()
    assert len(hidden(tiny_default)) == 1
    fetch_default(progress=False)
    assert convert.check_folder(tiny_default, verify=True)["model"] == lab_models.DEFAULT_MODEL
    assert hidden(tiny_default) == []


def test_a_killed_reconversion_leaves_the_old_model(
    children: Any, tiny_wheel: tuple[Path, str], tiny_default: Path, tmp_path: Path
) -> None:
    before = fetch_default(progress=False).stat().st_ino
    kill_in("_write_manifest", children, tiny_wheel, tmp_path, force=True)
    convert.check_folder(tiny_default, verify=True)
    assert tiny_default.stat().st_ino == before


def kill_in(phase: str, children: Any, wheel: tuple[Path, str], folder: Path, force: bool = False) -> None:
    """Start a conversion into ``folder``/cache and end it with SIGKILL once ``phase`` has done its work."""
    reached = folder / "reached"
    child = children.Process(target=fetch_and_stop_in, args=(phase, wheel, folder / "cache", reached, force))
    child.start()
    deadline = time.monotonic() + 60
    while not reached.exists():
        assert time.monotonic() < deadline
        assert child.is_alive()
        time.sleep(0.02)
    os.kill(child.pid, signal.SIGKILL)
    child.join()


def test_leftovers_beside_a_finished_model_go_too(tiny_default: Path) -> None:
    fetch_default(progress=False)
    (tiny_default.parent / f".{tiny_default.name}.tmp-1" / "model").mkdir(parents=True)
    fetch_default(progress=False)
    assert hidden(tiny_default) == []


def test_two_at_once_convert_once(children: Any, tiny_wheel: tuple[Path, str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    both = [children.Process(target=fetch_and_log, args=(tiny_wheel, tmp_path / "cache", log)) for _ in range(2)]
    for child in both:
        child.start()
    for child in both:
        child.join(60)
    assert [child.exitcode for child in both] == [0, 0]
    assert log.read_text().splitlines() == ["download"]


def test_a_wrong_file_is_refused_and_the_old_model_stays(tiny_default: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_default(progress=False)
    monkeypatch.setattr(convert, "GGUF_SHA256", "0" * 64)
    with pytest.raises(SpecDecError) as error:
        fetch_default(progress=False, force=True)
    assert "SHA-256" in one_line(error)
    assert "fetch --force" in one_line(error)
    assert hidden(tiny_default) == []
    convert.check_folder(tiny_default, verify=True)


def test_no_disk_is_one_line(tiny_default: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tiny_default.parents[2])
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=10**8))
        with pytest.raises(SpecDecError, match="No room") as error:
            fetch_default(progress=False)
        assert "SPECDEC_CACHE" in one_line(error)

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(convert, "_save_weights", full)
    with pytest.raises(SpecDecError, match="No room"):
        fetch_default(progress=False)
    assert hidden(tiny_default) == []
    assert not tiny_default.exists()


def test_a_cache_that_cannot_be_used_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(SpecDecError, match="SPECDEC_CACHE") as error:
        fetch_default(progress=False)
    one_line(error)


@pytest.mark.parametrize("commands", [[], [["false"]]])
def test_no_package_index_is_one_line(
    commands: list[list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    monkeypatch.setattr(convert, "_pip_commands", lambda: commands)
    with pytest.raises(SpecDecError, match="could not be downloaded") as error:
        fetch_default(progress=False)
    assert "PIP_FIND_LINKS" in one_line(error)


def test_damage_is_found(tiny_default: Path) -> None:
    weights = fetch_default(progress=False) / "model.safetensors"
    good, stamp = weights.read_bytes(), weights.stat().st_mtime_ns
    flipped = good[:-1] + bytes([good[-1] ^ 1])

    weights.write_bytes(flipped)
    os.utime(weights, ns=(stamp, stamp + 1))
    with pytest.raises(SpecDecError, match="fetch --force") as error:
        load_model(lab_models.DEFAULT_MODEL)
    assert "model.safetensors" in one_line(error)

    weights.write_bytes(good)  # as a copied cache: another time stamp, the same content
    fetch_default(progress=False)

    stamp = weights.stat().st_mtime_ns
    weights.write_bytes(flipped)  # what only reading it all can find
    os.utime(weights, ns=(stamp, stamp))
    with pytest.raises(SpecDecError, match="not what was written"):
        fetch_default(progress=False, verify=True)

    weights.write_bytes(good[:100])
    with pytest.raises(SpecDecError, match="not what was written"):
        fetch_default(progress=False)
    weights.unlink()
    with pytest.raises(SpecDecError, match=r"lacks model\.safetensors"):
        fetch_default(progress=False)
    (tiny_default / "manifest.json").write_text("{")
    with pytest.raises(SpecDecError, match=r"manifest\.json"):
        fetch_default(progress=False)
    fetch_default(progress=False, force=True)


# --- the real default -----------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def default() -> Path:
    return fetch_default(progress=False)


def test_default_is_what_was_published(default: Path) -> None:
    manifest = convert.check_folder(default)
    assert manifest["source"]["gguf_sha256"] == convert.GGUF_SHA256
    assert manifest["licence"] == "Apache-2.0"
    weights = "a672150fb4f99d7c8f4168cecdd464069c0ef3a37d8113f22ddb9d48031d03cd"
    assert manifest["files"]["model.safetensors"]["sha256"] == weights


def test_default_tokenizer_is_smollm2_instruct(default: Path) -> None:
    tokenizer = load_tokenizer(lab_models.DEFAULT_MODEL)
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.bos_token) == (
        "<|im_end|>",
        "<|im_end|>",
        "<|im_start|>",
    )
    assert len(tokenizer) == 49152
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert tokenizer.tokenize("x  2024") == ["x", "ĠĠ", "2", "0", "2", "4"]
    mixed = "Ω «naïve» 日本語 \t\n\n  3.14 <|im_end|> end"
    assert tokenizer.decode(tokenizer(mixed).input_ids) == mixed


def test_default_pair_loads_and_speaks(default: Path) -> None:
    pair = load_pair("smollm2")
    assert not pair.target.training
    assert not any(weight.requires_grad for weight in pair.target.parameters())
    prompt = pair.tokenizer("The capital of France is", return_tensors="pt")
    out = pair.target.generate(**prompt, max_new_tokens=3, do_sample=False)
    assert pair.tokenizer.decode(out[0]).startswith("The capital of France is Paris.")
    files = convert.check_folder(default)["files"]
    assert pair.lineage["target_weights_sha256"] == files["model.safetensors"]["sha256"]
    assert pair.lineage["target_tokenizer_sha256"] == files["tokenizer.json"]["sha256"]
    assert pair.drafter == "composite"
    assert pair.draft is not None
    assert pair.draft.config.num_hidden_layers == 2
    assert pair.lineage["draft_ref"] == "drafts/smollm2-135m-instruct"
    assert sum(file.stat().st_size for file in (code_root() / "drafts").rglob("*")) < 20e6


# --- finding and loading --------------------------------------------------------------------------------------------


def test_folder_loads_frozen_in_the_dtype_asked_for(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    model = load_model(str(folder), dtype="bfloat16", device="cpu", attn_implementation="eager")
    assert (model.dtype, model.config._attn_implementation, model.training) == (torch.bfloat16, "eager", False)
    assert load_model(str(folder), device="cpu").dtype == torch.float32


@pytest.mark.parametrize(
    ("ref", "words"),
    [
        ("no-such/model", "not on this machine"),
        ("what is this?", "does not exist"),
        ("./nowhere", "There is no model folder"),
        ("some/where/else", "There is no model folder"),
    ],
)
def test_unknown_models_are_one_line(ref: str, words: str) -> None:
    with pytest.raises(SpecDecError, match=words) as error:
        load_model(ref)
    assert ref in one_line(error)


def test_unfit_folders_are_one_line(tmp_path: Path) -> None:
    folder = tiny_folder(tmp_path / "tiny")
    (folder / "model.safetensors").write_bytes(b"not a model")
    (folder / "tokenizer.json").write_text("{}")
    for load in (load_model, load_tokenizer):
        with pytest.raises(SpecDecError, match="be loaded") as error:
            load(str(folder))
        one_line(error)
    (folder / "model.safetensors").unlink()
    with pytest.raises(SpecDecError, match="no safetensors"):
        load_model(str(folder))
    (folder / "config.json").unlink()
    with pytest.raises(SpecDecError, match=r"without config\.json"):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (hub_errors.GatedRepoError, "hf auth login"),
        (hub_errors.RepositoryNotFoundError, "does not exist"),
        (hub_errors.RevisionNotFoundError, "no revision 'v9'"),
    ],
)
def test_the_hubs_refusals_are_one_line(kind: type[Exception], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> str:
        response = httpx.Response(403, request=httpx.Request("GET", "https://hub"))
        raise kind("refused\nin many words", response=response)  # type: ignore[call-arg]

    monkeypatch.setattr("huggingface_hub.snapshot_download", refuse)
    with pytest.raises(SpecDecError, match=words) as error:
        load_model("org/model", revision="v9")
    one_line(error)


def test_settings_that_cannot_be_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = str(tiny_folder(tmp_path / "tiny"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    cases: list[dict[str, str]] = [
        {"device": "cuda"},
        {"dtype": "float8"},
        {"attn_implementation": "flash_attention_2"},
        {"attn_implementation": "magic"},
    ]
    for settings in cases:
        with pytest.raises(SpecDecError) as error:
            load_model(folder, **settings)
        assert next(iter(settings.values())) in one_line(error)


# --- digests --------------------------------------------------------------------------------------------------------


def test_digests_are_those_of_the_files_and_are_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    folder = tiny_folder(tmp_path / "tiny")
    want = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert lab_models.hashes(folder)["weights"] == want
    with monkeypatch.context() as patch:
        patch.setattr(hashlib, "file_digest", lambda *_: pytest.fail("read again"))
        assert lab_models.hashes(folder)["weights"] == want
    (folder / "model.safetensors").write_bytes(b"other")
    assert lab_models.hashes(folder)["weights"] == hashlib.sha256(b"other").hexdigest()
    (folder / "more.safetensors").write_bytes(b"shard")
    assert lab_models.hashes(folder)["weights"] not in (want, hashlib.sha256(b"other").hexdigest())
    assert lab_models.hashes(tmp_path) == {"weights": None, "tokenizer": None, "config": None}


# --- pairs ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def pair_file(tmp_path: Path) -> Callable[..., Path]:
    def write(**changes: Any) -> Path:
        content = {"name": "tiny", "target": str(tiny_folder(tmp_path / "target"))} | changes
        path = tmp_path / "tiny.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


def test_pair_with_a_draft_says_all_that_was_loaded(pair_file: Callable[..., Path], tmp_path: Path) -> None:
    draft = tiny_folder(tmp_path / "draft", vocab=16, seed=1)  # padded embedding rows
    pair = load_pair(
        pair_file(draft={"ref": str(draft), "licence": "MIT"}, drafter="model", device="cpu", dtype="bfloat16")
    )
    assert pair.draft is not None
    assert pair.drafter == "model"
    assert pair.lineage["draft_weights_sha256"] == lab_models.hashes(draft)["weights"]
    assert pair.lineage["draft_weights_sha256"] != pair.lineage["target_weights_sha256"]
    assert pair.lineage["draft_tokenizer_sha256"] == pair.lineage["target_tokenizer_sha256"]
    assert pair.lineage["draft_licence"] == "MIT"
    wanted = {"dtype": "bfloat16", "device": "cpu", "attn_implementation": "sdpa", "drafter": "model"}
    assert wanted.items() <= pair.lineage.items()
    assert pair.lineage["threads"] == torch.get_num_threads()


def test_self_draft_is_the_target(pair_file: Callable[..., Path]) -> None:
    for changes in ({"draft": "self"}, {"drafter": "self"}):
        pair = load_pair(pair_file(), **changes)
        assert pair.draft is pair.target
        assert pair.lineage["draft_is_target"] is True


def test_models_are_checked_before_they_are_compiled_since_the_check_takes_many_shapes(
    pair_file: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled: list[bool] = []
    monkeypatch.setattr("torch.nn.Module.compile", lambda model: compiled.append(model in caches._seen))
    load_pair(pair_file(compile=True))
    assert compiled == [True]


def test_a_packed_pair_says_so_and_is_not_compiled_too(pair_file: Callable[..., Path], tmp_path: Path) -> None:
    draft = str(tiny_folder(tmp_path / "draft"))
    pair = load_pair(pair_file(draft=draft, drafter="model", pack=True, device="cpu", dtype="float32"))
    assert pair.draft is not None
    for model in (pair.target, pair.draft):
        assert any(isinstance(module, BlockedLinear) for module in model.modules())
    assert pair.lineage["pack"] is True
    assert load_pair(pair_file(device="cpu")).lineage["pack"] is False
    with pytest.raises(SpecDecError, match="take one of them"):
        load_pair(pair_file(pack=True, compile=True))


def test_a_draft_with_another_tokenizer_is_translated_and_told_so(
    pair_file: Callable[..., Path], tmp_path: Path
) -> None:
    draft = tiny_folder(tmp_path / "draft", words=[*WORDS[:9], "ba", "Ġb", "Ġab"])
    pair = load_pair(pair_file(draft=str(draft), drafter="model"))
    assert pair.lineage["draft_translated"] is True
    assert pair.make_drafter("model", SamplingPolicy()).name == "translated"
    same = load_pair(pair_file(draft=str(tiny_folder(tmp_path / "same")), drafter="model"))
    assert same.lineage["draft_translated"] is False
    assert same.make_drafter("model", SamplingPolicy()).name == "model"


def test_a_draft_head_is_cut_to_the_ids_of_its_file(pair_file: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "ids.json").write_text("[1, 3, 5]")
    draft = str(tiny_folder(tmp_path / "draft"))
    pair = load_pair(pair_file(draft=draft, drafter="model", draft_head=str(tmp_path / "ids.json")))
    logits = pair.draft(torch.tensor([[1, 2]])).logits[0, -1]  # type: ignore[misc]
    assert torch.isfinite(logits).nonzero().flatten().tolist() == [1, 3, 5]
    assert len(pair.lineage["draft_head_sha256"]) == 64
    (tmp_path / "ids.json").write_text('{"a": 1}')
    with pytest.raises(SpecDecError, match=r"ids\.json"):
        load_pair(pair_file(draft=draft, draft_head=str(tmp_path / "ids.json")))
    with pytest.raises(SpecDecError, match="draft_head"):
        load_pair(pair_file(draft_head="nowhere.json"))


def test_a_model_with_too_few_logits_is_refused(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_folder(tmp_path / "tiny")))
    assert lab_models.check_same_tokenizer(tokenizer, tokenizer) == 12
    assert lab_models.check_same_tokenizer(tokenizer, tokenizer, (16, 12)) == 12
    with pytest.raises(SpecDecError, match="11 logits"):
        lab_models.check_same_tokenizer(tokenizer, tokenizer, (16, 11))


def test_shipped_pairs_are_complete() -> None:
    names = lab_models.pair_names()
    assert {"smollm2", "qwen3", "qwen2.5", "llama31", "pythia"} <= set(names)
    for name in names:
        spec = read_pair(name)
        assert spec.name == name
        assert spec.needs is not None
        assert spec.target.licence
        gated = "meta-llama" in spec.target.ref
        assert spec.target.gated == gated


def test_a_pair_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("smollm2", "smollm2.yaml", "params/models/smollm2.yaml"):
        assert read_pair(name).name == "smollm2"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"dtyp": "float32"}, "unknown key 'dtyp'; allowed are name, target, draft, drafter, draft_head, exit_layers"),
        ({"target": {"reff": "x"}}, "unknown key 'target.reff'; allowed are ref, revision, gated, licence"),
        ({"draft": {"ref": "x", "rev": "y"}}, "unknown key 'draft.rev'"),
        ({"draft": 3}, "draft must be a name, a folder, a hub id or a mapping with ref, not 3"),
        ({"dtype": "float8"}, "dtype: input should be 'float32', 'bfloat16', 'float16' or 'auto', not 'float8'"),
        ({"threads": "2"}, "threads: input should be a valid integer, not '2'"),
        ({"threads": 0}, "threads: input should be greater than or equal to 1, not 0"),
        ({"needs": {"gpu": True}}, "needs.memory_gb: field required"),
        ({"drafter": "model"}, "drafter 'model' needs a draft"),
        ({"drafter": "composite"}, "drafter 'composite' needs a draft"),
        ({"exit_layers": 0}, "exit_layers: input should be greater than or equal to 1, not 0"),
        ({"device": "gpu"}, "device: input should be 'auto', 'cpu' or 'cuda', not 'gpu'"),
    ],
)
def test_mistakes_in_a_pair_file_name_the_key(changes: dict[str, Any], words: str, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("name: mine\ntarget: smollm2-135m-instruct\n", encoding="utf-8")
    with pytest.raises(SpecDecError) as error:
        read_pair(tmp_path / "mine.yaml", **changes)
    assert words in one_line(error)


def test_unreadable_pair_files_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(SpecDecError, match="llama31, pythia") as error:
        read_pair("smolm")
    one_line(error)
    for content in ("a: [", "", "just text"):
        (tmp_path / "bad.yaml").write_text(content)
        with pytest.raises(SpecDecError, match=r"bad\.yaml") as error:
            read_pair(tmp_path / "bad.yaml")
        one_line(error)


def test_a_pair_that_cannot_fit_is_refused_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lab_models, "load_model", lambda *_, **__: pytest.fail("loaded"))
    for changes in ({"needs": {"memory_gb": 1e6}}, {"needs": {"memory_gb": 1.0, "gpu": True}, "device": "cpu"}):
        with pytest.raises(SpecDecError, match="Pair 'smollm2' needs") as error:
            load_pair("smollm2", **changes)
        one_line(error)
