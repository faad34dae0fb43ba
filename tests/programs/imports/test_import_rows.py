"""Imported recipes make the rows that the other trainer makes: the same tokens, the same of them trained.

What each trainer makes is written down here after its source (axolotl 0.19.0 ``prompt_strategies``, LLaMA-Factory 0.9.5
``data/processor``, ms-swift 4.6.0 ``template/base.py``, TRL 1.16.0 ``SFTTrainer._prepare_dataset``). The full tests
compare that with what the trainers themselves make, where they are installed.
"""

from __future__ import annotations

import json
import shlex
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from importlib.util import find_spec
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from transformers import PreTrainedTokenizerFast

from streamtune.base.model_facts import IGNORE_INDEX
from streamtune.models.tokenizer import set_chat_template
from streamtune.programs.imports.importing import import_recipe
from streamtune.recipe import load_recipe
from streamtune.run.data import make_sources
from streamtune.tasks import task_of
from tests.data.trained_tokenizers import read_template, train_bpe, wrap
from tests.programs.imports.peer_schemas import PEERS

Tokens = list[tuple[int, bool]]
"""Tokens of a row, and whether each is trained."""

LONG = "The quick brown fox jumps over the lazy dog. " * 3
DOCUMENTS = [LONG, "The answer is 42.", "Paris is the capital of France. " * 5]
SHORT = [{"role": "user", "content": "again"}, {"role": "assistant", "content": "The answer"}]
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": "The answer is 42."},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": "Paris is the capital."},
]
PAIRS = [("The quick brown", " fox jumps"), ("What is", " Paris")]

SHORT_THOUGHT, LONG_THOUGHT = "<think>\nfox\n</think>\n\nParis", "<think>\nThe quick fox\n</think>\n\nThe answer"
THOUGHTS = [
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": SHORT_THOUGHT},
    {"role": "user", "content": "again"},
    {"role": "assistant", "content": LONG_THOUGHT},
]
"""A chat with reasoning in every answer."""
QWEN = {"role": "system", "content": "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."}

