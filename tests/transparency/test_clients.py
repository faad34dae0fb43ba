"""Trainers of other libraries give the same loss curve and the same weights on a streamed model as on a plain one.

Every trainer runs twice from the same weights and seed. In fp64 all that it logs at every step is compared, and the
weights at the end, to 1e-9; in fp32 the losses, to 1e-6. The objectives that take no loss from the model (DPO, GRPO and
others) compute it from hidden states or logits; the layers are streamed all the same.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset
from peft import LoraConfig
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    ContinuousBatchingConfig,
    DataCollatorForSeq2Seq,
    GenerationConfig,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from trl import (
    DistillationConfig,
    DistillationTrainer,
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

import streamtune
from tests.engine import test_trainers as kit
from tests.precision_kit import Float64

CHUNK = 8
STEPS = 4
EXACT, CLOSE = 1e-9, 1e-6
TIMES = ("runtime", "per_second", "step_time", "flos")
"""Parts of the names of logged times."""

ONE_BY_ONE = {"experts_implementation": "eager"}
"""Experts one by one: the grouped product has no fp64."""

tokenizer = kit.tokenizer
fp64 = kit.fp64
Make = Callable[[Any, PreTrainedTokenizerFast, Path], Trainer]

pytestmark = pytest.mark.slow


@pytest.fixture(params=["float64", "float32"])
def exact(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Both runs are computed in fp64 throughout; False is fp32, where they also differ by rounding."""
    with Float64() if request.param == "float64" else nullcontext():
        yield request.param == "float64"


def pairs(count: int = 16) -> Dataset:
    """Prompts with a good and a bad completion, 11 to 36 tokens a row, 19 on average."""
    return Dataset.from_list(
        [
            {
                "prompt": row["prompt"],
                "chosen": row["completion"] + " and so" * (1 + n % 3),
                "rejected": "no idea" + " at all" * (n % 2) + f" {n}",
            }
            for n, row in enumerate(kit.rows(count))
        ]
    )


def judged(count: int = 16) -> Dataset:
    """Completions that are judged one by one, every other one bad."""
    return Dataset.from_list(
        [
            {"prompt": row["prompt"], "completion": row["chosen" if n % 2 else "rejected"], "label": bool(n % 2)}
            for n, row in enumerate(pairs(count))
        ]
    )


def prompts(count: int = 16) -> Dataset:
    return Dataset.from_list([{"prompt": row["prompt"]} for row in kit.rows(count)])


def even_tokens(completion_ids: list[list[int]], **_: Any) -> list[float]:
    """Reward the share of even tokens, and a little for every token."""
    return [sum(token % 2 == 0 for token in ids) / len(ids) + 0.01 * len(ids) for ids in completion_ids]


def options(folder: Path, **more: Any) -> dict[str, Any]:
    """Arguments all trainers of TRL take."""
    given = {"max_steps": STEPS, "bf16": False, "gradient_checkpointing": False, "learning_rate": 0.1, **more}
    return kit.settings(folder, **given)


def token_rows(tokenizer: PreTrainedTokenizerFast) -> Dataset:
    """The good completions as ids, labels masked over the prompt."""
    out = []
    for row in pairs():
        prompt, completion = (tokenizer(row[part])["input_ids"] for part in ("prompt", "chosen"))
        out.append({"input_ids": prompt + completion, "labels": [-100] * len(prompt) + completion})
    return Dataset.from_list(out)


def hf(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path, **more: Any) -> Trainer:
    data = token_rows(tokenizer)
    arguments = TrainingArguments(**options(folder, **more))
    collate = DataCollatorForSeq2Seq(tokenizer)
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data.select(range(5)), data_collator=collate)


def own_loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
    """A focal loss of the logits, as a user writes it."""
    logits, wanted = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    each = torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-100, reduction="none")
    return ((1 - torch.exp(-each)) ** 2 * each).sum() / num_items_in_batch


def hf_own_loss(*given: Any) -> Trainer:
    trainer = hf(*given)
    trainer.compute_loss_func = own_loss
    return trainer


def offline(
    config: Any,
    trainer: Any,
    data: Dataset,
    model: Any,
    tokenizer: Any,
    folder: Path,
    adapters: Any = None,
    **more: Any,
) -> Trainer:
    """A trainer of rows that are there beforehand."""
    arguments = config(**options(folder, max_length=64, **more))
    return trainer(
        model,
        args=arguments,
        train_dataset=data,
        eval_dataset=data.select(range(5)),
        processing_class=tokenizer,
        peft_config=adapters,
    )


