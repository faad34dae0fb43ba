"""Every optimizer of the table: the library's own trajectory, its bytes, a state that is saved and put back."""

from __future__ import annotations

import copy
import importlib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from streamtune.base.optimizer_table import OPTIMIZERS, PLAIN_STEP, check_installed, find_argument_mistake, state_bytes
from streamtune.errors import ArgumentError
from streamtune.ops.devices import simulate_device_type
from streamtune.optim import OptimChoice, build_optimizer, set_learning_rate, state_tensors
from streamtune.optim.badam import random_slice_start
from streamtune.optim.libraries import RULES
from streamtune.optim.matrix_optimizers import normalize_rows_and_columns
from streamtune.optim.narrow_states import pack_moment, unpack_moment
from streamtune.plan.simulate.memory import storage_bytes
from streamtune.train import HostOptimizer, InBackwardBackend, LocalBackend
from streamtune.train.slices import SliceReader, write_slices

ON_CPU = [
    pytest.param(name, marks=[] if entry.is_installed else pytest.mark.skip(f"{entry.library} is not installed"))
    for name, entry in OPTIMIZERS.items()
    # test_blocks.py and test_zeroth_order.py have the others.
    if entry.only_on in ("", "cpu") and entry.step == PLAIN_STEP
]
RATE, DECAY, STEPS = 3e-3, 0.1, 50
QUICK = ("muon", "adafactor")

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")


