"""The probe: trials in real processes that end in every way a trial can, and the search with trials made up."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import BytesIO

import pytest
import torch
from PIL import Image

from streamtune import Schedule, stream
from streamtune.base.text import show_size
from streamtune.errors import OutOfMemoryError
from streamtune.plan.budget import Budget, Range
from streamtune.plan.simulate.scored import use_checkpointing
from streamtune.programs.probe import trial as trial_module
from streamtune.programs.probe.probe import ProbeReport, ProbeTask, draw_probe, run_probe
from streamtune.programs.probe.trial import Outcome, Shape, TrainingStep, _describe_error, run_trial
from tests.exactness.families import build

MIB = 1 << 20
SHAPE = Shape("stream", 256, 1)
SCHEDULE = Schedule(chunk_size=64, head_chunk_size=32, offload="host")


def prepare(shape: Shape) -> TrainingStep:
    """A tiny model with AdamW in the mode of the trial."""
    model = build("llama", max_position_embeddings=4096)
    handle = stream(model, schedule=SCHEDULE) if shape.mode == "stream" else None
    if shape.mode == "checkpoint":
        use_checkpointing(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    ids = torch.randint(3, 97, (shape.batch_size, shape.length))

    def run() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return TrainingStep(model, optimizer, run, handle)


def prepare_killed(shape: Shape) -> TrainingStep:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


def prepare_wrong(shape: Shape) -> TrainingStep:
    raise ValueError("no such layer\nand more of it")


def prepare_endless(shape: Shape) -> TrainingStep:
    time.sleep(600)
    raise AssertionError


def prepare_greedy(shape: Shape) -> TrainingStep:
    """Holds more and more of the machine's memory, outside torch."""
    held = []
    while True:
        held.append(bytearray(os.urandom(1 << 20)) * 64)
        time.sleep(0.05)


@pytest.fixture(scope="module")
def ended() -> dict[str, Outcome]:
    """Trials in processes, two at a time: each has to import torch."""
    trials: dict[str, tuple[Callable[[Shape], TrainingStep], float]] = {
        "fits": (prepare, 120),
        "killed": (prepare_killed, 120),
        "endless": (prepare_endless, 1),
    }
    with ThreadPoolExecutor(2) as pool:
        futures = {
            name: pool.submit(run_trial, function, SHAPE, Budget(64 * MIB), timeout_seconds=seconds)
            for name, (function, seconds) in trials.items()
        }
        return {name: future.result() for name, future in futures.items()}