def online(
    config: Any,
    trainer: Any,
    model: Any,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    adapters: Any = None,
    **more: Any,
) -> Trainer:
    """A trainer that samples completions from the model it trains."""
    given = {"per_device_train_batch_size": 4, "num_generations": 4, "max_completion_length": 20, "beta": 0.05}
    given |= {"per_device_eval_batch_size": 4, "num_iterations": 2, **more}
    return trainer(
        model,
        even_tokens,
        args=config(**options(folder, **given)),
        train_dataset=prompts(),
        eval_dataset=prompts(2),
        processing_class=tokenizer,
        peft_config=adapters,
    )


def sft(*given: Any, **more: Any) -> Trainer:
    data = Dataset.from_list([{"prompt": row["prompt"], "completion": row["chosen"]} for row in pairs()])
    return offline(SFTConfig, SFTTrainer, data, *given, **more)


def dpo(*given: Any, **more: Any) -> Trainer:
    return offline(DPOConfig, DPOTrainer, pairs(), *given, **more)


def kto(*given: Any, **more: Any) -> Trainer:
    return offline(KTOConfig, KTOTrainer, judged(), *given, **more)


def reward(*given: Any, **more: Any) -> Trainer:
    return offline(RewardConfig, RewardTrainer, pairs(), *given, learning_rate=0.02, **more)


def grpo(*given: Any, **more: Any) -> Trainer:
    return online(GRPOConfig, GRPOTrainer, *given, **more)


def rloo(*given: Any, **more: Any) -> Trainer:
    return online(RLOOConfig, RLOOTrainer, *given, **more)


def orpo(*given: Any, **more: Any) -> Trainer:
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    return offline(ORPOConfig, ORPOTrainer, pairs(), *given, remove_unused_columns=False, **more)


def cpo(*given: Any, **more: Any) -> Trainer:
    from trl.experimental.cpo import CPOConfig, CPOTrainer

    return offline(CPOConfig, CPOTrainer, pairs(), *given, remove_unused_columns=False, **more)


def online_dpo(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Trainer:
    from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

    return OnlineDPOTrainer(
        model,
        reward_funcs=even_tokens,
        args=OnlineDPOConfig(**options(folder, max_new_tokens=20, missing_eos_penalty=None)),
        train_dataset=prompts(),
        processing_class=tokenizer,
    )


def teacher_of(model: Any) -> Any:
    """An unstreamed model of other weights."""
    teacher = loaded(Path(model.name_or_path)).eval()  # which seeds what is drawn here
    with torch.no_grad():
        for parameter in teacher.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.2)
    return teacher


