"""Keep secrets out of the record: every text that is logged passes through here first."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MASK = "***"

# Every repeat below is bounded or starts at a fixed word: texts of megabytes without a space must pass in linear time.
# Shapes that are secrets wherever they stand. A shape that other text could have by chance is not listed.
_SHAPES = re.compile(
    r"""
    \bhf_[A-Za-z0-9]{16,}                              # Hugging Face
    | \bsk-[A-Za-z0-9_-]{16,}                          # OpenAI and others
    | \bgh[pousr]_[A-Za-z0-9]{20,}                     # GitHub
    | \bgithub_pat_[A-Za-z0-9_]{20,}
    | \bglpat-[A-Za-z0-9_-]{16,}                       # GitLab
    | \bxox[abeprs]-[A-Za-z0-9-]{10,}                  # Slack
    | \bpypi-[A-Za-z0-9_-]{32,}
    | \bAIza[A-Za-z0-9_-]{35}                          # Google
    | \b(?:AKIA|ASIA)[A-Z0-9]{16}\b                    # AWS key id
    | \beyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]{8,}             # JSON web token
    | -----BEGIN\ [A-Z ]*PRIVATE\ KEY-----.*?(?:-----END\ [A-Z ]*PRIVATE\ KEY-----|\Z)
    """,
    re.VERBOSE | re.DOTALL,
)
_URL = re.compile(r"(\b[a-z][a-z0-9+.-]{1,20}://)[^/\s@\"'<>]{1,500}(?=@)", re.IGNORECASE)
_BEARER = re.compile(r"(\bBearer\s+|\bAuthorization[\"']?\s*[:=]\s*[\"']?Basic\s+)[\w.~+/=-]{8,}", re.IGNORECASE)
_SECRET_NAME = (
    r"(?:password|passwd|passphrase|secret|secret[_-]?key|api[_-]?key|access[_-]?key|private[_-]?key|credentials?)"
)
_VALUE = r"""(?:\\?"[^"\n]+"|\\?'[^'\n]+'|[^\s"'\\,;&<>]+)"""
_NAMED = re.compile(rf"""({_SECRET_NAME}(?:[_-]\w{{1,40}})?\\?["']?\s*[=:]\s*)(?:{_VALUE})""", re.IGNORECASE)
# "token" is an everyday word here (next_token = ..., bos_token: <s>), so its value must look like a secret too.
_TOKEN = re.compile(
    r"""(token\\?["']?\s*[=:]\s*\\?["']?)(?=[A-Za-z_-]*\d)(?=[\d_-]*[A-Za-z])[A-Za-z0-9_+/=-]{16,}""",
    re.IGNORECASE,
)
_OPTION = re.compile(rf"(?<![\w-])(--(?:\w{{1,40}}-){{0,4}}(?:{_SECRET_NAME}|token)\s+)\S+", re.IGNORECASE)
_SECRET_KEY = re.compile(rf"(?:{_SECRET_NAME}|token)$", re.IGNORECASE)
_SECRET_VARIABLE = re.compile(
    r"""
    (?:TOKEN | PASSWORD | PASSWD | PASSPHRASE | _PASS | SECRET | API_?KEY | ACCESS_?KEY | _KEY | _PAT | CREDENTIALS?)
        (?:_?\d+)?$
    | SECRET_?KEY | PRIVATE_?KEY
    | AUTH(?!ORS?(?:_|$)|ORITY) (?!\w*_SOCK$)           # neither GIT_AUTHOR_NAME nor the path in SSH_AUTH_SOCK
    """,
    re.IGNORECASE | re.VERBOSE,
)
_PATTERNS = (_SHAPES, _URL, _BEARER, _NAMED, _OPTION, _TOKEN)  # a first group is what stays readable before the secret


def mask(text: str) -> str:
    """``text`` with credentials replaced by ``***`` and the home folder by ``~``."""
    pieces, end = [], 0
    for start, stop in _merged(_secret_spans(text)):
        pieces += [text[end:start], MASK]
        end = stop
    return _without_home("".join([*pieces, text[end:]]))


def _secret_spans(text: str) -> Iterator[tuple[int, int]]:
    """Where secrets stand. All are looked for in the whole text: masking one first would tear others apart."""
    for pattern in (*_PATTERNS, *(re.compile(re.escape(value)) for value in _environment_secrets())):
        for found in pattern.finditer(text):
            yield (found.end(1) if pattern.groups else found.start()), found.end()


def _merged(spans: Iterator[tuple[int, int]]) -> list[tuple[int, int]]:
    """The spans in order, those that touch made one."""
    merged: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
        else:
            merged.append((start, stop))
    return merged


def masked(value: Any) -> Any:
    """``value`` (text, or dicts and lists of it, such as a notebook) with every text in it masked."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, dict):
        return {key: _masked_entry(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item) for item in value]
    return value


def _masked_entry(key: str, value: Any) -> Any:
    if key.startswith("image/"):  # base64 or SVG of a figure: nothing a pattern could judge
        return value
    short_token = key.lower().endswith("token") and len(str(value)) < 16  # bos_token: <s>
    if isinstance(value, str) and value and _SECRET_KEY.search(key) and not short_token:
        return MASK
    return masked(value)


def _environment_secrets() -> list[str]:
    """Values of variables that are named like secrets: these are masked whatever they look like."""
    values = [value for name, value in os.environ.items() if len(value) >= 8 and _SECRET_VARIABLE.search(name)]
    return values + [quoted for value in values if (quoted := json.dumps(value)[1:-1]) != value]  # as JSON spells it


def _without_home(text: str) -> str:
    home = str(Path.home())
    if len(home) < 3:
        return text
    return re.sub(rf"(?<![\w./~-]){re.escape(home)}(?=[/\s\"':,)]|$)", "~", text)
