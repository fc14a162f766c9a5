"""The composite drafter: a lookup where it finds a block, a model elsewhere, one proposal with one true law."""

from __future__ import annotations

import pytest
import torch
from kit import ScriptedDrafter, TableModel, iid, tiny_llama
from laws import FALSE_ALARM, PROMPTS, as_alone, distance_from_target, samples_p_value

from specdec_core import SamplingPolicy, SpecDecError
from specdec_core.drafters import ModelDrafter, PromptLookupDrafter, Proposal
from specdec_core.drafters.composite import CompositeDrafter
from specdec_core.lab.theory import random_law

GREEDY, WARM = SamplingPolicy(), SamplingPolicy(1.0)
REPEATS, NOVEL = [1, 2, 3, 4, 1, 2], [9, 8, 7]


class Counted(ModelDrafter):
    """Counts its proposals."""

    proposals = 0

    def propose(self, sequences, room, u):
        self.proposals += 1
        return super().propose(sequences, room, u)


def composite(policy=WARM, min_length=1, model=None, **kwargs):
    drafter = CompositeDrafter(
        PromptLookupDrafter(ngram_min=2), Counted(model or tiny_llama(), policy, 64, **kwargs), min_length
    )
    drafter.start()
    return drafter


@torch.inference_mode()
def propose(drafter, texts, room, k=1):
    torch.manual_seed(0)
    return drafter.propose(texts, room, torch.rand(len(texts), max(room) * k, dtype=torch.float64))


def test_rows_with_a_lookup_use_it_and_the_others_the_model():
    both, alone = composite(), Counted(tiny_llama(), WARM, 64)
    both.join([REPEATS, NOVEL])
    alone.join([REPEATS, NOVEL])
    texts = [[*REPEATS, 3], [*NOVEL, 6]]
    found, model = propose(both, texts, [2, 3]), propose(alone, texts, [0, 3])
    assert found.lengths.tolist() == found.drafted == [2, 3]
    assert found.tokens[0, :2].tolist() == [4, 1]
    assert torch.equal(found.tokens[1], model.tokens[1])
    for law, own in ((found.q, model.q), (found.belief, model.belief)):
        assert torch.equal(law[1], own[1])
        assert torch.equal(law[0, :2], torch.nn.functional.one_hot(torch.tensor([4, 1]), 64).float())
    assert (both.name, both.candidates, both.synthetic) == ("prompt_lookup+model", 1, False)


def test_the_model_does_not_run_where_every_row_has_a_block_and_catches_up_when_it_must():
    drafter = composite()
    drafter.join([REPEATS])
    text = [*REPEATS, 3]
    for _ in range(3):
        found = propose(drafter, [text], [2])
        assert found.q is None
        text = text + found.tokens[0].tolist()
        drafter.commit([len(text)])
    assert drafter.second.proposals == 0
    text += [50, 51]
    fresh = composite()
    fresh.join([text[:1]])
    assert torch.allclose(propose(drafter, [text], [3]).q, propose(fresh, [text], [3]).q, atol=1e-5)
    assert drafter.second.proposals == 1


def test_a_block_of_the_model_is_no_longer_than_asked_and_one_of_the_lookup_is():
    parts = PromptLookupDrafter(ngram_min=2), Counted(tiny_llama(), WARM, 64)
    drafter = CompositeDrafter(*parts, most=2)
    drafter.start()
    drafter.join([REPEATS, NOVEL])
    found = propose(drafter, [[*REPEATS, 3], [*NOVEL, 6]], [4, 4])
    assert found.lengths.tolist() == found.drafted == [4, 2]
    alone = Counted(tiny_llama(), WARM, 64)
    alone.join([REPEATS, NOVEL])
    model = propose(alone, [[*REPEATS, 3], [*NOVEL, 6]], [0, 4])
    assert torch.equal(found.tokens[1, :2], model.tokens[1, :2])
    assert torch.equal(found.q[1, :2], model.q[1, :2])
    with pytest.raises(SpecDecError, match="most"):
        CompositeDrafter(*parts, most=0)


def test_the_model_does_not_run_for_rows_without_room():
    drafter = composite()
    drafter.join([REPEATS, NOVEL])
    found = propose(drafter, [[*REPEATS, 3], [*NOVEL, 6]], [2, 0])
    assert drafter.second.proposals == 0
    assert found.lengths.tolist() == [2, 0]


@pytest.mark.parametrize(("room", "lookup"), [(4, False), (2, True)])
def test_a_lookup_shorter_than_wanted_gives_way_unless_there_is_no_room_for_more(room, lookup):
    drafter = composite(min_length=4)
    text = [1, 2, 3, 1, 2]  # three tokens are known behind the match
    drafter.join([text[:-1]])
    assert (propose(drafter, [text], [room]).q is None) == lookup
    assert drafter.second.proposals == (not lookup)


def test_rows_join_and_leave_both():
    drafter = composite()
    drafter.join([NOVEL, REPEATS])
    propose(drafter, [[*NOVEL, 6], [*REPEATS, 3]], [2, 2])
    drafter.commit([4, 7])
    drafter.keep([1])
    drafter.join([NOVEL])
    found = propose(drafter, [[*REPEATS, 50], [*NOVEL, 5]], [2, 2])
    fresh = composite()
    fresh.join([REPEATS, NOVEL])
    assert torch.allclose(found.q, propose(fresh, [[*REPEATS, 50], [*NOVEL, 5]], [2, 2]).q, atol=1e-5)