def distillation(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Trainer:
    arguments = DistillationConfig(**options(folder, max_completion_length=20))
    return DistillationTrainer(
        model, teacher_of(model), args=arguments, train_dataset=prompts(), processing_class=tokenizer
    )


def gkd(model: Any, tokenizer: PreTrainedTokenizerFast, folder: Path) -> Trainer:
    """Half of the batches are sampled from the student."""
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    rows = [
        {"messages": [{"role": "user", "content": row["prompt"]}, {"role": "assistant", "content": row["chosen"]}]}
        for row in pairs()
    ]
    arguments = GKDConfig(**options(folder, max_length=64, max_new_tokens=20, lmbda=0.5, temperature=0.9))
    return GKDTrainer(
        model,
        teacher_of(model),
        args=arguments,
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )


def tpo(*given: Any, **more: Any) -> Trainer:
    from trl.experimental.tpo import TPOConfig, TPOTrainer

    data = pairs()
    data = data.add_column("reference", [row["chosen"] + " yes" for row in data])
    return offline(TPOConfig, TPOTrainer, data, *given, **more)


def also(make: Callable[..., Trainer], **more: Any) -> Make:
    return lambda *given, **others: make(*given, **more, **others)


def lora(make: Callable[..., Trainer], **more: Any) -> Make:
    """A trainer of adapters on every projection, which it draws itself."""

    def with_adapters(*given: Any, **others: Any) -> Trainer:
        adapters = LoraConfig(r=4, lora_alpha=16, target_modules="all-linear", task_type="CAUSAL_LM")
        torch.manual_seed(9)
        return make(*given, adapters=adapters, **more, **others)

    return with_adapters


CLIENTS: dict[str, Make] = {
    "hf": hf,
    "hf adamw": also(hf, max_steps=6, optim="adamw_torch", learning_rate=1e-3, lr_scheduler_type="cosine"),
    "hf neftune": also(hf, neftune_noise_alpha=5.0),
    "hf label smoothing": also(hf, label_smoothing_factor=0.1),
    "hf own loss": hf_own_loss,
    "sft": sft,
    "sft whole rows": also(sft, completion_only_loss=False),
    "sft nll": also(sft, loss_type="nll"),
    "sft dft": also(sft, loss_type="dft"),
    "sft moe": also(sft, router_aux_loss_coef=0.1),
    "dpo": dpo,
    "dpo lora": lora(dpo),
    "dpo precomputed reference": also(dpo, precompute_ref_log_probs=True),
    "dpo reference synced": also(dpo, sync_ref_model=True, ref_model_sync_steps=2),
    "dpo padding free": also(dpo, padding_free=True),
    "dpo weighted": also(dpo, use_weighting=True),
    "dpo with sft": also(dpo, loss_type=["sigmoid", "sft"], loss_weights=[1.0, 0.5]),
    "dpo moe": also(dpo, router_aux_loss_coef=0.1, model_init_kwargs=ONE_BY_ONE),
    "kto": kto,
    "kto lora": lora(kto),
    "grpo": grpo,
    "grpo lora": lora(grpo),
    "grpo gspo": also(grpo, importance_sampling_level="sequence", loss_type="grpo"),
    "grpo moe": also(grpo, router_aux_loss_coef=0.1, model_init_kwargs=ONE_BY_ONE),
    "grpo entropy": also(grpo, top_entropy_quantile=0.5, entropy_coef=0.01),
    "rloo": rloo,
    "orpo": orpo,
    "orpo moe": orpo,
    "cpo": cpo,
    "simpo": also(cpo, loss_type="simpo", cpo_alpha=0.0),
    "reward": reward,
    "tpo": tpo,
    "gkd": gkd,
    "online dpo": online_dpo,
    "distillation": distillation,
}
CHECKPOINTING = {"sft", "dpo", "kto", "grpo", "rloo", "orpo", "dpo lora", "kto lora", "grpo lora", "reward"}
"""Clients that are asked for gradient checkpointing on the streamed model, as TRL does by default."""
LATER = {"sft", "dpo", "kto", "grpo", "dpo lora", "rloo", "orpo", "reward"}
"""Clients whose model is also streamed after the trainer was made."""


@pytest.fixture(scope="module")
def checkpoints(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with tiny models: some trainers load the reference from where the model came from."""
    folders = {family: tmp_path_factory.mktemp(family) for family in ("qwen3", "mixtral")}
    for family, folder in folders.items():
        model = kit.model_for(tokenizer, family).double()
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folders


def loaded(folder: Path, kind: Any = AutoModelForCausalLM, **more: Any) -> Any:
    """The model of a folder; its feed-forward layers note the longest piece of a row."""
    torch.manual_seed(0)  # a classifier's head is drawn
    model = kind.from_pretrained(folder, dtype=torch.get_default_dtype(), **ONE_BY_ONE, **more).train()
    for layer in model.model.layers:
        layer.mlp.register_forward_pre_hook(streamtune.chunkwise(kit.note_length))
    return model


def curves(trainer: Trainer) -> list[dict[str, float]]:
    """Return a trainer's log without times, and without the accuracy where all margins are zero but for rounding."""
    kept = []
    for entry in trainer.state.log_history:
        tied = abs(entry.get("rewards/margins", 1.0)) < 1e-12  # as in the first step, where the reference is the model
        left_out = (*TIMES, "accuracies") if tied else TIMES
        kept.append({name: value for name, value in entry.items() if not any(part in name for part in left_out)})
    return kept


def relative(got: float, want: float) -> float:
    return abs(got - want) / max(abs(want), 1e-6)


def assert_close(got: list[float], want: list[float]) -> None:
    """Assert losses that differ by 1e-6 of themselves, or of 1 where they are smaller: some are differences near 0."""
    assert len(got) == len(want)
    apart = [abs(mine - other) / max(abs(other), 1.0) for mine, other in zip(got, want, strict=True)]
    print(f"losses apart by at most {max(apart):.1e}")
    assert max(apart) <= CLOSE


def assert_same(got: Trainer, want: Trainer, before: dict[str, Tensor], exact: bool) -> None:
    """Assert the same logs at every step and the same weights."""
    assert_close(kit.losses(got), kit.losses(want))
    if not exact:
        return
    ours, theirs = curves(got), curves(want)
    assert len(kit.losses(want)) == want.args.max_steps
    assert [entry.keys() for entry in ours] == [entry.keys() for entry in theirs]
    off: dict[str, float] = {}
    for mine, other in zip(ours, theirs, strict=True):
        for name in other:
            off[name] = max(off.get(name, 0.0), relative(mine[name], other[name]))
    after, wanted = kit.weights(got.model), kit.weights(want.model)
    moved = difference(after, wanted, before)
    print(
        f"{type(got).__name__}: losses off by {off['loss']:.1e}, logs by {max(off.values()):.1e}, weights {moved:.1e}"
    )
    assert not {name: value for name, value in off.items() if not value <= EXACT}
    assert moved <= EXACT


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor], before: dict[str, Tensor]) -> float:
    """Return the difference of the weights, relative to the whole update."""
    assert ours.keys() == theirs.keys() == before.keys()
    moved = torch.stack([(theirs[name] - before[name]).norm() for name in before]).norm()
    assert moved > 1e-3
    return float(torch.stack([(ours[name] - theirs[name]).norm() for name in before]).norm() / moved)


