"""``specdec bench --profile cpu`` from end to end on a tiny model: what it keeps and says, not how fast it is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pytest
from books import artifacts, runs
from kit import Words, noisy_copy, pair_of, tiny_llama

from specdec_core import Pair
from specdec_core.control import Costs
from specdec_core.errors import SpecDecError
from specdec_core.lab import models, publish, speed
from specdec_core.lab.store import open_store

README = "# Title\n\n<!-- bench: cpu -->\n<!-- bench: end cpu -->\n\nMore.\n"


class Tokenizer(Words):
    eos_token_id = 63


def tiny_pair(**given: object) -> Pair:
    """In every number format the same tiny model, with a draft that agrees now and then."""
    target = tiny_llama()
    config = target.generation_config
    pair = pair_of(target, noisy_copy(tiny_llama()))
    target.generation_config = config
    pair.tokenizer = Tokenizer()  # type: ignore[assignment]
    pair.lineage = {
        "target_ref": "tiny",
        "draft_ref": "tiny draft",
        "dtype": "float32",
        "target_weights_sha256": "f" * 64,
    }
    return pair


@pytest.fixture
def root(project: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(models, "load_pair", lambda name, **options: tiny_pair(**options))
    monkeypatch.setattr(models, "read_pair", lambda name: SimpleNamespace(quantize="int8" if name == "small" else None))
    monkeypatch.setattr(models, "load_model", lambda ref, **options: noisy_copy(tiny_llama()))
    monkeypatch.setitem(__import__("sys").modules, "flashspec", None)
    monkeypatch.setattr(speed, "bandwidth", lambda: 1e9)
    return project


def test_the_command_chooses_on_one_half_judges_on_the_other_and_can_be_published(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    speed.command("mine", tokens=16)
    (run,) = runs()
    tags, client = run.data.tags, open_store().client
    assert (run.info.status, run.info.run_name, tags["kind"]) == ("FINISHED", "bench cpu mine", "bench")
    assert run.data.params["rule"] == speed.RULE
    assert "flashspec is not installed" in tags["missing"]
    files = artifacts(client, run.info.run_id)
    assert {f"tables/{name}.csv" for name in ("speed", "aims", "candidates", "costs", "times")} <= set(files)
    rows = pd.read_csv(client.download_artifacts(run.info.run_id, "tables/speed.csv")).set_index("arm")
    wanted = {f"{who} {w}" for who in ("ordinary", "default") for w in ("bf16", "fp32", "int8", "int4")}
    wanted |= {f"HF {who} {w}" for who in ("generate", "lookup", "assisted") for w in ("bf16", "fp32")}
    wanted |= {f"{who} bf16 T=.7" for who in ("ordinary", "default", "HF generate")}
    assert wanted <= set(rows.index)
    not_here = {"bf16": 1}  # flashspec
    assert {w: n + not_here.get(w, 0) for w, n in rows.groupby("weights").size().items()} == speed.JUDGED
    greedy = rows[rows["temperature"] == 0]
    assert (greedy["same_texts"] == greedy["texts"]).all()
    assert (rows.loc[[name for name in rows.index if name.startswith("ordinary")], "value"] == 1).all()
    candidates = pd.read_csv(client.download_artifacts(run.info.run_id, "tables/candidates.csv"))
    best = {w: t.loc[t["value"].idxmax(), "arm"] for w, t in candidates.reset_index().groupby("weights")}
    assert tags["chosen"] == f"bf16: {best['bf16']}; fp32: {best['fp32']}; int4: {best['int4']}"
    assert set(candidates["arm"]) == {c.name for c in speed.CANDIDATES}
    times = pd.read_csv(client.download_artifacts(run.info.run_id, "tables/times.csv"))
    assert not times.duplicated(["arm", "prompt"]).any()

    (root / "README.md").write_text(README, encoding="utf-8")
    publish.publish(run.info.run_id, root)
    shown = (root / "README.md").read_text(encoding="utf-8")
    assert f"Run `{run.info.run_id[:12]}`" in shown
    assert f"texts of at most {tags['tokens']} tokens" in shown, "as long as they were, not as was asked for"
    assert all(f"| {name} |" in shown for name in rows.index)
    assert shown.startswith("# Title")
    assert shown.endswith("More.\n")
    kept = (root / "results" / "bench_cpu.json").read_text(encoding="utf-8")
    assert run.info.run_id in kept
    assert "Chosen on one half" in capsys.readouterr().out


def test_too_few_prompts_of_a_category_leave_a_failed_run_that_says_so(root: Path) -> None:
    with pytest.raises(SpecDecError, match="has no category with 80 prompts"):
        speed.command("mine", each=40)
    (run,) = runs()
    assert run.info.status == "FAILED"


def test_a_quantised_pair_and_a_time_that_is_none_are_refused(root: Path) -> None:
    with pytest.raises(SpecDecError, match=r"is quantised \(int8\) already"):
        speed.command("small")
    assert [run.info.status for run in runs()] == ["FAILED"]
    with pytest.raises(SpecDecError, match="minutes=nan"):
        speed.command("mine", minutes=float("nan"))


def test_texts_get_shorter_where_the_bench_would_take_longer_than_it_may() -> None:
    contest = speed.Contest("mine", tokens=64)
    contest.pairs = dict.fromkeys(speed.JUDGED, tiny_pair())
    contest.costs = dict.fromkeys(speed.JUDGED, Costs({("target", 1, 1): 0.05}))
    arms = sum(speed.JUDGED.values()) + 3 * (1 + len(speed.CANDIDATES)) / 2
    contest.fit(3600, prompts=10)
    assert contest.tokens == 64
    contest.fit(800, prompts=10)
    assert contest.tokens == int(800 / (4 / 3 * 10 * 0.05 * arms)) == 35
    contest.fit(60, prompts=10)
    assert contest.tokens == 32
