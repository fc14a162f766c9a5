"""The parameters of each notebook: what may be set, of which type, within which bounds.

The schema is the only list of names. ``specdec run``, ``papermill --engine specdec`` and the notebook itself
check against it, so a misspelt key is an error everywhere and never a default used in silence.
"""

from __future__ import annotations

import difflib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator

from ..errors import SpecDecError
from .store import project_root

Drafter = Literal["prompt_lookup", "suffix", "model", "composite", "early_exit", "self"]
Replayed = Literal["prompt_lookup", "suffix", "model", "composite", "self"]  # those that lab.replay knows
Gamma = Annotated[int, Field(ge=1, le=64)]
PROMPT = (
    "Rewrite this note in the past tense: The harbour master keeps a diary of every ship that comes in. "
    "Every ship that comes in has a name, a flag and a captain, and the harbour master writes the name, the flag "
    "and the captain in the diary. When the wind turns north, the harbour master closes the gate and counts the "
    "ships again."
)


class NotebookParams(BaseModel):
    """Strict: no unknown keys, no silent conversion ("4" is not 4, yes is not a name)."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, protected_namespaces=())

    pair: str = Field("params/models/smollm2.yaml", min_length=1)
    drafter: Drafter = "composite"
    temperature: float = Field(0.0, ge=0, le=10, allow_inf_nan=False)
    seed: int = Field(0, ge=0, lt=2**63)
    workload: str = Field("builtin", min_length=1)


class QuickstartParams(NotebookParams):
    """00_quickstart: one prompt through the five stages."""

    prompt: str = Field(PROMPT, min_length=1)
    max_new_tokens: int = Field(96, ge=1, le=4096)
    gamma: Gamma = 4
    top_k: int = Field(0, ge=0)
    top_p: float = Field(1.0, gt=0, le=1)
    min_p: float = Field(0.0, ge=0, lt=1)
    timed_prompts: int = Field(6, ge=1, le=1000)
    traces: int = Field(3, ge=0, le=100)


class TheoryParams(NotebookParams):
    """01_theory_proof: the law enumerated exactly, then predicted and measured on the pair."""

    drafter: Drafter = "prompt_lookup"
    vocab_max: int = Field(4, ge=3, le=6)
    gamma_max: int = Field(3, ge=1, le=4)
    laws: int = Field(20, ge=1, le=1000)
    samples: int = Field(4000, ge=100, le=1_000_000)
    prompts: int = Field(6, ge=1, le=1000)
    max_new_tokens: int = Field(48, ge=1, le=4096)
    gammas: list[Gamma] = Field([1, 2, 4, 6], min_length=1)
    temperature: float = Field(0.7, ge=0, le=10, allow_inf_nan=False)


class AcceptanceParams(NotebookParams):
    """02_acceptance_sweep: every drafter and rule at every block length, from texts that are written once."""

    gamma: Gamma = 4
    prompts: int = Field(12, ge=2, le=10_000)
    max_new_tokens: int = Field(48, ge=2, le=4096)
    batch: int = Field(8, ge=1, le=1024)
    gammas: list[Gamma] = Field([1, 2, 3, 4, 6, 8], min_length=1)
    temperatures: list[Annotated[float, Field(ge=0, le=10, allow_inf_nan=False)]] = Field([0.0, 0.7, 1.0], min_length=1)
    top_ps: list[Annotated[float, Field(gt=0, le=1)]] = Field([1.0], min_length=1)
    drafters: list[Replayed] = Field(["prompt_lookup", "suffix", "model", "composite"], min_length=1)
    rules: list[Literal["token", "block"]] = Field(["token", "block"], min_length=1)
    checked: int = Field(4, ge=1, le=1000)
    timed_prompts: int = Field(4, ge=1, le=1000)

    @model_validator(mode="after")
    def _what_is_looked_at_is_swept(self) -> AcceptanceParams:
        names = ("gamma", "temperature", "drafter")
        for name, value, swept in ((name, getattr(self, name), getattr(self, f"{name}s")) for name in names):
            if value not in swept:
                raise ValueError(f"{name} = {value!r} is looked at prompt by prompt, but is not among {name}s: add it")
        return self


class FailureParams(NotebookParams):
    """03_failure_modes: one assumption broken at a time, with and without a control."""

    gamma: Gamma = 4
    prompts: int = Field(2, ge=1, le=1000)
    max_new_tokens: int = Field(32, ge=8, le=4096)
    episode_start: int = Field(8, ge=1, le=4096)
    episode_end: int = Field(20, ge=2, le=4096)
    least: float = Field(0.95, gt=0, le=1)
    warn_first_position: float = Field(0.2, ge=0, le=1)
    warn_entropy_gap: float = Field(2.5, gt=0, allow_inf_nan=False)
    warn_alpha_bound: float = Field(0.35, ge=0, le=1)

    @model_validator(mode="after")
    def _the_episode_lies_within_the_text(self) -> FailureParams:
        if not self.episode_start < self.episode_end < self.max_new_tokens:
            raise ValueError(
                "an episode begins before it ends, and ends within the text: mend episode_start or episode_end"
            )
        return self


class DistillationParams(NotebookParams):
    """draft_distillation: a draft made from a target's own layers and its own texts."""

    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    shards: int = Field(1, ge=1, le=10_000)
    batch: int = Field(24, ge=8, le=4096)
    question: int = Field(24, ge=1, le=4096)
    answer: int = Field(40, ge=1, le=4096)
    held_out: int = Field(4, ge=2, le=1000)
    layers: list[Annotated[int, Field(ge=0)]] = Field([0, 1], min_length=1)
    head: int = Field(8192, ge=16)
    losses: list[str] = Field(["forward_kl", "total_variation"], min_length=1)
    steps: int = Field(24, ge=1)
    step_tokens: int = Field(1024, ge=64)
    rate: float = Field(1e-2, gt=0, lt=1)
    folder: str = ""
    save_to: str = ""
    prompts: int = Field(4, ge=1, le=1000)
    max_new_tokens: int = Field(32, ge=1, le=4096)
    gamma: Gamma = 4


