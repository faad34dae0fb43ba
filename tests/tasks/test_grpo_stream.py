"""The stream of a grpo run, with random completions in place of a model: records, skipped rollouts and resumption."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from streamtune import data, train
from streamtune.errors import CheckpointError, OutOfMemoryError, RunError
from streamtune.recipe.schema import GrpoRecipe
from streamtune.run.train import SLOW_ACTIVITIES
from streamtune.tasks.grpo.groups import BatchLayout, Group, group_metrics
from streamtune.tasks.grpo.objective import PolicyBatch, PolicyObjective
from streamtune.tasks.grpo.rollout_rules import RolloutTools
from streamtune.tasks.grpo.stream import CompletionLog, GrpoSteps
from streamtune.tasks.rewards import RewardScores
from streamtune.tasks.rollout import Completion, GenerationStopped, Sampling
from streamtune.train.step import evaluate

PROMPTS = [data.Prompt([10 + number, 9], f"prompt {number}", {}, f"rows:{number}") for number in range(6)]


class Letters:
    """Replaces the tokenizer: each id is one letter."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(chr(97 + token % 26) for token in ids)


class Dice:
    """Writes random completions of one to four tokens, drawn from torch's generator without a model."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, int | tuple[int, ...], float]] = []

    def write(
        self, prompts: Sequence[list[int]], count: int | Sequence[int], sampling: Sampling, images: Any = None
    ) -> list[list[Completion]]:
        counts = [count] * len(prompts) if isinstance(count, int) else count
        self.asked.append((len(prompts), count if isinstance(count, int) else tuple(count), sampling.temperature))
        rows = [[torch.randint(3, 9, (int(torch.randint(1, 5, ())),)).tolist() for _ in range(own)] for own in counts]
        return [[Completion(ids, truncated=len(ids) == 4) for ids in group] for group in rows]


class Lengths:
    """Rewards length. For prompts in ``flat`` every completion has the reward 0."""

    def __init__(self, flat: frozenset[int] = frozenset()) -> None:
        self.flat = flat

    def __call__(self, prompts: Sequence[data.Prompt], completions: Sequence[list[int]]) -> RewardScores:
        scores: list[float | None] = [
            0.0 if PROMPTS.index(prompt) in self.flat else float(len(ids))
            for prompt, ids in zip(prompts, completions, strict=True)
        ]
        return RewardScores(scores, {"length": scores})


def steps(folder: Path, judge: Any = None, **settings: Any) -> GrpoSteps:
    recipe = GrpoRecipe(
        model_name_or_path="none",
        datasets=[{"path": "none"}],
        reward_funcs="none",
        **{"num_generations": 3, "per_device_train_batch_size": 6, "seed": 1, **settings},
    )
    layout = BatchLayout(recipe.per_device_train_batch_size, 0, share=True, leave_out=True, mask_truncated=False,
                    zero_advantage_has_gradient=False)  # fmt: skip
    folder.mkdir(exist_ok=True)

    class Policy:
        def logprobs(self, batch: train.TreeBatch) -> Tensor:
            return torch.arange(len(batch.row_K), dtype=torch.float32) / 7

    tools = RolloutTools(
        recipe=recipe,
        prompts=data.PreparedPrompts(PROMPTS, PROMPTS[:4], report=None, fingerprint="", measured=None),  # type: ignore[arg-type]
        writer=Dice(),
        score=judge or Lengths(),
        policy=Policy(),
        reference=None,
        layout=layout,
        gradient=norm_of,
        device=torch.device("cpu"),
    )
    log = CompletionLog(train.RunDirectory(folder), Letters(), 2)  # type: ignore[arg-type]
    return GrpoSteps(tools, supervised=None, log=log)


def norm_of(batch: train.TreeBatch) -> float:
    """Return a norm that depends on the prompt and, slightly, on the length of the completion."""
    assert batch.num_rows == 1
    return float(batch.input_ids[0, 0] - 9) + 0.01 * len(batch.row_K)


def seen(batches: Sequence[train.MicroBatch]) -> list[Any]:
    """Return token ids, advantages, old log-probs and metrics of each micro-batch of a step."""
    found = []
    for batch in batches:
        assert isinstance(batch, PolicyBatch)
        old = None if batch.old_K is None else batch.old_K.tolist()
        found.append((batch.input_ids.tolist(), batch.advantages_N.tolist(), old, dict(batch.metrics)))
    return found


def test_without_shuffle_prompts_come_in_the_order_of_the_rows(tmp_path: Path) -> None:
    ordered = steps(tmp_path / "ordered", num_completions_to_print=2, shuffle=False)
    for _ in range(4):
        ordered.next_step()
    lines = [json.loads(line) for line in ordered.log.path.read_text().splitlines()]
    assert [line["origin"] for line in lines] == [f"rows:{number % 6}" for number in range(8)]


def test_inner_epochs_go_through_one_rollout_and_resume_anywhere(tmp_path: Path) -> None:
    settings = {"num_iterations": 2, "steps_per_generation": 3}  # 6 prompts in parts of 2, twice: six steps
    whole = steps(tmp_path / "whole", **settings)
    torch.manual_seed(5)
    taken, states = [], []
    for _ in range(9):
        taken.append(seen(whole.next_step()))
        states.append((json.loads(json.dumps(whole.state_dict())), torch.get_rng_state()))
    assert len(whole.tools.writer.asked) == 2  # type: ignore[attr-defined]
    assert taken[:3] == taken[3:6]
    assert taken[6:9] != taken[:3]
    assert all(old is not None for step in taken for _, _, old, _ in step)
    for at in (0, 2, 4, 5, 7):
        resumed = steps(tmp_path / f"at-{at}", **settings)
        resumed.load_state_dict(states[at][0])
        torch.set_rng_state(states[at][1])
        assert [seen(resumed.next_step()) for _ in range(8 - at)] == taken[at + 1 :]


@pytest.mark.parametrize(
    ("before", "after", "left"),
    [
        ({"num_iterations": 4}, {"num_iterations": 2}, 1),
        ({"num_iterations": 4}, {"num_iterations": 8}, 1),
        ({"steps_per_generation": 4}, {"steps_per_generation": 2}, 1),
        ({"steps_per_generation": 4}, {"steps_per_generation": 6}, 1),
        ({"steps_per_generation": 2, "num_iterations": 2}, {"steps_per_generation": 1}, 1),
        ({"steps_per_generation": 3}, {"num_iterations": 2}, 0),
    ],
)
def test_a_resumed_rollout_is_used_as_often_as_when_it_was_written(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], left: int
) -> None:
    torch.manual_seed(5)
    whole = steps(tmp_path / "whole", **before)
    for _ in range(3):
        whole.next_step()
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = steps(tmp_path / "resumed", **after)
    resumed.load_state_dict(state)
    assert [seen(resumed.next_step()) for _ in range(left)] == [seen(whole.next_step()) for _ in range(left)]
    writer: Any = resumed.tools.writer
    assert writer.asked == []
    part_count = resumed.recipe.steps_per_rollout * resumed.recipe.num_iterations
    for rollouts in (1, 2):
        for _ in range(part_count):
            resumed.next_step()
        assert len(writer.asked) == rollouts


@pytest.mark.parametrize("num_iterations", [1, 2, 3])
def test_a_rollout_of_an_older_checkpoint_is_never_trained_on_until_the_end(
    tmp_path: Path, num_iterations: int
) -> None:
    whole = steps(tmp_path / "whole", num_iterations=4)
    for _ in range(3):
        whole.next_step()
    state = json.loads(json.dumps(whole.state_dict()))
    for name in ("parts", "iterations", "temperature"):
        del state["rollout"][name]
    resumed = steps(tmp_path / "resumed", num_iterations=num_iterations)
    resumed.load_state_dict(state)
    resumed.next_step()
    assert len(resumed.tools.writer.asked) == 1  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", ["parts", "iterations"])
def test_a_rollout_without_parts_is_refused(tmp_path: Path, name: str) -> None:
    stream = steps(tmp_path, num_iterations=2)
    stream.next_step()
    state = stream.state_dict()
    state["rollout"][name] = 0
    with pytest.raises(CheckpointError, match="at least one part and one iteration"):
        stream.load_state_dict(state)


@pytest.mark.parametrize("change", ["reference", "temperature", "layout", "none"])
def test_a_resumed_rollout_without_the_log_probs_of_a_changed_loss_is_not_trained_on(
    tmp_path: Path, change: str
) -> None:
    """With a KL the loss needs the reference's log-probs, and log-probs of completions whose advantage is 0."""
    settings = {"num_iterations": 2, "per_device_train_batch_size": 18}
    flat = Lengths(flat=frozenset({0, 1}))
    whole = steps(tmp_path / "whole", flat, **settings)
    whole.next_step()
    state = json.loads(json.dumps(whole.state_dict()))
    resumed = steps(tmp_path / "resumed", flat, **settings, **({"temperature": 0.7} if change == "temperature" else {}))
    if change == "reference":
        resumed.tools.reference = resumed.tools.policy
    if change == "layout":
        resumed.tools.layout = replace(resumed.tools.layout, leave_out=False)
    resumed.load_state_dict(state)
    batches = resumed.next_step()
    kept = change == "none"
    assert len(resumed.tools.writer.asked) == (0 if kept else 1)  # type: ignore[attr-defined]
    events = train.read_records(resumed.log.run.events) if resumed.log.run.events.exists() else []
    assert [event["event"] for event in events] == ([] if kept else ["skip"])
    for batch in batches:
        assert isinstance(batch, PolicyBatch)
        assert batch.old_K is not None
        assert len(batch.old_K) == len(batch.row_K)
        assert (batch.ref_K is not None) is (change == "reference")


