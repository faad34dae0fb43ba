"""Tokens and passwords: refused in a recipe, and nowhere in what a run writes or says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from streamtune.base.privacy import find_secret, redact, redact_values
from streamtune.errors import RecipeError
from streamtune.recipe import load_recipe
from tests.faults.figures import tell
from tests.sft_kit import FIXED, RECIPE, write_recipe, write_rows

# Built from pieces, so that no scanner takes this file for a leak.
SECRETS = {
    "a Hugging Face token": "hf_" + "Abcdefgh12345678" + "Abcdefgh12345678xy",
    "a GitHub token": "ghp_" + "A1b2" * 9,
    "a GitLab token": "glpat-" + "a1B2c3D4e5F6g7H8i9J0",
    "an API key": "sk-" + "proj-" + "A1b2" * 8,
    "a Slack token": "xoxb-" + "123456789012-abcdefABCDEF",
    "an AWS key": "AKIA" + "ABCDEFGHIJKLMNOP",
    "a bearer token": "Authorization: Bearer " + "abcdefghijklmnopqrstuvwxyz",
    "a signed token": "eyJ" + "hbGciOiJIUzI1" + ".eyJ" + "zdWIiOiIxMjM0" + "." + "SflKxwRJSMeKKF2QT4",
    "a private key": "-----BEGIN RSA PRIVATE" + " KEY-----\nMIIEowIBAAKCAQEA\n-----END RSA PRIVATE" + " KEY-----",
    "a password in a URL": "https://somebody:" + "correct-horse" + "@example.org/rows.jsonl",
    "a token in a URL": "https://" + "abcdef0123456789" + "@example.org/rows",
    "a secret in a URL": "https://example.org/rows?page=2&access_" + "token=abcdef012345&x=1",
}
MORE = {
    "a secret in a URL": [
        "https://storage.googleapis.com/b/o?X-Goog-Algorithm=G&X-Goog-" + "Credential=me%40p.iam/2026/auto",
        "https://storage.googleapis.com/b/o?X-Goog-Date=2026&X-Goog-" + "Signature=8a1f2b3c4d5e6f",
        "https://storage.googleapis.com/b/o?GoogleAccessId=me&Expires=1&" + "Signature=abc%2Bdef",
        "https://a.blob.core.windows.net/c?sv=2026&" + "sig=abc%2Bdef",
    ],
    "a Databricks token": ["dapi" + "0123456789abcdef" * 2, "dapi" + "0123456789abcdef" * 2 + "-3"],
    "an API key": [
        "nvapi-" + "aB3_" * 16,
        "gsk_" + "aB3d" * 13,
        "r8_" + "aB3d" * 9,
        "xai-" + "aB3d" * 20,
        "pplx-" + "aB3d" * 12,
        "lsv2_pt_" + "0123456789abcdef" * 2 + "_0123456789",
        "SG." + "aB3d" * 5 + "aB." + "aB3d" * 10,
        "sk-ant-api03-" + "aB3_" * 20,
    ],
    "a Stripe key": [f"{kind}_{mode}_" + "aB3d" * 6 for kind in ("sk", "pk", "rk") for mode in ("live", "test")],
    "a package registry's token": ["npm_" + "aB3d" * 9, "pypi-" + "AgEIcHlwaS5vcmc" * 4, "dckr_pat_" + "aB3_" * 7],
    "a Google token": ["ya29." + "a0AfB_" * 8, "GOCSPX-" + "aB3_" * 7, "1//0" + "aB3_" * 10],
    "an Azure key": [
        "DefaultEndpointsProtocol=https;AccountName=a;" + "AccountKey=" + "aB3+" * 21 + "==;EndpointSuffix=x",
        "Endpoint=sb://x/;SharedAccessKeyName=a;" + "SharedAccessKey=" + "aB3+" * 10 + "=",
    ],
    "a GitLab token": [f"gl{kind}-" + "aB3d" * 5 for kind in ("dt", "rt", "cbt", "ptt", "ft", "soat")],
    "a Vault token": ["hvs." + "aB3_" * 10],
    "a webhook": ["https://hooks.slack.com/services/" + "T01/B02/" + "aB3d" * 6],
}
HARMLESS = [
    *(
        "dapi",
        "gsk_attention",
        "npm_config_cache",
        "r8_group",
        "pypi-server",
        "ya29",
        "sk_live",
        "AccountKey=",
        "SG.x.y",
    ),
    *("fw_forward_pass_of_the_model", "hvs.x", "glide-path-of-the-plane-that-landed", "x?Expires=1&Policy=none"),
    *(
        "https://huggingface.co/Qwen/Qwen3-8B",
        "git@github.com:a/b.git",
        "ssh://git@github.com/a/b",
        "hf_transfer",
        "a/b",
    ),
    *("runs/sk-learn", "task-force", "s3://bucket/key", "user@example.org", "eyJust a word", "token=", "x?page=2"),
    *("what is a bearer?", "<|im_end|>", "{{ messages[0]['content'] }}", "gs://bucket/hf_model", "a:b@c"),
]


def test_what_is_a_secret_and_what_is_not() -> None:
    for kind, text in SECRETS.items():
        assert find_secret(f"x {text} y") == kind
        assert find_secret(redact(f"x {text} y")) is None, text
        assert f"[{kind}]" in redact(text)
    for text in HARMLESS:
        assert find_secret(text) is None, text
        assert redact(text) == text
    token = SECRETS["a Hugging Face token"]
    assert token not in json.dumps(redact_values({token: [{"a": (token, 1)}], "b": None}))


@pytest.mark.parametrize("kind", MORE)
def test_tokens_of_more_services_are_known(kind: str) -> None:
    for text in MORE[kind]:
        assert find_secret(f"x {text} y") == kind, text
        assert find_secret(redact(f"x {text} y")) is None, text


@pytest.mark.parametrize("piece", ["://", ":", "://a:", "sk-", "sk-a-", "-eyJ", ".eyJ", "SG.", "-----BEGIN ", "?token"])
def test_a_long_text_takes_no_longer_than_its_length(piece: str) -> None:
    text = piece * (300_000 // len(piece))
    began = time.process_time()
    redact(f"://{text}!")
    assert time.process_time() - began < 3


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(
            ("SIGNING_KEY", "aB3daB3d"),
            ("DEPLOY_KEY_2", "0123abcd4567"),
            ("SSH_PASS", "horsebattery"),
            ("KEY", "k3k3k3k3k"),
        ),
        *(
            ("MYSECRETVALUE", "horsebattery"),
            ("CLIENTSECRET", "a-b-c-d-e"),
            ("ADO_PAT", "horsebattery"),
            ("DB_PWD", "12hunter"),
        ),
    ],
)
def test_variables_named_like_secrets(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert find_secret(f"a {value} z") == f"the value of ${name}"


def test_variables_that_only_look_like_it_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SORT_KEY": "created_at", "XDG_PATH": "abcdefgh1", "KEYBOARD": "qwertz123", "COMPASS": "north1234",
        "SSH_KEY": "/home/me/.ssh/id", "PATTERN": "abc12345",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, value)
        assert find_secret(f"a {value} z") is None, name


def test_values_of_the_environment_are_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef0123")
    monkeypatch.setenv("MY_PASSWORD", "correct horse")
    monkeypatch.setenv("HF_TOKEN_PATH", "/home/me/token-file")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false-positive")
    assert redact("the key 0123456789abcdef0123!") == "the key [the value of $WANDB_API_KEY]!"
    assert find_secret("a correct horse") == "the value of $MY_PASSWORD"
    assert find_secret("/home/me/token-file false-positive") is None


@pytest.mark.parametrize("secret", SECRETS.values(), ids=[kind.replace(" ", "-") for kind in SECRETS])
def test_a_recipe_that_holds_one_is_refused_without_repeating_it(secret: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    quoted = json.dumps(secret)
    base = "model_name_or_path: a/b\ndatasets: [{path: rows.jsonl}]\n"
    texts = [
        base.replace("a/b", quoted),
        base.replace("rows.jsonl", quoted),
        base + f"sample: {{prompt: {quoted}}}\n",
        base + f"hub_token: {quoted}\n",
        base + f"model: {{init: {{model_type: qwen3, nested: [[{quoted}]]}}}}\n",
    ]
    for text in texts:
        path.write_text(text)
        with pytest.raises(RecipeError, match="every run keeps a copy of its recipe") as caught:
            load_recipe(path)
        assert secret not in str(caught.value)
        assert caught.value.where.startswith(str(path))
    path.write_text(base)
    with pytest.raises(RecipeError, match="every run keeps a copy of its recipe") as caught:
        load_recipe(path, [f"output_dir={quoted}"])
    assert secret not in str(caught.value)


@pytest.mark.slow
def test_nothing_a_run_writes_or_says_holds_a_secret(tmp_path: Path) -> None:
    """Tokens in the environment, in the recipe's comments, in rows that fail and in what a reward raises."""
    planted = dict(
        zip(("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY"), ("hf_" + "q" * 34, "w" * 40, "s" * 40), strict=True)
    )
    comment = "hf_" + "c" * 34
    write_rows(tmp_path, 6)
    (tmp_path / "mine.py").write_text(
        "import os\ndef score(completions, **columns):\n    raise RuntimeError('key ' + os.environ['HF_TOKEN'])\n"
    )
    recipe = write_recipe(tmp_path, {**RECIPE, "engine": FIXED, "max_steps": 2, "save_steps": 1})
    recipe.write_text(f"# {comment}\n{recipe.read_text()}")
    grpo = {**RECIPE, "engine": FIXED, "objective": "grpo", "reward_funcs": ["mine.py:score"], "max_steps": 1,
            "allow_code": True, "max_completion_length": 4, "max_prompt_length": 40, "num_generations": 2,
            "per_device_train_batch_size": 2,
            "datasets": [{"path": "demo-arithmetic", "name": "copy", "max_rows": 8}]}  # fmt: skip
    (tmp_path / "grpo.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in grpo.items()))
    commands = [
        (0, ["sft", "tiny.yaml", "--output-dir", "run"]),
        (1, ["grpo", "grpo.yaml", "--output-dir", "failed"]),
        (2, ["sft", "tiny.yaml", "--set", f"seed={planted['HF_TOKEN']}"]),
        (2, ["sft", "tiny.yaml", "--set", f"datasets=https://x:{'p' * 12}@example.org/a.jsonl"]),
        (2, ["validate", f"{planted['HF_TOKEN']}.yaml"]),
    ]
    said = ""
    for code, arguments in commands:
        done = subprocess.run(
            [sys.executable, "-m", "streamtune", *arguments],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            env={**os.environ, **planted},
            timeout=300,
        )
        assert done.returncode == code, done.stderr
        said += done.stdout + done.stderr
    written = {
        path: path.read_bytes()
        for folder in ("run", "failed")
        for path in (tmp_path / folder).rglob("*")
        if path.is_file()
    }
    assert any(path.name == "events.jsonl" and b"[the value of $HF_TOKEN]" in data for path, data in written.items())
    leaks = [
        f"{name} in {path}"
        for name, value in {**planted, "comment": comment, "password": "p" * 12}.items()
        for path, data in {**written, Path("output"): said.encode()}.items()
        if value.encode() in data
    ]
    tell(
        "secrets_in_runs",
        len(planted) + 2 - len({leak.split()[0] for leak in leaks}),
        len(planted) + 2,
        files=len(written),
    )
    assert leaks == []
