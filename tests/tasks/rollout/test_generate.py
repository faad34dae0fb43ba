"""Completions of real tiny models: reading a prompt once gives the same completions as plain ``generate``."""

from __future__ import annotations

from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import (
    AutoConfig,
    GenerationConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from streamtune import stream
from streamtune.errors import ArgumentError
from streamtune.models import RopeChange, add_lora, save_architecture
from streamtune.tasks.rollout import GenerationStopped, Sampling, TransformersGenerator
from streamtune.tasks.rollout.writers import policy_weights, require_vllm
from tests.exactness.families import VOCAB, build

END, PAD = 2, 0
RECURRENT: dict[str, Any] = {
    "qwen3_next": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "layer_types": ["linear_attention", "full_attention"],
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
}


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def writer(model: torch.nn.Module, **changes: Any) -> TransformersGenerator:
    settings = {"end_token_ids": [END], "pad_token_id": PAD, "prefill_chunk_size": 4, "max_rows": 64, **changes}
    return TransformersGenerator(model, **settings)


def plain(model: PreTrainedModel, prompt: list[int], count: int, sampling: Sampling) -> list[list[int]]:
    """Return completions of plain ``generate`` on repeated prompts, the reference of these tests."""
    drawn = {"temperature": sampling.temperature, "top_k": 0, "top_p": 1.0} if sampling.temperature > 0 else {}
    config = GenerationConfig(
        max_new_tokens=sampling.max_completion_length,
        do_sample=sampling.temperature > 0,
        eos_token_id=END,
        pad_token_id=PAD,
        **drawn,
    )
    ids = torch.tensor([prompt] * count)
    before, model.generation_config = model.generation_config, config
    model.eval()
    with torch.no_grad():
        rows = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids))[:, len(prompt) :].tolist()
    model.generation_config = before
    return [row[: row.index(END) + 1] if END in row else row for row in rows]


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt2", "mixtral", *RECURRENT])
@pytest.mark.parametrize("temperature", [0.0, 1.0], ids=["greedy", "sampled"])
def test_what_is_written_is_what_plain_generation_writes(family: str, temperature: float) -> None:
    model = build(family, **RECURRENT.get(family, {}))
    sampling = Sampling(max_completion_length=9, temperature=temperature)
    ours = writer(model)
    assert ours.shares_prompts == (family not in RECURRENT)
    (prompt,) = prompts(15)
    torch.manual_seed(7)
    expected = plain(model, prompt, 4, sampling)
    model.train()
    torch.manual_seed(7)
    (written,) = ours.write([prompt], 4, sampling)
    assert [completion.token_ids for completion in written] == expected
    assert model.training
    if temperature > 0:
        assert len({tuple(completion.token_ids) for completion in written}) == 4


@pytest.mark.parametrize("family", ["qwen3", "gpt2", "lfm2"])
def test_a_streamed_model_writes_the_same(family: str) -> None:
    model = build(family, **RECURRENT.get(family, {}))
    sampling = Sampling(max_completion_length=9)
    asked = prompts(15, 6, 6)
    torch.manual_seed(7)
    unstreamed = writer(model).write(asked, 3, sampling)
    with stream(model, chunk_size=5):
        torch.manual_seed(7)
        assert writer(model).write(asked, 3, sampling) == unstreamed


def test_prompts_of_several_lengths_are_padded_together_and_each_gets_its_own() -> None:
    model = build("qwen3")
    asked, greedy = prompts(3, 15, 1, 8), Sampling(max_completion_length=7, temperature=0.0)
    together = writer(model).write(asked, 2, greedy)
    alone = [plain(model, prompt, 2, greedy) for prompt in asked]
    assert [[completion.token_ids for completion in group] for group in together] == alone


SCALED: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "rope_theta": 10_000.0,
        "factor": 16.0,
        "original_max_position_embeddings": 16,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
    },
}
"""Rotary parameters whose frequencies depend on the length above 16 tokens."""


def scaled(rope_type: str) -> PreTrainedModel:
    """A model with these parameters, whose weights are large enough for positions to matter."""
    limits = {"max_position_embeddings": 256 if rope_type == "longrope" else 16}
    if rope_type == "longrope":
        limits["original_max_position_embeddings"] = 16
    family = "phi3" if rope_type == "longrope" else "llama"
    return build(family, rope_parameters=SCALED[rope_type], initializer_range=0.5, **limits)


