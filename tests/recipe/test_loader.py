"""Reading of recipe files, and the errors of wrong files."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from streamtune.base.chat_templates import CHAT_TEMPLATES
from streamtune.errors import RecipeError
from streamtune.recipe import dump_recipe, load_recipe, shipped_names, shipped_recipes


def line_of(error: RecipeError) -> int:
    return int(error.where.rpartition(":")[2])


@pytest.mark.parametrize("name", shipped_names())
def test_every_shipped_recipe_loads(name: str) -> None:
    (shipped,) = [recipe for recipe in shipped_recipes() if recipe.name == name]
    loaded = load_recipe(shipped.path)
    assert loaded.notes == ()
    assert loaded.recipe.output_dir == f"runs/{name}"
    assert loaded.key_origin("datasets", 0, "path").startswith(f"{shipped.path}:")


def test_defaults(write):
    loaded = load_recipe(write(""))
    recipe = loaded.recipe
    assert recipe.datasets[0].type == "auto"
    assert recipe.max_length == 2048
    assert recipe.overlength == "error"
    assert recipe.engine.chunk_size == "auto"
    assert recipe.engine.grad_dtype == "float32"
    assert recipe.lora_alpha is None
    assert recipe.max_steps == -1
    assert recipe.output_dir == "runs/recipe"  # the file's name


def test_every_key_has_a_line(write):
    path = write("engine:\n  keep_kv: true\n  chunk_size: 64\nseed: 3\n")
    loaded = load_recipe(path)
    assert loaded.key_origin("datasets", 0) == f"{path}:3"
    assert loaded.key_origin("datasets", 0, "path") == f"{path}:3"
    assert loaded.key_origin("engine", "chunk_size") == f"{path}:6"
    assert loaded.key_origin("seed") == f"{path}:7"
    assert loaded.key_origin("engine", "grad_dtype") == f"{path}:4"  # a default: the nearest parent
    assert loaded.key_origin("max_length") == f"{path}:1"


# --- scalars -------------------------------------------------------------------------------------------------------


def test_an_exponent_without_a_point_is_a_number(write):
    recipe = load_recipe(write("learning_rate: 1e-5\nadam_epsilon: 1E-8\nweight_decay: 1\n")).recipe
    assert (recipe.learning_rate, recipe.adam_epsilon, recipe.weight_decay) == (1e-5, 1e-8, 1.0)


def test_words_that_yaml_1_1_takes_for_booleans_are_text(write):
    sample = load_recipe(write("sample: {prompt: no}\n")).recipe.sample
    assert sample is not None
    assert sample.prompt == "no"


@pytest.mark.parametrize("word", ["yes", "on", "no", "off", "'true'", "1", "0", "y"])
def test_a_boolean_is_true_or_false(refused, word):
    error = refused(f"seed: 1\nbf16: {word}\n")
    assert "'bf16' must be true or false" in error.what
    assert line_of(error) == 5
    if not word.isdecimal():
        assert error.fix in ("write true", "write false")


@pytest.mark.parametrize(("word", "value"), [("true", True), ("false", False), ("True", True)])
def test_true_and_false(write, word, value):
    assert load_recipe(write(f"bf16: {word}\n")).recipe.bf16 is value


@pytest.mark.parametrize("word", [".nan", ".inf", "-.inf", "nan", "1e999"])
def test_a_rate_that_is_not_finite(refused, word):
    error = refused(f"learning_rate: {word}\n")
    assert "'learning_rate' must be a number of at least 0" in error.what
    assert line_of(error) == 4


def test_null_where_a_value_is_needed(refused):
    error = refused("learning_rate:\nseed: 1\n")
    assert "'learning_rate' has no value" in error.what
    assert line_of(error) == 4
    assert "delete the line" in error.fix


@pytest.mark.parametrize("word", ["null", "~", ""])
def test_null_where_nothing_is_a_value(write, word):
    assert load_recipe(write(f"lora_alpha: {word}\nsample: {word}\n")).recipe.sample is None


def test_unicode(write):
    loaded = load_recipe(write("sample: {prompt: 'Schreibe ein Gedicht über 猫 🐈'}\noutput_dir: läufe/猫\n"))
    assert loaded.recipe.sample is not None
    assert loaded.recipe.sample.prompt.endswith("猫 🐈")
    assert loaded.recipe.output_dir == "läufe/猫"


def test_byte_order_mark_and_windows_line_ends(tmp_path):
    path = tmp_path / "windows.yaml"
    path.write_bytes(b"\xef\xbb\xbfmodel_name_or_path: a/b\r\ndatasets:\r\n  - {path: x}\r\nsede: 1\r\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe(path)
    assert caught.value.where == f"{path}:4"
    assert caught.value.fix == "did you mean 'seed'?"


# --- what is told --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "line", "what", "fix"),
    [
        ("learning_rat: 1e-5\n", 4, "unknown key 'learning_rat'", "did you mean 'learning_rate'?"),
        ("seed: 1\nzzz: 1\n", 5, "unknown key 'zzz'", "`streamtune schema` lists every key"),
        ("engine:\n  chunksize: 8\n", 5, "unknown key 'chunksize' in 'engine'", "did you mean 'chunk_size'?"),
        ("chunk_size: 8\n", 4, "unknown key 'chunk_size'", "write it under 'engine:'"),
        ("chunk_sise: 8\n", 4, "unknown key 'chunk_sise'", "did you mean 'engine.chunk_size'?"),
        ("Learning_Rate: 1e-5\n", 4, "unknown key 'Learning_Rate'", "did you mean 'learning_rate'?"),
        ("optim: AdamW\n", 4, "found 'AdamW'", "did you mean 'adamw'?"),
        ("finetuning_type: qlora\nquantization: NF4\n", 5, "found 'NF4'", "did you mean 'nf4'?"),
        (
            "engine: {max_length: 8}\n",
            4,
            "unknown key 'max_length' in 'engine'",
            "write it at the top level",
        ),
        ("seed: 1\nseed: 2\n", 5, "'seed' occurs twice, first on line 4", "delete one of the two"),
        ("max_length: 8_192\n", 4, "found '8_192'", "write 8192"),
        ("max_length: 128k\n", 4, "found '128k'", "write 131072"),
        ("max_length: '4096'\n", 4, "found '4096'", "write 4096"),
        ("max_length: 4096.0\n", 4, "found 4096.0", "write 4096"),
        ("max_length: 1.5\n", 4, "must be a whole number of at least 2; found 1.5", ""),
        ("max_length: true\n", 4, "found true", ""),
        ("max_length: 1\n", 4, "'max_length' must be a whole number of at least 2; found 1", ""),
        ("learning_rate: -1e-5\n", 4, "must be a number of at least 0; found -1e-05", ""),
        ("learning_rate: '1e-5'\n", 4, "found '1e-5'", "write 1e-05"),
        ("warmup_ratio: 1\n", 4, "at least 0 and below 1; found 1", ""),
        ("max_steps: 0\n", 4, "must be -1, or a whole number of at least 1; found 0", ""),
        ("num_train_epochs: 0\n", 4, "must be a number above 0; found 0", ""),
        ("overlength: cut\n", 4, "must be 'error', 'truncate', 'drop' or 'split'; found 'cut'", ""),
        ("truncate_side: end\n", 4, "must be 'auto', 'left', 'right' or 'middle'; found 'end'", ""),
        (
            "truncate_side: left\n",
            4,
            "'truncate_side' is read only with 'overlength: truncate', and 'overlength' is 'error'",
            "",
        ),
        ("split_at: word\n", 4, "must be 'turn', 'paragraph', 'line' or 'token'; found 'word'", ""),
        ("split_at: line\n", 4, "'split_at' is read only with 'overlength: split'", "write overlength: split"),
        ("overlength: drop\nsplit_overlap: 4\n", 5, "and 'overlength' is 'drop'", "write overlength: split"),
        ("overlength: split\nsplit_overlap: -1\n", 5, "must be a whole number of at least 0; found -1", ""),
        (
            "overlength: split\nmax_length: 64\nsplit_overlap: 64\n",
            6,
            "must be below 'max_length' (64)",
            "lower split_overlap",
        ),
        ("overlength: spilt\n", 4, "found 'spilt'", "did you mean 'split'?"),
        ("lora_target: q_proj\n", 4, "must be a list of texts, or 'all-linear'; found 'q_proj'", "write [q_proj]"),
        ("lora_target: [q_proj, '']\n", 4, "found a list with an empty text", "delete the empty text"),
        ("tokenizer: runs/a\n", 4, "must be a group of keys (path, train); found 'runs/a'", "write {path: runs/a}"),
        ("lora_target: []\n", 4, "found an empty list", ""),
        ("engine: 5\n", 4, "'engine' must be a group of keys (schedule, chunk_size", ""),
        ("engine: {chunk_size: 0}\n", 4, "must be a whole number of at least 1, or 'auto'; found 0", ""),
        ("output_dir: 7\n", 4, "'output_dir' must be text; found 7", "put the value in quotes"),
        ("output_dir: ''\n", 4, "'output_dir' must be text; found ''", ""),
        ("val_size: 1.5\n", 4, "a fraction below 1 or a whole number of rows; found 1.5", ""),
        ("eval_steps: 5\n", 4, "'eval_steps' needs rows to evaluate on", "set val_size, such as val_size: 0.02"),
        ("warmup_ratio: 0.1\nwarmup_steps: 5\n", 5, "exclude each other", "keep one of them"),
        ("deepspeed: zero2\nfsdp: true\n", 5, "'deepspeed' and 'fsdp' exclude each other", "keep one of them"),
        ("model: {init: {model_type: qwen3}}\n", 4, "'model_name_or_path' and 'model' exclude", "keep one of them"),
        ("tokenizer: {}\n", 4, "'tokenizer' needs either 'path' or 'train'", "write {path: NAME}"),
        ("seed: 99999999999999999999\n", 4, "'seed' must be a whole number of at least 0", ""),
        ("sample: {max_new_tokens: 5}\n", 4, "'sample' has nothing to complete", "add prompt: ..., or held_out: 10"),
        ("sample: {held_out: 5}\n", 4, "'held_out' needs held-out rows", "set val_size, such as 0.02"),
        (
            "report_to: [wandB]\n",
            4,
            "'report_to[0]' must be 'tensorboard', 'wandb', 'mlflow' or 'trackio'",
            "did you mean 'wandb'",
        ),
        ("sample_steps: 5\n", 4, "'sample_steps' needs prompts to complete", "add sample: {prompt: ...}"),
        ("sample: {prompt: []}\n", 4, "'sample.prompt' must be", ""),
        (
            "finetuning_type: freeze\n",
            4,
            "'finetuning_type: freeze' trains some of the layers",
            "write finetuning_type: full and trainable_layers: last N",
        ),
        ("finetuning_type: qlora\nquantization: int4\n", 5, "'quantization: int4' is not supported", "write nf4"),
        ("finetuning_type: qlora\nquantization: fp4\n", 5, "'quantization' must be", ""),
        (
            "finetuning_type: lora\nquantization: nf4\n",
            5,
            "'quantization: nf4' needs 'finetuning_type: qlora'; found lora",
            "write finetuning_type: qlora",
        ),
        ("quantization: int8\n", 4, "needs 'finetuning_type: qlora'; found full", "write finetuning_type: qlora"),
        ("engine: {schedule: fast}\n", 4, "'engine.schedule' must be 'auto' or 'fixed'; found 'fast'", ""),
        ("engine: {offload: gpu}\n", 4, "'engine.offload' must be 'auto', 'device', 'host' or 'disk'", ""),
        (
            "engine:\n  levels: 3\n",
            5,
            "'engine.levels' must be a whole number of at least 1 and at most 2, or 'auto'; found 3",
            "",
        ),
        ("engine:\n  device_memory: 80\n", 5, "must be a size such as 80GiB, or 'auto'; found 80", ""),
        ("engine:\n  host_memory: lots\n", 5, "must be a size such as 80GiB, or 'auto'; found 'lots'", ""),
        ("engine:\n  margin: 1.5\n", 5, "'engine.margin' must be a number of at least 0 and below 1", ""),
        ("engine:\n  chunk_size: 8\n  offload: disk\n", 6, "needs a directory", "add offload_dir"),
        (
            "engine:\n  offload: device\n  device_layers: 3\n",
            6,
            "'engine.device_layers' needs offloaded layer inputs, and 'engine.offload' is device",
            "write offload: host",
        ),
        (
            "engine:\n  schedule: fixed\n  device_layers: 3\n",
            6,
            "and 'engine.offload' is device",
            "write offload: host",
        ),
        ("engine:\n  levels: 1\n  segment_size: 3\n", 6, "needs two levels", "write levels: 2"),
        ("engine:\n  schedule: fixed\n  segment_size: 3\n", 6, "needs two levels", "write levels: 2"),
        ("engine:\n  offload: host\n  offload_dir: x\n", 6, "needs 'offload: disk'", "write offload: disk"),
    ],
)
def test_a_mistake_is_told_with_its_line(refused, lines, line, what, fix):
    error = refused(lines)
    assert what in error.what
    assert line_of(error) == line
    assert error.fix.startswith(fix)
    assert error.exit_code == 2


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("datasets: [{path: x}]\n", 1, "the recipe names no model"),
        ("model: {init: {model_type: qwen3}}\ndatasets: [{path: x}]\n", 1, "'model' comes without a tokenizer"),
        ("model:\n  init: {hidden_size: 8}\ndatasets: [{path: x}]\n", 1, "'model.init' has no model_type"),
        ("model_name_or_path: a\n", 1, "'datasets' is missing"),
        ("model_name_or_path: a\ndatasets: []\n", 2, "found an empty list"),
        ("model_name_or_path: a\ndatasets: x.jsonl\n", 2, "'datasets' must be a list of entries; found 'x.jsonl'"),
        (
            "model_name_or_path: a\ndatasets: {path: x}\n",
            2,
            "'datasets' must be a list of entries; found a group of keys",
        ),
        ("model_name_or_path: a\ndatasets:\n  - path: x\n  - pth: y\n", 4, "2 mistakes"),
        ("model_name_or_path: 5\ndatasets: [{path: x}]\n", 1, "'model_name_or_path' must be text; found 5"),
    ],
)
def test_what_a_recipe_needs(refused, text, line, what):
    error = refused(text, before="")
    assert what in error.what
    assert line_of(error) == line


def test_all_mistakes_of_a_file_come_in_one_error(refused):
    error = refused("sede: 1\nmax_length: ten\nengine:\n  chunk_size: 0\nseed: 1\nseed: 2\n")
    first, *others = error.what.splitlines()
    assert first == "4 mistakes"
    assert [line.split(":")[0] for line in others] == ["- line 4", "- line 5", "- line 7", "- line 9"]
    assert line_of(error) == 4


# --- files that are no recipe --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("just words\n", 1, "found text"),
        ("- a\n- b\n", 1, "found a list"),
        ("seed:1\nmax_length:5\n", 1, "found text"),
        ("engine:\n\tkeep_kv: true\n", 2, "YAML does not allow tabs"),
        ("seed: 1\nengine: {keep_kv: true\nmax_length: 5\n", 2, "the bracket or brace opened here is not closed"),
        ("seed: 1\nlora_target: [a, b\nmax_length: 5\n", 2, "the bracket or brace opened here is not closed"),
        ("seed: 'open\nmax_length: 5\n", 1, "the quote opened here is not closed"),
        ('seed: 1\nx: "\\q"\n', 2, "not YAML"),
        ("seed: 1\n  max_length: 5\n", 2, "a key indented too far"),
        ("engine:\n  keep_kv: true\n chunk_size: 5\n", 3, "not aligned"),
        ("output_dir: @here\n", 1, "a value cannot start with '@'"),
        ("seed: 1\n---\nseed: 2\n", 2, "a second one starts here"),
        ("a: &x 5\nb: *x\n", 1, "anchors and aliases are not allowed: '&x'"),
        ("b: *x\n", 1, "anchors and aliases are not allowed: '*x'"),
        ("seed: !!python/object/apply:os.system [ls]\n", 1, "tags are not allowed: '!!python"),
        ("seed: !mine 5\n", 1, "tags are not allowed: '!mine'"),
        ("<<: {seed: 1}\n", 1, "merge keys are not allowed"),
        ("{a: b}: 1\n", 1, "a key must be plain text"),
        ("seed: 1\nx: a\x07b\n", 2, "U+0007"),
    ],
)
def test_text_that_is_no_recipe(refused, text, line, what):
    error = refused(text, before="")
    assert what in error.what
    assert line_of(error) == line
    assert error.fix


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n", "---\n"])
def test_an_empty_file(refused, text):
    assert refused(text, before="").what == "the recipe is empty"


def test_depth_is_bounded(refused):
    assert "a recipe has at most 32 levels" in refused("x: " + "[" * 50_000, before="").what
    assert "a recipe has at most 32 levels" in refused("x: " + "{a: " * 15_000, before="").what


def test_a_duplicate_key_does_not_hide_the_depth(refused):
    assert "a recipe has at most 32 levels" in refused("x: 1\nx: " + "[" * 50_000, before="").what


@pytest.mark.parametrize(
    "piece", ["x: 1\n", "x: {y: [1]}\n", "- [1]\n", "[1],", "'", "{", "? ", "- ", ": ", "a ", "|\n", "%"]
)
def test_no_file_is_slow(tmp_path, piece):
    """Within the size limit, nothing in YAML makes the reader quadratic: 64 KiB of anything are read or refused."""
    path = tmp_path / "odd.yaml"
    path.write_text("x: [" * piece.startswith("[") + piece * (60_000 // len(piece)))
    with pytest.raises(RecipeError):
        load_recipe(path)


def test_an_alias_bomb_costs_nothing(refused):
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{new}: &{new} [{','.join(['*' + old] * 9)}]\n" for old, new in zip("abcdefgh", "bcdefghi", strict=True)
    )
    assert "anchors and aliases are not allowed" in refused(bomb, before="").what


def test_size_is_bounded(refused):
    assert "exceeds 64 KiB" in refused("# " + "x" * 300_000).what


def test_a_number_too_long_to_convert(refused):
    assert "'seed' must be a whole number" in refused(f"seed: {'9' * 10_000}\n").what


def test_a_file_that_is_not_utf8(tmp_path):
    path = tmp_path / "latin1.yaml"
    path.write_bytes("seed: 1\noutput_dir: läufe\n".encode("latin-1"))
    with pytest.raises(RecipeError, match="not UTF-8") as caught:
        load_recipe(path)
    assert caught.value.where == f"{path}:2"


def test_a_missing_file_names_the_nearest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my-run.yaml").write_text("")
    cases = {
        "my-rum.yaml": "did you mean 'my-run.yaml'?",
        str(tmp_path / "my-rum.yaml"): f"did you mean '{tmp_path}/my-run.yaml'?",
        "quickstart.yaml": "`streamtune recipes copy quickstart` writes the shipped recipe",
        "quikstart": "did you mean the shipped recipe 'quickstart'?",
        "quikstart.yaml": "did you mean the shipped recipe 'quickstart'?",
        "qwen3/8b-lora-80gb.yaml": "`streamtune recipes copy qwen3/8b-lora-80gb` writes the shipped recipe",
        "qwen3/8b-lora-81gb": "did you mean the shipped recipe 'qwen3/8b-lora-80gb'?",
        "zzzzzzzz": "`streamtune recipes ls` lists the shipped recipes",
        "no/folder/zzzzzzz.yaml": "`streamtune recipes ls` lists the shipped recipes",
    }
    for name, fix in cases.items():
        with pytest.raises(RecipeError) as caught:
            load_recipe(name)
        assert (caught.value.what, caught.value.where) == ("the file does not exist", name)
        assert caught.value.fix == fix


def test_a_shipped_recipe_by_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    loaded = load_recipe("quickstart", ["max_steps=3"])
    (shipped,) = [recipe for recipe in shipped_recipes() if recipe.name == "quickstart"]
    assert loaded.path == shipped.path
    assert (loaded.recipe.max_steps, loaded.recipe.output_dir) == (3, "runs/quickstart")
    Path("quickstart").write_text("datasets: [{path: mine.jsonl}]\nmodel_name_or_path: org/name\n")
    assert load_recipe("quickstart").recipe.model_name_or_path == "org/name"  # a file of that name wins


def test_a_shipped_recipe_of_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.jsonl").write_text("")
    loaded = load_recipe("qwen3/8b-lora-80gb", ["datasets.0.path=mine.jsonl"])
    assert loaded.recipe.model_name_or_path == "Qwen/Qwen3-8B"
    assert loaded.recipe.datasets[0].path == "mine.jsonl"
    Path("qwen3").mkdir()
    Path("qwen3/8b-lora-80gb").write_text("datasets: [{path: mine.jsonl}]\nmodel_name_or_path: org/name\n")
    assert load_recipe("qwen3/8b-lora-80gb").recipe.model_name_or_path == "org/name"


def test_a_folder(tmp_path):
    with pytest.raises(RecipeError, match="expected a recipe file; found a folder") as caught:
        load_recipe(tmp_path)
    assert caught.value.fix == "name a YAML file"
    (tmp_path / "a.yaml").write_text("")
    with pytest.raises(RecipeError) as caught:
        load_recipe(tmp_path)
    assert str(tmp_path / "a.yaml") in caught.value.fix


def test_a_file_under_a_file(write):
    with pytest.raises(RecipeError, match="Not a directory"):
        load_recipe(write("") / "x.yaml")


def test_a_file_that_cannot_be_opened(tmp_path):
    path = tmp_path / "loop.yaml"
    path.symlink_to(path)
    with pytest.raises(RecipeError, match="cannot be read: Too many levels of symbolic links"):
        load_recipe(path)


def test_a_great_many_mistakes_are_counted(refused):
    lines = refused("".join(f"key_{n}: 1\n" for n in range(500))).what.splitlines()
    assert lines[0] == "500 mistakes"
    assert lines[-1] == "- and 480 more"
    assert len(lines) == 22


def test_damaged_recipes_only_ever_raise_recipe_errors(tmp_path):
    """Any bytes at all give a recipe or a RecipeError with a place, never another exception."""
    draw = random.Random(0)
    path = tmp_path / "damaged.yaml"
    pieces = [
        b"\t",
        b"'",
        b'"',
        b"{",
        b"}",
        b"[",
        b"]",
        b": ",
        b"- ",
        b"&a ",
        b"*a",
        b"!x ",
        b"|\n",
        b"\x00",
        b"\xff",
        b"null",
    ]
    texts = [recipe.text.encode() for recipe in shipped_recipes()]
    for _ in range(150):
        text = bytearray(draw.choice(texts))
        for _ in range(draw.randint(1, 4)):
            start = draw.randrange(len(text))
            text[start : start + draw.choice([0, 1, 5, 40])] = draw.choice(pieces)
        path.write_bytes(bytes(text))
        try:
            load_recipe(path)
        except RecipeError as error:
            assert error.where.startswith(str(path))  # noqa: PT017


# --- local paths ---------------------------------------------------------------------------------------------------


def test_local_paths_are_taken_from_the_recipes_folder(tmp_path, monkeypatch):
    (tmp_path / "project" / "data").mkdir(parents=True)
    (tmp_path / "project" / "data" / "train.jsonl").write_text("{}")
    (tmp_path / "project" / "template.jinja").write_text("{{ messages }}")
    built_in = ["python-stdlib", "demo-preferences", "demo-arithmetic", "demo-passkey", "demo-pages"]
    for name in built_in:
        (tmp_path / "project" / name).mkdir()
    (tmp_path / "project" / "run.yaml").write_text(
        "model_name_or_path: org/name\nchat_template: template.jinja\n"
        "datasets: [{path: data/train.jsonl}, {path: org/rows}, {path: python-stdlib}, {path: demo-preferences},\n"
        "  {path: demo-arithmetic}, {path: demo-passkey}, {path: demo-pages}]\n"
    )
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("project/run.yaml").recipe
    assert [spec.path for spec in recipe.datasets] == ["project/data/train.jsonl", "org/rows", *built_in]
    assert recipe.chat_template == "project/template.jinja"
    assert recipe.model_name_or_path == "org/name"
    assert recipe.output_dir == "runs/run"


def test_an_inline_template_is_not_taken_for_a_path(write):
    template = "{% for m in messages %}" + "x" * 5000 + "{% endfor %}"
    assert load_recipe(write(f'chat_template: "{template}"\n')).recipe.chat_template == template


def test_a_name_of_a_template_wins_over_a_file(tmp_path, monkeypatch):
    (tmp_path / "run.yaml").write_text("model_name_or_path: org/name\ndatasets: [{path: a.jsonl}]\n")
    monkeypatch.chdir(tmp_path)
    named = load_recipe("run.yaml", ["chat_template=llama3"])
    assert (named.recipe.chat_template, named.notes) == ("llama3", ())
    Path("llama3").write_text("{{ messages }}")
    named = load_recipe("run.yaml", ["chat_template=llama3"])
    assert named.recipe.chat_template == "llama3"
    assert named.notes == (
        "'chat_template: llama3' is StreamTune's template; to read the file 'llama3', write ./llama3",
    )
    for folder in (".", str(tmp_path)):
        file = load_recipe(f"{folder}/run.yaml", ["chat_template=./llama3"]).recipe.chat_template
        assert file not in CHAT_TEMPLATES
        assert Path(file).read_text() == "{{ messages }}"
    Path("lama3").write_text("{{ messages }}")
    assert load_recipe("run.yaml", ["chat_template=lama3"]).recipe.chat_template == "lama3"


def test_a_mistyped_name_of_a_template_is_refused(write):
    with pytest.raises(RecipeError, match="unknown chat template 'lama-3', and no file has this name") as caught:
        load_recipe(write("chat_template: lama-3\n"))
    assert caught.value.fix.startswith("did you mean 'llama3'? the names are chatml, ")


# --- keys without effect -------------------------------------------------------------------------------------------


def test_adapter_keys_of_a_full_run_are_noted(write):
    assert load_recipe(write("lora_r: 8\n")).notes == ("'lora_r' has no effect with finetuning_type: full",)
    assert load_recipe(write("lora_r: 8\nfinetuning_type: lora\n")).notes == ()


def test_mistakes_of_several_rules_are_told_at_once(refused):
    """Rules about several keys stop at the first mistake; others are found after its key is removed."""
    error = refused(
        "eval_steps: 5\nfsdp: true\ndeepspeed: zero2\nlr_layer_decay: 2.0\nwarmup_ratio: 0.1\nwarmup_steps: 3\n"
    )
    assert error.what.startswith("4 mistakes\n")
    for line, key in ((4, "eval_steps"), (5, "deepspeed"), (7, "lr_layer_decay"), (9, "warmup_ratio")):
        assert f"- line {line}: '{key}'" in error.what
    assert error.where.endswith(":4")


def test_a_mistake_that_may_follow_from_another_is_not_told(refused):
    error = refused("val_size: much\neval_steps: 5\n")
    assert error.what == "'val_size' must be a number of at least 0; found 'much'"


def test_folders_that_a_run_writes_to_may_be_in_the_home_folder(write, refused, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    lines = "output_dir: ~/runs/a\nengine: {offload: disk, offload_dir: ~/layers}\n"
    recipe = load_recipe(write(lines)).recipe
    assert recipe.output_dir == str(tmp_path / "home/runs/a")
    assert recipe.engine.offload_dir == str(tmp_path / "home/layers")
    assert load_recipe(write("output_dir: runs/~a\n")).recipe.output_dir == "runs/~a"
    monkeypatch.setenv("STREAMTUNE_NO_HOME", "1")  # HOME is deleted when the command ends
    assert "there is no home folder '~'" in refused("output_dir: ~/runs/a\n").what
    assert "no home folder '~nobody-of-this-name'" in str(refused("output_dir: ~nobody-of-this-name/a\n"))


@pytest.mark.parametrize(
    ("lines", "notes"),
    [
        ("train_batch_size: 8\ngradient_accumulation_steps: 4\n", ["gradient_accumulation_steps"]),
        ("train_batch_size: 8\ngradient_accumulation_steps: 1\n", []),
        ("max_steps: 9\nnum_train_epochs: 3\n", ["num_train_epochs"]),
        ("max_bad_rows: 5\nmax_skips: 3\n", ["max_bad_rows", "max_skips"]),
        ("on_bad_row: skip\nmax_bad_rows: 5\non_nan: skip\nmax_skips: 3\n", []),
        ("save_best_limit: 3\ngreater_is_better: true\n", ["save_best_limit", "greater_is_better"]),
        ("sequence_parallel: ring\nengine: {disk_memory: 1GiB}\n", ["sequence_parallel", "engine.disk_memory"]),
        ("val_size: 2\nsample: {held_out: 2, max_new_tokens: 3}\n", ["sample.max_new_tokens"]),
        ("val_size: 2\nsample: {held_out: 2, prompt: a, max_new_tokens: 3}\n", []),
        ("objective: dpo\nloss_type: kto\nidentical_pairs: drop\n", ["identical_pairs"]),
        (
            "objective: grpo\nreward_funcs: [length]\nsft_batch_size: 3\npass_reward: 0.5\ndataloader_num_workers: 2\n",
            ["dataloader_num_workers", "pass_reward", "sft_batch_size"],
        ),
        ("objective: grpo\nreward_funcs: [length]\nsft_steps: 2\nsft_batch_size: 3\nprompts: middle\n", []),
    ],
)
def test_a_key_without_effect_is_named_with_the_reason(write, lines, notes):
    loaded = load_recipe(write(lines))
    assert [note.split("'")[1] for note in loaded.notes] == notes
    assert all(" has no effect with" in note for note in loaded.notes)
    assert load_recipe(write(dump_recipe(loaded.recipe), before="", name="again.yaml")).notes == loaded.notes
