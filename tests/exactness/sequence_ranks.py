"""What ranks that share a sequence are tested by: the checks a case names, and the process that runs them.

Every rank runs every case, in the same order, with the same rows. Rank 0 computes the reference alone.
"""

from __future__ import annotations

import copy
import json
import math
import os
import re
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import streamtune
from streamtune import RouterLoss, Schedule, SequenceParallel, StreamHandle
from streamtune.data.batches import collate as batching
from streamtune.engine import check_packing
from streamtune.errors import StreamTuneError
from streamtune.models import add_lora
from streamtune.ops import Divergence, TokenLoss
from streamtune.tasks.preference import PairObjective, PreferenceBatch, batch_trees
from streamtune.train import ModelReference, SupervisedObjective
from streamtune.train.objective import call_model
from tests.conformance.reducer import build as build_any
from tests.precision_kit import Errors, Float64, Reference, errors, in_float64, reference_of, relative, total_error

from . import test_dpo as dpo
from . import test_token_losses as token_losses
from .families import FAMILIES, batch, build, evaluation, gradients, reference
from .sequence_cases import RECURRENT, WITHOUT_POSITIONS, Case, cases
from .test_branches import Rows, objective
from .test_branches import alone as rows_alone
from .test_branches import rows as trees
from .test_packing import apart, packed, targets
from .test_packing import rows as packs
from .test_routers import routed
from .test_shared_turns import conversations


def model_of(case: Case) -> Any:
    """The model, the same on every rank."""
    if case.check in ("routers", "routes"):
        return routed(case.model)
    known = build if case.model in FAMILIES else build_any
    # A configuration changes what it is given.
    return known(case.model, **copy.deepcopy(case.overrides)) if known is build else known(case.model)


def shared(model: nn.Module, case: Case, **more: Any) -> StreamHandle:
    """The model streamed by all ranks together."""
    schedule = Schedule(**{"chunk_size": 4, "head_chunk_size": 5, **case.schedule})
    return streamtune.stream(model, schedule=schedule, sequence_parallel=SequenceParallel(form=case.form), **more)  # type: ignore[arg-type]


Loss = Callable[[nn.Module, dict[str, Any]], Tensor]
Found = tuple[Tensor, dict[str, Tensor]]


def together(model: nn.Module, inputs: dict[str, Any], loss: Loss | None = None) -> Found:
    """The loss on this rank, and the sum of all ranks' gradients."""
    value, grads = gradients(model, inputs, loss)
    for grad in grads.values():
        dist.all_reduce(grad)
    return value, grads


def compared(model: nn.Module, case: Case, inputs: dict[str, Any], want: Callable[[], Reference]) -> dict[str, float]:
    """How far loss and gradient are off."""
    known = want() if dist.get_rank() == 0 else None
    with shared(model, case) as handle:
        found = together(model, inputs)
        assert handle.tiers.host.live_bytes == 0
    if known is not None and case.model in (*RECURRENT, *WITHOUT_POSITIONS):
        row = LARGEST.setdefault(case.model, {})
        row |= {whose: max(error, row.get(whose, 0.0)) for whose, error in largest(found, known).items()}
    return off(found, known)


LARGEST: dict[str, dict[str, float]] = {}
"""Of models with states, the largest error of any parameter's gradient in any case: ours, and plain torch's."""


def largest(found: Found, want: Reference) -> dict[str, float]:
    """Of errors relative to the norm of each parameter's gradient."""
    pairs = [pair for name, pair in want.compare(found).items() if name in want.truth[1]]
    return {"ours": max(pair.ours for pair in pairs), "torch": max(pair.plain for pair in pairs)}


def off(found: Found, want: Reference | None) -> dict[str, float]:
    """By how much errors are above what plain torch's explain; nothing on ranks without a reference."""
    if want is None:
        return {}
    pairs = want.compare(found)
    worst = max(pairs, key=lambda name: pairs[name].excess)
    return {f"{name}, {pairs[name]}": max(pairs[name].excess, 0.0) for name in ("loss", worst)}


