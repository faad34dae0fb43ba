"""Imported recipes with images make the inputs that the other trainer makes: tokens, trained tokens and pixels.

The full tests compare them with LLaMA-Factory's and axolotl's own code, where ``STREAMTUNE_PEERS`` names a folder with
their packages and what these import is installed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForImageTextToText, AutoTokenizer

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.data.templates import image_text
from streamtune.models import add_lora
from streamtune.models.tokenizer import set_chat_template
from streamtune.programs.imports.importing import import_recipe
from streamtune.recipe import load_recipe
from streamtune.run.data import make_sources
from streamtune.tasks import task_of
from streamtune.tasks.sft import Batches
from streamtune.tasks.task import image_options
from streamtune.train import MicroBatch
from tests.programs.imports.peer_schemas import PEERS
from tests.vision_kit import draw, processor_of, save_checkpoint

Tokens = list[list[tuple[int, bool]]]
"""Tokens of rows, and whether each is trained."""

TURNS = (("<image>Which colour?", "red"), ("First<image>then<image>?", "green blue"), ("No picture.", "none"))
SIZES = ((60, 48), (93, 72), (48, 120))
"""Sides of at least 28 pixels, also after scaling: LLaMA-Factory scales shorter ones up for Qwen's models."""
TOKEN_TYPES = {"token_type_ids", "mm_token_type_ids"}
"""Compared with transformers' processors in tests/data/test_images.py; LLaMA-Factory makes them from other tokens."""
LIMITS = {"image_max_pixels": 3600, "image_min_pixels": 3000}
SHAREGPT = {
    "file_name": "rows.jsonl",
    "formatting": "sharegpt",
    "columns": {"messages": "messages", "images": "images"},
    "tags": {f"{name}_tag": name for name in ("role", "content", "user", "assistant", "system")},
}


@pytest.fixture
def base(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint, whose tokenizer also has the tokens of Gemma's turns, in a working directory with rows."""
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "base"
    save_checkpoint(request.param, folder)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    turns = {"extra_special_tokens": ["<start_of_turn>", "<end_of_turn>"]}
    tokenizer.add_special_tokens(turns, replace_extra_special_tokens=False)
    tokenizer.save_pretrained(folder)
    rows = [
        {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ],
            "images": [
                str(draw(tmp_path / f"{number}-{place}.png", answer.split()[place], SIZES[number + place]))
                for place in range(question.count("<image>"))
            ],
        }
        for number, (question, answer) in enumerate(TURNS)
    ]
    write_rows(rows)
    Path("dataset_info.json").write_text(json.dumps({"mine": SHAREGPT}))
    return folder


def write_rows(rows: Sequence[dict[str, Any]]) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def read_rows() -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()]


def llamafactory(base: Path, template: str, **fields: Any) -> str:
    paths = {"model_name_or_path": str(base), "dataset": "mine", "dataset_dir": ".", "output_dir": "out"}
    stage = {"stage": "sft", "do_train": True, "finetuning_type": "full", "cutoff_len": 1024}
    return yaml.safe_dump({**paths, **stage, "template": template, **fields})


def made_here(base: Path, trainer: str, recipe: str) -> tuple[MicroBatch, set[str]]:
    """Import a recipe and prepare its rows as a run does; also return the fields that the importer marks."""
    Path("theirs.yaml").write_text(recipe)
    imported = import_recipe(Path("theirs.yaml"), trainer, "sft")
    Path("ours.yaml").write_text(imported.text)
    loaded = load_recipe(Path("ours.yaml"))
    tokenizer = AutoTokenizer.from_pretrained(base)
    if loaded.recipe.chat_template:
        set_chat_template(tokenizer, loaded.recipe.chat_template, image_text(tokenizer))
    prepared = task_of(loaded.recipe).prepare(make_sources(loaded), tokenizer, lambda message: None)
    batches = Batches(prepared, tokenizer, images=image_options(loaded.recipe))
    return batches.training_batch(range(len(TURNS))), {found.theirs for found in imported.changes_training}


def rows_of(batch: MicroBatch) -> Tokens:
    """Rows without padding; a label stands at the token before it."""
    trained = torch.nn.functional.pad(batch.shift_labels[:, :-1], (1, 0), value=IGNORE_INDEX) != IGNORE_INDEX
    assert batch.attention_mask is not None
    return [
        [*zip(ids[on].tolist(), kept[on].tolist(), strict=True)]
        for ids, kept, on in zip(batch.input_ids, trained, batch.attention_mask.bool(), strict=True)
    ]