TEXT_ROWS = [{"text": text} for text in DOCUMENTS]
CHAT_ROWS = [{"messages": CHAT}, {"messages": SHORT}]
PAIR_ROWS = [{"prompt": prompt, "completion": completion} for prompt, completion in PAIRS]
ALPACA_ROWS = [
    {"instruction": "What is it?", "input": "", "output": "The answer is 42."},
    {"instruction": "again", "input": "The quick", "output": "Paris"},
    {"instruction": "", "input": "again", "output": "Paris"},
]
ASKED = [
    [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
    for asked, answer in (("What is it?", "The answer is 42."), ("again\nThe quick", "Paris"), ("again", "Paris"))
]
"""Conversations of LLaMA-Factory and ms-swift for these rows."""
SMOLLM = {"role": "system", "content": "You are a helpful AI assistant named SmolLM, trained by Hugging Face."}
QUERY_ROWS = [{"q": "What is it?", "a": "The answer is 42."}]


def tokenizer_of(case: Case) -> PreTrainedTokenizerFast:
    folder, _, name = case.template.rpartition("/")
    if folder != "trl":
        return wrap(train_bpe(), read_template(name))
    found = find_spec("trl")
    assert found is not None
    assert found.origin is not None
    return wrap(train_bpe(), (Path(found.origin).parent / "chat_templates" / f"{name}.jinja").read_text())


Made = Callable[[PreTrainedTokenizerFast], list[Tokens]]


def whole(tokenizer: Any, text: str, *, ends: bool = True) -> Tokens:
    """A text with its end token, every token trained."""
    ids = tokenizer(text)["input_ids"] + ([tokenizer.eos_token_id] if ends else [])
    return [(token, True) for token in ids]


def chat(
    tokenizer: Any,
    messages: Sequence[dict[str, str]],
    trained: Callable[[int], bool],
    ends: Callable[[int], bool] | None = None,
    *,
    headers: bool = False,
) -> Tokens:
    """A chat in ChatML: of the messages that are trained the content and the end, of none the newline behind it."""
    found: Tokens = []
    for index, message in enumerate(messages):
        parts = [
            (f"<|im_start|>{message['role']}\n", headers),
            (message["content"], trained(index)),
            ("<|im_end|>", (ends or trained)(index)),
            ("\n", headers),
        ]
        found += [(token, on) for text, on in parts for token in tokenizer(text)["input_ids"]]
    return found


def pieces(rows: Sequence[Tokens], size: int) -> list[Tokens]:
    return [row[start : start + size] for row in rows for start in range(0, len(row), size)]


def answers(messages: Sequence[dict[str, str]]) -> Callable[[int], bool]:
    return lambda index: messages[index]["role"] == "assistant"


def chats(trained: Callable[[Sequence[dict[str, str]]], Callable[[int], bool]], **more: Any) -> Made:
    return lambda tokenizer: [chat(tokenizer, row["messages"], trained(row["messages"]), **more) for row in CHAT_ROWS]


def last_answer(messages: Sequence[dict[str, str]]) -> Callable[[int], bool]:
    return lambda index: index == len(messages) - 1


def everything(messages: Sequence[dict[str, str]]) -> Callable[[int], bool]:
    return lambda index: True


def texts(size: int | None = None, *, cut: bool = False) -> Made:
    def made(tokenizer: Any) -> list[Tokens]:
        rows = [whole(tokenizer, text) for text in DOCUMENTS]
        return rows if size is None else [row[:size] for row in rows] if cut else pieces(rows, size)

    return made


def pairs(tokenizer: Any) -> list[Tokens]:
    return [
        [*((token, False) for token, _ in whole(tokenizer, prompt, ends=False)), *whole(tokenizer, completion)]
        for prompt, completion in PAIRS
    ]


def asked(conversations: Sequence[Sequence[dict[str, str]]]) -> Made:
    return lambda tokenizer: [chat(tokenizer, messages, answers(messages)) for messages in conversations]


def llama3(tokenizer: Any) -> list[Tokens]:
    """Conversations in the format of Llama 3, of which the answers and their ends are trained."""
    rows = []
    for row in CHAT_ROWS:
        parts = [("<|begin_of_text|>", False)]
        for message in row["messages"]:
            on = message["role"] == "assistant"
            parts += [(f"<|start_header_id|>{message['role']}<|end_header_id|>\n", False), ("\n", False)]
            parts += [(message["content"], on), ("<|eot_id|>", on)]
        rows.append([(token, on) for text, on in parts for token in tokenizer(text)["input_ids"]])
    return rows


@dataclass(frozen=True)
class Case:
    """A recipe of another trainer, the rows it reads, and what the trainer makes of them."""

    trainer: str
    recipe: str
    rows: list[dict[str, Any]]
    made: Made
    stars: set[str] = field(default_factory=set)
    info: dict[str, Any] | None = None
    template: str = "chatml"
    """The tokenizer's own: a file of tests/data/templates, or of TRL's chat_templates"""


AXOLOTL = "base_model: own/model\nsequence_len: {size}\nmicro_batch_size: 1\nlearning_rate: 1e-5\n"
FACTORY = "model_name_or_path: own/model\nfinetuning_type: full\ndataset: mine\ndataset_dir: .\ntemplate: chatml\n"
OPENAI = {
    "formatting": "sharegpt",
    "columns": {"messages": "messages"},
    "tags": {
        **{"role_tag": "role", "content_tag": "content"},
        **{"user_tag": "user", "assistant_tag": "assistant", "system_tag": "system"},
    },
}
TRL = "model_name_or_path: own/model\ndataset_name: rows.jsonl\n"
SWIFT = "swift {command} --model own/model --train_type full --dataset rows.jsonl --use_hf true "

TRAINING = "{}/chat_templates/qwen3_training.jinja".format(*(find_spec("trl").submodule_search_locations or []))  # type: ignore[union-attr]

CASES: dict[str, Case] = {
    "axolotl completion": Case(
        "axolotl",
        AXOLOTL.format(size=16) + "sample_packing: true\ndatasets: [{path: rows.jsonl, type: completion}]\n",
        TEXT_ROWS,
        texts(16),
    ),
    "axolotl completion, another column": Case(
        "axolotl",
        AXOLOTL.format(size=16)
        + "excess_length_strategy: truncate\ndatasets: [{path: rows.jsonl, type: completion, field: body}]\n",
        [{"body": text} for text in DOCUMENTS],
        texts(16),
    ),
    "axolotl llama3": Case(
        "axolotl",
        AXOLOTL.format(size=256)
        + 'chat_template: llama3\neot_tokens: ["<|eot_id|>"]\n'
        + "datasets: [{path: rows.jsonl, type: chat_template}]\n",
        CHAT_ROWS,
        llama3,
    ),
    "axolotl chat_template": Case(
        "axolotl",
        AXOLOTL.format(size=256) + "datasets: [{path: rows.jsonl, type: chat_template}]\n",
        CHAT_ROWS,
        chats(answers),
    ),
    "axolotl chatml": Case(
        "axolotl",
        AXOLOTL.format(size=256) + "chat_template: chatml\ndatasets: [{path: rows.jsonl, type: chat_template}]\n",
        [{"messages": CHAT}, {"messages": THOUGHTS}],
        asked([CHAT, THOUGHTS]),
        template="qwen3",
    ),
    "axolotl train_on_inputs": Case(
        "axolotl",
        AXOLOTL.format(size=256) + "train_on_inputs: true\ndatasets: [{path: rows.jsonl, type: chat_template}]\n",
        CHAT_ROWS,
        chats(everything),
    ),
    "axolotl roles and ends": Case(
        "axolotl",
        AXOLOTL.format(size=256)
        + "datasets: [{path: rows.jsonl, type: chat_template, roles_to_train: [assistant, user], train_on_eos: all}]\n",
        CHAT_ROWS,
        chats(lambda messages: lambda index: messages[index]["role"] != "system", ends=lambda index: True),
    ),
    "axolotl last end": Case(
        "axolotl",
        AXOLOTL.format(size=256) + "datasets: [{path: rows.jsonl, type: chat_template, train_on_eos: last}]\n",
        CHAT_ROWS,
        lambda tokenizer: [
            chat(tokenizer, row["messages"], answers(row["messages"]), last_answer(row["messages"]))
            for row in CHAT_ROWS
        ],
    ),
    "axolotl leaves out long chats": Case(
        "axolotl",
        AXOLOTL.format(size=24) + "datasets: [{path: rows.jsonl, type: chat_template}]\n",
        CHAT_ROWS,
        lambda tokenizer: [chat(tokenizer, SHORT, answers(SHORT))],
    ),
    "llamafactory pt": Case(
        "llamafactory",
        FACTORY + "stage: pt\ncutoff_len: 16\n",
        TEXT_ROWS,
        texts(16),
        info={"columns": {"prompt": "text"}},
    ),
    "llamafactory pt without packing": Case(
        "llamafactory",
        FACTORY + "stage: pt\ncutoff_len: 16\npacking: false\n",
        TEXT_ROWS,
        texts(16, cut=True),
        info={"columns": {"prompt": "text"}},
    ),
    "llamafactory alpaca": Case(
        "llamafactory",
        FACTORY + "stage: sft\n",
        ALPACA_ROWS,
        asked(ASKED),
        info={},
    ),
    "llamafactory prompt and response": Case(
        "llamafactory",
        FACTORY + "stage: sft\n",
        QUERY_ROWS,
        asked(ASKED[:1]),
        info={"columns": {"prompt": "q", "response": "a"}},
    ),
    "llamafactory history of another name": Case(
        "llamafactory",
        FACTORY + "stage: sft\n",
        [{"instruction": "again", "output": "Paris", "past": [["What is it?", "The answer is 42."]]}],
        asked([[*ASKED[0], *ASKED[2]]]),
        info={"columns": {"prompt": "instruction", "response": "output", "history": "past"}},
    ),
    "llamafactory openai": Case("llamafactory", FACTORY + "stage: sft\n", CHAT_ROWS, chats(answers), info=OPENAI),
    "llamafactory mask_history": Case(
        "llamafactory", FACTORY + "stage: sft\nmask_history: true\n", CHAT_ROWS, chats(last_answer), info=OPENAI
    ),
    "llamafactory train_on_prompt": Case(
        "llamafactory",
        FACTORY + "stage: sft\ntrain_on_prompt: true\n",
        CHAT_ROWS,
        chats(everything, headers=True),
        info=OPENAI,
    ),
    "llamafactory qwen3_nothink": Case(
        "llamafactory",
        FACTORY.replace("chatml", "qwen3_nothink") + "stage: sft\n",
        [{"messages": CHAT}, {"messages": THOUGHTS}],
        asked([CHAT, THOUGHTS]),
        info=OPENAI,
        template="qwen3",
    ),
    "llamafactory qwen": Case(
        "llamafactory",
        FACTORY.replace("chatml", "qwen") + "stage: sft\n",
        CHAT_ROWS,
        asked([CHAT, [QWEN, *SHORT]]),
        info=OPENAI,
        template="qwen3",
    ),
    "llamafactory smollm2": Case(
        "llamafactory",
        FACTORY.replace("chatml", "smollm2") + "stage: sft\n",
        CHAT_ROWS,
        asked([CHAT, [SMOLLM, *SHORT]]),
        info=OPENAI,
        template="qwen3",
    ),
    "llamafactory qwen3": Case(
        "llamafactory",
        FACTORY.replace("chatml", "qwen3") + "stage: sft\n",
        [{"messages": THOUGHTS}],
        asked([THOUGHTS]),
        stars={"template"},
        info=OPENAI,
        template="qwen3",
    ),
    "trl assistant_only_loss of Qwen3": Case(
        "trl",
        TRL.replace("own/model", "own/Qwen3-8B") + "assistant_only_loss: true\n",
        [{"messages": THOUGHTS}],
        asked([THOUGHTS]),
        stars={"assistant_only_loss"},
        template="trl/qwen3",
    ),
    "trl assistant_only_loss of Qwen3, its template": Case(
        "trl",
        TRL.replace("own/model", "own/Qwen3-8B") + f"assistant_only_loss: true\nchat_template_path: {TRAINING}\n",
        [{"messages": [*THOUGHTS[:3], {"role": "assistant", "content": "Paris"}]}],
        asked([[*THOUGHTS[:3], {"role": "assistant", "content": "<think>\n\n</think>\n\nParis"}]]),
        template="trl/qwen3",
    ),
    "trl text": Case("trl", TRL + "max_length: 16\n", TEXT_ROWS, texts(16, cut=True)),
    "trl text column": Case(
        "trl",
        TRL + "max_length: 16\ndataset_text_field: body\n",
        [{"body": text} for text in DOCUMENTS],
        texts(16, cut=True),
    ),
    "trl wrapped": Case(
        "trl", TRL + "max_length: 16\npacking: true\npacking_strategy: wrapped\n", TEXT_ROWS, texts(16)
    ),
    "trl bfd_split": Case(
        "trl", TRL + "max_length: 16\npacking: true\npacking_strategy: bfd_split\n", TEXT_ROWS, texts(16)
    ),
    "trl bfd": Case("trl", TRL + "max_length: 16\npacking: true\n", TEXT_ROWS, texts(16, cut=True)),
    "trl prompt and completion": Case("trl", TRL, PAIR_ROWS, pairs),
    "trl prompt and completion, all trained": Case(
        "trl",
        TRL + "completion_only_loss: false\n",
        PAIR_ROWS,
        lambda tokenizer: [[(token, True) for token, _ in row] for row in pairs(tokenizer)],
    ),
    "trl chats": Case("trl", TRL, CHAT_ROWS, chats(everything, headers=True)),
    "trl assistant_only_loss": Case("trl", TRL + "assistant_only_loss: true\n", CHAT_ROWS, chats(answers)),
    "trl no length": Case("trl", TRL + "max_length: null\n", TEXT_ROWS, texts()),
    "swift sft": Case("swift", SWIFT.format(command="sft") + "--max_length 256", CHAT_ROWS, chats(answers)),
    "swift last_round": Case(
        "swift",
        SWIFT.format(command="sft") + "--max_length 256 --loss_scale last_round",
        CHAT_ROWS,
        chats(last_answer),
    ),
    "swift template_backend": Case(
        "swift",
        SWIFT.format(command="sft") + "--max_length 256 --template_backend jinja --loss_scale last_round",
        CHAT_ROWS,
        chats(everything, headers=True),
    ),
    "swift qwen3_nothinking": Case(
        "swift",
        SWIFT.format(command="sft") + "--max_length 256 --template qwen3_nothinking",
        [{"messages": CHAT}, {"messages": THOUGHTS}],
        asked([CHAT, THOUGHTS]),
        template="qwen3",
    ),
    "swift Qwen3": Case(
        "swift",
        SWIFT.format(command="sft") + "--max_length 256 --template qwen3",
        [{"messages": THOUGHTS}],
        asked([THOUGHTS]),
        stars={"template"},
        template="qwen3",
    ),
    "swift Qwen3, last_round": Case(
        "swift",
        SWIFT.format(command="sft") + "--max_length 256 --template qwen3 --loss_scale last_round",
        [{"messages": THOUGHTS}],
        lambda tokenizer: [
            chat(tokenizer, [THOUGHTS[0], {**THOUGHTS[1], "content": "Paris"}, *THOUGHTS[2:]], last_answer(THOUGHTS))
        ],
        template="qwen3",
    ),
    "swift delete": Case(
        "swift",
        SWIFT.format(command="sft") + "--max_length 24",
        CHAT_ROWS,
        lambda tokenizer: [chat(tokenizer, SHORT, answers(SHORT))],
    ),
    "swift left": Case(
        "swift",
        SWIFT.format(command="sft") + "--max_length 16 --truncation_strategy left",
        [{"messages": CHAT[1:]}],
        lambda tokenizer: [chat(tokenizer, CHAT[1:], answers(CHAT[1:]))[-16:]],
    ),
    "swift alpaca": Case("swift", SWIFT.format(command="sft") + "--max_length 256", ALPACA_ROWS, asked(ASKED)),
    "swift query and response": Case(
        "swift",
        SWIFT.format(command="sft") + "--max_length 256",
        [{"query": "again", "response": "Paris", "history": [["What is it?", "The answer is 42."]]}],
        asked([[*ASKED[0], *ASKED[2]]]),
    ),
    "swift prompt and completion": Case(
        "swift",
        SWIFT.format(command="sft") + "--max_length 256",
        [{"prompt": "again", "completion": "Paris", "system_prompt": "Be brief."}],
        asked([[CHAT[0], *ASKED[2]]]),
    ),
    "swift columns": Case(
        "swift",
        SWIFT.format(command="sft") + """--max_length 256 --columns '{"q": "query", "a": "response"}'""",
        QUERY_ROWS,
        asked(ASKED[:1]),
    ),
    "swift sharegpt": Case(
        "swift",
        SWIFT.format(command="sft") + "--max_length 256",
        [{"messages": [{"from": "human", "value": "again"}, {"from": "gpt", "value": "Paris"}]}],
        asked(ASKED[2:]),
    ),
    "swift pt split": Case(
        "swift",
        SWIFT.format(command="pt") + "--max_length 16 --truncation_strategy split",
        TEXT_ROWS,
        texts(16),
    ),
}
"""Recipes as the trainers' documentation writes them."""


def made_here(case: Case, folder: Path, tokenizer: Any) -> list[Tokens]:
    """Import a recipe, load what was written, and prepare the rows as a run does."""
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in case.rows))
    if case.info is not None:
        (folder / "dataset_info.json").write_text(json.dumps({"mine": {"file_name": "rows.jsonl", **case.info}}))
    theirs = folder / ("theirs.sh" if case.trainer == "swift" else "theirs.yaml")
    theirs.write_text(case.recipe)
    imported = import_recipe(theirs, case.trainer, "sft")
    assert {found.theirs.partition(":")[0] for found in imported.changes_training} == case.stars
    (folder / "ours.yaml").write_text(imported.text)
    loaded = load_recipe(folder / "ours.yaml")
    if loaded.recipe.chat_template:
        set_chat_template(tokenizer, loaded.recipe.chat_template)
    rows = task_of(loaded.recipe).prepare(make_sources(loaded), tokenizer, lambda message: None).training
    return [
        [(int(token), label != IGNORE_INDEX) for token, label in zip(row.input_ids, row.labels, strict=True)]
        for row in rows
    ]


