"""Parameters: what is refused, and what the refusal says."""

from __future__ import annotations

from pathlib import Path

import pytest
from books import write_profile

from specdec_core.errors import SpecDecError
from specdec_core.lab import params
from specdec_core.lab.params import NOTEBOOKS, check, load_profile, validated

REPO = Path(__file__).resolve().parents[2]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_ROOT", str(tmp_path))
    return tmp_path


def refusal(*overrides: str, yaml: str = "gamma: 2\n", root: Path) -> str:
    write_profile(root, yaml)
    with pytest.raises(SpecDecError) as caught:
        load_profile("00_quickstart", "smoke", overrides)
    assert "\n" not in str(caught.value), "a message is one line"
    return str(caught.value)


def test_profile_gives_every_parameter_with_defaults_filled_in(root: Path) -> None:
    write_profile(root, "gamma: 7\ntemperature: 1\n")
    values = load_profile("00_quickstart", "smoke")
    assert values["gamma"] == 7
    assert values["temperature"] == 1.0
    assert values["seed"] == 0
    assert set(values) == set(NOTEBOOKS["00_quickstart"].model_fields)


def test_an_empty_profile_means_the_defaults(root: Path) -> None:
    write_profile(root, "# nothing\n")
    assert load_profile("00_quickstart", "smoke") == NOTEBOOKS["00_quickstart"]().model_dump()


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("prompt=123", "prompt", "123"),
        ("prompt=a=b", "prompt", "a=b"),
        ("temperature=1e-3", "temperature", 0.001),
        ("temperature=1", "temperature", 1.0),
        ("gamma=6", "gamma", 6),
        ("drafter=self", "drafter", "self"),
    ],
)
def test_override_is_read_by_the_type_of_its_field(root: Path, text: str, key: str, value: object) -> None:
    write_profile(root)
    got = load_profile("00_quickstart", "smoke", [text])[key]
    assert got == value
    assert type(got) is type(value)


@pytest.mark.parametrize("text", ["gammas=[1,3]", "gammas=1, 3"])
def test_override_of_a_list(root: Path, text: str) -> None:
    write_profile(root, "seed: 1\n", name="01_theory_proof")
    assert load_profile("01_theory_proof", "smoke", [text])["gammas"] == [1, 3]


def test_misspelt_key_names_itself_the_nearest_and_the_allowed_ones(root: Path) -> None:
    for message in (refusal("gama=3", root=root), refusal(yaml="gama: 3\n", root=root)):
        assert "'gama'" in message
        assert "did you mean 'gamma'" in message
        assert "max_new_tokens" in message


@pytest.mark.parametrize(
    ("yaml", "words"),
    [
        ("gamma: four\n", ["gamma = 'four'", "a whole number at least 1 and at most 64"]),
        ("gamma: 65\n", ["gamma = 65", "at most 64"]),
        ("gamma: '4'\n", ["gamma = '4'", "a whole number"]),
        ("gamma: yes\n", ["gamma = True", "a whole number"]),
        ("gamma: 2.5\n", ["gamma = 2.5"]),
        ("temperature: 1e-3\n", ["write 0.001"]),
        ("prompt: 123\n", ["prompt = 123", "text", "quotes"]),
        ("prompt: ''\n", ["prompt = ''", "not empty"]),
        ("drafter: eagle\n", ["'eagle'", "prompt_lookup, suffix, model, composite, early_exit, self"]),
        ("top_p: .nan\n", ["top_p = nan"]),
        ("- gamma\n", ["key: value"]),
        ("gamma: [1\n", ["not YAML", "line"]),
    ],
)
def test_mistyped_value_in_yaml_says_what_is_expected(root: Path, yaml: str, words: list[str]) -> None:
    message = refusal(yaml=yaml, root=root)
    for word in words:
        assert word in message, message