@pytest.mark.parametrize("rope_type", SCALED)
@pytest.mark.parametrize("streamed", [False, True])
def test_every_chunk_of_a_prompt_has_the_frequencies_of_its_length(rope_type: str, streamed: bool) -> None:
    """Also after a longer prompt, and beside one."""
    asked, greedy = prompts(60, 9, 31, 31), Sampling(max_completion_length=6, temperature=0.0)
    alone = [plain(scaled(rope_type), prompt, 2, greedy) for prompt in asked]
    model = scaled(rope_type)
    with stream(model, chunk_size=16) if streamed else nullcontext():
        together = writer(model, prefill_chunk_size=7).write(asked, 2, greedy)
    assert [[completion.token_ids for completion in group] for group in together] == alone


def test_a_decoder_that_the_prefix_does_not_name_is_found() -> None:
    """``base_model_prefix`` of Llama 4's text model is the name of a part that only the multimodal model has."""
    shape = {"attention_chunk_size": 8, "intermediate_size_mlp": 48, "num_local_experts": 2, "no_rope_layers": [1, 0]}
    small = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": VOCAB, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": PAD, "bos_token_id": 1}
    torch.manual_seed(0)
    model = Llama4ForCausalLM(Llama4TextConfig(**shape, **small, **heads))
    (prompt,), greedy = prompts(15), Sampling(max_completion_length=5, temperature=0.0)
    (written,) = writer(model).write([prompt], 1, greedy)
    assert [completion.token_ids for completion in written] == plain(model, prompt, 1, greedy)


def test_rows_written_at_a_time_are_bounded() -> None:
    model = build("qwen3")
    asked, greedy = prompts(5, 9, 7), Sampling(max_completion_length=4, temperature=0.0)
    widths: list[int] = []
    embedding = model.get_input_embeddings()
    hook = embedding.register_forward_pre_hook(lambda module, inputs: widths.append(inputs[0].shape[0]))
    bounded = writer(model, max_rows=4).write(asked, 6, greedy)
    hook.remove()
    assert max(widths) == 4
    assert bounded == writer(model).write(asked, 6, greedy)


@pytest.mark.parametrize("family", ["qwen3", "mistral"])
def test_each_prompt_has_as_many_completions_as_are_asked_of_it(family: str) -> None:
    """Caches are repeated unevenly in one batch, and in several batches of bounded width."""
    model = build(family)
    asked, greedy = prompts(3, 15, 1, 8), Sampling(max_completion_length=7, temperature=0.0)
    counts = [2, 5, 1, 3]
    alone = [plain(model, prompt, count, greedy) for prompt, count in zip(asked, counts, strict=True)]
    widths: list[int] = []
    embedding = model.get_input_embeddings()
    hook = embedding.register_forward_pre_hook(lambda module, inputs: widths.append(inputs[0].shape[0]))
    for most in (16, 4):
        widths.clear()
        written = writer(model, max_rows=most).write(asked, counts, greedy)
        assert [[completion.token_ids for completion in group] for group in written] == alone
        assert max(widths) <= most
    hook.remove()
    drawn = Sampling(max_completion_length=7)
    torch.manual_seed(3)
    equal = writer(model).write(asked, 3, drawn)
    torch.manual_seed(3)
    assert writer(model).write(asked, [3] * 4, drawn) == equal


def test_a_prompt_is_read_once_and_in_chunks() -> None:
    model = build("qwen3")
    shapes: list[tuple[int, ...]] = []
    embedding = model.get_input_embeddings()
    hook = embedding.register_forward_pre_hook(lambda module, inputs: shapes.append(tuple(inputs[0].shape)))
    writer(model, prefill_chunk_size=6).write(prompts(15), 8, Sampling(max_completion_length=3))
    hook.remove()
    assert shapes[:3] == [(1, 6), (1, 6), (1, 2)]
    assert set(shapes[3:]) == {(8, 1)}


def test_an_end_token_ends_a_completion_and_padding_is_never_returned() -> None:
    """The pad token is the end token, as in many tokenizers."""
    model = build("qwen3")
    ends = list(range(3, 40))  # many tokens end it, so that rows end at different lengths
    torch.manual_seed(0)
    (written,) = writer(model, end_token_ids=ends, pad_token_id=ends[0]).write(
        prompts(6), 24, Sampling(max_completion_length=6)
    )
    assert len({len(completion.token_ids) for completion in written}) > 2
    for completion in written:
        assert not set(completion.token_ids[:-1]) & set(ends)
        assert completion.truncated == (completion.token_ids[-1] not in ends)
        assert 1 <= len(completion.token_ids) <= 6
        assert not completion.truncated or len(completion.token_ids) == 6


def test_a_checkpoints_own_generation_settings_do_not_count_and_are_kept() -> None:
    model = build("qwen3")
    own = GenerationConfig(top_k=1, do_sample=True, max_new_tokens=2, repetition_penalty=5.0)
    model.generation_config = own
    torch.manual_seed(0)
    (written,) = writer(model).write(prompts(6), 8, Sampling(max_completion_length=5))
    assert model.generation_config is own
    assert len({tuple(completion.token_ids) for completion in written}) > 1
    assert max(len(completion.token_ids) for completion in written) == 5


