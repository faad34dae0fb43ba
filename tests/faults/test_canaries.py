"""Code in places where data is expected. Each would create a file if it ran: none is created.

A folder with a model is a stranger's, and so is a recipe. What may run code does so only where it is asked for by name.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from streamtune.errors import ArgumentError, StreamTuneError
from streamtune.models import (
    ModelOptions,
    add_lora,
    init_model,
    load_model,
    load_peft_adapters,
    load_tokenizer,
    train_tokenizer,
)
from tests.faults.figures import tell
from tests.sft_kit import QWEN3, RECIPE, write_rows

TOKEN_IDS = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}


class Canary:
    """Unpickled, it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (os.system, (f"touch {self.path}",))


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound model with its tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "sound"
    tokenizer = train_tokenizer(["Add 1. return a + b"] * 4, vocab_size=320)
    model = init_model(QWEN3, ModelOptions("float32"), vocab_size=len(tokenizer), token_ids=TOKEN_IDS, seed=0)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def edit(file: Path, **keys: Any) -> None:
    """Set keys of a JSON file."""
    file.write_text(json.dumps({**json.loads(file.read_text()), **keys}))


def touching(path: Path) -> str:
    """A Python file that touches another when it is imported."""
    return f"import pathlib\npathlib.Path({str(path)!r}).touch()\n"


def pickled_weights(folder: Path, canary: Path) -> None:
    (folder / "model.safetensors").unlink()
    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump(Canary(canary), file, protocol=2)


def pickle_named_safetensors(folder: Path, canary: Path) -> None:
    with (folder / "model.safetensors").open("wb") as file:
        pickle.dump(Canary(canary), file, protocol=2)


def pickle_in_index(folder: Path, canary: Path) -> None:
    pickled_weights(folder, canary)
    weights = {"weight_map": {"model.norm.weight": "pytorch_model.bin"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(weights))


def pickle_named_in_config(folder: Path, canary: Path) -> None:
    (folder / "model.safetensors").unlink()
    with (folder / "adapter_model.bin").open("wb") as file:
        pickle.dump(Canary(canary), file, protocol=2)
    edit(folder / "config.json", transformers_weights="adapter_model.bin")


def embedded_adapter(folder: Path, canary: Path) -> None:
    with (folder / "adapter_model.bin").open("wb") as file:
        pickle.dump(Canary(canary), file, protocol=2)
    keys = {"peft_type": "LORA", "r": 1, "target_modules": ["q_proj"], "base_model_name_or_path": str(folder)}
    (folder / "adapter_config.json").write_text(json.dumps(keys))


def code_of_its_own(folder: Path, canary: Path) -> None:
    names = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model", "AutoTokenizer": "evil.Tokenizer"}
    (folder / "evil.py").write_text(touching(canary))
    edit(folder / "config.json", auto_map=names, model_type="evil_new")
    edit(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]})


def code_beside_a_known_type(folder: Path, canary: Path) -> None:
    code_of_its_own(folder, canary)
    edit(folder / "config.json", model_type="qwen3")


def kernel_in_config(folder: Path, canary: Path) -> None:
    edit(folder / "config.json", attn_implementation="evil/attention", _attn_implementation="evil/attention:run",
         experts_implementation="evil/experts", kernel_config={"kernel_mapping": {"RMSNorm": "evil/norm:Norm"}},
         use_kernels=True)  # fmt: skip


def flash_attention_by_kernel(folder: Path, canary: Path) -> None:
    edit(folder / "config.json", attn_implementation="flash_attention_2")


def kernels_of_a_quantiser(folder: Path, canary: Path) -> None:
    edit(folder / "config.json", quantization_config={"quant_method": "mxfp4"})


def tokenizer_class_elsewhere(folder: Path, canary: Path) -> None:
    (folder / "evil.py").write_text(touching(canary))
    edit(folder / "tokenizer_config.json", tokenizer_class="evil.Tokenizer", processor_class="evil.Processor")


