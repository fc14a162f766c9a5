"""Condition C5: on every architecture that transformers offers, the loop is exact or says beforehand that it is not."""

from __future__ import annotations

from functools import cache, wraps
from itertools import islice

import pytest
from transformers import AutoConfig

from specdec_core.lab.architectures import Verdict, as_text, causal_types, examine, matrix, tiny, verdict_on

TOKENS = 12
FULL = ["llama", "gpt2", "gpt_neox", "opt", "falcon"]
SLIDING = ["qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3", "mixtral", "qwen3_moe"]  # windows of 8 tokens
NOT_LOADABLE = {
    "gemma3n": "needs the package timm for its vision tower",
    "gemma4_assistant": "reads the cache of another model; its default configuration is not valid",
    "gemma4_unified_assistant": "reads the cache of another model",
    "musicgen": "reads several codebooks at once, not a text",
    "musicgen_melody": "reads several codebooks at once, not a text",
}
judged = cache(lambda model_type: verdict_on(model_type, TOKENS))


def is_clear(refusal: Verdict) -> bool:
    """One line that names the type, or that of the language model inside it."""
    text = AutoConfig.for_model(refusal.model_type).get_text_config(decoder=True)
    named = any(f"'{name}'" in refusal.detail for name in (refusal.model_type, text.model_type))
    return named and "\n" not in refusal.detail


@pytest.mark.parametrize("model_type", [t for t in causal_types() if t not in NOT_LOADABLE])
def test_c5_every_architecture_is_exact_or_refused_never_silently_wrong(model_type):
    found = judged(model_type)
    assert found.verdict in ("exact", "refused"), f"{found.verdict}: {found.detail}"
    assert found.verdict == "exact" or is_clear(found), found.detail


@pytest.mark.parametrize("model_type", FULL + SLIDING)
def test_c5_the_architectures_in_common_use_are_exact(model_type):
    found = judged(model_type)
    assert found.verdict == "exact", f"{found.verdict}: {found.detail}"


def test_c5_at_least_forty_types_load_and_thirty_are_exact():
    loadable = (t for t in causal_types() if judged(t).verdict != "not loadable")
    assert len(list(islice(loadable, 40))) == 40
    exact = (t for t in causal_types() if judged(t).verdict == "exact")
    assert len(list(islice(exact, 30))) == 30


@pytest.mark.parametrize("model_type", ["blt", "deepseek_v4", "reformer", "xlnet"])
def test_c5_a_refusal_names_the_model_type_in_one_line(model_type):
    found = judged(model_type)
    assert found.verdict == "refused"
    assert is_clear(found), found.detail


@pytest.mark.parametrize("model_type", sorted(NOT_LOADABLE))
def test_c5_a_type_that_cannot_be_built_says_why(model_type):
    found = judged(model_type)
    assert found.verdict == "not loadable"
    assert found.detail
    assert "\n" not in found.detail


def test_c5_a_model_that_says_something_else_with_its_cache_is_found_out():
    model = tiny("llama")
    plain = model.forward

    @wraps(plain)
    def forward(*args, **kwargs):
        out = plain(*args, **kwargs)
        if kwargs.get("use_cache") and kwargs["position_ids"].max() > 24:  # far behind where the loop's own check looks
            out.logits = out.logits.roll(1, -1)
        return out

    model.forward = forward
    found = examine(model, TOKENS)
    assert found.verdict == "silently wrong"
    assert found.detail.startswith("ordinary decoding: row ")
    assert found.layers == "2 DynamicLayer"


def test_c5_the_matrix_reports_each_type_and_ends_in_counts():
    heard: list[str] = []
    table = matrix(["llama", "gemma3n"], lambda verdict: heard.append(verdict.model_type), TOKENS)
    assert heard == list(table["model_type"]) == ["llama", "gemma3n"]
    assert as_text(table).splitlines()[-1] == "1 exact, 0 refused, 0 silently wrong, 0 crashed, 1 not loadable"