WHOLE_EVALUATION = ("orpo moe",)
"""Clients that evaluate without labels a model that returns router logits: the plain model computes these calls."""


def cases() -> list[Any]:
    """Every client streamed first, some also streamed after the trainer was made."""
    first = [pytest.param(name, "streamed first") for name in CLIENTS]
    return first + [pytest.param(name, "trainer first") for name in CLIENTS if name in LATER]


@pytest.mark.filterwarnings("ignore::UserWarning:trl.experimental")
@pytest.mark.filterwarnings("ignore:a streamed evaluation with labels or gradients returns")
@pytest.mark.parametrize(("client", "order"), cases())
def test_trainer(
    client: str,
    order: str,
    tokenizer: PreTrainedTokenizerFast,
    checkpoints: dict[str, Path],
    tmp_path: Path,
    exact: bool,
) -> None:
    runs, pieces = [], []
    for streamed in (False, True):
        if client == "reward":
            model = loaded(checkpoints["qwen3"], AutoModelForSequenceClassification, num_labels=1)
        else:
            model = loaded(checkpoints["mixtral" if "moe" in client else "qwen3"])
            model.config.output_router_logits = client in ("sft moe", "orpo moe")
        early = streamed and order == "streamed first"
        more = {"gradient_checkpointing": True} if streamed and client in CHECKPOINTING else {}
        with streamtune.stream(model, chunk_size=CHUNK) if early else nullcontext():
            trainer = CLIENTS[client](model, tokenizer, tmp_path / str(streamed), **more)
            before = kit.weights(trainer.model)
            for module in model.modules():
                module.longest = 0  # the reference may have been computed by now
            with streamtune.stream(model, chunk_size=CHUNK) if streamed and not early else nullcontext():
                trainer.train()
                if client in WHOLE_EVALUATION:
                    pieces.append(kit.longest_piece(trainer.model))
                if trainer.eval_dataset is not None:
                    trainer.evaluate()
        if client not in WHOLE_EVALUATION:
            pieces.append(kit.longest_piece(trainer.model))
        runs.append(trainer)
    assert pieces[0] > CHUNK >= pieces[1]
    assert_same(runs[1], runs[0], before, exact)
    assert_plain(runs[1].model, runs[0].model)


def assert_plain(model: Any, plain: Any) -> None:
    """Assert that nothing is streamed any more, although the trainer put a forward of its own around the streamed."""
    ids = torch.arange(30)[None]
    for module in model.modules():
        module.longest = 0
    outputs = [m.eval()(input_ids=ids) for m in (model, plain)]
    apart = (outputs[0].logits - outputs[1].logits).norm() / outputs[1].logits.norm()
    assert apart <= (EXACT if model.dtype == torch.float64 else 1e-3)
    assert kit.longest_piece(model) == 30


