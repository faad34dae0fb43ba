"""Steps of several fp32 ranks compared with plain autograd on one, in fp32 and fp64: gradients, loss and norm.

Every rank computes the truth for itself: the same model, unstreamed, over the rows of all ranks. Ranks have different
numbers of rows, tokens and targets, prompts are masked, and the last micro-batch of a rank may be a filler.
"""

from __future__ import annotations

import copy
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

import streamtune
from streamtune import models, train
from streamtune.data import Tree, assign_to_ranks, collate
from streamtune.data.record_table import Example
from streamtune.distributed.deepspeed_config import PRESETS
from streamtune.models.quantize import quantize
from streamtune.recipe import DpoRecipe, Recipe
from streamtune.run.ranks import make_backend, sequence_ranks
from streamtune.tasks.preference import PairObjective, PreferenceBatch, batch_trees
from streamtune.train.step import accumulate_gradients
from tests.exactness.families import VOCAB, build
from tests.precision_kit import Errors, Float64, in_float64

RATE, STEPS = 1e-4, 3  # so small that AdamW does not make a difference of weights of one in rounding


def run(case: dict[str, Any]) -> dict[str, Any]:
    """Return the largest errors of any step: of a parameter's gradient (also of plain fp32 autograd), loss and norm.

    ``excess`` is the most by which any of them is above what plain autograd's error explains.
    """
    world = train.World(distributed.get_rank(), distributed.get_world_size(), case.get("sequence", 1))
    kind = DpoRecipe if case.get("objective") == "dpo" else Recipe
    recipe = kind(
        model_name_or_path="none",
        datasets=[{"path": "none"}],
        max_length=64,
        learning_rate=RATE,
        max_grad_norm=0.5,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=case.get("accumulation", 1),
        finetuning_type=case.get("finetuning", "full"),
        deepspeed=_deepspeed(case["engine"]),
        fsdp=case["engine"] == "fsdp",
        sequence_parallel_size=world.sequence_size,
        sequence_parallel=case.get("form", "auto"),
    )
    model = build(case.get("family", "llama"), **case.get("settings", {})).train()
    if "trained" in case:
        models.freeze_parts(model, models.TrainedParts(*case["trained"]))
    adapters = recipe.finetuning_type != "full"  # which are their own reference, without themselves
    if recipe.finetuning_type == "qlora":
        quantize(model, "nf4", torch.device("cpu"))
    if adapters:
        model = models.add_lora(model, r=4, alpha=8, dropout=0.0, target="all-linear", seed=0)
        for name, parameter in model.named_parameters():  # B is zero at first, and then A has no gradient
            if "lora_B" in name:  # small, as training leaves them: saturated pairs have a gradient of rounding alone
                nn.init.normal_(parameter, std=0.02, generator=torch.Generator().manual_seed(1))
    plain, reference = copy.deepcopy(model), copy.deepcopy(model).requires_grad_(False)
    with torch.no_grad():
        for name, parameter in reference.named_parameters():
            if "lora_B" in name:
                parameter.zero_()
            elif not adapters:
                parameter.add_(0.02)
    truth = _Truth(in_float64(_written_out(plain)), recipe, in_float64(_written_out(reference)))
    torchs = _Truth(plain, recipe, copy.deepcopy(reference))
    chunk = case.get("chunk", 5)
    shared = sequence_ranks(recipe, world)
    schedule = streamtune.Schedule(chunk_size=chunk, head_chunk_size=7, **case.get("schedule", {}))
    handle = streamtune.stream(model, schedule=schedule, sequence_parallel=shared)
    beside = streamtune.stream(reference, schedule=schedule, sequence_parallel=shared)
    backend = make_backend(recipe, model, handle.layers, world)
    objective: train.Objective
    if isinstance(recipe, DpoRecipe):
        asked = (model, handle) if adapters else (reference, beside)
        objective = PairObjective(handle, recipe, train.ModelReference(*asked))
    else:
        objective = train.SupervisedObjective(handle)
    found: dict[str, Any] = {"gradient": 0.0, "loss": 0.0, "norm": 0.0, "excess": 0.0, "where": ""}
    for step in range(STEPS):
        if case.get("dropped"):  # as after a NaN that is skipped
            _accumulate(
                backend, objective, handle, _mine(recipe, _rows(recipe, 7 + step, world.data_size), world), world
            )
            backend.drop_gradients()
        rows = _rows(recipe, step, world.data_size)
        batches = _mine(recipe, rows, world)
        score = _accumulate(backend, objective, handle, batches, world)
        with Float64():
            loss, gradients, norm = truth.step(rows)
        torch_loss, rounded, torch_norm = torchs.step(rows)
        got = whole_gradients(backend, model)
        pairs = {
            "loss": Errors(abs(score.loss / loss - 1), abs(torch_loss / loss - 1), 1),
            "norm": Errors(abs(backend.clip_gradients(0.5) / norm - 1), abs(torch_norm / norm - 1), 1),
        }
        for name, want in gradients.items():
            error = _relative(got[name].double(), want, norm)
            pairs[name] = Errors(error, _relative(rounded[name].double(), want, norm), want.numel())
            if error > found["gradient"]:
                found |= {"gradient": error, "parameter": name, "torch": pairs[name].plain}
        worst = max(pair.plain for pair in pairs.values())
        for name, pair in pairs.items():
            pair = pair if name in ("loss", "norm") else pair._replace(plain=worst)
            if pair.excess > found["excess"]:
                found |= {"excess": pair.excess, "where": f"{name}: {pair}"}
        found["loss"] = max(found["loss"], pairs["loss"].ours)
        found["norm"] = max(found["norm"], pairs["norm"].ours)
        backend.step(RATE)
    found["fillers"] = sum(world.gather_data_ranks(sum(batch.filler for batch in batches)))
    backend.close()
    return found