def labelled(inputs: Any, newline: int | None) -> Tokens:
    """The rows of another trainer's collator, in which a newline behind the end of a turn is not trained."""
    made = []
    for ids, labels, on in zip(inputs["input_ids"], inputs["labels"], inputs["attention_mask"].bool(), strict=True):
        tokens = ids[on].tolist()
        trained = (labels[on] != IGNORE_INDEX).tolist()
        trained[-1] &= tokens[-1] != newline
        made.append([*zip(tokens, trained, strict=True)])
    return made


@pytest.mark.parametrize("base", ["gemma3"], indirect=True)
def test_a_template_by_name_prints_the_images_of_the_checkpoint(base: Path) -> None:
    """LLaMA-Factory's ``template: gemma3`` becomes a template of ours, which has no text of images by itself."""
    batch, marked = made_here(base, "llamafactory", llamafactory(base, "gemma3"))
    assert marked == {"template: gemma3"}  # strips whitespace
    tokenizer = AutoTokenizer.from_pretrained(base)
    image = "\n\n<start_of_image>" + "<image_soft_token>" * 4 + "<end_of_image>\n\n"
    assert tokenizer.decode([token for token, _ in rows_of(batch)[1]]) == (
        f"<start_of_turn>user\nBe brief.\n\nFirst{image}then{image}?<end_of_turn>\n"
        "<start_of_turn>model\ngreen blue<end_of_turn>\n"
    )


@pytest.mark.parametrize(("template", "marked"), [("llava", True), ("gemma3", False)])
def test_axolotl_trains_prompts_of_some_templates(template: str, marked: bool, tmp_path: Path) -> None:
    fields = {"base_model": "org/model", "processor_type": "AutoProcessor", "chat_template": template}
    (tmp_path / "theirs.yaml").write_text(
        yaml.safe_dump(fields | {"datasets": [{"path": "org/rows", "type": "chat_template"}], "sequence_len": 64})
    )
    found = import_recipe(tmp_path / "theirs.yaml", "axolotl", "sft").changes_training
    assert any("trains prompts too" in each.note for each in found) is marked


