"""Texts of a target's own, the draft distilled from them, and the folder that ships without the target's tensors."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from kit import tiny_llama
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, LlamaForCausalLM, PreTrainedTokenizerFast

from specdec_core import SpecDecError
from specdec_core.api import Pair
from specdec_core.lab import corpus, distill, drafts
from specdec_core.lab.convert import file_sha256
from specdec_core.lab.distill import Course, Trainer

WORDS = ["<end>", "<user>", "<model>", *"abcdefghijklm"]
CHAT = "<user> {{ messages[0]['content'] }} <end> {% if add_generation_prompt %}<model> {% endif %}"


def target(seed: int = 0, layers: int = 3) -> LlamaForCausalLM:
    special = {"bos_token_id": 1, "eos_token_id": 0, "pad_token_id": 0}
    return tiny_llama(seed, len(WORDS), num_hidden_layers=layers, tie_word_embeddings=True, **special)


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="a"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a", eos_token="<end>")
    made.chat_template = CHAT
    return made


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr(corpus, "openings", lambda: [("free", ""), ("letters", "a b"), ("letters", "c")])
    return Pair("tiny", target(), tokenizer())


def written(pair: Pair, folder: Path, shards: int = 2) -> list[Path]:
    return corpus.write(pair, folder, shards, batch=8, question=6, answer=8)


def test_a_conversation_is_opening_question_and_answer_between_the_chat_templates_own_tokens(
    pair: Pair, tmp_path: Path
) -> None:
    for text in corpus.read(written(pair, tmp_path)):
        ids = text.tokens.tolist()
        assert ids[: text.start] == [1, *{"free": [], "letters": ids[1 : text.start]}[text.kind]]  # <user>, the opening
        assert ids[text.answer - 2 : text.answer] == [0, 2]  # <end> <model>
        assert 0 not in ids[text.start : text.answer - 2]
        assert 1 <= len(ids) - text.answer <= 8
        assert text.answer - 2 - text.start <= 6
        if text.kind == "letters":
            assert ids[1 : text.start] in ([3, 4], [5])  # a b, or c


def test_greedy_answers_are_what_the_target_prefers(pair: Pair, tmp_path: Path) -> None:
    greedy = [t for t in corpus.read(written(pair, tmp_path)) if t.temperature == 0]
    assert greedy
    for text in greedy:
        with torch.no_grad():
            likes = pair.target(torch.from_numpy(text.tokens).unsqueeze(0)).logits[0].argmax(-1)
        assert likes[text.answer - 1 : -1].tolist() == text.tokens[text.answer :].tolist()


def test_a_shard_that_is_there_is_not_written_again_and_the_same_shard_comes_out_the_same(
    pair: Pair, tmp_path: Path
) -> None:
    first = written(pair, tmp_path / "a")
    stamps = [path.stat().st_mtime_ns for path in first]
    assert [path.stat().st_mtime_ns for path in written(pair, tmp_path / "a")] == stamps
    assert corpus.digest(written(pair, tmp_path / "b")) == corpus.digest(first)
    first[1].unlink()
    assert corpus.digest(written(pair, tmp_path / "a")) == corpus.digest(written(pair, tmp_path / "b"))


def test_texts_of_other_weights_formats_openings_or_settings_are_kept_apart(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair.lineage = {"target_weights_sha256": "a", "target_tokenizer_sha256": "b", "dtype": "bfloat16"}
    folders = {corpus.folder_for(pair, 8, 6, 8), corpus.folder_for(pair, 8, 6, 9)}
    for key in pair.lineage:
        changed = replace(pair, lineage=pair.lineage | {key: "other"})
        folders.add(corpus.folder_for(changed, 8, 6, 8))
    monkeypatch.setattr(corpus, "openings", lambda: [("free", "")])
    folders.add(corpus.folder_for(pair, 8, 6, 8))
    assert len(folders) == 6


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    (tmp_path / "shard-000-0000.npz").write_bytes(b"PK\x03\x04 cut off")
    with pytest.raises(SpecDecError, match=r"shard-000-0000\.npz is no shard .* write it again"):
        list(corpus.read([tmp_path / "shard-000-0000.npz"]))


def test_the_laws_that_the_draft_learns_from_are_the_targets_own(pair: Pair, tmp_path: Path) -> None:
    shards = written(pair, tmp_path)
    distill.teach(pair, shards)
    ids = list(range(3, 12))
    trainer = Trainer(distill.student(pair.target, [0, 1, 2]), ids, Course(), tmp_path / "run")
    trainer.model.eval()
    for lesson in distill.lessons(shards)[:4]:
        with torch.no_grad():
            law = pair.target(torch.from_numpy(lesson.text.tokens).unsqueeze(0)).logits[0].softmax(-1)[:, ids]
            p, q = trainer._laws(*trainer._states([lesson]))
        assert torch.allclose(p.exp(), law, atol=2e-2)  # states are kept in bfloat16
        assert torch.allclose(q.exp().sum(-1), torch.ones(len(q)))
        assert torch.allclose(q.exp(), law / law.sum(-1, keepdim=True), atol=1e-5)  # all its layers: the target itself


def test_gradients_by_slices_are_those_of_the_whole_batch(
    pair: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = written(pair, tmp_path)
    distill.teach(pair, shards)
    trainer = Trainer(distill.student(pair.target, [0]), range(3, 12), Course(), tmp_path / "run")
    trainer.model.eval()  # without autocast, so that nothing but the order of sums differs
    batch, found = distill.lessons(shards)[:4], {}
    for size in (7, 10**6):
        monkeypatch.setattr(distill, "SLICE", size)
        trainer.model.zero_grad()
        loss = trainer._learn(batch, "forward_kl")
        found[size] = [loss, *(w.grad.clone() for w in trainer.model.parameters() if w.grad is not None)]
    assert len(found[7]) > 5
    assert found[7][0] == pytest.approx(found[10**6][0], rel=1e-5)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found[7][1:], found[10**6][1:], strict=True))


def test_losses_are_zero_for_equal_laws_and_the_total_variation_is_what_is_not_accepted() -> None:
    rng = torch.Generator().manual_seed(0)
    p, q = (torch.randn(5, 7, generator=rng).log_softmax(-1) for _ in range(2))
    for loss in distill.LOSSES.values():
        assert torch.allclose(loss(p, p), torch.zeros(5), atol=1e-6)
        assert (loss(p, q) > 0.01).all()
    assert torch.allclose(distill.total_variation(p, q), (p.exp() - q.exp()).abs().sum(-1) / 2, atol=1e-6)


def lessons(pair: Pair, folder: Path) -> list[distill.Lesson]:
    shards = written(pair, folder)
    distill.teach(pair, shards)
    return distill.lessons(shards)


def test_training_raises_acceptance_and_leaves_the_embeddings_alone(pair: Pair, tmp_path: Path) -> None:
    taught, course = lessons(pair, tmp_path), Course(steps=60, tokens=256, rate=3e-3, warm=5, every=30)
    trainer = Trainer(distill.student(pair.target, [0]), range(len(WORDS)), course, tmp_path / "run")
    before = trainer.look(taught)["alpha"]
    progress = trainer.train(taught, taught, lambda row, step: None)
    assert [row["step"] for row in progress.history] == [30, 60]
    assert [row["learns"] for row in progress.history] == ["forward_kl", "total_variation"]
    assert progress.history[-1]["alpha"] > before + 0.05
    own = trainer.model.get_input_embeddings().weight
    assert torch.equal(own, pair.target.get_input_embeddings().weight)


def test_a_training_that_was_stopped_goes_on_as_if_it_had_not_been(pair: Pair, tmp_path: Path) -> None:
    taught, course = lessons(pair, tmp_path), Course(steps=6, tokens=128, every=2)

    def run(folder: str, stop: int | None) -> Trainer:
        trainer = Trainer(distill.student(pair.target, [0]), range(len(WORDS)), course, tmp_path / folder)

        def log(row: dict[str, float], step: int) -> None:
            if step == stop:
                raise KeyboardInterrupt

        trainer.train(taught, taught[:4], log)
        return trainer

    whole = run("whole", None)
    with pytest.raises(KeyboardInterrupt):
        run("cut", 4)  # stopped before this step's checkpoint: it falls back to the one of step 2
    again = run("cut", None)
    assert [row["step"] for row in again.progress.history] == [2, 4, 6]
    for name, weight in whole.model.state_dict().items():
        assert torch.allclose(weight, again.model.state_dict()[name], atol=1e-6), name


def test_a_checkpoint_of_another_course_is_refused(pair: Pair, tmp_path: Path) -> None:
    taught, course = lessons(pair, tmp_path), Course(steps=2, tokens=128, every=1)
    model = distill.student(pair.target, [0])
    Trainer(model, range(len(WORDS)), course, tmp_path / "run").train(taught, taught[:2], lambda *_: None)
    with pytest.raises(SpecDecError, match="is of another course: give another folder"):
        Trainer(model, range(len(WORDS)), replace(course, rate=0.1), tmp_path / "run").train(
            taught, [], lambda *_: None
        )


def test_checkpoints_of_the_same_training_lie_in_the_same_folder_and_of_another_elsewhere() -> None:
    place, course = Path("here"), Course()
    same = distill.folder_for(place, course, [0], [1, 2], "texts")
    assert distill.folder_for(place, Course(), [0], [1, 2], "texts") == same
    others = [(replace(course, seed=1), [0], [1, 2], "texts"), (course, [1], [1, 2], "texts")]
    others += [(course, [0], [1], "texts"), (course, [0], [1, 2], "other")]
    assert len({same, *(distill.folder_for(place, *other) for other in others)}) == 5


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: distill.student(target(), [3]), r"layers=\[3\] are not possible: name some of 0 to 2"),
        (lambda: distill.student(target(), []), r"layers=\[\] are not possible"),
        (lambda: Course(losses=("kl",)), "loss 'kl' is unknown: choose from forward_kl, reverse_kl, total_variation"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(make: object, says: str) -> None:
    with pytest.raises(SpecDecError, match=says):
        make()  # type: ignore[operator]


# --- the folder that ships --------------------------------------------------------------------------------


def shipped(tmp_path: Path) -> tuple[Path, Path, LlamaForCausalLM]:
    """A target's folder, a draft's folder, and the draft that was saved in it."""
    large = target()
    large.save_pretrained(tmp_path / "target")
    tokenizer().save_pretrained(tmp_path / "target")
    model = distill.student(large, [2])
    with torch.no_grad():
        for weight in model.parameters():
            if weight.requires_grad:
                weight.add_(0.25)
    sha = file_sha256(tmp_path / "target" / "model.safetensors")
    drafts.save_draft(model, tmp_path / "draft", "target", sha)
    return tmp_path / "target", tmp_path / "draft", model  # type: ignore[return-value]


def test_the_shipped_folder_lacks_the_targets_tensors_and_the_whole_one_loads_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    large, small, model = shipped(tmp_path)
    assert json.loads((small / "shared.json").read_text())["tensors"] == ["model.embed_tokens.weight"]
    whole = drafts.whole(small, large)
    assert drafts.whole(small, large) == whole
    assert (whole / "tokenizer.json").is_file()
    loaded = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32)
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        assert torch.allclose(loaded(ids).logits, model(ids).logits, atol=0.1)  # stored in bfloat16


def test_a_draft_of_another_target_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    _, small, _ = shipped(tmp_path)
    target(seed=1).save_pretrained(tmp_path / "other")
    with pytest.raises(SpecDecError, match="was distilled from a target with other weights"):
        drafts.whole(small, tmp_path / "other")


def test_a_folder_that_does_not_say_what_it_shares_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shared.json").write_text("[]")
    with pytest.raises(SpecDecError, match="does not say what the draft shares"):
        drafts.read_shared(tmp_path)


def test_draft_and_target_hold_one_embedding_in_memory() -> None:
    large = target()
    small = distill.student(large, [0]).bfloat16().float()  # stored in bfloat16, loaded in float32
    assert small.get_input_embeddings().weight.data_ptr() != large.get_input_embeddings().weight.data_ptr()
    drafts.share_embeddings(small, large)
    shared = large.get_input_embeddings().weight
    assert small.get_input_embeddings().weight is shared
    assert small.get_output_embeddings().weight is shared
    apart = distill.student(large, [0]).bfloat16()  # as a packed draft of a float32 target: its layers need bfloat16
    drafts.share_embeddings(apart, large)
    assert apart.get_input_embeddings().weight.dtype == torch.bfloat16
    other = target(seed=1)
    drafts.share_embeddings(other, large)
    assert other.get_input_embeddings().weight is not shared


def test_openings_give_every_kind_its_turn_and_half_the_questions_to_the_target() -> None:
    kinds = [kind for kind, _ in corpus.openings()]
    assert kinds[1::2] == ["free"] * (len(kinds) // 2)
    counts = np.unique(kinds[::2], return_counts=True)[1]
    assert len(set(counts.tolist())) == 1
