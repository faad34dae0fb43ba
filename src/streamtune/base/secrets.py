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

# A repetition that something must follow is bounded: a text of another person costs time in proportion to its length.
_FORMS: dict[str, str] = {
    "a password in a URL": r"(?<=://)[^\s/?#@:'\"]{0,256}:[^\s/?#@'\"]{1,512}(?=@)",
    "a token in a URL": r"(?<=://)(?!git@)[^\s/?#@:'\"]{8,512}(?=@)",
    "a secret in a URL": (
        r"(?i)(?<=[?&;])(?:(?:access|auth|api|id|refresh)?[_-]?(?:token|key)|apikey|auth|password|passwd|pwd|secret|"
        r"client_secret|sig|signature|x-(?:amz|goog)-(?:signature|credential|security-token))=[^\s&#;'\"]+"
    ),
    "a webhook": r"(?<=//)(?:hooks\.slack\.com/services|discord(?:app)?\.com/api/webhooks)/[A-Za-z0-9/_-]{16,}",
    "a Hugging Face token": r"\b(?:hf|api_org)_[A-Za-z0-9]{16,}\b",
    "a GitHub token": r"\b(?:gh[opsur]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,})\b",
    "a GitLab token": r"\bgl(?:pat|dt|rt|cbt|ptt|ft|soat|imt|agent|oas)-[A-Za-z0-9_.-]{16,}",
    "an API key": (
        r"\b(?:sk|pk|rk)-(?:[A-Za-z0-9]{1,64}-){0,8}[A-Za-z0-9_]{20,}|\bAIza[A-Za-z0-9_-]{30,}|\bnvapi-[A-Za-z0-9_-]{20,}"
        r"|\b(?:xai|pplx|csk)-[A-Za-z0-9]{24,}|\btgp_v1_[A-Za-z0-9_-]{20,}"
        r"|\b(?:gsk|r8|fw|lin_api|dop_v1|KGAT|wandb_v1)_[A-Za-z0-9]{20,}"
        r"|\blsv2_(?:pt|sk)_[A-Za-z0-9_]{20,}|\bSG\.[A-Za-z0-9_-]{16,64}\.[A-Za-z0-9_-]{16,}"
    ),
    "a Databricks token": r"\bdapi[0-9a-f]{32}(?:-\d+)?\b",
    "a Stripe key": r"\b(?:(?:sk|pk|rk)_(?:live|test)|whsec)_[A-Za-z0-9]{16,}",
    "a package registry's token": r"\b(?:npm_[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{30,}|dckr_pat_[A-Za-z0-9_-]{20,})",
    "a Google token": r"\b(?:ya29\.[A-Za-z0-9_-]{20,}|GOCSPX-[A-Za-z0-9_-]{20,}|1//0[A-Za-z0-9_-]{30,})",
    "an Azure key": r"(?i)\b(?:AccountKey|SharedAccessKey|SharedAccessSignature)=[^\s;'\"]{16,}",
    "a Vault token": r"\bhv[sbr]\.[A-Za-z0-9_-]{20,}",
    "a Slack token": r"\bxox[abeprs]-[A-Za-z0-9-]{10,}",
    "an AWS key": r"\b(?:AKIA|ASIA)[A-Z0-9]{16}\b",
    "a bearer token": r"(?i)\bbearer\s{1,8}[A-Za-z0-9._~+/=-]{16,}",
    "a signed token": r"\beyJ[A-Za-z0-9_-]{8,1024}\.eyJ[A-Za-z0-9_-]{8,8192}\.[A-Za-z0-9_-]{8,}",
    "a private key": (
        r"-----BEGIN [A-Z ]{0,64}PRIVATE KEY-----(?:[\s\S]*?-----END [A-Z ]{0,64}PRIVATE KEY-----|[\s\S]*)"
    ),
}
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
_ORDERS = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]")
_COMPILED = {kind: re.compile(form) for kind, form in _FORMS.items()}
# Every form holds one of these: a text without any is let through at the speed of a search for a word.
_HINT = re.compile(
    r"://|[?&;][A-Za-z_-]{0,64}=|hf_|api_org_|gh[opsur]_|github_pat_|gl[a-z]{2,5}-|[spr]k[-_]|AIza|nvapi-|xai-|pplx-|fw_"
    r"|tgp_v1|csk-|gsk_|r8_|lin_api_|dop_v1_|KGAT_|wandb_v1_|lsv2_|SG\.|dapi|whsec_|npm_|pypi-|dckr_pat_|ya29\.|GOCSPX-"
    r"|1//0|AccountKey|SharedAccess|hv[sbr]\.|hooks\.|webhooks|xox|AKIA|ASIA|eyJ|PRIVATE KEY|bearer",
    re.IGNORECASE,
)
_NAMED_LIKE_SECRETS = re.compile(
    r"(?i)(?:^|_)(?:token|password|passwd|passphrase|pass|pwd|pat|api_?key|access_?key|credentials?|webhook)(?:_|$)|secret"
)
_NAMED_KEY = re.compile(r"(?i)_?key(?:_|$)")
_WORD = re.compile(r"[A-Za-z]+(?:[ _.-][A-Za-z]+)*")
"""A value of a variable ``..._KEY`` that is the name of something: ``SORT_KEY=created_at``."""
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
        if len(value) >= _SHORTEST and is_named_like_secret(name, value) and not _is_path_or_switch(value)
    }
    return dict(sorted(found.items(), key=lambda item: -len(item[1])))


def is_named_like_secret(name: str, value: str) -> bool:
    """Return True if a variable or a key has a name under which secrets are kept, and the value may be one."""
    if _NAMED_LIKE_SECRETS.search(name):
        return True
    return _NAMED_KEY.search(name) is not None and _WORD.fullmatch(value) is None


def _is_path_or_switch(value: str) -> bool:
    """Return True if a value is a number, a path of a file that holds the secret, or a switch such as ``disabled``."""
    return (
        value.isdecimal() or value.startswith(("/", "~", "./")) or value.lower() in ("disabled", "required", "optional")
    )


def without_controls(text: str) -> str:
    """Return text in which escapes and other controls of a terminal are written out; every letter stays as it is."""
    return _ORDERS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def plain(text: str) -> str:
    """Return text that is safe to show: no secrets, nothing that a terminal obeys (escapes, changes of direction)."""
    return visible(redact(text))


def visible(text: str) -> str:
    """Return text in which everything that a terminal obeys, and half of a character, is written as an escape."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)
