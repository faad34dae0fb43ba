"""Find tokens and passwords in a user's input, and remove them from what a run writes or prints.

Recognised are the forms that services give their tokens, credentials in a URL, and the values of environment variables
that are named like secrets. A removed secret is replaced by its kind: ``[a Hugging Face token]``.

This module is a leaf: it imports nothing of the project and nothing heavy.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["find_secret", "plain", "redact", "redact_values"]

_FORMS: dict[str, str] = {
    "a password in a URL": r"(?<=://)[^\s/?#@'\"]*:[^\s/?#@'\"]+(?=@)",
    "a token in a URL": r"(?<=://)(?!git@)[^\s/?#@:'\"]{8,}(?=@)",
    "a secret in a URL": (
        r"(?i)(?<=[?&;])(?:(?:access|auth|api|id|refresh)?[_-]?(?:token|key)|apikey|auth|password|passwd|pwd|secret|"
        r"client_secret|sig|signature|x-amz-(?:signature|credential|security-token))=[^\s&#;'\"]+"
    ),
    "a Hugging Face token": r"\b(?:hf|api_org)_[A-Za-z0-9]{16,}\b",
    "a GitHub token": r"\b(?:gh[opsur]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})\b",
    "a GitLab token": r"\bglpat-[A-Za-z0-9_-]{16,}",
    "an API key": r"\b(?:sk|pk|rk)-(?:[A-Za-z0-9]+-)*[A-Za-z0-9_]{20,}|\bAIza[A-Za-z0-9_-]{30,}",
    "a Slack token": r"\bxox[abeprs]-[A-Za-z0-9-]{10,}",
    "an AWS key": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "a bearer token": r"(?i)\bbearer\s+[A-Za-z0-9._~+/=-]{16,}",
    "a signed token": r"\beyJ[A-Za-z0-9_-]{8,}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[\s\S]*?-----END [A-Z ]*PRIVATE KEY-----|[\s\S]*)",
}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_COMPILED = {kind: re.compile(form) for kind, form in _FORMS.items()}
# Every form holds one of these: a text without any is let through at the speed of a search for a word.
_HINT = re.compile(
    r"://|[?&;][A-Za-z_-]*(?:=)|hf_|api_org_|gh[opsur]_|github_pat_|glpat-|[spr]k-|AIza|xox|AKIA|ASIA|eyJ|PRIVATE KEY"
    r"|bearer",
    re.IGNORECASE,
)
_NAMED_LIKE_SECRETS = re.compile(
    r"(?i)(?:^|_)(?:token|secret|password|passwd|api_?key|access_?key|credentials?)(?:_|$)"
)
_SHORTEST = 8
"""Characters of an environment variable's value below which it is a switch rather than a secret."""


def find_secret(text: str) -> str | None:
    """Return the kind of secret in a text, such as ``a Hugging Face token``; None where none is found."""
    if _HINT.search(text):
        for kind, form in _COMPILED.items():
            if form.search(text):
                return kind
    return next((f"the value of ${name}" for name, value in _from_environment().items() if value in text), None)


def redact(text: str) -> str:
    """Return the text with each secret replaced by its kind in brackets."""
    for name, value in _from_environment().items():
        if value in text:
            text = text.replace(value, f"[the value of ${name}]")
    if _HINT.search(text):
        for kind, form in _COMPILED.items():
            text = form.sub(f"[{kind}]", text)
    return text


def redact_values(value: Any) -> Any:
    """Redact every text in JSON values, keys of mappings included."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {redact(key) if isinstance(key, str) else key: redact_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_values(item) for item in value]
    return value


def _from_environment() -> dict[str, str]:
    """Return the variables named like secrets, with values; the longest first, so that none is replaced in part."""
    found = {
        name: value
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST and _NAMED_LIKE_SECRETS.search(name) and not _is_path_or_switch(value)
    }
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def _is_path_or_switch(value: str) -> bool:
    """Return True if a value is a number, a path of a file that holds the secret, or a switch such as ``disabled``."""
    return (
        value.isdecimal() or value.startswith(("/", "~", "./")) or value.lower() in ("disabled", "required", "optional")
    )


def plain(text: str) -> str:
    """Return text that is safe to show: no secrets, nothing that a terminal obeys (escapes, changes of direction)."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), redact(text))