def test_after_a_change_of_the_data_only_the_number_of_steps_is_kept(tmp_path: Path) -> None:
    whole = steps(tmp_path / "whole", num_iterations=2, prompts="pass_rate")
    whole.next_step()
    resumed = steps(tmp_path / "resumed", num_iterations=2, prompts="pass_rate")
    resumed.load_state_dict({"taken": whole.state_dict()["taken"]})
    assert resumed.steps_taken == 1
    resumed.next_step()
    assert len(resumed.tools.writer.asked) == 1  # type: ignore[attr-defined]


def test_one_pass_over_one_step_needs_no_old_log_probs(tmp_path: Path) -> None:
    ((_, _, old, metrics),) = seen(steps(tmp_path / "run").next_step())
    assert old is None
    assert metrics["reward"][1] == 6
    assert metrics["completions/mean_length"] == metrics["reward"]


def test_flat_groups_are_left_out_and_counted(tmp_path: Path) -> None:
    stream = steps(tmp_path / "run", Lengths(flat=frozenset({0, 1, 2})), gradient_accumulation_steps=3)
    batches = stream.next_step()
    assert all(isinstance(batch, PolicyBatch) for batch in batches)
    first = batches[0]
    assert isinstance(first, PolicyBatch)
    assert first.metrics["frac_reward_zero_std"][0] >= 3
    assert first.left_out_rows >= 9
    assert first.left_out_rows + sum(batch.num_rows for batch in batches) == 18  # type: ignore[attr-defined]
    flat = {10, 11, 12}  # first tokens of the prompts that teach nothing
    assert not flat & {token for batch in batches for token in batch.input_ids.flatten().tolist()}