def _written_out(model: Any) -> Any:
    """Return the model with the dequantised weights of its 4-bit layers; the model itself if it has none."""
    if models.quantization_kind(model) is None:
        return model
    import bitsandbytes

    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        weight = module._parameters.get("weight")
        if type(weight).__name__ == "Params4bit":
            values = bitsandbytes.functional.dequantize_4bit(weight.data, weight.quant_state)
            linear = nn.Linear(*reversed(values.shape), bias=module.bias is not None)
            linear.weight, linear.bias = nn.Parameter(values, requires_grad=False), module.bias
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, linear)
    return model


def _deepspeed(engine: str) -> str | None:
    """Return a preset's name, or the path of a DeepSpeed file for options that no preset has."""
    if engine != "zero2_offload":
        return engine if engine.startswith("zero") else None
    config = PRESETS["zero2"]
    zero = config["zero_optimization"] | {"offload_optimizer": {"device": "cpu"}}
    path = Path(tempfile.mkdtemp()) / "zero2_offload.json"
    path.write_text(json.dumps(config | {"zero_optimization": zero, "zero_force_ds_cpu_optimizer": False}))
    return str(path)


def _accumulate(backend: Any, objective: Any, handle: Any, batches: list[Any], world: train.World) -> train.StepScore:
    settings = train.TrainSettings(1, 1, 0.5, 0, 0, 1, bf16=False, seed=0, out_of_memory_fix="")
    context = train.StepContext(backend, objective, settings, handle, world)
    score = accumulate_gradients(context, batches, step=1, stop=train.StopRequest())
    assert score is not None
    return score


def _relative(got: Tensor, want: Tensor, norm: float) -> float:
    return float((got - want).norm() / max(want.norm(), 1e-3 * norm))


def whole_gradients(backend: Any, model: Any) -> dict[str, Tensor]:
    """Return the full gradient of each parameter, gathered from all ranks."""
    found = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if hasattr(parameter, "ds_id") or hasattr(parameter, "_hp_mapping"):
            from deepspeed.utils import safe_get_full_grad

            found[name] = safe_get_full_grad(parameter).clone()
        elif isinstance(parameter.grad, DTensor):
            found[name] = parameter.grad.full_tensor()
        else:
            found[name] = parameter.grad.clone()
    return found