class Net(nn.Module):
    """Matrices in a layer, an embedding, a vector, and a weight of three dimensions."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)

        def weight(*shape: int) -> nn.Parameter:
            return nn.Parameter((torch.randn(*shape, generator=generator) / 8).to(dtype))

        self.embed, self.norm, self.experts = weight(80, 64), weight(64), weight(3, 16, 32)
        self.layer = nn.ParameterDict({"up": weight(128, 64), "down": weight(64, 128), "small": weight(4, 8)})

    def loss(self, step: int) -> Tensor:
        """Return a loss that is another one at each step, and depends on all weights."""
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(step)).to(self.embed.dtype)
        y = x * self.norm + torch.tanh(x @ self.layer["up"].T) @ self.layer["down"].T
        wrong = torch.nn.functional.cross_entropy((y @ self.embed.T).float(), torch.arange(32) % 80)
        return wrong + self.experts.float().square().mean() + (self.layer["small"].float() - 1).square().mean()


ARGS: dict[str, dict[str, Any]] = {
    "apollo": {"rank": 8, "update_proj_gap": 20},
    "badam_ratio": {"update_ratio": 0.25, "switch_block_every": 4},
    "galore": {"rank": 3, "update_proj_gap": 7, "scale": 0.5},
    "natural_galore": {"rank": 3, "update_proj_gap": 7, "scale": 0.5, "history": 3, "damping": 0.5},
}
"""Options of the tests: a projection that is changed within their steps."""


def is_in_layer(name: str) -> bool:
    return name.startswith("layer.")


def ours(model: Net, name: str, **more: Any) -> torch.optim.Optimizer:
    more.setdefault("args", ARGS.get(name, {}))
    return build_optimizer(
        OptimChoice(name, RATE, weight_decay=DECAY, **more), model.named_parameters(), is_in_layer=is_in_layer
    )


def theirs(model: Net, name: str) -> list[torch.optim.Optimizer]:
    """The library's optimizer over all weights at once, as its own documentation makes it."""
    library: Any = importlib.import_module(OPTIMIZERS[name].library)
    in_layer = {id(p) for key, p in model.named_parameters() if is_in_layer(key) and p.ndim == 2}
    parts = [[p for p in model.parameters() if (id(p) in in_layer) == inside] for inside in (True, False)]

    def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        decays = [(DECAY, [p for p in parameters if p.ndim >= 2]), (0.0, [p for p in parameters if p.ndim < 2])]
        return [{"params": chosen, "weight_decay": decay} for decay, chosen in decays if chosen]

    def galore() -> list[torch.optim.Optimizer]:
        import galore_torch

        low = [{**group, **ARGS["galore"], "proj_type": "std"} for group in groups(parts[0])]
        projected = galore_torch.GaLoreAdamW(low, lr=RATE, eps=1e-8, no_deprecation_warning=True)
        return [projected, adamw(groups(parts[1]), lr=RATE)]

    every = groups(list(model.parameters()))
    adamw = torch.optim.AdamW
    libraries: dict[str, Callable[[], list[torch.optim.Optimizer]]] = {
        "adamw": lambda: [adamw(every, lr=RATE, fused=True)],
        "adamw_8bit": lambda: [library.optim.AdamW8bit(every, lr=RATE)],
        "adamw_torch_8bit": lambda: [torchao_optim().AdamW8bit(every, lr=RATE)],
        "adamw_torch_4bit": lambda: [torchao_optim().AdamW4bit(every, lr=RATE)],
        "adamw_torch_fp8": lambda: [torchao_optim().AdamWFp8(every, lr=RATE)],
        "adamw_coat": lambda: [Expanded(every)],
        "adafactor": lambda: [torch.optim.Adafactor(every, lr=RATE)],
        "adan": lambda: [library.Adan(every, lr=RATE)],
        "adopt": lambda: [library.ADOPT(every, lr=RATE, weight_decouple=True, clip_lambda=lambda t: (t - 1) ** 0.25)],
        "apollo": lambda: [
            library.APOLLOAdamW(
                [
                    {
                        "params": parts[0],
                        "rank": 8,
                        "proj": "random",
                        "update_proj_gap": 20,
                        "scale": 1.0,
                        "proj_type": "std",
                        "scale_type": "channel",
                    }
                ],
                lr=RATE,
                eps=1e-8,
                weight_decay=DECAY,
            ),
            adamw(groups(parts[1]), lr=RATE),
        ],
        "badam_ratio": lambda: [Parts(every)],
        "came": lambda: [library.CAME(every, lr=RATE)],
        "galore": galore,
        "lamb": lambda: [library.Lamb(every, lr=RATE, weight_decouple=False, max_grad_norm=0.0)],
        "lion": lambda: [library.Lion(every, lr=RATE)],
        "lion_8bit": lambda: [library.optim.Lion8bit(every, lr=RATE)],
        "muon": lambda: [
            torch.optim.Muon(parts[0], lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
            adamw(groups(parts[1]), lr=RATE),
        ],
        "natural_galore": lambda: [NaturalGaLore(parts[0]), adamw(groups(parts[1]), lr=RATE)],
        "schedule_free": lambda: [schedule_free(every)],
        "sgd": lambda: [torch.optim.SGD(every, lr=RATE, momentum=0.9)],
        "sinkgd": lambda: [Sinkhorn(parts[0]), adamw(groups(parts[1]), lr=RATE)],
    }
    return libraries[name]()


def torchao_optim() -> Any:
    return importlib.import_module("torchao.optim")


def schedule_free(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    from schedulefree import AdamWScheduleFree

    made: Any = AdamWScheduleFree(groups, lr=RATE)
    made.train()
    return made


class Sinkhorn(torch.optim.Optimizer):
    """The formula of the paper, in float64; no library has it."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": RATE})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            x, (m, n) = p.grad.double(), p.shape
            for _ in range(5):
                x = n**0.5 * x / x.norm(dim=1, keepdim=True)
                x = m**0.5 * x / x.norm(dim=0, keepdim=True)
            p.copy_((1 - self.param_groups[0]["lr"] * DECAY) * p.double() - self.param_groups[0]["lr"] * x)


class Adam:
    """AdamW's two moments by their formula, in float64, with their bias corrected."""

    def __init__(self) -> None:
        self.count, self.first, self.second = 0, torch.zeros(()), torch.zeros(())

    def moments(self, grad: Tensor) -> tuple[Tensor, Tensor]:
        self.count += 1
        self.first = 0.9 * self.first + 0.1 * grad
        self.second = 0.999 * self.second + 0.001 * grad**2
        return self.first / (1 - 0.9**self.count), self.second / (1 - 0.999**self.count)


class NaturalGaLore(torch.optim.Optimizer):
    """The natural gradient by the inverse of the whole Fisher matrix, in float64; no library has it."""

    def __init__(self, params: list[nn.Parameter]) -> None:
        super().__init__(params, {"lr": RATE})
        self.taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        args, rate = ARGS["natural_galore"], self.param_groups[0]["lr"]
        for p in self.param_groups[0]["params"]:
            state, grad = self.state[p], p.grad.double()
            wide = p.shape[0] < p.shape[1]
            if self.taken % args["update_proj_gap"] == 0:
                left, _, right = torch.linalg.svd(p.grad, full_matrices=False)
                state["P"] = (left[:, :3] if wide else right[:3].T).double()
                state["known"] = []
                state.setdefault("adam", Adam())
            projected = (grad.T if wide else grad) @ state["P"]
            known = state["known"] = [*state["known"], projected.flatten()][-args["history"] :]
            ridge = args["damping"] * sum(float(x @ x) for x in known) / len(known)
            fisher = torch.stack([torch.outer(x, x) for x in known]).mean(0) + ridge * torch.eye(projected.numel())
            natural = ridge * torch.linalg.solve(fisher, projected.flatten()).view_as(projected)
            first, second = state["adam"].moments(natural)
            corrected = (1 - 0.999 ** state["adam"].count) ** 0.5
            # eps is added before the bias of the second moment is corrected, as in GaLore.
            update = first / (second.sqrt() + 1e-8 / corrected) @ state["P"].T * args["scale"]
            moved = p.double() - rate * (update.T if wide else update)
            p.copy_((1 - rate * DECAY) * moved)
        self.taken += 1


class Expanded(torch.optim.Optimizer):
    """Torch's AdamW on moments that are rounded after each step; test_narrow_states.py has the rounding."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": RATE})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state["copy"] = nn.Parameter(p.clone())
                    state["adamw"] = torch.optim.AdamW([state["copy"]], weight_decay=group["weight_decay"])
                state["copy"].copy_(p)
                state["copy"].grad = p.grad
                set_theirs(state["adamw"], group["lr"])
                state["adamw"].step()
                p.copy_(state["copy"])
                for name in ("exp_avg", "exp_avg_sq"):
                    x = state["adamw"].state[state["copy"]][name]
                    x.copy_(unpack_moment(*pack_moment(x, 128), x.numel()).view_as(x))


class Parts(torch.optim.Optimizer):
    """Torch's AdamW on masked weights, made anew for each turn; the parts are those of ours."""

    def __init__(self, groups: list[dict[str, Any]]) -> None:
        super().__init__(groups, {"lr": RATE})
        self.taken = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        args, number = ARGS["badam_ratio"], 0
        turn, fresh = divmod(self.taken, args["switch_block_every"])
        for group in self.param_groups:
            for p in group["params"]:
                number += 1
                size = max(1, round(args["update_ratio"] * p.numel()))
                start = random_slice_start(p.numel() - size, number, turn)
                if not fresh:
                    state = self.state[p] = {"part": nn.Parameter(p.flatten()[start : start + size].clone())}
                    state["adamw"] = torch.optim.AdamW([state["part"]], weight_decay=group["weight_decay"])
                state = self.state[p]
                state["part"].grad = p.grad.flatten()[start : start + size].clone()
                set_theirs(state["adamw"], group["lr"])
                state["adamw"].step()
                p.view(-1)[start : start + size] = state["part"]
        self.taken += 1


def rate_at(step: int) -> float:
    return RATE / (1 + step / 10)


def set_theirs(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize("name", ON_CPU)
def test_the_trajectory_is_that_of_the_library(name: str) -> None:
    """On the same gradients: those of the library's own weights, at each of 50 steps with a changing rate."""
    reference, model = Net(), Net()
    libraries, optimizer = theirs(reference, name), ours(model, name)
    for step in range(STEPS):
        reference.loss(step).backward()
        for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
            mine.grad, other.grad = other.grad.clone(), other.grad.clone()
        set_learning_rate(optimizer, rate_at(step))
        optimizer.step()
        for library in libraries:
            set_theirs(library, rate_at(step))
            with torch.compiler.set_stance("force_eager"):
                library.step()
            library.zero_grad()
    start = Net()
    for (key, got), want, before in zip(
        model.named_parameters(), reference.parameters(), start.parameters(), strict=True
    ):
        assert (got - want).norm() <= 1e-6 * want.norm(), key
        assert (want - before).norm() > 5e-4 * before.norm(), "it was trained"


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize("name", ON_CPU)
def test_bytes_of_state_are_those_of_the_table_and_of_the_plan(name: str) -> None:
    check_bytes(name, ARGS.get(name, {}))


@pytest.mark.parametrize("name", ["galore", "natural_galore"])
def test_bytes_of_gradients_projected_on_both_sides(name: str) -> None:
    check_bytes(name, {**ARGS[name], "proj_type": "full"})


def check_bytes(name: str, args: dict[str, Any]) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        model = Net(dtype)
        optimizer = ours(model, name, args=args)
        for step in range(2):
            model.loss(step).backward()
            optimizer.step()
        planned = copy.deepcopy(Net(dtype)).to("meta")
        simulated = ours(planned, name, args=args)
        with simulate_device_type("cpu"):
            for parameter in planned.parameters():
                parameter.grad = torch.empty_like(parameter)
            for group in simulated.param_groups:
                group.update({key: False for key in ("foreach", "fused") if key in group})
            simulated.step()
        for (key, parameter), other in zip(model.named_parameters(), planned.parameters(), strict=True):
            want = state_bytes(name, tuple(parameter.shape), dtype.itemsize, args, in_layer=is_in_layer(key))
            got, meta = (
                storage_bytes(x for _, x in state_tensors(each.state.get(p, {})))
                for each, p in ((optimizer, parameter), (simulated, other))
            )
            assert got == want, key
            assert meta in (want, want - 4), "a count may be on the host"


def run_steps(model: Net, backend: Any, steps: range) -> None:
    for step in steps:
        backend.begin_step(rate_at(step), lambda: None)
        with backend.micro_batch_context(last=True):
            backend.backward(model.loss(step))
        backend.clip_gradients(0.0)
        backend.step(rate_at(step))
    backend.close()


def backend_of(model: Net, name: str, kind: str, **more: Any) -> LocalBackend:
    optimizer = ours(model, name, **more)
    if "host" in kind:
        optimizer = HostOptimizer(optimizer)
    return InBackwardBackend(model, optimizer, 0.0) if "backward" in kind else LocalBackend(model, optimizer)


@pytest.mark.quick(*QUICK)
@pytest.mark.parametrize("name", ON_CPU)
def test_steps_in_the_backward_on_the_host_and_after_a_resume_are_the_same(name: str, tmp_path: Path) -> None:
    want = Net()
    run_steps(want, backend_of(want, name, "after"), range(6))
    for kind in ("backward", "host", "host, backward"):
        model = Net()
        run_steps(model, backend_of(model, name, kind), range(6))
        assert all(map(torch.equal, model.parameters(), want.parameters())), kind
    for number, (before, after) in enumerate((("after", "after"), ("host, backward", "after"), ("after", "host"))):
        model, folder = Net(), tmp_path / str(number)
        folder.mkdir()
        backend = backend_of(model, name, before)
        run_steps(model, backend, range(3))
        write_slices(folder, backend.optimizer_slices(), 0, has_whole_tensors=True)
        resumed = Net()
        resumed.load_state_dict(model.state_dict())
        again = backend_of(resumed, name, after)
        again.load_optimizer_slices(SliceReader(folder))
        run_steps(resumed, again, range(3, 6))
        assert all(map(torch.equal, resumed.parameters(), want.parameters())), (before, after)


def test_some_optimizers_are_experimental() -> None:
    found = {name for name, entry in OPTIMIZERS.items() if entry.status == "experimental"}
    assert found == {"adamw_coat", "mezo", "natural_galore"}


def test_every_entry_has_a_rule_and_says_what_is_wrong_with_options() -> None:
    assert RULES.keys() == {name for name, e in OPTIMIZERS.items() if e.step == PLAIN_STEP}
    assert find_argument_mistake("sgd", {"momentum": 0.5, "nesterov": True}) is None
    assert find_argument_mistake("sgd", {"momentun": 0.5}) == (
        "momentun", "'sgd' has no option 'momentun'", "did you mean 'momentum'?",
    )  # fmt: skip
    key, what, fix = find_argument_mistake("adan", {"betas": [0.9, 0.99]}) or ("", "", "")
    assert (key, what) == (
        "betas", "'betas' of 'adan' must be a list of 3 numbers from 0 to below 1; found [0.9, 0.99]",
    )  # fmt: skip
    assert fix == "write a value such as [0.98, 0.92, 0.99]"
    for args in ({"nesterov": 1}, {"momentum": True}, {"momentum": "0.9"}, {"momentum": float("nan")}):
        assert find_argument_mistake("sgd", args) is not None
    assert find_argument_mistake("muon", {"adjust_lr_fn": "none"}) is not None
    assert find_argument_mistake("badam_ratio", {"update_ratio": 1.5}) == (
        "update_ratio", "'update_ratio' of 'badam_ratio' must be from 1e-12 to 1; found 1.5",
        "write a value such as 0.01",
    )  # fmt: skip
    assert find_argument_mistake("natural_galore", {"damping": 0.0}) is not None
    assert find_argument_mistake("natural_galore", {"damping": 7.5, "history": 20}) is None
    assert "adam_beta1" in (find_argument_mistake("adamw", {"betas": [0.9, 0.95]}) or ("", "", ""))[2]


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"nesterov": True, "momentum": 0}),
    ("sgd", {"nesterov": True, "dampening": 0.5}),
    ("sgd", {"momentum": -1}),
    ("muon", {"ns_steps": 100}),
    ("adafactor", {"eps2": -1.0}),
    ("adafactor", {"clip_threshold": 0.0}),
    ("adafactor", {"beta2_decay": 5.0}),
    ("adan", {"eps": -1.0}),
    ("adan", {"betas": ["a", "b", "c"]}),
    ("adopt", {"betas": [None, 0.9]}),
    ("apollo", {"rank": 10**30}),
    ("apollo", {"scale": -1.0}),
    ("schedule_free", {"r": 1e300}),
    ("mezo", {"n": 10**30}),
    ("mezo", {"eps": 1e-300}),
    ("badam", {"blocks": ["["]}),
]
"""What a library refuses by an error of its own, or trains nothing with."""


