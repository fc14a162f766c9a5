"""What people read of a generation says what the records say."""

from __future__ import annotations

from dataclasses import replace

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pandas as pd
import pytest
from kit import noisy_copy, pair_of, tiny_llama
from rich.console import Console

from specdec_core import generate
from specdec_core.lab import plots, proof, show, stages
from specdec_core.lab.identity import same_text
from specdec_core.lab.measure import interleaved, ratios_by_prompt, verdict
from specdec_core.lab.stats import Interval

PROMPT = [3, 3, 4, 5, 6, 7, 8, 9, 10]


@pytest.fixture(scope="module")
def pair():
    target = tiny_llama(3)
    return pair_of(target, noisy_copy(target))


@pytest.fixture(scope="module")
def output(pair):
    return generate(pair, PROMPT, max_new_tokens=40, gamma=4)


def test_the_story_holds_every_emitted_token_in_order_and_each_rejection(pair, output):
    pieces = show.story(output, pair)
    kept = [p.text for p in pieces if p.kind != "rejected"]
    assert kept == [pair.tokenizer.decode([t]) for t in output.tokens]
    rejected = [p for p in pieces if p.kind == "rejected"]
    assert len(rejected) == sum(r.rejected for r in output.records) > 0
    assert all(p.instead and p.instead != p.text for p in rejected), "greedy: the target preferred another token"
    kinds = [p.kind for p in pieces]
    for i, kind in enumerate(kinds):
        if kind == "rejected":
            assert kinds[i + 1] == "resampled"


def test_the_html_escapes_what_a_model_writes():
    pieces = [show.Piece(1, "<script>alert(1)</script>", "accepted"), show.Piece(1, "a\nb", "rejected", "<b>")]
    page = show.as_html(pieces)
    assert "<script>" not in page
    assert "&lt;script&gt;" in page
    assert "target preferred &#x27;&lt;b&gt;&#x27;" in page


def test_terminal_text_keeps_square_brackets_that_rich_would_read_as_markup():
    console = Console(record=True, width=80, force_terminal=False)
    console.print(show.as_rich([show.Piece(0, "[red]list[0]", "accepted")]))
    assert "[red]list[0]" in console.export_text()


def test_the_stage_table_names_the_five_stages_and_counts_what_the_record_counts(pair, output):
    record = stages.telling_pass(output)
    assert record.accepted
    assert record.rejected
    table = stages.stage_table(output, pair, record, greedy=True)
    assert table["stage"].tolist() == ["draft", "score", "accept", "resample", "repeat"]
    assert f"{record.accepted} of {record.verified} kept" in table["shows that it was valid"][2]
    assert "min(1, p/q)" not in table.to_string()
    assert "min(1, p/q)" in stages.stage_table(output, pair, record, greedy=False).to_string()
    held = record.context + len(record.emitted) - 1
    assert f"rewound to {held}" in table["changed"][4]


def test_reading_backwards_names_the_token_that_was_turned_down(pair, output):
    slow = max(output.records, key=lambda r: r.rejected)
    text = stages.read_backwards(output, pair)
    assert "gave least for its time" in text
    only = type(output)("", PROMPT, "", output.tokens, None, [output.records[0], slow])
    assert "turned down" in stages.read_backwards(only, pair)
    assert "Only the prefill ran" in stages.read_backwards(
        type(output)("", PROMPT, "", [1], None, output.records[:1]), pair
    )


def test_same_text_says_identical_or_raises_where_rounding_is_no_excuse(pair, output):
    base = generate(pair, PROMPT, max_new_tokens=40, speculate=False)
    assert same_text(pair.target, PROMPT, base.tokens, output.tokens) == "all 40 tokens are identical"
    wrong = [*output.tokens[:5], (output.tokens[5] + 1) % 64, *output.tokens[6:]]
    with pytest.raises(AssertionError, match="position=5"):
        same_text(pair.target, PROMPT, base.tokens, wrong)
    with pytest.raises(AssertionError, match="goes on"):
        same_text(pair.target, PROMPT, base.tokens, output.tokens[:-1])


def test_interleaved_runs_every_arm_once_a_prompt_and_rotates_who_is_first(pair):
    calls = []

    def arm(name):
        def run(prompt):
            calls.append((name, prompt))
            return generate(pair, PROMPT, max_new_tokens=6, speculate=name == "b", diagnostics=False)

        return run

    times, outputs = interleaved({"a": arm("a"), "b": arm("b")}, ["x", "y", "z"])
    assert calls == [("a", "x"), ("b", "x"), ("b", "y"), ("a", "y"), ("a", "z"), ("b", "z")]
    assert len(outputs["a"]) == len(outputs["b"]) == 3
    assert len(ratios_by_prompt(times, "b", "a")) == 3
    assert (times["tokens"] == 6).all()


def test_a_verdict_needs_the_whole_interval_on_one_side():
    assert verdict(Interval(1.2, 1.1, 1.3)) == "Speculation pays"
    assert verdict(Interval(0.9, 0.8, 0.99)) == "Speculation does not pay"
    assert verdict(Interval(1.2, 0.99, 1.3)).startswith("Undecided")