FOLDERS: list[Callable[[Path, Path], None]] = [
    pickled_weights,
    pickle_named_safetensors,
    pickle_in_index,
    pickle_named_in_config,
    embedded_adapter,
    code_of_its_own,
    code_beside_a_known_type,
    kernel_in_config,
    flash_attention_by_kernel,
    kernels_of_a_quantiser,
    tokenizer_class_elsewhere,
]
RECIPES: dict[str, str] = {
    "tag": "seed: !!python/object/apply:os.system ['touch {canary}']\n",
    "tag of a class": "seed: !!python/object/new:os.system ['touch {canary}']\n",
    "template": "chat_template: \"{{{{ cycler.__init__.__globals__.os.system('touch {canary}') }}}}\"\n",
    "template of a tuple": 'chat_template: "{{{{ ().__class__.__base__.__subclasses__() }}}}{{{{ '
    "lipsum.__globals__['os'].popen('touch {canary}').read() }}}}\"\n",
    "dataset script": "datasets: [{{path: evil}}]\n",
    "pickled dataset": "datasets: [{{path: pandas}}]\n",
    "reward file": "objective: grpo\nreward_funcs: ['evil.py:score']\n",
    "reward module": "objective: grpo\nreward_funcs: ['evil:score']\n",
    "reward options": "objective: grpo\nreward_funcs:\n"
    '- \'exact_match(column=__import__("os").system("touch {canary}"))\'\n',
    "code a model writes": "objective: grpo\nreward_funcs: [unit_tests]\n",
}
KERNELS = """
__version__ = "0.18.2"
import pathlib
pathlib.Path({canary!r}).touch()
def __getattr__(name):
    return lambda *args, **kwargs: None
"""


def tell_of(canaries: list[Path]) -> list[str]:
    return [path.name for path in canaries if path.exists()]


@pytest.mark.full
def test_a_folder_with_a_model_runs_nothing(model_folder: Path, tmp_path: Path) -> None:
    """In a process of its own, as the command line sets it up, with a package of kernels that a stranger wrote."""
    canaries = []
    for plant in FOLDERS:
        folder, canary = tmp_path / plant.__name__, tmp_path / f"{plant.__name__}.fired"
        shutil.copytree(model_folder, folder)
        plant(folder, canary)
        canaries.append(canary)
    installed = tmp_path / "site"
    (installed / "kernels-0.18.2.dist-info").mkdir(parents=True)
    (installed / "kernels-0.18.2.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: kernels\nVersion: 0.18.2\n"
    )
    canaries.append(tmp_path / "kernels.fired")
    (installed / "kernels.py").write_text(KERNELS.format(canary=str(canaries[-1])))
    program = """
import sys
from streamtune.base.privacy import disable_telemetry
disable_telemetry()
from streamtune.errors import StreamTuneError
from streamtune.models import build_meta_model, load_model, load_tokenizer
for folder in sys.argv[1:]:
    for read in (load_model, load_tokenizer, build_meta_model):
        try:
            read(folder)
        except StreamTuneError as error:
            print(folder.rpartition("/")[2], "|", error.what[:150].replace(chr(10), " "))
        else:
            print(folder.rpartition("/")[2], "| loaded")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, *(str(tmp_path / plant.__name__) for plant in FOLDERS)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(installed), os.environ.get("PYTHONPATH", "")])},
        input="y\n" * 40,  # what a prompt for consent would take for it
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    tell("canaries_in_model_folders", len(canaries) - len(tell_of(canaries)), len(canaries), fired=tell_of(canaries))
    assert tell_of(canaries) == []
    said = done.stdout.splitlines()
    assert "pickled_weights | the weights in" in done.stdout
    assert "kernel_in_config | loaded" in said  # it does nothing
    assert sum(line.endswith("| loaded") for line in said) < len(said)


def test_a_recipe_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Through the commands, one after the other; the reward and the script stand beside the recipe."""
    from streamtune.cli import main

    monkeypatch.chdir(tmp_path)
    write_rows(tmp_path, 4)
    canaries = []
    for number, (name, text) in enumerate(RECIPES.items()):
        canary = tmp_path / f"{number}.fired"
        canaries.append(canary)
        for file in ("evil.py", "evil/evil.py"):
            Path(file).parent.mkdir(exist_ok=True)
            Path(file).write_text(touching(canary) + "def score(completions, **columns):\n    return [1.0]\n")
        with Path("train.pkl").open("wb") as file:
            pickle.dump(Canary(canary), file, protocol=2)
        keys = {key: value for key, value in RECIPE.items() if key != "datasets" or "datasets" not in text}
        if "grpo" in text:
            keys = {**keys, "datasets": [{"path": "demo-arithmetic", "name": "copy"}]}
        lines = [f"{key}: {json.dumps(value)}\n" for key, value in keys.items()]
        Path("r.yaml").write_text(text.format(canary=canary) + "".join(lines))
        command = "grpo" if "grpo" in text else "sft"
        with pytest.raises(SystemExit) as left:
            main([command, "r.yaml", "--output-dir", f"run-{number}"])
        said = capsys.readouterr().err
        assert left.value.code == 2, (name, said)
        assert "Traceback" not in said
    tell("canaries_in_recipes", len(canaries) - len(tell_of(canaries)), len(canaries), fired=tell_of(canaries))
    assert tell_of(canaries) == []