@pytest.mark.parametrize(("name", "args"), WRONG)
def test_an_option_that_the_library_would_refuse_is_a_mistake(name: str, args: dict[str, Any]) -> None:
    key, what, fix = find_argument_mistake(name, args) or ("", "", "")
    assert key in args
    assert what
    assert fix


@pytest.mark.parametrize("name", [name for name, entry in OPTIMIZERS.items() if entry.options])
def test_defaults_are_no_mistake(name: str) -> None:
    assert find_argument_mistake(name, OPTIMIZERS[name].options) is None


def test_a_library_that_is_not_installed_is_named_with_the_line_that_installs_it(monkeypatch: Any) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ArgumentError, match="'optim: adan' needs pytorch_optimizer") as caught:
        check_installed("adan")
    assert caught.value.fix == "pip install 'streamtune[optim]'"


def test_what_runs_on_an_accelerator_only_is_refused_elsewhere() -> None:
    with pytest.raises(ArgumentError, match="runs only on cuda, but the weights are on cpu") as caught:
        ours(Net(), "paged_adamw_8bit")
    assert "adamw_8bit" in caught.value.fix
    ours(Net().to("meta"), "paged_adamw_8bit")  # a plan


def test_rows_and_columns_are_normalised_and_zeros_stay() -> None:
    gradient = torch.randn(24, 40, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found = normalize_rows_and_columns(gradient, 50)
    assert torch.allclose(found.norm(dim=0), torch.tensor(24.0, dtype=torch.float64).sqrt().expand(40))
    assert torch.allclose(found.norm(dim=1), torch.tensor(40.0, dtype=torch.float64).sqrt().expand(24))
    gradient[3] = 0
    assert normalize_rows_and_columns(gradient, 5).isfinite().all()


def test_no_warning_of_a_library_is_an_error_here() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert ours(Net(), "sgd").param_groups


def test_the_page_has_every_optimizer_with_its_bytes() -> None:
    page = (Path(__file__).parents[2] / "docs/guide/optimizers.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1:5] for line in page.splitlines() if line.startswith("| `") and line.count("|") > 5][1:]
    found = {name.strip(" `"): (fp32.strip(), bf16.strip(), library.strip()) for name, fp32, bf16, library in rows}
    size = 4096
    assert found == {
        name: (*(f"{state_bytes(name, (size, size), width, {}) / size**2:.3g}" for width in (4, 2)), entry.library)
        for name, entry in OPTIMIZERS.items()
    }


@pytest.mark.skipif(not OPTIMIZERS["adamw_torch_8bit"].is_installed, reason="torchao is not installed")
@pytest.mark.full
def test_weights_that_are_rounded_stochastically_are_the_same_in_any_order() -> None:
    found = {}
    for kind in ("after", "backward", "host, backward"):
        torch.manual_seed(11)
        model = Net(torch.bfloat16)
        args = {"bf16_stochastic_round": True}
        run_steps(model, backend_of(model, "adamw_torch_8bit", kind, args=args), range(4))
        found[kind] = [*model.parameters(), torch.rand(3)]
    assert all(all(map(torch.equal, each, found["after"])) for each in found.values())
    assert torch.equal(found["after"][-1], torch.rand(3, generator=torch.Generator().manual_seed(11)))
    nearest = Net(torch.bfloat16)
    run_steps(nearest, backend_of(nearest, "adamw_torch_8bit", "after"), range(4))
    assert not all(map(torch.equal, nearest.parameters(), found["after"]))
    other = Net(torch.bfloat16)
    run_steps(other, backend_of(other, "adamw_torch_8bit", "after", args=args, seed=1), range(4))
    assert not all(map(torch.equal, other.parameters(), found["after"]))


@pytest.mark.skipif(not OPTIMIZERS["adamw_torch_8bit"].is_installed, reason="torchao is not installed")
@pytest.mark.full
def test_a_step_on_the_host_seeds_no_generator_of_other_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("a generator that all threads use was seeded")

    model = Net(torch.bfloat16)
    backend = backend_of(model, "adamw_torch_8bit", "after", args={"bf16_stochastic_round": True})
    for place in (torch, torch.random, torch.cuda):
        monkeypatch.setattr(place, "manual_seed", fail)
    monkeypatch.setattr(torch.cuda, "manual_seed_all", fail)
    monkeypatch.setattr(torch.random, "set_rng_state", fail)
    before = torch.get_rng_state()
    run_steps(model, backend, range(2))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.quick("badam_ratio")
@pytest.mark.parametrize("name", [each for each in ON_CPU if each.values[0] in ("badam_ratio", "apollo")])
def test_the_seed_decides_the_random_choices(name: str) -> None:
    found = []
    for seed in (1, 2, 1):
        model = Net()
        run_steps(model, backend_of(model, name, "after", seed=seed), range(3))
        found.append(list(model.parameters()))
    assert all(map(torch.equal, found[0], found[2]))
    assert not all(map(torch.equal, found[0], found[1]))


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ArgumentError) as caught:
        build_optimizer(OptimChoice("adam", 1.0), torch.nn.Linear(2, 2).named_parameters())
    assert "'adamw'" in caught.value.fix


def test_only_matrices_decay_and_only_trainable_parameters_are_held() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 2))
    model[2].weight.requires_grad_(False)
    optimizer = build_optimizer(OptimChoice("adamw", 0.1, weight_decay=0.5), model.named_parameters())
    decayed, kept = optimizer.param_groups
    assert decayed["params"] == [model[0].weight]
    assert decayed["weight_decay"] == 0.5
    assert {id(p) for p in kept["params"]} == {id(p) for p in (model[0].bias, *model[1].parameters(), model[2].bias)}
    assert kept["weight_decay"] == 0.0


def test_nothing_to_train_is_refused() -> None:
    model = torch.nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(ArgumentError, match="nothing to train"):
        build_optimizer(OptimChoice("adamw", 0.1), model.named_parameters())
