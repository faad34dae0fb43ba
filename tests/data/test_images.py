"""Rows with images: prepared as the model's own processor prepares them; bad images each get their sentence."""

from __future__ import annotations

import base64
import dataclasses
import io
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
import torch
from PIL import Image
from tests.vision_kit import KINDS, draw, processor_of, save_checkpoint, write_image_rows
from transformers import AutoTokenizer

from streamtune import data, models
from streamtune.data.reading.image_cells import MARK, ImageCell
from streamtune.data.rendering.render import RowRenderer
from streamtune.data.row_types import Conversation
from streamtune.data.templates import ChatRequest, image_text, render_chat
from streamtune.errors import ArgumentError, DataError, StorageError
from streamtune.tasks.sft import Batches
from streamtune.train import MicroBatch

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # glm4v's processor
ANSWER = {"role": "assistant", "content": "red"}
QUESTION = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Which colour?"}]}


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    save_checkpoint("qwen3_vl", folder)
    return folder


def prepare(
    base: Path,
    rows: Path,
    notify: Any = lambda message: None,
    pixels: tuple[int | None, int | None] = (None, None),
    **options: Any,
) -> tuple[data.PreparedData, Batches]:
    images = data.ImageOptions(str(base), str(rows.parent / "held"), max_pixels=pixels[0], min_pixels=pixels[1])
    tokenizer = AutoTokenizer.from_pretrained(base)
    options = {"max_length": 1024, "images": images} | options
    prepared = data.prepare([data.Source(str(rows))], tokenizer, data.DataOptions(**options), notify)
    return prepared, Batches(prepared, tokenizer, images=images)


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def same(one: MicroBatch, other: MicroBatch) -> bool:
    assert one.images is not None
    assert other.images is not None
    return (
        torch.equal(one.input_ids, other.input_ids)
        and torch.equal(one.shift_labels, other.shift_labels)
        and one.images.keys() == other.images.keys()
        and all(torch.equal(value, other.images[name]) for name, value in one.images.items())
    )


@pytest.mark.quick("qwen3_vl", "gemma3", "llava")
@pytest.mark.parametrize("kind", KINDS)
def test_as_the_processor_prepares_them(kind: str, tmp_path: Path) -> None:
    """One image, two of unlike sizes, and none, in one batch: all inputs equal bit for bit."""
    base = tmp_path / "base"
    save_checkpoint(kind, base)
    rows = write_image_rows(tmp_path, 3)
    _, batches = prepare(base, tmp_path / "rows.jsonl")
    batch = batches.training_batch([0, 1, 2])
    conversations = []
    for row in rows:
        left = iter(row["images"])
        conversations.append(
            [
                {
                    **message,
                    "content": [
                        {"type": "image", "image": Image.open(tmp_path / next(left)).convert("RGB")}
                        if part["type"] == "image"
                        else part
                        for part in message["content"]
                    ],
                }
                for message in row["messages"]
            ]
        )
    padding = {"padding": True, "padding_side": "right"}
    want = processor_of(kind, base).apply_chat_template(
        conversations, tokenize=True, return_dict=True, return_tensors="pt", processor_kwargs=padding
    )
    assert batch.images is not None
    assert torch.equal(batch.input_ids, want["input_ids"])
    assert torch.equal(batch.attention_mask, want["attention_mask"])
    assert {*batch.images} == {*want} - {"input_ids", "attention_mask"}
    for name, value in batch.images.items():
        assert torch.equal(value, want[name]), name
    tokenizer = batches.tokenizer
    assert tokenizer is not None
    trained = [tokenizer.decode([token for token in row.tolist() if token >= 0]) for row in batch.shift_labels]
    assert [text.strip() for text in trained] == ["red<|im_end|>", "green blue<|im_end|>", "none<|im_end|>"]