NOTEBOOKS: dict[str, type[NotebookParams]] = {
    "00_quickstart": QuickstartParams,
    "01_theory_proof": TheoryParams,
    "02_acceptance_sweep": AcceptanceParams,
    "03_failure_modes": FailureParams,
    "draft_distillation": DistillationParams,
}


def load_profile(notebook: str, profile: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Every parameter of ``notebook``: the schema's defaults, then the profile's file, then ``key=value`` overrides.

    Raises:
        SpecDecError: no such notebook or profile, unreadable YAML, an unknown key or a value that does not fit.
    """
    schema = _schema(notebook)
    values = read_profile(notebook, profile)
    given = [_override(notebook, schema, text) for text in overrides]
    if twice := [key for key, times in Counter(key for key, _ in given).items() if times > 1]:
        raise SpecDecError(f"-p {twice[0]} is given more than once: give it once.")
    values |= dict(given)
    return check(notebook, values).model_dump()


def check(notebook: str, values: Mapping[str, Any]) -> NotebookParams:
    """``values`` as the notebook's parameters; the error names key, value, what is expected and what is allowed."""
    schema = _schema(notebook)
    try:
        return schema.model_validate(dict(values))
    except ValidationError as error:
        raise SpecDecError(f"{notebook}: " + "; ".join(_complaint(schema, e) for e in error.errors())) from None


def validated(notebook: str, namespace: Mapping[str, Any]) -> NotebookParams:
    """The notebook's parameters, read from its own globals. Called in the cell after the parameters.

    papermill injects a misspelt parameter as one more global, so a global that the notebook does not know is an
    error. When nobody else owns a run yet, one is opened and marked FAILED: bad input leaves a trace as well.
    """
    schema = _schema(notebook)
    known = {name: namespace[name] for name in schema.model_fields if name in namespace}
    try:
        return check(notebook, known | {name: namespace[name] for name in _strangers(schema, namespace)})
    except SpecDecError as error:
        if "get_ipython" in namespace and not os.environ.get("MLFLOW_RUN_ID"):
            from .lineage import record_failure

            record_failure(notebook, error)
        raise


def read_profile(notebook: str, profile: str) -> dict[str, Any]:
    """The keys that ``params/<notebook>/<profile>.yaml`` sets, not yet checked."""
    folder = project_root() / "params" / notebook
    there = sorted(path.stem for path in folder.glob("*.yaml"))
    if profile not in there:  # a name, never a path: what ran must be found under its name
        names = ", ".join(there) or "none"
        raise SpecDecError(f"{notebook} has no profile '{profile}': choose one of {names} (in params/{notebook}).")
    return read_yaml(folder / f"{profile}.yaml")


def read_yaml(path: Path) -> dict[str, Any]:
    """A YAML file of keys and values. The message of an error names file and line."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise SpecDecError(f"{path.name} cannot be read ({error}): check the file.") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{path.parent.name}/{path.name}" + (f" line {mark.line + 1}" if mark else "")
        raise SpecDecError(f"{where} is not YAML ({getattr(error, 'problem', error)}): mend that line.") from None
    if values is None:
        return {}
    if not isinstance(values, dict) or not all(isinstance(key, str) for key in values):
        raise SpecDecError(f"{path.parent.name}/{path.name} must hold lines of the form 'key: value'.")
    return values


def _schema(notebook: str) -> type[NotebookParams]:
    if notebook not in NOTEBOOKS:
        near = _nearest(notebook, list(NOTEBOOKS))
        raise SpecDecError(f"Unknown notebook '{notebook}'{near}; there are {', '.join(NOTEBOOKS)}.")
    return NOTEBOOKS[notebook]


def _override(notebook: str, schema: type[NotebookParams], text: str) -> tuple[str, Any]:
    """``key=value`` as typed on a command line. The field's type decides what the text means."""
    key, equals, raw = text.partition("=")
    key = key.strip()
    if not equals or not key:
        raise SpecDecError(f"-p {text}: write -p key=value; keys of {notebook}: {_keys(schema)}.")
    field = schema.model_fields.get(key)
    if field is None or field.annotation is str:
        return key, raw
    value: Any = raw
    if get_origin(field.annotation) is list:
        value = [part.strip() for part in raw.strip().strip("[]").split(",") if part.strip()]
    try:
        return key, TypeAdapter[Any](field.annotation or str).validate_python(value, strict=False)
    except ValidationError:
        # the schema says what is wrong with it
        return key, [int(part) if part.lstrip("-").isdecimal() else part for part in value] if value != raw else raw


def _strangers(schema: type[NotebookParams], namespace: Mapping[str, Any]) -> list[str]:
    """Globals that look like parameters and are none.

    On a kernel's first pass that is any public name with plain data. On a re-run by hand the globals hold
    results of the earlier pass too; then only names set in the previous cell count, the parameter cell.
    """
    # In and Out, and what papermill itself injects on request, are no parameters of ours
    others = [n for n in namespace if not n.startswith(("_", "PAPERMILL_")) and n not in {"In", "Out"}]
    plain = (str, int, float, list, tuple, dict, type(None))  # imports and functions are no parameters
    names = [n for n in others if n not in schema.model_fields and isinstance(namespace[n], plain)]
    cells = list(namespace.get("In", []))[:-1]
    if not any("validated(" in cell for cell in cells):
        return names
    return [name for name in names if name in _assigned(cells[-1])]


def _assigned(source: str) -> set[str]:
    import ast

    try:
        body = ast.parse(source).body
    except SyntaxError:
        return set()
    targets = [t for node in body if isinstance(node, ast.Assign) for t in node.targets]
    targets += [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


# --- messages ---------------------------------------------------------------------------------------------


def _complaint(schema: type[NotebookParams], error: Any) -> str:
    if not error["loc"]:  # about several parameters, in our own words
        return f"{error['msg'].removeprefix('Value error, ')}"
    key, value = str(error["loc"][0]), error["input"]
    if error["type"] == "extra_forbidden":
        near = _nearest(key, list(schema.model_fields))
        return f"unknown parameter '{key}' (= {value!r}){near}; allowed keys: {_keys(schema)}"
    place = key + "".join(f"[{part}]" for part in error["loc"][1:])
    hint = ""
    if isinstance(value, str) and _is_number(value) and "float" in error["type"]:
        hint = f" (YAML reads {value} as text: write {float(value)})"
    elif isinstance(value, int | float) and "string" in error["type"]:
        hint = " (put it in quotes; with papermill use -r)"
    return f"{place} = {value!r} does not fit: must be {_expected(schema, key)}{hint}; allowed keys: {_keys(schema)}"


def _expected(schema: type[NotebookParams], key: str) -> str:
    """The field's type and bounds in words, read off its JSON schema."""
    spec = schema.model_json_schema()["properties"][key]
    if "enum" in spec:
        return "one of " + ", ".join(spec["enum"])
    words = {"integer": "a whole number", "number": "a number", "string": "text", "boolean": "true or false"}
    name = words.get(spec["type"], spec["type"])
    if spec["type"] == "array":
        filled = "a list that is not empty" if spec.get("minItems") else "a list"
        name, spec = f"{filled}, each entry {words[spec['items']['type']]}", spec["items"]
    bounds = {"minimum": "at least", "exclusiveMinimum": "above", "maximum": "at most", "exclusiveMaximum": "below"}
    limits = [f"{word} {spec[bound]}" for bound, word in bounds.items() if bound in spec]
    if spec.get("minLength"):
        limits.append("not empty")
    return " ".join([name, " and ".join(limits)]).strip()


def _nearest(word: str, choices: list[str]) -> str:
    close = difflib.get_close_matches(word, choices, n=1, cutoff=0.5)
    return f": did you mean '{close[0]}'?" if close else ""


def _keys(schema: type[NotebookParams]) -> str:
    return ", ".join(schema.model_fields)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