def test_every_figure_has_a_headline_units_on_its_axes_and_its_run_id(pair, output):
    rows = [{"rule": "token", "exact": True, "error": 0.0}, {"rule": "wrong", "exact": False, "error": 0.1}]
    drawn = {
        "blocks": plots.block_map(output, pair, "finding"),
        "stages": plots.stage_bars({"ordinary": output}, "finding"),
        "laws": plots.law_errors(rows, "finding"),
        "curves": plots.theory_curves("finding"),
        "ratios": plots.ratios([0.9, 1.2], ["a", "b"], Interval(1.05, 0.9, 1.2), "finding"),
        "prediction": plots.prediction([1, 2], [Interval(1.2, 1, 1.4)] * 2, {"x": [1.1, 1.2]}, "finding", "note"),
    }
    for name, figure in drawn.items():
        plots.finish(figure, "0123abcd")
        assert figure.get_suptitle() == "finding", name
        assert any("run 0123abcd" in t.get_text() for t in figure.texts), name
        if name != "blocks":
            assert all(axes.get_xlabel() for axes in figure.axes), name
    plots.plt.close("all")


def test_tables_show_missing_values_as_a_dash_and_format_p_values():
    table = pd.DataFrame({"rule": ["a"], "power": [float("nan")], "p": [0.0]})
    page = show.table(table, p=proof.p_text).to_html()
    assert "–" in page
    assert "below 1e-100" in page


def test_sliders_draw_the_figure_anew_in_its_place_without_an_output_widget(monkeypatch):
    shown, calls = [], []

    class Handle:
        def update(self, figure):
            shown.append(figure)

    def display(what, display_id=False):
        shown.append(what)
        return Handle() if display_id else None

    def draw(alpha, gamma):
        calls.append((alpha, gamma))
        return plt.figure()

    monkeypatch.setattr("IPython.display.display", display)
    plots.sliders(draw, alpha=(0.0, 1.0, 0.1, 0.6), gamma=(1, 20, 1, 8))
    box, first = shown
    assert [type(control).__name__ for control in box.children] == ["FloatSlider", "IntSlider"]
    box.children[1].value = 3
    assert calls == [(0.6, 8), (0.6, 3)]
    assert isinstance(first, plt.Figure)
    assert shown[2] is not first
    assert not plt.get_fignums(), "a figure left open is shown twice"


def test_the_command_decodes_as_the_pair_says_where_no_option_does(pair, monkeypatch, capsys):
    asked = []
    own = replace(pair, options={"gamma": 2, "control": "heuristic"})
    monkeypatch.setattr("specdec_core.lab.models.load_pair", lambda name: own)
    real = show.generate
    monkeypatch.setattr(show, "generate", lambda p, prompt, **o: asked.append(o) or real(p, PROMPT, **o))
    show.show_generate("Why?", pair="tiny", max_new_tokens=8)
    assert not {"gamma", "control", "candidates", "drafter", "rule"} & set(asked[0])
    assert "γ = 2" in capsys.readouterr().out
    show.show_generate("Why?", pair="tiny", max_new_tokens=8, gamma=3)
    assert "γ = 3" in capsys.readouterr().out


def test_energy_is_read_where_the_machine_counts_it_and_else_is_no_number(tmp_path, monkeypatch):
    from specdec_core.lab import measure

    monkeypatch.setattr(measure, "RAPL", tmp_path)
    assert np.isnan(measure.joules())
    for i, microjoules in enumerate((5_000_000, 2_500_000)):
        (tmp_path / f"intel-rapl:{i}").mkdir()
        (tmp_path / f"intel-rapl:{i}" / "energy_uj").write_text(f"{microjoules}\n")
    (tmp_path / "intel-rapl:0:0").mkdir()  # a part of a package, which the package counts too
    (tmp_path / "intel-rapl:0:0" / "energy_uj").write_text("9\n")
    assert measure.joules() == 7.5
    rows = [(0, "a", 10, 30.0), (0, "b", 10, 20.0), (1, "a", 10, 60.0), (1, "b", 20, 40.0)]
    times = pd.DataFrame(rows, columns=["prompt", "arm", "tokens", "joules"])
    assert measure.energy_ratio(times, "a", "b").value == pytest.approx((1.5 * 3) ** 0.5)
    assert measure.energy_ratio(times.assign(joules=np.nan), "a", "b") is None
    assert measure.energy_ratio(times.assign(joules=[30.0, 20.0, -5.0, 40.0]), "a", "b") is None, "a counter began anew"


def test_what_never_happened_is_not_dated():
    assert show.dated(3.0, "it acts", "it does not act") == "it acts after 3 tokens"
    assert show.dated(1.0, "it acts", "it does not act") == "it acts after 1 token"
    assert show.dated(None, "it acts", "it does not act") == show.dated(float("nan"), "", "it does not act")