def test_bad_entry_of_a_list_is_pointed_at(root: Path) -> None:
    with pytest.raises(SpecDecError, match=r"gammas\[1\] = 0"):
        check("01_theory_proof", {"gammas": [1, 0]})


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("gammas=99", "gammas[0] = 99 does not fit: must be a list that is not empty, each entry a whole number"),
        ("gammas=1,x", "gammas[1] = 'x' does not fit"),
        ("gammas=", "gammas = [] does not fit: must be a list that is not empty"),
    ],
)
def test_bad_list_as_override_says_which_entry(root: Path, text: str, words: str) -> None:
    write_profile(root, "seed: 1\n", name="01_theory_proof")
    with pytest.raises(SpecDecError) as caught:
        load_profile("01_theory_proof", "smoke", [text])
    assert words in str(caught.value)


def test_a_parameter_given_twice_is_refused(root: Path) -> None:
    assert "-p gamma is given more than once" in refusal("gamma=2", "gamma=3", root=root)


@pytest.mark.parametrize("profile", ["../01_theory_proof/smoke", "./smoke", "../00_quickstart/smoke", ""])
def test_a_profile_is_a_name_and_no_path(root: Path, profile: str) -> None:
    write_profile(root)
    write_profile(root, "seed: 1\n", name="01_theory_proof")
    with pytest.raises(SpecDecError, match="choose one of smoke"):
        load_profile("00_quickstart", profile)


def test_several_faults_stand_in_one_line(root: Path) -> None:
    message = refusal("gama=3", "seed=x", root=root)
    assert "'gama'" in message
    assert "seed = 'x'" in message


def test_override_without_equals_sign(root: Path) -> None:
    assert "key=value" in refusal("gamma", root=root)


def test_unknown_profile_lists_those_there_are(root: Path) -> None:
    write_profile(root, profile="smoke")
    with pytest.raises(SpecDecError, match="choose one of smoke"):
        load_profile("00_quickstart", "huge")


def test_unknown_notebook_lists_those_there_are() -> None:
    with pytest.raises(SpecDecError, match=r"did you mean '00_quickstart'.*01_theory_proof"):
        load_profile("00_quikstart", "cpu")


def test_notebook_check_takes_its_parameters_and_leaves_imports_and_ipython_names_alone() -> None:
    names = {"In": ["", "x"], "Out": {}, "exit": print, "get_ipython": print, "_i": "x", "Path": Path, "np": pytest}
    got = validated("00_quickstart", {"gamma": 3, "prompt": "p", **names, "PAPERMILL_INPUT_PATH": "x"})
    assert got.gamma == 3
    assert got.seed == 0


def test_notebook_check_refuses_a_misspelt_parameter_that_papermill_injected() -> None:
    with pytest.raises(SpecDecError, match=r"'gama'.*did you mean 'gamma'"):
        validated("00_quickstart", {"gamma": 3, "gama": 5})


def test_notebook_run_again_by_hand_is_not_disturbed_by_its_own_results() -> None:
    earlier = ["", "gamma = 4", 'P = validated("00_quickstart", globals())', "table = [1]", "gamma = 5", "this cell"]
    assert validated("00_quickstart", {"In": earlier, "gamma": 5, "table": [1]}).gamma == 5  # type: ignore[attr-defined]
    earlier[-2] = "gama = 5"
    with pytest.raises(SpecDecError, match="'gama'"):
        validated("00_quickstart", {"In": earlier, "gamma": 4, "gama": 5, "table": [1]})


@pytest.mark.parametrize("notebook", list(NOTEBOOKS))
@pytest.mark.parametrize("profile", ["smoke", "cpu", "gpu", "full"])
def test_shipped_profiles_fit_their_schema(monkeypatch: pytest.MonkeyPatch, notebook: str, profile: str) -> None:
    monkeypatch.setenv("SPECDEC_ROOT", str(REPO))
    assert load_profile(notebook, profile)
    text = (REPO / "params" / notebook / f"{profile}.yaml").read_text(encoding="utf-8")
    assert all("#" in line for line in text.splitlines() if line.strip()), "every key has a comment"


def test_only_the_schema_knows_the_names() -> None:
    assert all(schema.model_config.get("extra") == "forbid" for schema in params.NOTEBOOKS.values())