def test_another_thread_sees_the_models_own_settings_while_it_writes() -> None:
    """Checkpoints are written meanwhile, so the model's config, generation config and modules must not change."""
    model = build("qwen3")
    own = model.generation_config = GenerationConfig(max_new_tokens=99, eos_token_id=2)
    configuration = model.config.to_dict()
    seen: list[object] = []

    def stop() -> bool:
        seen.append(model.generation_config)
        assert model.config.to_dict() == configuration
        return False

    writer(model, should_stop=stop).write(prompts(2), 2, Sampling(max_completion_length=5, top_k=3))
    assert seen
    assert all(each is own for each in seen)


def test_modules_that_are_in_another_mode_stay_in_it() -> None:
    model = build("qwen3").train()
    model.model.layers[0].eval()
    before = [module.training for module in model.modules()]
    writer(model).write(prompts(1), 1, Sampling(max_completion_length=2))
    assert [module.training for module in model.modules()] == before


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(max_completion_length=6, top_k=1),
        Sampling(max_completion_length=6, top_p=1e-6),
        Sampling(max_completion_length=6, min_p=1.0),
    ],
    ids=["top_k", "top_p", "min_p"],
)
def test_a_draw_among_one_token_is_greedy(sampling: Sampling) -> None:
    model = build("qwen3")
    greedy = writer(model).write(prompts(6), 2, Sampling(max_completion_length=6, temperature=0.0))
    assert writer(model).write(prompts(6), 2, sampling) == greedy


def test_a_repetition_penalty_does_not_count_padding() -> None:
    """A prompt has the same completions alone and in a batch with a longer prompt."""
    model = build("qwen3")
    asked = prompts(9, 4)
    sampling = Sampling(max_completion_length=8, temperature=0.0, repetition_penalty=1.5)
    alone = [writer(model, pad_token_id=30).write([prompt], 1, sampling)[0] for prompt in asked]
    assert writer(model, pad_token_id=30).write(asked, 1, sampling) == alone
    assert alone != writer(model).write(asked, 1, Sampling(max_completion_length=8, temperature=0.0))


def test_a_model_with_adapters_writes_with_them() -> None:
    model = build("qwen3")
    greedy = Sampling(max_completion_length=8, temperature=0.0)
    before = writer(model).write(prompts(6), 1, greedy)
    adapted = add_lora(model, r=4, alpha=64.0, dropout=0.0, target="all-linear", seed=0)
    assert writer(adapted).write(prompts(6), 1, greedy) == before  # they begin as nothing
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(0))
    after = writer(adapted).write(prompts(6), 1, greedy)
    assert after != before
    # What vLLM is handed is the model with the adapters in it, under the names of a checkpoint.
    weights = dict(policy_weights(adapted))
    merged = build("qwen3")
    missing, unexpected = merged.load_state_dict(weights, strict=False)
    assert (missing, unexpected) == ([], [])
    assert writer(merged).write(prompts(6), 1, greedy) == after


def test_writing_breaks_off_at_the_next_token_when_it_is_asked_to() -> None:
    model = build("qwen3").train()
    asked: list[int] = []

    def stop() -> bool:
        asked.append(1)
        return len(asked) > 5

    with pytest.raises(GenerationStopped):
        writer(model, should_stop=stop).write(prompts(6), 2, Sampling(max_completion_length=100))
    assert len(asked) < 10
    assert model.training


def test_an_engine_gets_the_architecture_of_the_base_with_its_positions(tmp_path: Path) -> None:
    model = build("qwen3")
    RopeChange({"rope_type": "yarn", "factor": 4.0}).apply(model.config)
    adapted = add_lora(model, r=2)
    words = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(WordLevel({"a": 0}, unk_token="a")))
    save_architecture(adapted, words, tmp_path)
    read = AutoConfig.from_pretrained(tmp_path)
    assert (read.model_type, read.num_hidden_layers) == ("qwen3", model.config.num_hidden_layers)
    assert read.rope_parameters == model.config.rope_parameters
    assert read.max_position_embeddings == 4 * 128
    assert not list(tmp_path.glob("*.safetensors"))
    names = {name for name, _ in policy_weights(adapted)}
    assert names == set(dict(build("qwen3").named_parameters()))


def test_vllm_is_refused_where_it_is_not() -> None:
    with pytest.raises(ArgumentError) as refused:
        require_vllm(torch.device("cpu"))
    assert refused.value.where == "use_vllm"
    assert ("not installed" in refused.value.what) == (find_spec("vllm") is None)