def as_trained(rows: Sequence[Tokens]) -> list[Tokens]:
    """Return the rows without the mask of their first token, which no token stands before."""
    return [[(row[0][0], False), *row[1:]] for row in rows]


@pytest.mark.parametrize("name", CASES)
def test_the_same_tokens_are_trained(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tokenizer = tokenizer_of(CASES[name])
    assert made_here(CASES[name], tmp_path, tokenizer) == as_trained(CASES[name].made(tokenizer))


def test_there_are_recipes_of_each_trainer() -> None:
    assert len(CASES) >= 24
    assert {case.trainer for case in CASES.values()} == {"axolotl", "llamafactory", "trl", "swift"}


# --- the trainers themselves ------------------------------------------------------------------------------------------


def labelled(rows: Any) -> list[Tokens]:
    pairs = zip(rows["input_ids"], rows["labels"], strict=True)
    return [[(int(token), label != IGNORE_INDEX) for token, label in zip(*row, strict=True)] for row in pairs]


def without_newlines(rows: Sequence[Tokens], tokenizer: Any) -> list[Tokens]:
    """Return the rows, in which the newline behind the end of a turn is not trained."""
    (newline,), end = tokenizer("\n")["input_ids"], tokenizer.convert_tokens_to_ids("<|im_end|>")
    behind = [[before == end and token == newline for (before, _), (token, _) in pairwise(row)] for row in rows]
    return [
        [row[0], *((token, on and not is_end) for (token, on), is_end in zip(row[1:], ends, strict=True))]
        for row, ends in zip(rows, behind, strict=True)
    ]


def by_trl(case: Case, folder: Path, tokenizer: Any) -> list[Tokens]:
    """The rows of TRL's own trainer: its ``train_dataset``."""
    import trl
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM

    size = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1, "head_dim": 8}
    model = Qwen3ForCausalLM(Qwen3Config(vocab_size=len(tokenizer), num_key_value_heads=1, **size))
    given = yaml.safe_load(case.recipe)
    options = {name: value for name, value in given.items() if name not in ("model_name_or_path", "dataset_name")}
    if options.get("assistant_only_loss") and case.template == "chatml":
        tokenizer = wrap(train_bpe(), read_template("chatml_generation"))
    options |= {"output_dir": str(folder), "report_to": [], "use_cpu": True, "bf16": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = trl.SFTTrainer(
            model=model,
            args=trl.SFTConfig(**options),
            train_dataset=Dataset.from_list(case.rows),
            processing_class=tokenizer,
        )
    made = labelled(trainer.train_dataset[:])
    if case.template != "chatml":
        made = without_newlines(made, tokenizer)
    starts = trainer.train_dataset[:].get("seq_lengths")
    return (
        made if starts is None else [part for row, sizes in zip(made, starts, strict=True) for part in cut(row, sizes)]
    )


def cut(row: Tokens, sizes: Sequence[int]) -> list[Tokens]:
    bounds = [0, *accumulate(sizes)]
    return [row[start:stop] for start, stop in pairwise(bounds)]


def by_axolotl(case: Case, folder: Path, tokenizer: Any) -> list[Tokens]:
    """The rows of axolotl's strategy for the type of the dataset, and of its rule for long rows."""
    from axolotl.prompt_strategies import chat_template, completion
    from axolotl.utils.dict import DictDefault

    given = yaml.safe_load(case.recipe)
    settings = {"train_on_inputs": False, "chat_template": "tokenizer_default", **given}
    entry = {"field_messages": "messages", "chat_template": settings["chat_template"], **given["datasets"][0]}
    if entry["type"] == "completion":
        strategy = completion.load(tokenizer, DictDefault(settings), DictDefault(entry))
        columns = {name: [row[name] for row in case.rows] for name in case.rows[0]}
        return labelled(strategy.tokenize_prompt(columns))
    strategy = chat_template.load(tokenizer, DictDefault(settings), ds_cfg=DictDefault(entry))
    rows = [strategy.tokenize_prompt(row) for row in case.rows]
    made = labelled({name: [row[name] for row in rows] for name in ("input_ids", "labels")})
    return [row for row in made if len(row) <= given["sequence_len"]]


def by_llamafactory(case: Case, folder: Path, tokenizer: Any) -> list[Tokens]:
    """The rows of LLaMA-Factory's processors, of which the newline behind a trained end is not trained here."""
    from llamafactory.data.converter import get_dataset_converter
    from llamafactory.data.parser import DatasetAttr
    from llamafactory.data.processor import pretrain, supervised
    from llamafactory.data.template import get_template_and_fix_tokenizer
    from llamafactory.hparams import DataArguments

    given = yaml.safe_load(case.recipe)
    names = ("template", "cutoff_len", "packing", "mask_history", "train_on_prompt")
    settings = DataArguments(**{name: given[name] for name in names if name in given})
    template = get_template_and_fix_tokenizer(tokenizer, settings)
    parts = {"template": template, "tokenizer": tokenizer, "processor": None, "data_args": settings}
    if given["stage"] == "pt":
        settings.packing = given.get("packing", True)
        prompts = [[{"role": "user", "content": row["text"]}] for row in case.rows]
        made = pretrain.PretrainDatasetProcessor(**parts).preprocess_dataset({"_prompt": prompts})
        return [[(token, True) for token in row] for row in made["input_ids"]]
    attributes = DatasetAttr("file", "mine")
    attributes.join(case.info or {})
    convert = get_dataset_converter(attributes.formatting, attributes, settings)
    rows = [convert(deepcopy(row)) for row in case.rows]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    made = labelled(supervised.SupervisedDatasetProcessor(**parts).preprocess_dataset(columns))
    return made if given.get("train_on_prompt") else without_newlines(made, tokenizer)


def by_swift(case: Case, folder: Path, tokenizer: Any) -> list[Tokens]:
    """The rows of ms-swift's template, of which the newline behind a trained end is not trained here."""
    import torch
    from swift.template import MaxLengthError, get_template

    words = shlex.split(case.recipe)
    given = {name.removeprefix("--"): value for name, value in zip(words[2::2], words[3::2], strict=True)}
    facts = {"model_dir": "", "torch_dtype": torch.float32, "max_model_len": 2048, "task_type": "causal_lm"}
    unset = dict.fromkeys(("config", "model_type", "quant_method", "rope_scaling", "model_arch"))
    tokenizer.model_info = SimpleNamespace(**facts, **unset, is_moe_model=False)
    tokenizer.model_meta = SimpleNamespace(
        **unset, template=given.get("template", "chatml"), is_multimodal=False, is_reranker=False
    )
    pretrains = words[1] == "pt"
    template = get_template(
        tokenizer,
        template_type=given.get("template", "chatml"),
        template_backend=given.get("template_backend", "swift"),
        use_chat_template=not pretrains,
        max_length=int(given["max_length"]),
        truncation_strategy=given.get("truncation_strategy", "raise"),
        loss_scale="all" if pretrains else given.get("loss_scale", "default"),
    )
    template.set_mode("train")
    made: list[dict[str, Any]] = []
    for row in case.rows if pretrains else read_by_swift(case.rows, given):
        messages = [{"role": "assistant", "content": row["text"]}] if pretrains else row["messages"]
        with suppress(MaxLengthError):  # delete, which is the default
            found = template.encode({"messages": messages})
            made += found if isinstance(found, list) else [found]
    rows = labelled({name: [row[name] for row in made] for name in ("input_ids", "labels")})
    whole_rows = pretrains or given.get("template_backend") == "jinja"
    return rows if whole_rows else without_newlines(rows, tokenizer)


def read_by_swift(rows: Sequence[dict[str, Any]], given: dict[str, str]) -> list[dict[str, Any]]:
    """The rows as ms-swift's preprocessors hand them to its template."""
    from datasets import Dataset
    from swift.dataset.preprocessor.core import AutoPreprocessor

    columns = json.loads(given.get("columns", "{}"))
    made = AutoPreprocessor(columns=columns)(Dataset.from_list(list(rows)), load_from_cache_file=False,
                                             enable_auto_mapping=True)  # fmt: skip
    turns = [[{name: turn[name] for name in ("role", "content")} for turn in row["messages"]] for row in made]
    return [{"messages": row} for row in turns]


MADE_BY = {"trl": by_trl, "axolotl": by_axolotl, "llamafactory": by_llamafactory, "swift": by_swift}
"""Trainer -> what makes its rows by its own code."""


@pytest.mark.full
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.trainer in ("trl", *PEERS)])
def test_the_trainer_itself_makes_these_rows(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where STREAMTUNE_PEERS names a folder with the other trainers, and what they import is installed, theirs too."""
    monkeypatch.chdir(tmp_path)
    case = CASES[name]
    tokenizer = tokenizer_of(case)
    made, wanted = MADE_BY[case.trainer](case, tmp_path, tokenizer), case.made(tokenizer)
    if name == "trl wrapped" or name == "llamafactory pt":  # there rows go on in the same block
        joined, theirs = ([token for row in rows for token in row] for rows in (wanted, made))
        assert theirs == joined[: len(theirs)]
        assert len(joined) - len(theirs) < 16
    else:
        assert sorted(as_trained(made)) == sorted(as_trained(wanted))