def test_batches_that_teach_nothing_are_drawn_anew_counted_and_end_the_run(tmp_path: Path) -> None:
    stream = steps(tmp_path / "run", Lengths(flat=frozenset({0, 1, 2, 3})), skip_limit=9)
    counted = 0
    for _ in range(4):
        ((_, _, _, metrics),) = seen(stream.next_step())
        counted += int(metrics.get("skipped_batches", (0, 1))[0])
    events = train.read_records(stream.log.run.events)
    assert counted == len(events) > 0
    assert {event["event"] for event in events} == {"skip"}
    hopeless = steps(tmp_path / "hopeless", Lengths(flat=frozenset(range(6))), skip_limit=4)
    with pytest.raises(RunError, match="4 rollouts in a row had no gradient"):
        hopeless.next_step()


def test_skipped_batches_are_counted_by_the_first_step_that_has_a_gradient(tmp_path: Path) -> None:
    """The third rollout has a gradient only in its second part."""

    class Judge:
        calls = 0

        def __call__(self, prompts: Sequence[data.Prompt], completions: Sequence[list[int]]) -> RewardScores:
            self.calls += 1
            flat = len(completions) // 2 if self.calls > 2 else len(completions)
            scores: list[float | None] = [float(max(0, place - flat)) for place in range(len(completions))]
            return RewardScores(scores, {"place": scores})

    stream = steps(tmp_path, Judge(), steps_per_generation=2, num_iterations=2)
    metrics = [stream.next_step()[0].metrics for _ in range(2)]
    assert metrics[0]["skipped_batches"] == (2.0, 1.0)
    assert "skipped_batches" not in metrics[1]