@pytest.mark.quick("qwen3_vl", "idefics3")
@pytest.mark.parametrize("kind", KINDS)
def test_shapes_without_pixels(kind: str, tmp_path: Path) -> None:
    """Shapes that ``plan --images`` plans with equal those of a row with three images of that size."""
    base = tmp_path / "base"
    save_checkpoint(kind, base)
    paths = [str(draw(tmp_path / f"{number}.png", "red", (60, 48))) for number in range(3)]
    row = {"messages": [{"role": "user", "content": "<image><image><image>"}, ANSWER], "images": paths}
    prepared, batches = prepare(base, write(tmp_path, row))
    batch = batches.training_batch([0])
    assert batch.images is not None
    assert batches.images is not None
    processor = data.ImageProcessor(batches.images, AutoTokenizer.from_pretrained(base))
    found, tokens = processor.shapes_of(3, 60, 48)
    assert {name: value.shape for name, value in found.items()} == {
        name: value.shape for name, value in batch.images.items() if not name.endswith("token_type_ids")
    }
    for name, value in found.items():
        assert value.is_floating_point() or torch.equal(value, batch.images[name]), name
    one = {**row, "messages": [{"role": "user", "content": "<image>"}, ANSWER], "images": paths[:1]}
    fewer, _ = prepare(base, write(tmp_path, one))
    marks = prepared.training.lengths()[0] - fewer.training.lengths()[0] - 2 * tokens
    assert 0 <= marks <= 2 * 2, "the chat template prints at most two tokens around an image"


def _png(path: Path) -> bytes:
    return path.read_bytes()


def test_every_form_of_an_image(qwen: Path, tmp_path: Path) -> None:
    file = draw(tmp_path / "a.png", "red")
    encoded = base64.b64encode(_png(file)).decode()
    text = {"type": "text", "text": "Which colour?"}

    def asked(part: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [part, text]}, ANSWER]

    sharegpt = [{"from": "human", "value": "<image>Which colour?"}, {"from": "gpt", "value": "red"}]
    plain = [{"role": "user", "content": "Which colour?"}, ANSWER]
    forms: list[dict[str, Any]] = [
        {"messages": [QUESTION, ANSWER], "images": ["a.png"]},
        {"messages": [QUESTION, ANSWER], "images": "a.png"},
        {"messages": [QUESTION, ANSWER], "images": [{"path": str(file)}]},
        {"messages": plain, "images": ["a.png"]},
        {"messages": asked({"type": "image", "image": "a.png"})},
        {"messages": asked({"type": "image", "path": f"file://{file}"})},
        {"messages": asked({"type": "image", "base64": encoded})},
        {"messages": asked({"type": "image_url", "image_url": {"url": f"data:image/png;base64,{encoded}"}})},
        {"conversations": sharegpt, "images": ["a.png"]},
        {"conversations": sharegpt, "image": "a.png"},
        {"prompt": [QUESTION], "completion": [ANSWER], "images": ["a.png"]},
        {"instruction": "<image>Which colour?", "output": "red", "images": ["a.png"]},
        {"instruction": "Which colour?", "input": "", "output": "red", "image": {"path": "a.png"}},
    ]
    prepared, batches = prepare(qwen, write(tmp_path, *forms[:1]))
    want = batches.training_batch([0])
    for number, form in enumerate(forms):
        prepared, batches = prepare(qwen, write(tmp_path, form))
        assert same(batches.training_batch([0]), want), number
        assert prepared.training[0].images[0].endswith((str(tmp_path / "a.png"), _digest(prepared))), number
    table = pa.table({"messages": [json.dumps([QUESTION, ANSWER])], "images": [[{"bytes": _png(file), "path": None}]]})
    pq.write_table(table, tmp_path / "rows.parquet")
    prepared, batches = prepare(qwen, tmp_path / "rows.parquet")
    assert same(batches.training_batch([0]), want)
    assert prepared.training[0].images[0].endswith(_digest(prepared)), "bytes are in a file named by their digest"


def test_a_folder_that_takes_no_images(qwen: Path, tmp_path: Path) -> None:
    encoded = base64.b64encode(_png(draw(tmp_path / "a.png", "red"))).decode()
    Path(tmp_path, "held").write_text("a file")
    rows = write(tmp_path, {"messages": [QUESTION, ANSWER], "images": [f"data:image/png;base64,{encoded}"]})
    for on_bad_row in ("error", "skip"):
        with pytest.raises(StorageError, match="cannot write an image that a row holds as bytes: Not a directory"):
            prepare(qwen, rows, on_bad_row=on_bad_row)


def _digest(prepared: data.PreparedData) -> str:
    return prepared.training[0].images[0].partition(" ")[0]


