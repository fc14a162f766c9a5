"""A draft with another tokenizer: what maps to what, whose tokens lie in its cache, and a law that is true."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from kit import TableModel, tiny_llama
from laws import FALSE_ALARM, as_alone, distance_from_target, samples_p_value
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, MambaConfig, PreTrainedTokenizerFast

from specdec_core import SamplingPolicy, SpecDecError
from specdec_core.drafters import ModelDrafter
from specdec_core.drafters.translated import TranslatedDrafter, pieces, shared_tokens
from specdec_core.lab.theory import random_law
from specdec_core.processors import Processing

WARM = SamplingPolicy(1.0)
SENTENCES = [
    "the cat sat on the mat and the dog sat on the log",
    "a cat and a dog saw the café on the hill",
    "the hill is high, and the log is low",
] * 3


@cache
def byte_level():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|user|>"]
    trainer = trainers.BpeTrainer(
        show_progress=False, vocab_size=300, special_tokens=special, initial_alphabet=alphabet
    )
    made.train_from_iterator(SENTENCES, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|end|>", pad_token="<|user|>")


@cache
def sentencepiece():
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=True)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    made.decoder = decoders.Sequence(steps)
    special = ["<unk>", "<s>", "</s>"]
    made.train_from_iterator(SENTENCES, trainers.BpeTrainer(vocab_size=80, special_tokens=special, show_progress=False))
    made.add_tokens([AddedToken(f"<0x{i:02X}>", normalized=False) for i in (0x41, 0x61, 0xC3)])
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


@cache
def wordpiece():
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.decoder = decoders.WordPiece(cleanup=False)
    special = ["[UNK]", "[EOS]"]
    made.train_from_iterator(
        SENTENCES, trainers.WordPieceTrainer(vocab_size=70, special_tokens=special, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="[EOS]", unk_token="[UNK]")


def by_hand(vocab, merges, **special):
    made = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(vocab)}, merges=merges))
    made.decoder = decoders.ByteLevel()
    if "bos_token" in special:
        made.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", vocab.index("<s>"))]
        )
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


# The same three letters with other ids and other merges: after "a", "b" the draft reads one token, and the target one
# where the draft reads two.
TARGET = by_hand(["a", "b", "ca", "c"], [("c", "a")])
DRAFT = by_hand(["c", "ab", "a", "<s>", "b"], [("a", "b")], bos_token="<s>")
SHARED = {0: 2, 1: 4, 3: 0}  # target id -> draft id


def small(policy=WARM, draft=None, **kwargs):
    drafter = TranslatedDrafter(draft or tiny_llama(4, vocab=5, scale=0.4), policy, 4, DRAFT, TARGET, **kwargs)
    drafter.start()
    return drafter


@torch.inference_mode()
def propose(drafter, texts, room, seed=0):
    torch.manual_seed(seed)
    return drafter.propose(texts, room, torch.rand(len(texts), max(room) * drafter.candidates, dtype=torch.float64))


# --- which tokens are the same ----------------------------------------------------------------------------


def behind(tokenizer, anchor, token):
    """What a token adds to a text, as the tokenizer itself writes it."""
    first = tokenizer(anchor, add_special_tokens=False).input_ids
    text = tokenizer.decode([*first, token], clean_up_tokenization_spaces=False)
    return text[len(tokenizer.decode(first, clean_up_tokenization_spaces=False)) :]


@pytest.mark.parametrize("one", [byte_level, sentencepiece, wordpiece])
@pytest.mark.parametrize("other", [byte_level, sentencepiece, wordpiece])
def test_tokens_are_paired_one_to_one_when_both_tokenizers_write_them_alike(one, other):
    a, b = one(), other()
    pairs = shared_tokens(a, b)
    ends, words = pairs[0], pairs[1:]
    assert ends == (a.eos_token_id, b.eos_token_id)
    assert len({i for i, _ in pairs}) == len({t for _, t in pairs}) == len(pairs)
    written = [(behind(a, "cat", i), behind(b, "cat", t)) for i, t in words]
    assert all(x == y or "\ufffd" in x + y for x, y in written)
    assert {" the", " cat", "a"} <= {x for x, _ in written}
    special = {*a.all_special_ids}
    assert not special & {i for i, _ in words}


def test_a_leading_space_is_one_in_every_spelling_and_parts_of_characters_go_by_theirs():
    b, s, w = pieces(byte_level()), pieces(sentencepiece()), pieces(wordpiece())
    b_ids, s_ids, w_ids = (t().get_vocab() for t in (byte_level, sentencepiece, wordpiece))
    assert (b[" the"], s[" the"], w[" the"]) == (b_ids["Ġthe"], s_ids["▁the"], w_ids["the"])
    assert (b["t"], s["t"], w["t"]) == (b_ids["t"], s_ids["t"], w_ids["##t"])
    assert (b["\ufffdÃ"], s["\ufffd<0xC3>"]) == (b_ids["Ã"], s_ids["<0xC3>"])
    assert s["a"] == s_ids["a"]  # the letter, and not its byte
    assert s["A"] == s_ids["<0x41>"]
    assert s["é"] == s_ids["é"]


def test_special_tokens_are_paired_by_role_and_not_by_name():
    one = by_hand(["a", "b", "<s>", "</s>", "<pad>"], [], eos_token="</s>", pad_token="<pad>", bos_token="<s>")
    other = by_hand(["</s>", "<s>", "b", "a"], [], eos_token="<s>", pad_token="</s>")
    assert set(shared_tokens(one, other)) == {(0, 3), (1, 2), (3, 1)}
    assert set(shared_tokens(one, by_hand(["b", "</s>"], []))) == {(1, 0)}


def test_too_small_an_intersection_is_refused_in_one_line():
    other = by_hand(["x", "y", "a"], [])
    with pytest.raises(SpecDecError, match="share only 1 tokens") as caught:
        TranslatedDrafter(tiny_llama(vocab=3), WARM, 4, other, TARGET)
    assert "\n" not in str(caught.value)
    with pytest.raises(SpecDecError, match="share only 3"):
        small(least=0.8)
    with pytest.raises(SpecDecError, match="share only 3"):
        small(candidates=4)
    with pytest.raises(SpecDecError, match="share only 2"):  # ids behind the target's head do not count
        TranslatedDrafter(tiny_llama(vocab=5), WARM, 3, DRAFT, TARGET, least=0.9)


def test_a_draft_with_a_recurrent_state_is_refused():
    sizes = {"vocab_size": 5, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
    config = MambaConfig(**sizes, bos_token_id=None, eos_token_id=None, pad_token_id=None)
    with pytest.raises(SpecDecError, match="'mamba' keeps a recurrent state"):
        small(draft=AutoModelForCausalLM.from_config(config).eval())


# --- the law ----------------------------------------------------------------------------------------------


def own_law(context, policy=WARM, seed=4):
    """The draft's restricted law after draft tokens, on the target's ids."""
    with torch.inference_mode():
        logits = tiny_llama(seed, vocab=5, scale=0.4)(torch.tensor([context]), use_cache=False).logits[0, -1]
    law = torch.zeros(4)
    law[list(SHARED)] = (logits[list(SHARED.values())] / policy.temperature).softmax(-1)
    return law


def test_q_is_the_drafts_law_on_the_shared_tokens_renormalised_and_in_the_targets_ids():
    drafter = small()
    drafter.join([[0]])
    found = propose(drafter, [[0, 1, 2]], [3])  # "abca": for the draft <s>, ab, c, a
    context = [3, 1, 0, 2]
    for i, token in enumerate(found.tokens[0].tolist()):
        assert torch.allclose(found.q[0, i], own_law(context), atol=1e-5)
        assert found.q[0, i, 2] == 0
        context = [*context, SHARED[token]]  # within a block the draft goes on with the very tokens it drew
    assert torch.equal(found.belief, found.q)
    assert found.lengths.tolist() == found.drafted == [3]


def test_what_speaks_of_the_targets_ids_or_lengths_does_not_reach_the_draft():
    plain, told = small(), small(processing=Processing(suppress=(4,)), capacity=2)
    for drafter in (plain, told):
        drafter.join([[0]])
    found, want = (propose(d, [[0, 1, 3, 0, 1]], [3]) for d in (told, plain))
    assert torch.equal(found.q, want.q)


def test_at_temperature_0_the_likeliest_shared_token_is_chosen():
    drafter = small(SamplingPolicy())
    drafter.join([[0]])
    found = propose(drafter, [[0, 1]], [2])
    assert found.q is None
    first = int(own_law([3, 1]).argmax())
    assert found.tokens[0].tolist() == [first, int(own_law([3, 1, SHARED[first]]).argmax())]


def test_after_any_commit_the_proposals_are_those_of_a_drafter_that_reads_the_text_anew():
    """Accepted letters are read again as other tokens, so that the cache is rewound further than the loop asks."""
    drafter, text = small(), [3, 0]
    drafter.join([text])
    for step, new in enumerate([[1], [1, 0], [1, 0, 1], [2, 1], [0], [1, 3, 0, 1, 0, 1]]):
        text = text + new
        found = propose(drafter, [text], [3], step)
        fresh = small()
        fresh.join([text[:1]])
        want = propose(fresh, [text], [3], step)
        assert torch.equal(found.tokens, want.tokens)
        assert torch.allclose(found.q, want.q, atol=1e-5)
        drafter.commit([len(text) + 1])
        text = [*text, int(found.tokens[0, 0])]
        assert len(drafter.held[0]) == drafter.cache.lengths[0]


def test_the_drafts_cache_never_sees_the_targets_ids(monkeypatch):
    fed = []
    draft = tiny_llama(4, vocab=5, scale=0.4)
    forward = draft.forward
    drafter = small(draft=draft)
    monkeypatch.setattr(draft, "forward", lambda **inputs: (fed.append(inputs["input_ids"]), forward(**inputs))[1])
    drafter.join([[0, 1]])
    found = propose(drafter, [[0, 1, 0]], [3])
    ids = [int(i) for tokens in fed for i in tokens.flatten()]
    assert ids == [3, 1, 2, *(SHARED[t] for t in found.tokens[0, :2].tolist())]


def test_rows_join_leave_and_stand_still_without_touching_each_other():
    drafter = small()
    drafter.join([[0], [3, 3], [1]])
    texts = [[0, 1, 0], [3, 3, 0, 1], [1, 0]]
    propose(drafter, texts, [3, 0, 2])
    drafter.commit([4, 4, 2])
    drafter.keep([2, 1])
    drafter.join([[0, 0]])
    texts = [[1, 0, 1], [3, 3, 0, 1, 3], [0, 0, 1]]
    found = propose(drafter, texts, [2, 3, 1])
    fresh = small()
    fresh.join([t[:1] for t in texts])
    want = propose(fresh, texts, [2, 3, 1])
    assert torch.equal(found.lengths, want.lengths)
    for b, n in enumerate(found.lengths.tolist()):
        assert torch.equal(found.tokens[b, :n], want.tokens[b, :n])
        assert torch.allclose(found.q[b, :n], want.q[b, :n], atol=1e-5)


def test_a_text_that_ends_within_a_character_waits_and_its_neighbour_does_not():
    target, own = byte_level(), sentencepiece()
    ids = target.get_vocab()
    policy = SamplingPolicy()
    drafter = TranslatedDrafter(tiny_llama(vocab=len(own)), policy, len(target), own, target)
    drafter.start()
    whole = target("the cat").input_ids
    half = [*target("the caf").input_ids, ids["Ã"]]
    drafter.join([whole[:1], half[:1]])
    found = propose(drafter, [whole, half], [2, 2])
    assert found.lengths.tolist() == [2, 0]
    found = propose(drafter, [[*whole, ids["s"]], [*half, ids["©"]]], [2, 2])
    assert found.lengths.tolist() == [2, 2]
    assert drafter.held[1][: len(own("the café").input_ids)] == own("the café").input_ids
    alone = TranslatedDrafter(tiny_llama(vocab=len(own)), policy, len(target), own, target)
    alone.join([half])
    nothing = propose(alone, [half], [2])
    assert nothing.tokens.shape == (1, 0)
    assert "within a character" in nothing.note


def test_special_tokens_of_the_target_are_no_text_for_the_draft():
    target, own = byte_level(), sentencepiece()
    drafter = TranslatedDrafter(tiny_llama(vocab=len(own)), WARM, len(target), own, target)
    marked = [target.get_vocab()["<|user|>"], *target("the cat").input_ids]
    assert drafter._encode(marked) == own("the cat").input_ids
    assert drafter._encode(marked)[0] == own.bos_token_id


def test_a_full_context_of_the_draft_ends_the_proposals_of_that_row():
    drafter = small(draft=tiny_llama(4, vocab=5, context=6))
    drafter.join([[0], [1]])
    found = propose(drafter, [[0] * 8, [1, 0]], [2, 2])
    assert found.lengths.tolist() == [0, 2]
    found = propose(drafter, [[0] * 8, [1, 0, 0, 0]], [4, 4])
    assert found.lengths.tolist() == [0, 2]


# --- the loop ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [SamplingPolicy(), SamplingPolicy(0.8)])
@pytest.mark.parametrize("candidates", [1, 2])
def test_rows_equal_their_own_runs(policy, candidates):
    target, draft = tiny_llama(vocab=4, scale=0.4), tiny_llama(4, vocab=5, scale=0.4)
    prompts = ([0, 1, 3], [3, 3, 0, 1, 2, 2, 1, 0], [1] * 10)
    make = lambda: TranslatedDrafter(draft, policy, 4, DRAFT, TARGET, candidates=candidates)  # noqa: E731
    rows = as_alone(target, make, policy, prompts=prompts)
    assert sum(r.accepted for request in rows for r in request.records) > 0


def test_the_output_law_is_the_targets():
    draft = tiny_llama(4, vocab=5, scale=0.4)
    make = lambda: TranslatedDrafter(draft, WARM, 4, DRAFT, TARGET)  # noqa: E731
    as_numbered_by_the_draft = (3, 0, 1, 2)
    assert distance_from_target(make, random_law(4, 5), (0, 3), 2, 2, order=as_numbered_by_the_draft) < 1e-6
    table = torch.tensor([[0.4, 0.3, 0.2, 0.1], [0.25] * 4, [0.1, 0.2, 0.3, 0.4], [0.5, 0.2, 0.2, 0.1]]).double()
    law = lambda text: table[text[-1] if text else 3]  # noqa: E731
    assert samples_p_value(TableModel(table), law, make, [0, 3]) > FALSE_ALARM


def test_read_in_the_targets_own_tokens_it_is_the_plain_model_drafter():
    model = tiny_llama(vocab=4)
    ours, plain = TranslatedDrafter(model, WARM, 4, TARGET, TARGET), ModelDrafter(model, WARM, 4)
    for drafter in (ours, plain):
        drafter.join([[0, 1]])
    found, want = (propose(d, [[0, 1, 2]], [4]) for d in (ours, plain))
    assert torch.equal(found.tokens, want.tokens)
    assert torch.allclose(found.q, want.q)