def test_a_call_of_the_reward_is_a_phase_of_its_own_in_training_and_evaluation(tmp_path: Path) -> None:
    """The name of the phase begins with "scoring", where a rank may wait for another service."""
    phases = ["evaluating"]

    class Judge(Lengths):
        def __call__(self, *args: Any) -> RewardScores:
            phases.append("CALL")
            return super().__call__(*args)

    stream = steps(tmp_path, Judge())
    stream.tools.show_activity = phases.append
    stream.next_step()
    list(stream.held_out_batches())
    calls = [index for index, phase in enumerate(phases) if phase == "CALL"]
    assert [phases[index - 1] for index in calls] == ["scoring completions", "scoring held-out completions"]
    assert not any(phases[index + 1].startswith(SLOW_ACTIVITIES) for index in calls)


def test_held_out_prompts_are_answered_by_the_likeliest_tokens(tmp_path: Path) -> None:
    stream = steps(tmp_path / "run")
    (batch,) = stream.held_out_batches()
    assert stream.tools.writer.asked == [(4, 1, 0.0)]  # type: ignore[attr-defined]
    assert batch.metrics["reward"][1] == 4
    assert "reward_std" not in batch.metrics


def test_a_stop_while_held_out_completions_are_written_ends_the_evaluation(tmp_path: Path) -> None:
    """The evaluation is due again after a resume; the run saves, as after any other stop."""
    stream, stop = steps(tmp_path / "run"), train.StopRequest()

    def write(*_: Any) -> Any:
        stop.signum = signal.SIGINT
        raise GenerationStopped

    stream.tools.writer.write = write  # type: ignore[method-assign]
    model = torch.nn.Linear(1, 1)
    backend = train.LocalBackend(model, torch.optim.SGD(model.parameters()))
    settings = train.TrainSettings(1, 1, 0.0, 0, 0, 1, autocast_dtype=None, seed=0, out_of_memory_fix="")
    context = train.StepContext(backend, PolicyObjective(None, stream.recipe), settings)  # type: ignore[arg-type]
    assert evaluate(context, {"": stream.held_out_batches}, 1, stop) is None


def test_remax_compares_with_the_likeliest_completion(tmp_path: Path) -> None:
    stream = steps(tmp_path / "run", loss_type="remax")
    stream.next_step()
    assert stream.tools.writer.asked == [(2, 3, 1.0), (2, 1, 0.0)]  # type: ignore[attr-defined]


def test_samples_are_one_of_each_prompt_first_and_are_cut_with_the_steps(tmp_path: Path) -> None:
    stream = steps(tmp_path / "run")
    for _ in range(3):
        stream.next_step()
    kept = train.read_records(stream.log.path)
    assert [record["step"] for record in kept] == [1, 1, 2, 2, 3, 3]
    assert kept[0]["origin"] != kept[1]["origin"]
    stream.log.delete_records_after_step(1)
    assert [record["step"] for record in train.read_records(stream.log.path)] == [1, 1]