def test_placeholders_are_never_trained(qwen: Path, tmp_path: Path) -> None:
    write_image_rows(tmp_path, 3)
    pad = AutoTokenizer.from_pretrained(qwen).convert_tokens_to_ids("<|image_pad|>")
    for options in ({"train_on": "all"}, {"chat": data.ChatOptions(roles_to_train=("user", "assistant"))}):
        prepared, _ = prepare(qwen, tmp_path / "rows.jsonl", **options)
        ids, labels = (torch.tensor(getattr(prepared.training[1], name)) for name in ("input_ids", "labels"))
        assert (ids == pad).any()
        assert not (labels == pad).any()
        assert (labels >= 0).sum() > 20, "the text of the user is trained"


def test_an_image_is_never_cut(qwen: Path, tmp_path: Path) -> None:
    write_image_rows(tmp_path, 3)
    whole, _ = prepare(qwen, tmp_path / "rows.jsonl")
    longest = int(whole.training.lengths().max())
    for overlength in ("truncate", "split"):
        with pytest.raises(DataError, match=r"with its 2 images, more than max_length = \d+, and a row with images"):
            prepare(qwen, tmp_path / "rows.jsonl", max_length=longest - 1, overlength=overlength)
    with pytest.raises(DataError, match="row has more than max_length") as caught:
        prepare(qwen, tmp_path / "rows.jsonl", max_length=longest - 1)
    advice = (
        "write max_pixels if smaller images of this model have fewer tokens, or drop the rows with overlength: drop"
    )
    assert caught.value.fix == f"set max_length to {longest} or more, {advice}"
    fewer, _ = prepare(qwen, tmp_path / "rows.jsonl", max_length=longest - 1, overlength="drop")
    assert len(fewer.training) == 2
    smaller, _ = prepare(qwen, tmp_path / "rows.jsonl", pixels=(64, None), max_length=longest - 1)
    assert len(smaller.training) == 3
    larger, _ = prepare(qwen, tmp_path / "rows.jsonl", pixels=(None, 4096))
    assert int(larger.training.lengths().max()) > longest


def _save(image: Image.Image, path: Path, **settings: Any) -> None:
    image.save(path, **settings)


def test_bad_images(qwen: Path, tmp_path: Path) -> None:
    sound = draw(tmp_path / "sound.png", "red", (64, 64))
    (tmp_path / "cut.png").write_bytes(_png(sound)[:60])
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "folder.png").mkdir()
    _save(Image.new("RGB", (8, 8)), tmp_path / "figure.eps")
    _save(Image.new("RGB", (1, 1)), tmp_path / "dot.png")
    _save(Image.new("1", (9000, 9000)), tmp_path / "bomb.png")
    _save(Image.new("1", (30000, 30000)), tmp_path / "huge.png")
    _save(Image.fromarray(np.full((8, 8), 40000, dtype=np.uint16)), tmp_path / "grey.png")
    _save(Image.new("F", (8, 8)), tmp_path / "float.tiff")
    frames = [Image.new("RGB", (8, 8), colour) for colour in ("red", "blue")]
    frames[0].save(tmp_path / "moving.gif", save_all=True, append_images=frames[1:])
    for name, what in {
        "cut.png": r"cut\.png is damaged",
        "text.png": r"text\.png is in none of the formats PNG, JPEG",
        "folder.png": r"cannot read the image .*folder\.png: Is a directory",
        "none.png": r"cannot read the image .*none\.png: No such file",
        "figure.eps": r"figure\.eps is in none of the formats",
        "dot.png": r"dot\.png has 1 x 1 pixels",
        "bomb.png": r"bomb\.png has 81 million pixels, more than 67 million",
        "huge.png": r"huge\.png has more than 67 million pixels",
        "grey.png": r"grey\.png has more than 8 bits per pixel",
        "float.tiff": r"float\.tiff has more than 8 bits per pixel",
        "a\0b.png": r"images\[0\] is not a path: .*it has a NUL",
        "~nosuchuser/a.png": r"images\[0\] is not a path",
        "iVBORw0K" * 1000: r"it is base64 without data:image/png;base64,",
        "HTTP://example.com/a.png": r"images\[0\] is a URL",
        "moving.gif": r"moving\.gif has 2 frames or pages",
        "https://example.com/a.png": r"images\[0\] is a URL: https://example\.com/a\.png",
        "data:image/png,abc": r"images\[0\] is not a valid data URL: it is not base64",
        7: r"images\[0\] must be the path of an image, found a number",
    }.items():
        with pytest.raises(DataError, match=what) as caught:
            prepare(qwen, write(tmp_path, {"messages": [QUESTION, ANSWER], "images": [name]}))
        assert caught.value.where.endswith("rows.jsonl:1")
        assert caught.value.fix