def test_a_block_wider_than_the_other_is_padded_on_either_side():
    drafter = composite()
    drafter.join([REPEATS, NOVEL])
    found = propose(drafter, [[*REPEATS, 3], [*NOVEL, 6]], [1, 3])
    assert found.lengths.tolist() == [1, 3]
    assert found.q.shape == (2, 3, 64)
    drafter.commit([7, 4])
    found = propose(drafter, [[*REPEATS, 3], [*NOVEL, 6, 5]], [4, 1])
    assert found.lengths.tolist() == [4, 1]
    assert torch.equal(found.q[0].argmax(-1), found.tokens[0])


def test_where_the_model_cannot_follow_the_lookup_stands_and_the_note_says_so():
    drafter = composite(model=tiny_llama(context=8))
    drafter.join([REPEATS, list(range(20, 30))])
    found = propose(drafter, [[*REPEATS, 3], list(range(20, 31))], [2, 2])
    assert found.lengths.tolist() == [2, 0]
    assert found.tokens[0].tolist() == [4, 1]
    assert "full" in found.note


def test_further_candidates_of_a_looked_up_token_are_itself_which_no_rule_keeps():
    drafter = composite(candidates=3)
    drafter.join([REPEATS, NOVEL])
    found = propose(drafter, [[*REPEATS, 3], [*NOVEL, 6]], [2, 2], k=3)
    assert drafter.candidates == 3
    assert torch.equal(found.branches[0], found.tokens[0].unsqueeze(-1).expand(-1, 2))
    assert all(len({int(t), *row.tolist()}) == 3 for t, row in zip(found.tokens[1], found.branches[1], strict=True))


def test_a_first_drafter_that_draws_is_refused():
    drafter = CompositeDrafter(ModelDrafter(tiny_llama(), WARM, 64), PromptLookupDrafter())
    drafter.start()
    drafter.join([NOVEL[:2]])
    with pytest.raises(SpecDecError, match="'model' draws its tokens"):
        propose(drafter, [NOVEL], [2])


@pytest.mark.parametrize("parts", [(PromptLookupDrafter(), None), (PromptLookupDrafter, PromptLookupDrafter())])
def test_a_part_that_is_no_drafter_is_refused_in_one_line(parts):
    with pytest.raises(SpecDecError, match="is no drafter: give two") as caught:
        CompositeDrafter(*parts)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("policy", "vocab", "said"), [(1.0, 64, "policy=1.0"), (WARM, 64.0, "vocab=64.0"), (WARM, 0, "vocab=0")]
)
def test_a_model_drafter_refuses_what_is_no_policy_and_no_vocabulary(policy, vocab, said):
    with pytest.raises(SpecDecError, match=said):
        ModelDrafter(tiny_llama(), policy, vocab)


def test_a_synthetic_part_marks_the_whole():
    marked = ScriptedDrafter(lambda *_: Proposal.nothing(1, torch.device("cpu"), ""))
    marked.synthetic = True
    assert CompositeDrafter(marked, PromptLookupDrafter()).synthetic
    assert CompositeDrafter(PromptLookupDrafter(), marked).synthetic


@pytest.mark.parametrize("policy", [GREEDY, SamplingPolicy(0.8)])
@pytest.mark.parametrize("candidates", [1, 2])
def test_rows_equal_their_own_runs(policy, candidates):
    target = tiny_llama(vocab=16, scale=0.4)
    draft = tiny_llama(4, vocab=16)
    make = lambda: CompositeDrafter(PromptLookupDrafter(), ModelDrafter(draft, policy, 16, candidates=candidates))  # noqa: E731
    rows = as_alone(target, make, policy, prompts=PROMPTS)
    assert sum(r.accepted for request in rows for r in request.records) > 0


def test_the_output_law_is_the_targets():
    draft = TableModel(torch.tensor([[0.2, 0.3, 0.5], [0.6, 0.2, 0.2], [0.1, 0.8, 0.1]], dtype=torch.float64))
    make = lambda: CompositeDrafter(PromptLookupDrafter(ngram_min=2), ModelDrafter(draft, WARM, 3), 2)  # noqa: E731
    for beside in ((), (2, 2, 2), (0, 1, 2)):
        assert distance_from_target(make, random_law(3, 5), (0, 1, 2, 2, 0), 2, 3, beside) < 1e-6
    table = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.4, 0.3, 0.3]], dtype=torch.float64)
    law = lambda text: table[text[-1] if text else 0]  # noqa: E731
    assert samples_p_value(TableModel(table), law, make, [0, 1, 2, 2, 0]) > FALSE_ALARM
    two = lambda: CompositeDrafter(PromptLookupDrafter(), ModelDrafter(draft, WARM, 3, candidates=2))  # noqa: E731
    assert samples_p_value(TableModel(table), law, two, [0, 1, 2, 2, 0], seed=2) > FALSE_ALARM


def test_a_choice_that_rests_on_the_drawn_token_would_be_caught():
    """What the composite must not do: withhold a model's block because of what it drew."""

    class Picky(ModelDrafter):
        def propose(self, sequences, room, u):
            found = super().propose(sequences, room, u)
            found.lengths = found.lengths * (found.tokens[:, 0] == 0)
            return found

    law = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    make = lambda: Picky(iid([0.2, 0.3, 0.5]), WARM, 3)  # noqa: E731
    assert samples_p_value(iid(law.tolist()), lambda text: law, make, [0]) < FALSE_ALARM
