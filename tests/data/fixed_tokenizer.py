"""A byte-level tokenizer with a few merges, made of a list and not of counts: its ids are the same on every machine."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from trained_tokenizers import read_template
from transformers import PreTrainedTokenizerFast

from streamtune.models.tokenizer import CHATML_TEMPLATE

MERGES = [
    *[("t", "h"), ("th", "e"), ("Ġ", "the"), ("i", "n"), ("Ġ", "a"), ("e", "r"), ("o", "n"), ("o", "u"), ("u", "s")],
    *[
        ("Ċ", "Ċ"),
        ("Ġ", "Ġ"),
        ("Ġa", "n"),
        ("s", "w"),
        ("sw", "er"),
        ("Ġan", "swer"),
        ("Ġ", "P"),
        ("a", "r"),
        ("i", "s"),
    ],
]

DEEPSEEK = [
    f"<\uff5c{name}\uff5c>"
    for name in ("begin\u2581of\u2581sentence", "end\u2581of\u2581sentence", "User", "Assistant")
]
"""With bars of full width."""

SPECIAL: dict[str, list[str]] = {
    "chatml": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "qwen3": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
    "llama31": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
    "mistral3": ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                 "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
    "gemma3": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
    "phi4": ["<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>"],
    "deepseek_r1": DEEPSEEK,
    "gpt_oss": ["<|startoftext|>", "<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"],
    "granite": ["<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>"],
}  # fmt: skip
"""Special tokens of each template."""

ENDS = {
    "llama31": "<|eot_id|>",
    "mistral3": "</s>",
    "gemma3": "<end_of_turn>",
    "deepseek_r1": DEEPSEEK[1],
    "gpt_oss": "<|return|>",
    "granite": "<|end_of_text|>",
}
BEGINS = {
    "llama31": "<|begin_of_text|>",
    "mistral3": "<s>",
    "gemma3": "<bos>",
    "deepseek_r1": DEEPSEEK[0],
}


def fixed_tokenizer(name: str, *, marked: bool = False) -> PreTrainedTokenizerFast:
    """A tokenizer in the manner of a family; ``marked`` has ``{% generation %}`` around what the assistant writes."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = [*letters, *("".join(merge) for merge in MERGES)]
    backend = Tokenizer(models.BPE(vocab={piece: index for index, piece in enumerate(pieces)}, merges=MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(SPECIAL[name])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token=ENDS.get(name, "<|im_end|>"),
        bos_token=BEGINS.get(name),
        pad_token=SPECIAL[name][0],
    )
    template = CHATML_TEMPLATE if name == "chatml" else read_template(name)
    if marked:
        template = template.replace("{#-GENERATION-#}", "{%- generation %}")
        template = template.replace("{#-ENDGENERATION-#}", "{%- endgeneration %}")
    elif name == "chatml":
        template = template.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", "")
    made.chat_template = template
    return made