def check_loss(case: Case) -> dict[str, float]:
    model, inputs = model_of(case), batch(case.kind)
    return compared(model, case, inputs, lambda: reference(model, inputs))


def check_lora(case: Case) -> dict[str, float]:
    model: Any = add_lora(model_of(case), r=4)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)) * 0.1)
    return compared(model, case, inputs := batch(case.kind), lambda: reference(model, inputs))


def check_frozen(case: Case) -> dict[str, float]:
    """Only weights that make no state are trained, so that states need a gradient on some ranks; backward twice."""
    model, inputs = model_of(case), batch(case.kind)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("feed_forward" in name or "mlp" in name)

    def twice(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        loss = model(**inputs).loss
        loss.backward(retain_graph=True)
        return loss

    want = reference(model, inputs, twice) if dist.get_rank() == 0 else None
    with shared(model, case):
        return off(together(model, inputs, twice), want)


def check_packed(case: Case) -> dict[str, float]:
    model, pieces = model_of(case), packs()
    inputs = {**packed(pieces), "num_items_in_batch": targets(pieces)}
    return compared(model, case, inputs, lambda: apart(model, pieces))


def check_token_losses(case: Case) -> dict[str, float]:
    """Another loss than the cross entropy, of packed rows with weights; what is measured is of whole rows."""
    model, rows = model_of(case), token_losses.examples()
    loss, alone = TokenLoss("focal", z_loss=1e-3), [token_losses.batches("one", [row])[0] for row in rows]
    [batch] = token_losses.batches("packed", rows)
    plain = SupervisedObjective(None, loss)
    want = reference_of(model, lambda m: token_losses.gradients(m, plain, alone)) if dist.get_rank() == 0 else None
    with shared(model, case) as handle:
        objective = SupervisedObjective(handle, loss)
        value, grads = token_losses.gradients(model, objective, [batch])
        measured = objective.score(model, batch, 1.0).metrics["nll"][0]
    for grad in grads.values():
        dist.all_reduce(grad)
    nll = sum(call_model(model, row, num_targets=1).loss.item() for row in alone)
    return {**off((value, grads), want), "nll": abs(measured - nll) / nll}


def check_teacher(case: Case) -> dict[str, float]:
    """A divergence from a teacher whose tokens the ranks share as well."""
    model, rows = model_of(case), token_losses.examples()
    teacher = build("qwen3", hidden_size=48).eval().requires_grad_(False)
    loss, alone = TokenLoss(divergence=Divergence("jsd")), [token_losses.batches("one", [row])[0] for row in rows]

    def plain(model: Any) -> Found:
        wide = in_float64(teacher) if model.lm_head.weight.dtype == torch.float64 else teacher
        return token_losses.gradients(model, SupervisedObjective(None, loss, ModelReference(wide, None)), alone)  # type: ignore[arg-type]

    want = reference_of(model, plain) if dist.get_rank() == 0 else None
    with shared(model, case) as handle, shared(teacher, case) as other:
        objective = SupervisedObjective(handle, loss, ModelReference(teacher, other))
        value, grads = token_losses.gradients(model, objective, token_losses.batches("packed", rows))
    for grad in grads.values():
        dist.all_reduce(grad)
    return off((value, grads), want)


def check_packs(case: Case) -> dict[str, float]:
    """Two packed sequences whose rows end at different tokens: one's state goes on where the other's begins anew."""
    model, packs_of_rows = model_of(case), [packs((9, 20, 8, 23)), packs((31, 9, 20), seed=6)]
    pieces = [piece for each in packs_of_rows for piece in each]
    inputs = {**packed(*packs_of_rows), "num_items_in_batch": targets(pieces)}
    return compared(model, case, inputs, lambda: apart(model, pieces))


def check_scores(case: Case) -> dict[str, float]:
    """Log-probabilities and entropies of whole rows on every rank, and an objective that mixes all of them.

    Rows are summed in fp64: in fp32 the sums of about -166 are rounded to 1.5e-5, and so is every gradient, by chance
    more in ours or in plain torch.
    """
    model, inputs = model_of(case), batch(case.kind)
    labels = nn.functional.pad(inputs.pop("labels"), (0, 1), value=-100)[:, 1:]

    def mixed(scores: Any) -> Tensor:
        per_row = scores.logprobs.double().sum(1)
        return -torch.nn.functional.logsigmoid(per_row[0] - per_row[1:]).sum() + (scores.entropy * labels.ge(0)).mean()

    def by(handle: StreamHandle) -> Loss:
        return lambda model, inputs: mixed(
            handle.logprobs(inputs["input_ids"], labels, entropy=True, temperature=0.7, **rest(inputs))
        )

    def rest(inputs: dict[str, Any]) -> dict[str, Any]:
        return {key: value for key, value in inputs.items() if key != "input_ids"}

    def plain(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        logprobs = (model(**inputs).logits / 0.7).log_softmax(-1)
        picked = logprobs.gather(-1, labels.clamp_min(0)[..., None])[..., 0] * labels.ge(0)
        entropy = -(logprobs.exp() * logprobs).sum(-1) * labels.ge(0)
        return mixed(streamtune.engine.TokenScores(picked, entropy, None))

    want = reference(model, inputs, plain) if dist.get_rank() == 0 else None
    with shared(model, case) as handle:
        return off(together(model, inputs, by(handle)), want)


def check_branches(case: Case) -> dict[str, float]:
    model, given = model_of(case), trees()
    want = reference(model, {"rows": given}, rows_alone) if dist.get_rank() == 0 else None
    with shared(model, case) as handle:

        def loss(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
            rows: Rows = inputs["rows"]
            scores = handle.logprobs(rows.ids, rows.targets, branches=rows.branches)
            return objective(scores.logprobs[rows.targets != -100], rows.row_of_target)

        return off(together(model, {"rows": given}, loss), want)


def check_pairs(case: Case) -> dict[str, float]:
    """Pairs that share turns, in a tree of four levels, and a loss that reads common tokens of both by themselves."""
    model, trees_of_pairs, recipe = model_of(case), conversations(), dpo.recipe_of(loss_type="orpo")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batching, "LEAST_SAVED", 1)
        pairs = PreferenceBatch(**batch_trees(trees_of_pairs, pad_token_id=0, share=True))

    def plain(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        return dpo.plain_pairs(model, model, trees_of_pairs, recipe)

    want = reference(model, {}, plain) if dist.get_rank() == 0 else None
    with shared(model, case) as handle:
        scored = PairObjective(handle, recipe, None)
        return off(together(model, {}, lambda model, _: scored.score(model, pairs, len(trees_of_pairs)).loss), want)


def check_routers(case: Case) -> dict[str, float]:
    model, inputs = model_of(case), batch(case.kind)
    model.router_aux_loss_coef = 0.5
    return compared(model, case, inputs, lambda: reference(model, inputs))


def check_calls(case: Case) -> dict[str, float]:
    """Ways to call: few tokens, embeddings, unnamed arguments, tuples, a divisor, without gradients, autocast."""
    model, worst = model_of(case), {}
    whole = batch(case.kind)
    ids, labels, mask = whole["input_ids"], whole["labels"], whole["attention_mask"]
    embeds = model.get_input_embeddings()(ids).detach()

    def autocast(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model(**inputs).loss

    ways: dict[str, tuple[dict[str, Any], Loss | None]] = {
        f"{count} tokens": ({"input_ids": ids[:1, :count], "labels": ids[:1, :count]}, None) for count in (2, 3, 5)
    }
    ways["embeddings"] = ({"inputs_embeds": embeds, "labels": labels, "attention_mask": mask}, None)
    ways["unnamed, tuple"] = (whole, lambda model, x: model(ids, mask, labels=labels, return_dict=False)[0])
    ways["divisor"] = ({**whole, "num_items_in_batch": torch.tensor(7)}, None)
    wide = in_float64(model)
    for name, (inputs, loss) in ways.items():
        if name in ("2 tokens", "3 tokens"):  # two see one another at most: in fp32 their queries' gradient is rounding
            with Float64():
                _, truth = gradients(wide, inputs, loss)
                with shared(wide, case):
                    worst[name] = max(errors(together(wide, inputs, loss)[1], truth).values())
            continue
        want = reference(model, inputs, loss) if dist.get_rank() == 0 else None
        with shared(model, case):
            worst |= {f"{name}: {what}": value for what, value in off(together(model, inputs, loss), want).items()}
    truth, quiet = reference(model, whole).truth[1], evaluation(model, whole)
    narrow = total_error(gradients(model, whole, autocast)[1], truth)
    with shared(model, case):
        worst["autocast"] = max(total_error(together(model, whole, autocast)[1], truth) - 1.1 * narrow, 0.0)
        with torch.no_grad():
            worst |= off((model.eval()(**whole).loss, {}), quiet)
    model.train()
    return worst


def check_groups(case: Case) -> dict[str, float]:
    """Two groups, each with rows of its own: all ranks' gradients add up to that of all rows."""
    pairs = [dist.new_group([first, first + 1]) for first in range(0, dist.get_world_size(), 2)]
    mine = dist.get_rank() // 2
    model, inputs = model_of(case), batch(case.kind)
    items = int((inputs["labels"][:, 1:] != -100).sum())

    def loss(model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        return model(**inputs, num_items_in_batch=items).loss

    want = reference(model, inputs, loss) if dist.get_rank() == 0 else None
    rows = {key: value[:1] if mine == 0 else value[1:] for key, value in inputs.items()}
    ranks = SequenceParallel(pairs[mine], case.form)  # type: ignore[arg-type]
    with streamtune.stream(model, chunk_size=5, sequence_parallel=ranks):
        value, grads = together(model, rows, loss)
    dist.all_reduce(total := value.clone())
    return off((total / 2, grads), want)


def check_routes(case: Case) -> dict[str, float]:
    """The experts' frequencies of a step, counted before it: those of one rank alone."""
    model, inputs = in_float64(model_of(case)), batch(case.kind)
    with Float64(), streamtune.stream(model, chunk_size=8, router_loss=RouterLoss(0.5)) as handle:
        want = handle.count_routes([inputs]) / dist.get_world_size()  # every rank has counted all of them
    with Float64(), shared(model, case, router_loss=RouterLoss(0.5)) as handle:
        found = handle.count_routes([inputs])
    return {"routes": float((found - want).abs().max())}


def check_dropout(case: Case) -> dict[str, float]:
    """Ranks draw their own numbers, outside as before; the backward draws the forward's again.

    With dropout the loss is a function of the generator's state. Its slope along the gradient is the gradient's norm.
    In fp64, so that a small step tells the slope.
    """
    model = in_float64(build(case.model, attention_dropout=0.2, **case.overrides))
    inputs = batch(case.kind)
    with Float64(), shared(model, case) as handle:
        torch.manual_seed(11)
        loss, grads = together(model, inputs)
        after = torch.get_rng_state()
        losses = []
        square = sum(grad.double().square().sum() for grad in grads.values())
        for step in (1e-4, -1e-4):
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.add_(step * (grads[name].double() / square.sqrt()).to(parameter.dtype))
            torch.manual_seed(11)
            losses.append(float(model(**inputs).loss.detach()))
            with torch.no_grad():
                for name, parameter in model.named_parameters():
                    parameter.sub_(step * (grads[name].double() / square.sqrt()).to(parameter.dtype))
        slope = (losses[0] - losses[1]) / 2e-4
        torch.manual_seed(11)
        again = float(model(**inputs).loss)
        model.eval()
        calm = float(model(**inputs).loss)
        model.train()
        with torch.no_grad():  # whether the numbers of the ranks differ
            from streamtune.engine.sequence.calls import different_random_state_per_rank

            torch.manual_seed(11)
            assert handle.sequence_parallel is not None
            with different_random_state_per_rank(handle.sequence_parallel, torch.device("cpu")):
                mine = torch.rand(4)
            outside = torch.rand(4)
    numbers = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(numbers, mine)
    kept = [torch.empty_like(outside) for _ in range(dist.get_world_size())]
    dist.all_gather(kept, outside)
    assert not torch.equal(numbers[0], numbers[1])
    assert torch.equal(kept[0], kept[1])
    assert abs(calm - float(loss)) > 1e-4, "dropout did nothing"
    states = [torch.empty_like(after) for _ in range(dist.get_world_size())]
    dist.all_gather(states, after)
    assert torch.equal(states[0], states[1])
    return {"loss": abs(again / float(loss) - 1), "slope": abs(slope / float(square.sqrt()) - 1)}


def check_preflight(case: Case) -> dict[str, float]:
    model = model_of(case)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    with shared(model, case) as handle:
        handle.check()
    changed = [name for name, p in model.named_parameters() if not torch.equal(p, before[name]) or p.grad is not None]
    assert changed == []
    return {"changed": 0.0}


def check_traffic(case: Case) -> dict[str, float]:
    """What a step sends is what docs/decisions/015-sequence-parallel.md says."""
    model, inputs = model_of(case), batch(case.kind)
    sent = [0]
    exchange, ring = dist.all_to_all_single, dist.batch_isend_irecv

    def counted_exchange(out: Tensor, x: Tensor, group: Any) -> Any:
        sent[0] += x.nbytes * (dist.get_world_size(group) - 1) // dist.get_world_size(group)
        return exchange(out, x, group=group)

    def counted_ring(calls: list[Any]) -> Any:
        sent[0] += sum(call.tensor.nbytes for call in calls if call.op is dist.isend)
        return ring(calls)

    with shared(model, case) as handle:
        dist.all_to_all_single, dist.batch_isend_irecv = counted_exchange, counted_ring
        try:
            gradients(model, inputs)
        finally:
            dist.all_to_all_single, dist.batch_isend_irecv = exchange, ring
        size, config = dist.get_world_size(), model.config
        rows, own = len(inputs["input_ids"]), -(-inputs["input_ids"].shape[1] // size)
        chunks = handle.schedule.chunks(own)
    head, element = config.head_dim, 4
    q = o = config.num_attention_heads * head * element
    if case.form == "ring":
        kv = 2 * config.num_key_value_heads * head * element
        blocks = sum(chunk.stop for chunk in chunks)
        want = blocks * kv * ((size - 1) * 3 + size)  # forward, replay, backward; dK and dV
    else:
        kv = 2 * math.lcm(config.num_key_value_heads, size) * head * element
        want = (3 * own * (q + kv + o) + chunks[-1].start * kv) * (size - 1) // size
    return {"bytes": float(sent[0] - want * rows * config.num_hidden_layers)}


def check_state_traffic(case: Case) -> dict[str, float]:
    """Each shard but the last sends one state, and gets one gradient; nothing else is sent from rank to rank."""
    model, inputs = model_of(case), batch(case.kind)
    sent, send = [0], dist.isend

    def counted(x: Tensor, to: int, group: Any, tag: int) -> Any:
        sent[0] += x.nbytes if x.is_floating_point() else 0  # headers are integers
        return send(x, to, group=group, tag=tag)

    with shared(model, case) as handle:
        dist.isend = counted
        try:
            gradients(model, inputs)
        finally:
            dist.isend = send
        chunks = handle.schedule.chunks(-(-inputs["input_ids"].shape[1] // dist.get_world_size()))
    dist.all_reduce(total := torch.tensor(sent[0]))
    config = model.config
    state = len(inputs["input_ids"]) * config.hidden_size * config.conv_L_cache * 4
    convolutions = config.layer_types.count("conv")
    assert convolutions
    return {"bytes": float(total - 2 * (len(chunks) * dist.get_world_size() - 1) * state * convolutions)}


def check_refused(case: Case) -> dict[str, float]:
    """By name, on every rank, and the model is as it was."""

    def refused(what: str, act: Callable[[], object]) -> None:
        with pytest.raises(StreamTuneError, match=re.escape(what)):
            act()

    for family, what in (
        ("xlstm", "xLSTMForCausalLM"),
        ("bloom", "has its own attention code"),
    ):
        other = build_any(family)
        refused(what, lambda other=other: shared(other, case))  # type: ignore[misc]
        assert not any("forward" in module.__dict__ for module in other.modules())
    refused("needs a streamed head", lambda: shared(build("llama"), case, head=False))
    from_tokens, plain_batch = build_any("camembert"), batch("plain")
    with shared(from_tokens, case):
        refused("computes positions from all tokens", lambda: from_tokens(**plain_batch))
    both, pieces = build_any("falcon_h1"), packs()
    with shared(both, case) as handle:
        refused("has both attention and a recurrent state", lambda: both(**packed(pieces)))
        refused("has both attention and a recurrent state", lambda: check_packing(handle))
    three_heads = build("qwen3", num_attention_heads=3, num_key_value_heads=3)
    refused("cannot be divided among", lambda: shared(three_heads, Case("qwen3", form="ulysses")))
    model, inputs = build("llama"), batch("plain")
    square = torch.ones(3, 1, 37, 37, dtype=torch.bool).tril()
    with shared(model, case):
        refused("would return only this rank's logits", lambda: model(input_ids=inputs["input_ids"]))
        refused("attention_mask must be a padding mask [B, T]", lambda: model(**inputs, attention_mask=square))
        refused("'token_type_ids'", lambda: model(**inputs, token_type_ids=inputs["input_ids"]))
        refused("output_hidden_states", lambda: model(**inputs, output_hidden_states=True))
        with torch.no_grad():
            whole = model(input_ids=inputs["input_ids"]).logits
            written = model.generate(inputs["input_ids"][:, :5], max_new_tokens=4, do_sample=False)
    plain = model(input_ids=inputs["input_ids"]).logits.detach()
    with Float64():
        truth = in_float64(model)(input_ids=inputs["input_ids"]).logits
    return {
        "logits of a call that is not shared": max(
            Errors(relative(whole, truth), relative(plain, truth), truth.numel()).excess, 0.0
        ),
        "tokens": float(
            (written != model.generate(inputs["input_ids"][:, :5], max_new_tokens=4, do_sample=False)).sum()
        ),
    }


CHECKS: dict[str, Callable[[Case], dict[str, float]]] = {
    name.removeprefix("check_"): value for name, value in globals().items() if name.startswith("check_")
}


def run_rank(rank: int, size: int, slow: bool, folder: str) -> None:
    """One rank: all cases, and what it found as JSON; after a failure the others would wait in vain, so it ends."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/meet", rank=rank, world_size=size, timeout=timedelta(seconds=120))
    found: dict[str, Any] = {}
    for case in cases(size, slow):
        try:
            found[case.name] = CHECKS[case.check](case)
        except BaseException:
            found[case.name] = traceback.format_exc()
            break
        finally:
            (Path(folder) / f"rank{rank}.json").write_text(json.dumps(found))
            (Path(folder) / f"largest{rank}.json").write_text(json.dumps(LARGEST))
    dist.destroy_process_group()