def test_unusual_images_are_read(qwen: Path, tmp_path: Path) -> None:
    """CMYK, palettes, transparency and rotation by EXIF: as RGB, upright."""
    upright = Image.new("RGB", (40, 16), "red")
    turned = Image.Exif()
    turned[0x0112] = 6  # the camera was turned by a quarter
    _save(upright.transpose(Image.Transpose.ROTATE_90), tmp_path / "turned.png", exif=turned)
    _save(upright.convert("CMYK"), tmp_path / "cmyk.tiff")
    _save(upright.convert("P"), tmp_path / "palette.png")
    _save(upright.convert("RGBA"), tmp_path / "rgba.png")
    _save(upright, tmp_path / "plain.png")
    names = ["plain.png", "turned.png", "palette.png", "rgba.png", "cmyk.tiff"]
    rows = [{"messages": [QUESTION, ANSWER], "images": [name]} for name in names]
    _, batches = prepare(qwen, write(tmp_path, *rows))
    want = batches.training_batch([0])
    for number, name in enumerate(names[1:-1], 1):
        assert same(batches.training_batch([number]), want), name
    cmyk = batches.training_batch([4]).images
    assert cmyk is not None
    assert cmyk["pixel_values"].shape == (want.images or {})["pixel_values"].shape


def test_places_and_images_must_agree(qwen: Path, tmp_path: Path) -> None:
    draw(tmp_path / "a.png", "red")
    image = {"type": "image", "image": "a.png"}
    for row, what in (
        (
            {"messages": [QUESTION, ANSWER], "images": ["a.png"] * 2},
            "have 1 place for images, and the column 'images' has 2",
        ),
        ({"messages": [QUESTION, QUESTION, ANSWER], "images": ["a.png"]}, "more places for images, and .* has 1"),
        ({"messages": [QUESTION, ANSWER]}, "more places for images, and the row has no column 'images'"),
        (
            {"messages": [QUESTION, {"role": "assistant", "content": [image]}], "images": ["a.png"]},
            "an image in an answer",
        ),
        ({"text": "a", "images": ["a.png"]}, "no messages that could show them"),
        ({"messages": [{"role": "user", "content": "\ufdd0"}, ANSWER], "images": ["a.png"]}, r"U\+FDD0"),
        (
            {"messages": [{"role": "user", "content": "<|image_pad|>"}, ANSWER], "images": ["a.png"]},
            "has 1 images, and its rendered chat has 2 times the placeholder",
        ),
    ):
        with pytest.raises(DataError, match=what):
            prepare(qwen, write(tmp_path, row))


def test_tokens_of_images_without_an_image(qwen: Path, tmp_path: Path) -> None:
    """A model would replace them by features of another row's image, or train on an embedding that nothing reads."""
    image = str(draw(tmp_path / "a.png", "red"))
    spelled = {"messages": [{"role": "user", "content": "what is <|image_pad|> here?"}, ANSWER]}
    shown = {"messages": [QUESTION, ANSWER], "images": [image]}
    pad = AutoTokenizer.from_pretrained(qwen).convert_tokens_to_ids("<|image_pad|>")
    options = data.ImageOptions(str(qwen), str(tmp_path), placeholders=(pad,))
    with pytest.raises(DataError, match=r"has the token <\|image_pad\|> in a text, and no image for it") as caught:
        prepare(qwen, write(tmp_path, shown, spelled), images=options)
    assert str(caught.value.where).endswith("rows.jsonl:2")
    split = data.ChatOptions(split_special_tokens=True)
    prepared, _ = prepare(qwen, write(tmp_path, shown, spelled), images=options, chat=split)
    assert pad not in prepared.training[1].input_ids
    for empty in (None, []):
        row = {"messages": [{"role": "user", "content": "<image>what?"}, ANSWER], "images": empty}
        with pytest.raises(DataError, match="has <image> in a text, and its column 'images' is empty"):
            prepare(qwen, write(tmp_path, row))