def batches(tokenizer: PreTrainedTokenizerFast) -> DataLoader:
    return DataLoader(token_rows(tokenizer), batch_size=2, collate_fn=DataCollatorForSeq2Seq(tokenizer))


def test_accelerate_loop(tokenizer: PreTrainedTokenizerFast, checkpoints: dict[str, Path], exact: bool) -> None:
    """A loop of one's own: accumulation of two batches, clipping, AdamW."""
    runs = []
    for streamed in (False, True):
        model = loaded(checkpoints["qwen3"])
        before = kit.weights(model)
        with streamtune.stream(model, chunk_size=CHUNK) if streamed else nullcontext():
            accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            prepared, optimizer, loader = accelerator.prepare(model, optimizer, batches(tokenizer))
            curve = []
            for batch in loader:
                with accelerator.accumulate(prepared):
                    loss = prepared(**batch).loss
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        curve.append(float(accelerator.clip_grad_norm_(prepared.parameters(), 1.0)))
                    optimizer.step()
                    optimizer.zero_grad()
                curve.append(float(loss.detach()))
        runs.append((curve, kit.weights(model), kit.longest_piece(model)))
    (theirs, wanted, whole), (ours, after, piece) = runs
    assert len(theirs) == 8 + 4
    assert_close(ours, theirs)
    moved = difference(after, wanted, before)
    print(f"weights apart by {moved:.1e}")
    if exact:
        assert ours == pytest.approx(theirs, rel=EXACT)
        assert moved <= EXACT
    assert whole > CHUNK >= piece


@pytest.mark.filterwarnings("ignore:.isinstance.treespec")
def test_lightning(
    tokenizer: PreTrainedTokenizerFast, checkpoints: dict[str, Path], tmp_path: Path, exact: bool
) -> None:
    """A model within a module of Lightning; left out where the extra ``clients`` is not installed."""
    lightning = pytest.importorskip("pytorch_lightning")

    class Module(lightning.LightningModule):
        def __init__(self, model: Any) -> None:
            super().__init__()
            self.model, self.curve = model, []

        def training_step(self, batch: Any, index: int) -> Tensor:
            loss = self.model(**batch).loss
            self.curve.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    runs = []
    for streamed in (False, True):
        module = Module(loaded(checkpoints["qwen3"]))
        before = kit.weights(module.model)
        with streamtune.stream(module.model, chunk_size=CHUNK) if streamed else nullcontext():
            trainer = lightning.Trainer(
                max_steps=STEPS,
                accelerator="cpu",
                gradient_clip_val=1.0,
                accumulate_grad_batches=2,
                default_root_dir=tmp_path,
                logger=False,
                enable_checkpointing=False,
                enable_progress_bar=False,
            )
            trainer.fit(module, batches(tokenizer))
        runs.append((module.curve, kit.weights(module.model), kit.longest_piece(module.model)))
    (theirs, wanted, whole), (ours, after, piece) = runs
    assert_close(ours, theirs)
    moved = difference(after, wanted, before)
    print(f"weights apart by {moved:.1e}")
    if exact:
        assert ours == pytest.approx(theirs, rel=EXACT)
        assert moved <= EXACT
    assert whole > CHUNK >= piece


@pytest.mark.usefixtures("fp64")
def test_continuous_batching_is_the_plain_models(
    tokenizer: PreTrainedTokenizerFast, checkpoints: dict[str, Path]
) -> None:
    """Its cache takes layers that are not chunked; the same tokens, and the model is streamed again afterwards."""
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in kit.rows(3)]
    given: dict[str, Any] = {
        "generation_config": GenerationConfig(do_sample=False, max_new_tokens=6, pad_token_id=0, eos_token_id=2),
        "continuous_batching_config": ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=64),
        "progress_bar": False,
    }
    model = loaded(checkpoints["qwen3"]).eval()
    plain = model.generate_batch(prompts, **given)
    with streamtune.stream(model, chunk_size=CHUNK):
        streamed = model.generate_batch(prompts, **given)
        for module in model.modules():
            module.longest = 0
        ids = torch.arange(30)[None]
        model(input_ids=ids, labels=ids).loss.backward()
        assert kit.longest_piece(model) <= CHUNK
    tokens = [[answer.generated_tokens for answer in each.values()] for each in (streamed, plain)]
    assert len(tokens[0]) == len(prompts)
    assert tokens[0] == tokens[1]
    assert all(tokens[0])