@pytest.mark.parametrize("peft", [False, True])
def test_trl_trains_the_tower(peft: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows([{"messages": [], "images": ["a.png"]}])
    fields = {"model_name_or_path": "org/model", "dataset_name": "rows.jsonl", "output_dir": "out", "max_length": 64}
    Path("theirs.yaml").write_text(
        yaml.safe_dump(fields | ({"use_peft": True, "lora_target_modules": "all-linear"} if peft else {}))
    )
    imported = import_recipe(Path("theirs.yaml"), "trl", "sft")
    assert not [each.theirs for each in imported.changes_training if "tower" in each.theirs]
    target = ["all-linear", "vision-tower", "vision-projector"] if peft else None
    assert yaml.safe_load(imported.text).get("lora_target") == target
    if peft:  # of both parts
        Path("theirs.yaml").write_text(yaml.safe_dump({**fields, "use_peft": True, "lora_target_modules": "q_proj"}))
        found = import_recipe(Path("theirs.yaml"), "trl", "sft").changes_training
        assert "adapters in the vision tower" in [each.theirs for each in found]
    assert ("freeze_vision_tower: false" in imported.text) is not peft
    assert ("freeze_projector: false" in imported.text) is not peft


def test_adapters_of_axolotl_are_in_the_tower_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_rows([{"messages": [], "images": ["a.png"]}])
    fields = {"base_model": "org/model", "adapter": "lora", "lora_target_linear": True, "sequence_len": 64}
    fields["datasets"] = [{"path": "rows.jsonl", "type": "chat_template"}]
    Path("theirs.yaml").write_text(yaml.safe_dump(fields))
    imported = import_recipe(Path("theirs.yaml"), "axolotl", "sft")
    said = [each.ours for each in imported.findings if each.theirs.startswith("lora_target_linear")]
    assert said == ["lora_target: all-linear, vision-tower, vision-projector"]


# --- the trainers themselves ------------------------------------------------------------------------------------------


def by_llamafactory(recipe: str, processor: Any) -> Any:
    """The batch of LLaMA-Factory's processor of rows and its collator."""
    sys.modules.setdefault("torchaudio", ModuleType("torchaudio"))  # imported, and used for audio only
    from llamafactory.data.collator import MultiModalDataCollatorForSeq2Seq
    from llamafactory.data.converter import get_dataset_converter
    from llamafactory.data.parser import DatasetAttr
    from llamafactory.data.processor import supervised
    from llamafactory.data.template import get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments

    given = yaml.safe_load(recipe)
    settings = DataArguments(template=given["template"], cutoff_len=given["cutoff_len"], media_dir=".")
    processor.image_max_pixels = given.get("image_max_pixels", 768 * 768)
    processor.image_min_pixels = given.get("image_min_pixels", 32 * 32)
    processor.image_do_pan_and_scan = processor.crop_to_patches = False
    processor.video_processor = processor.image_processor  # it must be there
    for name in ("max_pixels", "min_pixels", "fps", "maxlen"):
        setattr(processor, f"video_{name}", 1)
    template = get_template_and_fix_tokenizer(processor.tokenizer, settings)
    parts = {"template": template, "tokenizer": processor.tokenizer, "processor": processor}
    attributes = DatasetAttr("file", "mine")
    attributes.join(SHAREGPT)
    convert = get_dataset_converter(attributes.formatting, attributes, settings)
    rows = [convert(row) for row in read_rows()]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    made = supervised.SupervisedDatasetProcessor(**parts, data_args=settings).preprocess_dataset(columns)
    features = [{name: made[name][number] for name in made} for number in range(len(rows))]
    return MultiModalDataCollatorForSeq2Seq(**parts)(features)


def by_axolotl(recipe: str, processor: Any) -> Any:
    """The batch of axolotl's strategy for the processor, and of its collator."""
    from axolotl.processing_strategies import get_processing_strategy
    from axolotl.utils.chat_templates import get_chat_template
    from axolotl.utils.collators.mm_chat import MultiModalChatDataCollator

    name = yaml.safe_load(recipe)["chat_template"]
    strategy = get_processing_strategy(processor, get_chat_template(name, tokenizer=processor.tokenizer), name)
    return MultiModalChatDataCollator(processor.tokenizer, strategy)(read_rows())


def by_swift(recipe: str, processor: Any) -> Any:
    """The batch of ms-swift's template, which scales the images of Qwen's models with qwen_vl_utils."""
    from swift.template import get_template

    given = yaml.safe_load(recipe)
    config, name = AutoConfig.from_pretrained(given["model"]), given["template"]
    processor.model_info = SimpleNamespace(
        config=config, task_type="causal_lm", max_model_len=given["max_length"], model_dir=given["model"]
    )
    processor.model_meta = SimpleNamespace(is_multimodal=True, template=name, model_type=config.model_type)
    template = get_template(processor, template_type=name)
    template.image_token_id = config.image_token_id  # written out for the published tokenizers
    template.set_mode("train")
    rows = [template.encode(row) for row in read_rows()]
    made = {
        name: pad_sequence([torch.tensor(row[name]) for row in rows], True, -100) for name in ("input_ids", "labels")
    }
    made["attention_mask"] = (made["input_ids"] >= 0).long()
    for name in ("pixel_values", "image_grid_thw"):
        made[name] = torch.cat([row[name] for row in rows if name in row])
    return made


def compare(base: Path, kind: str, trainer: str, recipe: str, make: Callable[[str, Any], Any]) -> set[str]:
    batch, marked = made_here(base, trainer, recipe)
    processor = processor_of(kind, base)
    (newline,) = processor.tokenizer("\n")["input_ids"]
    theirs = make(recipe, processor)
    assert rows_of(batch) == labelled(theirs, newline)
    assert batch.images is not None
    pixels = batch.images.keys() - TOKEN_TYPES
    assert "pixel_values" in pixels
    for name in pixels:
        assert torch.equal(batch.images[name], theirs[name]), name
    return marked


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of imports
@pytest.mark.skipif("llamafactory" not in PEERS, reason="STREAMTUNE_PEERS names no folder with LLaMA-Factory")
@pytest.mark.parametrize("limits", [{}, LIMITS], ids=["default limits", "limits"])
@pytest.mark.parametrize(
    ("base", "template"),
    [("qwen2_vl", "qwen2_vl"), ("qwen2_5_vl", "qwen2_vl"), ("qwen3_vl", "qwen3_vl_nothink"), ("gemma3", "gemma3")],
    indirect=["base"],
)
def test_llamafactory_makes_these_batches(
    base: Path, template: str, limits: dict[str, int], request: pytest.FixtureRequest
) -> None:
    kind = request.node.callspec.params["base"]
    marked = compare(base, kind, "llamafactory", llamafactory(base, template, **limits), by_llamafactory)
    assert marked == {f"template: {template}"}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of imports
@pytest.mark.skipif("llamafactory" not in PEERS, reason="STREAMTUNE_PEERS names no folder with LLaMA-Factory")
@pytest.mark.parametrize("base", ["qwen2_vl", "qwen2_5_vl", "gemma3", "llava"], indirect=True)
def test_llamafactory_adapts_these_layers_of_the_tower(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``freeze_vision_tower: false``. Of Qwen3-VL it also adapts the mergers between layers, a part of the projector
    here."""
    monkeypatch.setattr("trl.AutoModelForCausalLMWithValueHead", None, raising=False)  # imported, and used for PPO only
    from llamafactory.hparams import FinetuningArguments
    from llamafactory.model.model_utils.misc import find_all_linear_modules
    from llamafactory.model.model_utils.visual import patch_target_modules

    model: Any = AutoModelForImageTextToText.from_pretrained(base)
    given = FinetuningArguments(freeze_vision_tower=False)
    names = set(patch_target_modules(model, given, find_all_linear_modules(model, freeze_vision_tower=False)))
    theirs = {name for name, module in model.named_modules() if name in names and isinstance(module, torch.nn.Linear)}
    adapted: Any = add_lora(model, r=2, target=["all-linear", "vision-tower"])
    ours = {name for name, module in adapted.get_base_model().named_modules() if hasattr(module, "base_layer")}
    # torch's MultiheadAttention reads the weight of this layer without calling it, so an adapter has no effect.
    assert ours == theirs - {"model.vision_tower.head.attention.out_proj"}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of imports
@pytest.mark.skipif("swift" not in PEERS, reason="STREAMTUNE_PEERS names no folder with ms-swift")
@pytest.mark.parametrize(("base", "patch"), [("qwen2_vl", 14), ("qwen2_5_vl", 14), ("qwen3_vl", 16)], indirect=["base"])
def test_swift_makes_these_batches(base: Path, patch: int, request: pytest.FixtureRequest) -> None:
    """With published sizes of patches and images; ms-swift's smallest image has four tokens, whatever the checkpoint's.

    Its template of Gemma 3 fails with transformers 5.24 (``Gemma3ProcessorKwargs._defaults``).
    """
    pytest.importorskip("qwen_vl_utils")  # needs torchvision
    kind, side = request.node.callspec.params["base"], 2 * patch
    settings = json.loads((base / "preprocessor_config.json").read_text())
    settings |= {"patch_size": patch, "size": {"shortest_edge": 4 * side**2, "longest_edge": 16384 * side**2}}
    (base / "preprocessor_config.json").write_text(json.dumps(settings))
    recipe = {"model": str(base), "dataset": "rows.jsonl", "tuner_type": "full", "max_length": 4096, "template": kind}
    marked = compare(base, kind, "swift", yaml.safe_dump({**recipe, "output_dir": "out"}), by_swift)
    assert marked == {f"template: {kind}"}


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of imports
@pytest.mark.skipif("axolotl" not in PEERS, reason="STREAMTUNE_PEERS names no folder with axolotl")
@pytest.mark.parametrize(
    ("base", "template"),
    [("qwen2_vl", "qwen2_vl"), ("qwen2_5_vl", "qwen2_vl"), ("qwen3_vl", "qwen2_vl"), ("gemma3", "gemma3")],
    indirect=["base"],
)
def test_axolotl_makes_these_batches(base: Path, template: str, request: pytest.FixtureRequest) -> None:
    rows = []
    for row in read_rows():
        left = iter(row["images"])
        turns = []
        for turn in row["messages"]:
            parts: list[dict[str, str]] = []
            for number, text in enumerate(turn["content"].split("<image>")):
                parts += [{"type": "image", "path": next(left)}] if number else []
                parts += [{"type": "text", "text": text}] if text else []
            turns.append({**turn, "content": parts})
        rows.append({"messages": turns})
    write_rows(rows)
    entry = {"path": "rows.jsonl", "type": "chat_template", "field_messages": "messages"}
    recipe = {"base_model": str(base), "processor_type": "AutoProcessor", "skip_prepare_dataset": True,
              "remove_unused_columns": False, "sample_packing": False, "chat_template": template,
              "datasets": [entry], "sequence_len": 1024, "output_dir": "out"}  # fmt: skip
    kind = request.node.callspec.params["base"]
    assert compare(base, kind, "axolotl", yaml.safe_dump(recipe), by_axolotl) == (
        {"chat_template: qwen2_vl"} if template == "qwen2_vl" else set()
    )