@pytest.mark.parametrize(
    "row",
    [
        {"messages": [{"role": "user", "content": "Which colour?"}, ANSWER], "image": "a.png"},
        {"messages": [QUESTION, ANSWER], "image": "a.png"},
        {"prompt": "<image>Which colour?", "completion": [ANSWER], "images": ["a.png"]},
        {"prompt": [QUESTION], "completion": [QUESTION, ANSWER], "images": ["a.png"]},
        {"prompt": [{"role": "user", "content": "Which colour?"}], "completion": [ANSWER], "images": ["a.png"]},
    ],
    ids=["a column image", "a place", "a prompt of text", "the prompt again", "no place"],
)
def test_the_same_row_in_other_words(row: dict[str, Any], qwen: Path, tmp_path: Path) -> None:
    draw(tmp_path / "a.png", "red")
    _, batches = prepare(qwen, write(tmp_path, {"messages": [QUESTION, ANSWER], "images": ["a.png"]}))
    _, others = prepare(qwen, write(tmp_path, row))
    assert same(batches.training_batch([0]), others.training_batch([0]))


def test_pairs_of_images_in_other_words(qwen: Path, tmp_path: Path) -> None:
    draw(tmp_path / "a.png", "red")
    tokenizer, options = AutoTokenizer.from_pretrained(qwen), data.ImageOptions(str(qwen), str(tmp_path / "held"))

    def trees(*rows: dict[str, Any]) -> Any:
        settings = data.DataOptions(max_length=256, images=options)
        return data.prepare_preferences(
            [data.Source(str(write(tmp_path, *rows)))], tokenizer, settings, lambda text: None
        )

    other, asked = {"role": "assistant", "content": "blue"}, {"role": "user", "content": "Which colour?"}
    first = trees({"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [other], "images": ["a.png"]}).training[0]
    for row in (
        {"chosen": [asked, ANSWER], "rejected": [asked, other]},
        {"prompt": [QUESTION], "chosen": [QUESTION, ANSWER], "rejected": [QUESTION, other]},
        {"prompt": "<image>Which colour?", "chosen": [ANSWER], "rejected": [other]},
    ):
        found = trees({**row, "images": ["a.png"]}).training[0]
        assert (found.prompt, found.completions, found.images) == (first.prompt, first.completions, first.images)
    later = [ANSWER, {"role": "user", "content": "<image>again?"}, ANSWER]
    with pytest.raises(DataError, match="'chosen' has an image, and images belong to the prompt"):
        trees({"prompt": [asked], "chosen": later, "rejected": [other], "images": ["a.png"]})


def test_a_changed_image_of_streamed_rows(qwen: Path, tmp_path: Path) -> None:
    """Streamed rows are rendered again in each pass."""
    image = draw(tmp_path / "a.png", "red")
    render = RowRenderer(
        AutoTokenizer.from_pretrained(qwen),
        train_on="assistant",
        notify=lambda text: None,
        images=data.ImageOptions(str(qwen), str(tmp_path)),
    )
    cell = ImageCell("images[0]", image)
    row = Conversation([{"role": "user", "content": f"{MARK}Which colour?"}, ANSWER], None, images=(cell,))
    assert render(row, "rows:1").input_ids == render(row, "rows:1").input_ids
    draw(image, "blue")
    with pytest.raises(DataError, match="the image has changed"):
        render(row, "rows:1")


def test_the_template_of_an_older_checkpoint(qwen: Path, tmp_path: Path) -> None:
    """Its template is in ``chat_template.json``, which belongs to the processor."""
    base = tmp_path / "base"
    shutil.copytree(qwen, base)
    file = base / "chat_template.jinja"
    template = file.read_text()
    file.unlink()
    (base / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    assert models.load_tokenizer(str(base)).chat_template == template
    (base / "chat_template.json").unlink()
    tokenizer = models.load_tokenizer(str(base))
    models.set_chat_template(tokenizer, "chatml", image_text(tokenizer))
    draw(tmp_path / "a.png", "red")
    rows = write(tmp_path, {"messages": [QUESTION, ANSWER], "images": ["a.png"]})
    options = data.DataOptions(max_length=64, images=data.ImageOptions(str(base), str(tmp_path)))
    with pytest.raises(ArgumentError, match="the chat template prints none"):
        data.prepare([data.Source(str(rows))], tokenizer, options, lambda text: None)
    prompts = write(tmp_path, {"prompt": [QUESTION], "images": ["a.png"]})
    settings = dataclasses.replace(options, max_prompt_length=32)
    with pytest.raises(ArgumentError, match="the chat template prints none"):
        data.prepare_prompts([data.Source(str(prompts))], tokenizer, settings, lambda text: None)


@pytest.mark.parametrize("name", ["chatml", "qwen3"])
def test_a_named_template_prints_texts_and_calls_as_without_images(name: str, qwen: Path) -> None:
    plain, shown = AutoTokenizer.from_pretrained(qwen), AutoTokenizer.from_pretrained(qwen)
    models.set_chat_template(plain, name)
    models.set_chat_template(shown, name, image_text(shown))
    assert plain.chat_template != shown.chat_template
    call = {"type": "function", "function": {"name": "look", "arguments": {"page": 1}}}
    asked = {"role": "user", "content": "Which colour?"}
    chat = [asked, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "content": "red"}, ANSWER]
    for messages in ([asked, ANSWER], chat, [{"role": "system", "content": ""}, *chat]):
        assert render_chat(shown, ChatRequest(messages)) == render_chat(plain, ChatRequest(messages))


def test_gemmas_template_with_another_checkpoint(qwen: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(qwen)
    models.set_chat_template(tokenizer, "gemma3", image_text(tokenizer))
    system = {"role": "system", "content": [{"type": "image"}, {"type": "text", "text": "Be brief."}]}
    text = render_chat(tokenizer, ChatRequest([system, QUESTION, ANSWER]))
    shown = "<|vision_start|><|image_pad|><|vision_end|>"
    assert f"{shown}Be brief.\n\n{shown}Which colour?<end_of_turn>" in text


def test_cached_rows_have_no_pixels_and_notice_changes(qwen: Path, tmp_path: Path) -> None:
    write_image_rows(tmp_path, 3)
    cache, said = data.RowCache(tmp_path / "cache"), list[str]()
    first, batches = prepare(qwen, tmp_path / "rows.jsonl", said.append, cache=cache)
    assert sum(file.stat().st_size for file in cache.root.rglob("*") if file.is_file()) < 20_000
    again, _ = prepare(qwen, tmp_path / "rows.jsonl", said.append, cache=cache)
    assert again.fingerprint == first.fingerprint
    assert any("using cached rows" in line for line in said)
    batches.training_batch([1])
    draw(tmp_path / "1-0.png", "black", (26, 16))
    with pytest.raises(DataError, match="has changed since its row was prepared") as caught:
        batches.training_batch([1])
    assert caught.value.where.endswith("1-0.png")
    said.clear()
    third, batches = prepare(qwen, tmp_path / "rows.jsonl", said.append, cache=cache)
    assert any(re.search(r"1-0\.png has changed since its row was cached", line) for line in said)
    assert third.fingerprint != first.fingerprint, "a run is not resumed on other images"
    batches.training_batch([1])


def test_a_model_of_text_refuses_images(tmp_path: Path) -> None:
    write_image_rows(tmp_path, 1)
    (tmp_path / "base").mkdir()
    save_checkpoint("qwen3_vl", tmp_path / "base")
    config = json.loads((tmp_path / "base/config.json").read_text())
    (tmp_path / "base/config.json").write_text(json.dumps({**config, "model_type": "qwen3"}))
    with pytest.raises(DataError, match="rows have images, and models of the kind qwen3 take none"):
        prepare(tmp_path / "base", tmp_path / "rows.jsonl")


@pytest.mark.full
@pytest.mark.parametrize("kind", ["qwen3_vl", "gemma3", "idefics3", "internvl"])
def test_as_trl_prepares_them(kind: str, tmp_path: Path) -> None:
    """The collator of TRL, on its own form of the rows."""
    from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling  # type: ignore[import-untyped]

    base = tmp_path / "base"
    save_checkpoint(kind, base)
    rows = write_image_rows(tmp_path, 2)
    _, batches = prepare(base, tmp_path / "rows.jsonl")
    batch = batches.training_batch([0, 1])
    read = [
        {**row, "images": [Image.open(io.BytesIO((tmp_path / name).read_bytes())) for name in row["images"]]}
        for row in rows
    ]
    want = DataCollatorForVisionLanguageModeling(processor_of(kind, base))(read)
    assert batch.images is not None
    assert torch.equal(batch.input_ids, want["input_ids"])
    for name, value in batch.images.items():
        assert torch.equal(value, want[name]), name