def test_running_out_of_memory_while_writing_says_what_to_lower(tmp_path: Path) -> None:
    stream = steps(tmp_path / "run")

    def write(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    stream.tools.writer.write = write  # type: ignore[method-assign]
    with pytest.raises(OutOfMemoryError, match="generating 6 completions at a time, with up to 514 tokens") as raised:
        stream.next_step()
    assert "per_device_generation_batch_size" in raised.value.fix


GVM = {"allocation": "gvm", "num_generations": 4, "per_device_train_batch_size": 8, "pass_reward": 3.0}


def test_completions_are_divided_by_what_was_seen(tmp_path: Path) -> None:
    """Two of six prompts have passes. After the first visits, the prompt with the larger gradient gets more."""
    stream = steps(tmp_path / "run", **GVM, gradient_accumulation_steps=3)
    stream.tools.score = lambda prompts, ids: RewardScores(
        scores := [
            float(len(own)) if PROMPTS.index(p) in (1, 4) else 0.5 * len(own)
            for p, own in zip(prompts, ids, strict=True)
        ],
        {"length": list(scores)},
    )
    torch.manual_seed(3)
    for _ in range(6):
        stream.next_step()
    asked = [count for _, count, _ in stream.tools.writer.asked]  # type: ignore[attr-defined]
    assert asked[0] == 4, "nothing is known of any prompt"
    for counts in asked[1:]:
        assert isinstance(counts, tuple)
        assert (sum(counts), min(counts)) == (24, 2)
    assert stream.current is not None
    last = {group.prompt: len(group.completions) for group in stream.current.groups}
    assert last[4] > last[1] > 2
    assert [last[prompt] for prompt in (0, 2, 3, 5)] == [2] * 4
    assert set(stream.state_dict()["norms"]) == {"1", "4"}
    record = train.read_records(stream.log.path)
    assert len(record) == 12, "two of each rollout"


def test_every_prompt_counts_the_same_however_many_completions_it_has(tmp_path: Path) -> None:
    """The mean over all completions of a step equals the mean over prompts of their means."""
    stream = steps(tmp_path / "run", **GVM, gradient_accumulation_steps=3, loss_type="rloo")
    torch.manual_seed(1)
    for _ in range(4):
        stream.next_step()
    assert stream.current is not None
    groups = stream.current.groups
    assert len({len(group.completions) for group in groups}) > 1
    for group in groups:
        rewards = torch.tensor(group.rewards, dtype=torch.float64)
        others = (rewards.sum() - rewards) / (len(rewards) - 1)
        want = (rewards - others) * 4 / len(rewards)
        torch.testing.assert_close(torch.tensor(group.advantages, dtype=torch.float64), want, rtol=1e-5, atol=1e-6)


def test_unequal_groups_resume_anywhere(tmp_path: Path) -> None:
    """A rollout of several steps is resumed in its middle. Each step has as many completions as with equal groups."""
    settings = {**GVM, "num_iterations": 2, "steps_per_generation": 3}
    whole = steps(tmp_path / "whole", **settings)
    torch.manual_seed(5)
    taken, states = [], []
    for _ in range(14):
        batches = whole.next_step()
        assert sum(len(b.advantages_N) for b in batches) + batches[0].left_out_rows == 8  # type: ignore[attr-defined]
        taken.append(seen(batches))
        states.append((json.loads(json.dumps(whole.state_dict())), torch.get_rng_state()))
    assert any(isinstance(count, tuple) for _, count, _ in whole.tools.writer.asked)  # type: ignore[attr-defined]
    for at in (1, 5, 7, 11):
        resumed = steps(tmp_path / f"at-{at}", **settings)
        resumed.load_state_dict(states[at][0])
        torch.set_rng_state(states[at][1])
        assert [seen(resumed.next_step()) for _ in range(13 - at)] == taken[at + 1 :]


def test_rewards_nobody_gave_count_in_no_mean() -> None:
    group = Group(0, [[1], [2]], [False, True], [1.0, None], {"a": [1.0, None], "b": [None, None]}, [0.0, 0.0])
    metrics = group_metrics([group])
    assert metrics["reward"] == (1.0, 1)
    assert metrics["rewards/b/mean"] == (0.0, 0)
    assert metrics["completions/clipped_ratio"] == (1, 2)
