"""The suffix drafter: its trees count, forget and are followed as told; its rows do not touch each other."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kit import TableModel, tiny_llama
from laws import FALSE_ALARM, as_alone, distance_from_target, samples_p_value

from specdec_core import SamplingPolicy
from specdec_core.drafters.suffix import Node, SuffixDrafter, learn
from specdec_core.lab.theory import random_law

TEXT = st.lists(st.integers(0, 3), max_size=24)
COINS = torch.zeros(1, 8, dtype=torch.float64)


def counts(node, path=()):
    found = {}
    for token, child in node.next.items():
        found[(*path, token)] = child.count
        found |= counts(child, (*path, token))
    return found


def occurrences(text, depth):
    return Counter(tuple(text[i : i + n]) for n in range(1, depth + 1) for i in range(len(text) - n + 1))


def read(tree, text, depth, times=1):
    ends = [tree]
    for token in text:
        ends = learn(ends, token, depth, times)
    return ends


def block(drafter, text, room=8):
    return drafter.propose([text], [room], COINS).tokens[0].tolist()


def started(*texts, **options):
    drafter = SuffixDrafter(**options)
    drafter.start()
    drafter.join([list(t) for t in texts])
    return drafter


@given(TEXT, st.integers(1, 5))
def test_a_tree_counts_every_piece_of_its_text_up_to_its_depth(text, depth):
    tree = Node()
    ends = read(tree, text, depth)
    assert counts(tree) == occurrences(text, depth)
    assert [node.count for node in ends[1:]] == [
        counts(tree)[tuple(text[-n:])] for n in range(1, min(depth, len(text)) + 1)
    ]


@given(TEXT, TEXT, st.integers(1, 5))
def test_a_text_that_is_forgotten_leaves_the_tree_of_the_other(one, other, depth):
    tree = Node()
    read(tree, one, depth)
    read(tree, other, depth)
    read(tree, one, depth, -1)
    assert counts(tree) == occurrences(other, depth)


@settings(max_examples=50)
@given(TEXT.filter(len), st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=4), max_size=6))
def test_a_tree_that_grew_with_its_text_proposes_what_one_built_from_scratch_does(prompt, steps):
    grown, text = started(prompt, depth=5, factor=3.0), list(prompt)
    for step in [[], *steps]:
        text += step
        scratch = started(text, depth=5, factor=3.0)
        assert block(grown, text) == block(scratch, text)
        assert counts(grown.rows[0].own[0]) == counts(scratch.rows[0].own[0])


def test_the_most_frequent_continuation_of_the_longest_match_is_followed():
    # "1 2" was followed by 3 twice and by 4 once; "2" alone mostly by 9.
    text = [1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 3, 5, 2, 9, 2, 9, 2, 9, 2, 9, 1, 2]
    assert block(started(text), text, 1) == [3]
    assert block(started([7, *text[:-2]]), [7, *text[:-2]], 1) == [2]  # after 9
    assert started(text).propose([text], [4], COINS).q is None


def test_of_equally_frequent_tokens_the_smallest_is_taken():
    text = [1, 5, 0, 1, 4, 0, 1]
    assert block(started(text), text, 1) == [4]


def test_a_block_is_as_long_as_its_match_allows_and_ends_where_the_shares_fall_too_low():
    text = [1, 2, 3, 4, 5, 6, 7, 8, 0, 1, 2]
    assert block(started(text), text) == [3, 4]
    assert block(started(text, factor=2.5), text) == [3, 4, 5, 6, 7]
    assert block(started(text, factor=2.5), text, 3) == [3, 4, 5]
    assert block(started(text, factor=0.4), text) == []
    forked = [1, 2, 3, 8, 1, 2, 4, 9, 1, 2]
    assert block(started(forked, threshold=0.5), forked, 1) == [3]
    assert block(started(forked, threshold=0.51), forked, 1) == []


def test_the_threshold_is_for_the_product_of_the_shares():
    text = [1, 2, 5, 60, 1, 2, 5, 61, 1, 2, 6, 62, 1, 3, 63, 1]  # 2 follows 1 in 3 of 4, 5 follows "1 2" in 2 of 3
    assert block(started(text, factor=2.0, threshold=0.49), text) == [2, 5]
    assert block(started(text, factor=2.0, threshold=0.51), text) == [2]


@pytest.mark.parametrize(("own", "taken"), [([1, 2, 60, 1], 2), ([1, 2, 60, 1, 3, 61, 1], 7)])
def test_of_the_two_trees_the_one_that_promises_more_is_followed_and_its_own_where_both_do_alike(own, taken):
    drafter = started([50])
    drafter.propose([[50, 1, 7, 51]], [1], COINS)
    drafter.start()
    drafter.join([own])
    assert block(drafter, own) == [taken]


def test_behind_the_depth_of_a_tree_the_next_shorter_suffix_goes_on():
    text = [*range(20), 30, *range(12)]
    assert block(started(text, depth=6, factor=2.0), text) == [12, 13, 14, 15, 16, 17, 18, 19]
    assert block(started(text, depth=1, factor=2.0), text) == []  # a path of one token follows nothing


def test_outputs_are_remembered_from_the_next_start_on_with_the_end_of_their_prompt():
    drafter = started([50, 51, 1, 2], [9, 9, 1, 2], depth=4)
    drafter.propose([[50, 51, 1, 2, 3, 4, 5], [9, 9, 1, 2]], [4, 4], COINS.expand(2, -1))
    drafter.keep([1])
    assert block(drafter, [9, 9, 1, 2]) == []
    drafter.start()
    drafter.join([[8, 1, 2]])
    assert block(drafter, [8, 1, 2]) == [3, 4]
    assert (50, 51) not in counts(drafter.shared)  # prompts are not outputs
    assert counts(drafter.shared)[(51, 1, 2, 3)] == 1


def test_the_shared_tree_holds_no_more_than_its_memory_and_forgets_the_oldest():
    drafter = SuffixDrafter(depth=3, memory=6)
    for first in (10, 20, 30):
        drafter.start()
        drafter.join([[first]])
        drafter.propose([[first, first + 1, first + 2]], [1], COINS)
    drafter.start()
    assert counts(drafter.shared) == occurrences([20, 21, 22], 3) + occurrences([30, 31, 32], 3)
    drafter.join([[1]])
    drafter.propose([[1, *range(100, 120)]], [1], COINS)
    drafter.start()
    assert counts(drafter.shared) == occurrences(range(114, 120), 3)
    nothing = SuffixDrafter(memory=0)
    for _ in range(3):
        nothing.start()
        nothing.join([[1, 2, 1, 2]])
    assert not nothing.shared.next
    assert not nothing.outputs


def test_rows_leave_and_join_and_keep_their_order_and_their_room():
    texts = [[1, 2, 3, 1], [4, 5, 6, 4], [7, 8, 9, 7]]
    drafter = started(*texts)
    drafter.keep([2, 0])
    drafter.join([texts[1]])
    found = drafter.propose([texts[2], texts[0], texts[1]], [1, 0, 3], COINS.expand(3, -1))
    assert found.lengths.tolist() == found.drafted == [1, 0, 1]
    assert [found.tokens[b, 0].item() for b in (0, 2)] == [8, 5]
    assert drafter.propose([texts[2], texts[0], texts[1]], [0, 0, 0], COINS.expand(3, -1)).note


@pytest.mark.parametrize("policy", [SamplingPolicy(), SamplingPolicy(0.8)])
def test_rows_equal_their_own_runs_whatever_the_neighbours_say(policy):
    target = tiny_llama(vocab=16, scale=0.5)
    prompts = ([7, 8, 9], [3, 3, 4, 5, 6, 7, 8, 9, 3, 4, 5], [5] * 20)
    rows = as_alone(target, lambda: SuffixDrafter(factor=4.0), policy, 24, prompts)
    assert sum(r.accepted for request in rows for r in request.records) > 0


def test_the_output_law_is_the_targets():
    make = lambda: SuffixDrafter(depth=4, factor=2.0)  # noqa: E731
    assert distance_from_target(make, random_law(3, 5), (0, 1, 2, 0, 1), 2, 3) < 1e-12
    table = torch.tensor([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6], [0.4, 0.3, 0.3]], dtype=torch.float64)
    law = lambda text: table[text[-1] if text else 1]  # noqa: E731
    assert samples_p_value(TableModel(table), law, make, [0, 1, 2, 0, 0, 1, 1, 2, 1]) > FALSE_ALARM