def _rows(recipe: Recipe, step: int, ranks: int) -> list[Any]:
    """Return rows or pairs of different lengths with masked prompts; the last step has one too few for all ranks."""
    generator = torch.Generator().manual_seed(step)
    count = 2 * ranks * recipe.gradient_accumulation_steps
    if step == STEPS - 1:
        count = max(1, ranks - 1)
    rows: list[Any] = []
    for index in range(count):
        length = int(torch.randint(9, 40, (), generator=generator))
        ids = torch.randint(3, VOCAB, (length,), generator=generator).tolist()
        if isinstance(recipe, DpoRecipe):
            cut = length // 2
            answers = [ids[cut:], torch.randint(3, VOCAB, (4 + index,), generator=generator).tolist()]
            rows.append(Tree(ids[:cut], answers, None, f"pair {index}", [True, False], None))
        else:
            labels = [-100] * (length // 3) + ids[length // 3 :]
            rows.append(Example(ids, labels, f"row {index}"))
    return rows


def _mine(recipe: Recipe, rows: list[Any], world: train.World) -> list[train.MicroBatch]:
    shares = assign_to_ranks(range(len(rows)), lambda row: len(_ids(rows[row])), ranks=world.data_size, batch_size=2)
    batches = []
    for part in shares[world.data_rank]:
        chosen = [rows[row] for row in part] or [rows[0]]
        if isinstance(recipe, DpoRecipe):
            batches.append(PreferenceBatch(**batch_trees(chosen, pad_token_id=0, share=False), filler=not part))
        else:
            made = collate(chosen, pad_token_id=0)
            batches.append(train.MicroBatch(**made, origins=tuple(row.origin for row in chosen), filler=not part))
    return batches


def _ids(row: Any) -> list[int]:
    return row.prompt + row.completions[0] + row.completions[1] if isinstance(row, Tree) else row.input_ids


class _Truth:
    """Plain autograd and AdamW on one model, one row at a time."""

    def __init__(self, model: nn.Module, recipe: Recipe, reference: nn.Module) -> None:
        self.model, self.recipe, self.reference = model, recipe, reference
        self.optimizer = make_optimizer(recipe, model)

    def step(self, rows: list[Any]) -> tuple[float, dict[str, Tensor], float]:
        """Take a step; return loss, gradients before clipping, and their norm."""
        self.optimizer.zero_grad()
        divisor = (
            len(rows)
            if isinstance(self.recipe, DpoRecipe)
            else sum(sum(label != -100 for label in row.labels[1:]) for row in rows)
        )
        total = 0.0
        for row in rows:
            loss = (self._pair(row) if isinstance(row, Tree) else self._row(row)) / divisor
            loss.backward()
            total += loss.item()
        trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        gradients = {name: p.grad.clone() for name, p in trained.items()}
        norm = torch.nn.utils.clip_grad_norm_(list(trained.values()), 0.5)
        self.optimizer.step()
        return total, gradients, float(norm)

    def _row(self, row: Example) -> Tensor:
        logits = self.model(input_ids=torch.tensor([row.input_ids]), use_cache=False).logits[0, :-1]
        return nn.functional.cross_entropy(logits, torch.tensor(row.labels[1:]), reduction="sum")

    def _pair(self, row: Tree) -> Tensor:
        won, lost = (self._score(self.model, row, i) - self._score(self.reference, row, i).detach() for i in (0, 1))
        assert isinstance(self.recipe, DpoRecipe)
        return -nn.functional.logsigmoid(self.recipe.beta * (won - lost))

    def _score(self, model: nn.Module, row: Tree, index: int) -> Tensor:
        answer = row.completions[index]
        logits = model(input_ids=torch.tensor([row.prompt + answer]), use_cache=False).logits[0]
        logps = logits[len(row.prompt) - 1 : -1].log_softmax(-1)
        return logps.gather(1, torch.tensor(answer)[:, None]).sum()


def make_optimizer(recipe: Recipe, model: nn.Module) -> torch.optim.Optimizer:
    from streamtune.run.model import make_optimizer as make

    return make(recipe, model)


assert os.environ.get("WORLD_SIZE"), "imported by ranks alone"
