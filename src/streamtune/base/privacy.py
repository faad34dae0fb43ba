"""Redaction of secrets in everything that a run writes or prints, and refusal of connections with ``--offline``.

Secrets are tokens in the formats of known services, credentials in a URL, and values of environment variables with
names such as ``API_KEY``. Each is replaced by its kind: ``[a Hugging Face token]``.

Libraries read their environment variables when they are imported, so call :func:`disable_telemetry`,
:func:`use_hub_caches_only`, :func:`use_hub_caches_if_unreachable` and :func:`go_offline` before. This module imports no
heavy library.
"""

from __future__ import annotations

import ipaddress
import os
import re
import socket
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from streamtune.errors import RunError

# Repetitions before another part are bounded, so that a hostile text takes time in proportion to its length.
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
# Every form contains one of these, so that most texts need only this fast search.
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
"""Pattern of a harmless value of a variable ``..._KEY``, which is a plain name: ``SORT_KEY=created_at``."""
_SHORTEST = 8
"""Minimum number of characters of a secret in an environment variable; a shorter value is a switch."""


def find_secret(text: str) -> str | None:
    """Return the kind of the first secret in a text, such as ``a Hugging Face token``; None if there is no secret."""
    if _HINT.search(text):
        for kind, form in _COMPILED.items():
            if form.search(text):
                return kind
    return next((f"the value of ${name}" for name, value in _secrets_in_environment().items() if value in text), None)


def redact(text: str) -> str:
    """Return the text with each secret replaced by its kind in brackets, such as ``[a Hugging Face token]``."""
    for name, value in _secrets_in_environment().items():
        if value in text:
            text = text.replace(value, f"[the value of ${name}]")
    if _HINT.search(text):
        for kind, form in _COMPILED.items():
            text = form.sub(f"[{kind}]", text)
    return text


def redact_values(value: Any) -> Any:
    """Return JSON values with secrets redacted in every string, dictionary keys included."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {redact(key) if isinstance(key, str) else key: redact_values(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [redact_values(item) for item in value]
    return value


def _secrets_in_environment() -> dict[str, str]:
    """Return environment variables that may be secrets, as name -> value, the longest value first."""
    secrets = {
        name: value
        for name, value in os.environ.items()
        if len(value) >= _SHORTEST and is_named_like_secret(name, value) and not _is_path_or_switch(value)
    }
    return dict(sorted(secrets.items(), key=lambda item: -len(item[1])))


def is_named_like_secret(name: str, value: str) -> bool:
    """Return True if the name of a variable or JSON key means a secret, such as ``HF_TOKEN``.

    Other names with ``KEY``, such as ``SORT_KEY``, also count, unless the value consists of plain words.
    """
    if _NAMED_LIKE_SECRETS.search(name):
        return True
    return _NAMED_KEY.search(name) is not None and _WORD.fullmatch(value) is None


def _is_path_or_switch(value: str) -> bool:
    return (
        value.isdecimal() or value.startswith(("/", "~", "./")) or value.lower() in ("disabled", "required", "optional")
    )


def escape_terminal_controls(text: str) -> str:
    """Return the text with terminal control characters escaped, except tab, newline and carriage return."""
    return _ORDERS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def safe_text(text: str) -> str:
    """Return the text without secrets, and with the characters of :func:`escape_invisible` escaped."""
    return escape_invisible(redact(text))


def escape_invisible(text: str) -> str:
    """Return the text with lone surrogates, bidirectional formatting and control characters except tab and newline
    escaped."""
    return _CONTROL.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


# --- connections ------------------------------------------------------------------------------------------------------

OFFLINE = "STREAMTUNE_OFFLINE"
"""Environment variable that ``--offline`` sets, so that child processes are offline too."""

_PRIVATE = {
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "DISABLE_TELEMETRY": "1",
    "DO_NOT_TRACK": "1",
    "ACCELERATE_DISABLE_TELEMETRY": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # transformers would ask a hub service to convert checkpoints without safetensors.
    "DISABLE_SAFETENSORS_CONVERSION": "1",
    "USE_HUB_KERNELS": "0",
}
_OFF_THE_HUB = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
_guarded = False
_thread = threading.local()


class OfflineError(RunError):
    """A connection was refused because of ``--offline``."""


def disable_telemetry() -> None:
    """Disable telemetry of libraries and kernels from the Hugging Face Hub, in this process and its children.

    Variables that the user has set do not change: ``USE_HUB_KERNELS=1`` enables the kernels.
    """
    for name, value in _PRIVATE.items():
        os.environ.setdefault(name, value)
    if os.environ["USE_HUB_KERNELS"].upper() not in ("1", "ON", "YES", "TRUE"):
        # A model's configuration may name a hub kernel, which is code; without this package none is loaded.
        sys.modules.setdefault("kernels", None)  # type: ignore[arg-type]


def use_hub_caches_only() -> None:
    """Set ``HF_HUB_OFFLINE`` and similar variables, so that Hugging Face libraries read only their local caches."""
    os.environ.update(_OFF_THE_HUB)


def use_hub_caches_if_unreachable() -> None:
    """Call :func:`use_hub_caches_only` if the Hub's host name cannot be resolved; libraries would retry for a minute.

    With a proxy nothing happens, because the proxy resolves names.
    """
    from urllib.request import getproxies  # 50 ms

    if os.environ.get("HF_HUB_OFFLINE") or {"https", "all"} & getproxies().keys():
        return
    host = urlsplit(os.environ.get("HF_ENDPOINT") or "https://huggingface.co").hostname
    try:
        socket.getaddrinfo(host, None)
    except (socket.gaierror, UnicodeError):  # a part of the name may exceed the limit of host names
        use_hub_caches_only()


def go_offline() -> None:
    """Refuse connections to other machines, in this process and its children.

    Connections made by Python code raise :class:`OfflineError`. Connections made by compiled libraries, such as NCCL,
    are not checked.
    """
    global _guarded
    use_hub_caches_only()
    os.environ[OFFLINE] = "1"
    if not _guarded:
        sys.addaudithook(_refuse_connection)
        _guarded = True


def is_offline() -> bool:
    return os.environ.get(OFFLINE) == "1"


@contextmanager
def allow_rank_connections() -> Iterator[None]:
    """Context manager that lets the current thread connect to other ranks despite ``--offline``."""
    before = getattr(_thread, "to_ranks", False)
    _thread.to_ranks = True
    try:
        yield
    finally:
        _thread.to_ranks = before


def _refuse_connection(event: str, arguments: tuple[Any, ...]) -> None:
    """Audit hook that raises :class:`OfflineError` for a connection to another machine while offline."""
    if not event.startswith("socket.") or not is_offline() or getattr(_thread, "to_ranks", False):
        return
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        address = arguments[1]
        if address is not None and not _is_local(address):
            raise _offline_error(address[0] if isinstance(address, tuple) else address)
    elif event in ("socket.getaddrinfo", "socket.gethostbyname") and not _is_local((arguments[0],)):
        raise _offline_error(arguments[0])


def _is_local(address: Any) -> bool:
    if not isinstance(address, tuple):
        return True  # a path, or an address family without hosts
    host = address[0]
    if isinstance(host, bytes):
        host = host.decode("ascii", "replace")
    if host in (None, "", "localhost") or not isinstance(host, str):
        return True
    try:
        return ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


def _offline_error(host: Any) -> OfflineError:
    shown = host.decode("ascii", "replace") if isinstance(host, bytes) else str(host)
    return OfflineError(
        f"--offline forbids a connection to {shown}",
        fix="run once without --offline to fill the caches, or use local folders and files in the recipe",
    )