@pytest.fixture
def serve_trial(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """What the process of a trial does, in this one."""
    monkeypatch.setattr(trial_module, "_raise_oom_score", lambda: None)

    def run(function: Callable[[Shape], TrainingStep], shape: Shape = SHAPE, **budget: int) -> Outcome:
        ours, theirs = multiprocessing.Pipe(duplex=False)
        trial_module.serve_trial(theirs, function, shape, Budget(**budget))
        while isinstance(message := ours.recv(), str):
            pass
        return Outcome(**message)

    return run


@pytest.mark.full
def test_a_trial_that_fits_says_what_it_took(ended: dict[str, Outcome]) -> None:
    done = ended["fits"]
    assert (done.fits, done.cause, done.reason) == (True, "", "")
    model = build("llama", max_position_embeddings=4096)
    weights = sum(p.nbytes for p in model.parameters()) + sum(b.nbytes for b in model.buffers())
    assert done.terms["weights"] == pytest.approx(weights, rel=0.01)
    assert done.terms["optimizer"] == pytest.approx(2 * sum(p.nbytes for p in model.parameters()), rel=0.01)
    assert done.peak_bytes == sum(done.terms.values())
    assert done.host_bytes is not None
    assert done.host_bytes >= 2 * 256 * 32 * 4, "the inputs of two layers wait on the host"
    assert done.disk_bytes == 0
    assert done.step_seconds is not None
    assert done.step_seconds > 0
    assert done.rss_bytes is not None
    assert done.rss_bytes > 50 * MIB
    assert done.env["device_bytes"] == 64 * MIB


def test_what_the_engine_keeps_on_the_host_is_not_counted_on_the_device(serve_trial: Callable[..., Outcome]) -> None:
    ours, theirs = serve_trial(prepare), serve_trial(prepare, Shape("checkpoint", 256, 1))
    assert ours.fits
    assert theirs.fits
    assert ours.host_bytes
    assert theirs.host_bytes is None
    assert ours.peak_bytes is not None
    assert theirs.peak_bytes is not None
    assert ours.peak_bytes < theirs.peak_bytes
    assert "layer inputs" in theirs.terms


@pytest.mark.parametrize("part", [0.2, 0.5, 0.99])
def test_a_budget_that_is_crossed_breaks_off(serve_trial: Callable[..., Outcome], part: float) -> None:
    whole = serve_trial(prepare).peak_bytes
    assert whole is not None
    budget = int(part * whole)
    cut = serve_trial(prepare, device_bytes=budget)
    assert (cut.fits, cut.cause) == (False, "device memory")
    assert cut.reason == f"device memory: the step needs more than {show_size(budget)}"
    assert cut.peak_bytes is not None
    assert budget < cut.peak_bytes <= whole
    assert serve_trial(prepare, device_bytes=whole).fits


@pytest.mark.full
def test_a_budget_of_the_host_is_kept(serve_trial: Callable[..., Outcome]) -> None:
    whole = serve_trial(prepare).host_bytes
    assert whole is not None
    cut = serve_trial(prepare, host_bytes=4096)
    assert (cut.fits, cut.cause) == (False, "host memory")
    assert cut.reason == "host memory: the step needs more than 4.00 KiB"
    assert serve_trial(prepare, host_bytes=whole).fits
    assert not serve_trial(prepare, host_bytes=whole - 1).fits


@pytest.mark.full
def test_a_crash_is_a_failed_trial_with_its_reason(
    ended: dict[str, Outcome], serve_trial: Callable[..., Outcome]
) -> None:
    wrong, killed, endless = serve_trial(prepare_wrong), ended["killed"], ended["endless"]
    assert (wrong.cause, wrong.reason) == ("crash", "ValueError: no such layer")
    assert "prepare_wrong" in wrong.detail
    assert killed.cause == "crash"
    assert killed.reason == "the process was killed by SIGKILL (usually because the machine ran out of memory)"
    assert (endless.cause, endless.reason) == ("time", "not finished after 1 s (--trial-timeout)")
    assert not any(outcome.fits for outcome in (wrong, killed, endless))


def test_signals_have_names() -> None:
    assert trial_module._describe_exit(-signal.SIGSEGV) == "the process was killed by SIGSEGV"
    assert trial_module._describe_exit(-99) == "the process was killed by signal 99"
    assert trial_module._describe_exit(1) == "the process ended with exit code 1"


@pytest.mark.full
def test_the_machine_is_not_driven_out_of_memory(ended: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch) -> None:
    whole = ended[
        "fits"
    ].rss_bytes  # of imports, which take more with some wheels of torch than with others, and a step
    assert whole is not None
    most = whole + 200 * MIB
    monkeypatch.setattr(trial_module, "usable_host_bytes", lambda: most)
    phases: list[str] = []
    outcome = run_trial(prepare_greedy, SHAPE, Budget(), timeout_seconds=120, notify_phase=phases.append)
    assert outcome.cause == "host memory"
    assert outcome.reason.startswith("host memory: the process used ")
    assert outcome.reason.endswith(f", only {show_size(most)} were free")
    assert outcome.rss_bytes is not None
    assert outcome.rss_bytes > most
    assert phases == ["building the model"]
    assert multiprocessing.active_children() == []


def test_errors_of_the_device_are_told_from_those_of_the_host() -> None:
    assert _describe_error(torch.OutOfMemoryError("CUDA out of memory"))["cause"] == "device memory"
    assert _describe_error(RuntimeError("can't allocate memory: you tried"))["cause"] == "host memory"
    assert _describe_error(MemoryError())["cause"] == "host memory"
    assert _describe_error(OutOfMemoryError("no room on the host"))["reason"] == "no room on the host"
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert _describe_error(caught.value)["cause"] == "host memory"
    assert _describe_error(KeyError("x"))["reason"] == "KeyError: 'x'"


# --- the search -------------------------------------------------------------------------------------------------------


def task(**changes: object) -> ProbeTask:
    settings: dict[str, object] = {
        "method": "measure",
        "objective": "sft",
        "scaled": "length",
        "fixed": 1,
        "within": Range(first=2048, least=256, most=1 << 20, step=256, grain=64),
        "modes": ("stream", "checkpoint", "plain"),
        "device_bytes": 1_000_000,
        "host_bytes": None,
        "disk_bytes": None,
        "schedule": Schedule(),
        "margin": 0.0,
    }
    return ProbeTask(**{**settings, **changes})  # type: ignore[arg-type]


PER_TOKEN = {"stream": 10, "checkpoint": 40, "plain": 160}


def made_up(shape: Shape, tell: Callable[[str], None]) -> Outcome:
    tell("step 1 of 2")
    needed = 100_000 + PER_TOKEN[shape.mode] * shape.length * shape.batch_size
    if shape.mode == "plain" and shape.length > 3000:
        return Outcome(False, "crash", "the process was killed by SIGSEGV")
    if needed > 1_000_000:
        return Outcome(False, "device memory", "device memory: more", peak_bytes=1_000_001)
    return Outcome(True, peak_bytes=needed, step_seconds=0.5, terms={"weights": 1, "activations": 2})


def test_every_mode_has_its_longest() -> None:
    said: list[str] = []
    tried: list[int] = []
    report, interrupted = run_probe(task(), made_up, notify=said.append, on_trial=lambda trial: tried.append(1))
    assert not interrupted
    assert report.complete
    fits = {mode: limit.fits for mode, limit in report.limits.items()}
    assert 90_000 - 900 <= fits["stream"] <= 90_000
    assert 22_500 - 256 <= fits["checkpoint"] <= 22_500
    assert 2744 <= fits["plain"] <= 3000
    assert report.limits["plain"].failed is not None
    assert report.limits["plain"].failed.outcome.reason == "the process was killed by SIGSEGV"
    assert "stream, 4,096 tokens: step 1 of 2 (fits: 2,048 tokens)" in said
    assert len(tried) == len(report.trials)


def test_the_document_has_the_promised_keys() -> None:
    report, _ = run_probe(task(), made_up)
    document = json.loads(json.dumps(report.to_json()))
    assert {"max_length", "method", "device_memory_bytes", "schedule", "baseline", "trials"} <= document.keys()
    assert document["max_length"] == report.limits["stream"].fits
    assert document["baseline"] == {mode: report.limits[mode].fits for mode in ("checkpoint", "plain")}
    assert {"length", "fits", "peak_bytes", "step_seconds"} <= document["trials"][0].keys()
    assert (document["objective"], document["complete"], document["batch_size"]) == ("sft", True, 1)
    assert document["limited_by"]["plain"] == "the process was killed by SIGSEGV"


def test_the_batch_scales_instead() -> None:
    within = Range(first=1, least=1, most=1000, step=1)
    report, _ = run_probe(task(scaled="batch", fixed=4096, within=within, modes=("stream", "checkpoint")), made_up)
    assert report.limits["stream"].fits == 900_000 // 40_960
    assert report.limits["checkpoint"].fits == 900_000 // 163_840
    assert {trial.shape.length for trial in report.trials} == {4096}
    document = report.to_json()
    assert (document["max_batch_size"], document["length"]) == (21, 4096)
    assert "max_length" not in document


@pytest.mark.parametrize("at", [1, 3, 12])
def test_an_interrupt_ends_with_what_is_known(at: int) -> None:
    count = 0

    def run(shape: Shape, tell: Callable[[str], None]) -> Outcome:
        nonlocal count
        count += 1
        if count == at:
            raise KeyboardInterrupt
        return made_up(shape, tell)

    report, interrupted = run_probe(task(), run)
    assert interrupted
    assert not report.complete
    assert len(report.trials) == at - 1
    assert report.to_json()["max_length"] == {1: 0, 3: 4096}.get(at, report.limits["stream"].fits)
    assert draw_probe(report, title="so far").startswith(b"\x89PNG")


@pytest.mark.parametrize("scaled", ["length", "batch"])
def test_the_picture_is_drawn(scaled: str) -> None:
    within = Range(first=1, least=1, most=1000, step=1)
    how = task() if scaled == "length" else task(scaled="batch", fixed=2048, within=within, modes=("stream",))
    report, _ = run_probe(how, made_up)
    with Image.open(BytesIO(draw_probe(report, title="a title"))) as image:
        assert image.width > 1000
        assert len(image.convert("RGB").getcolors(1 << 24) or []) > 10


def test_a_report_without_a_trial_can_be_shown() -> None:
    report = ProbeReport(task())
    assert draw_probe(report, title="nothing").startswith(b"\x89PNG")
    assert report.to_json()["max_length"] is None