def test_reward_code_runs_where_it_is_allowed_and_is_named_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from streamtune.cli import main

    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text("def score(completions, **columns):\n    return [1.0 for _ in completions]\n")
    keys = {**RECIPE, "objective": "grpo", "reward_funcs": ["mine.py:score"], "max_steps": 1,
            "datasets": [{"path": "demo-arithmetic", "name": "copy", "max_rows": 16}]}  # fmt: skip
    Path("r.yaml").write_text("".join(f"{key}: {json.dumps(value)}\n" for key, value in keys.items()))
    with pytest.raises(SystemExit) as left:
        main(["grpo", "r.yaml", "--dry-run"])
    assert left.value.code == 2
    assert "--allow-code" in capsys.readouterr().err
    with pytest.raises(SystemExit) as left:
        main(["grpo", "r.yaml", "--dry-run", "--allow-code"])
    assert not left.value.code
    said = capsys.readouterr()
    assert f"running the code of {tmp_path / 'mine.py'}:score" in said.err
    assert "runs code" in said.out


def test_a_pickle_that_is_allowed_gives_tensors_and_runs_nothing(model_folder: Path, tmp_path: Path) -> None:
    folder, canary = tmp_path / "model", tmp_path / "fired"
    shutil.copytree(model_folder, folder)
    sound = load_model(str(model_folder))
    (folder / "model.safetensors").unlink()
    torch.save(sound.state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(ArgumentError, match=r"are a pickle \(pytorch_model.bin\)") as caught:
        load_model(str(folder))
    assert "allow_pickle: true" in caught.value.fix
    loaded = load_model(str(folder), allow_pickle=True)
    for name, value in sound.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    with (folder / "pytorch_model.bin").open("wb") as file:
        pickle.dump(Canary(canary), file, protocol=2)
    with pytest.raises(StreamTuneError):
        load_model(str(folder), allow_pickle=True)
    assert not canary.exists()


def test_a_recipe_names_no_kernel_of_a_hub() -> None:
    for key in ("attn_implementation", "experts_implementation"):
        with pytest.raises(ArgumentError, match="would download a kernel from the hub") as caught:
            init_model({**QWEN3, key: "evil/kernel"}, vocab_size=320, token_ids={}, seed=0)
        assert caught.value.where == f"model.init.{key}"


def test_adapters_are_safetensors(model_folder: Path, tmp_path: Path) -> None:
    adapted = add_lora(load_model(str(model_folder)), r=2)
    adapted.save_pretrained(tmp_path / "adapters")
    load_peft_adapters(load_model(str(model_folder)), tmp_path / "adapters")
    (tmp_path / "adapters" / "adapter_model.safetensors").unlink()
    with (tmp_path / "adapters" / "adapter_model.bin").open("wb") as file:
        pickle.dump(Canary(tmp_path / "fired"), file, protocol=2)
    with pytest.raises(ArgumentError, match="no adapters in safetensors"):
        load_peft_adapters(load_model(str(model_folder)), tmp_path / "adapters")
    edit(tmp_path / "adapters" / "adapter_config.json", base_model_name_or_path="evil/base")
    save_file({}, tmp_path / "adapters" / "adapter_model.safetensors")
    with pytest.raises(ArgumentError, match="whose base 'evil/base' is not a local folder"):
        load_model(str(tmp_path / "adapters"))
    assert not (tmp_path / "fired").exists()
    with pytest.raises(ArgumentError):
        load_tokenizer(str(tmp_path / "adapters"))
