"""Code of completions in a real subprocess: what passes, what fails, what is stopped and cleaned up."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from streamtune.errors import RunError
from streamtune.tasks.rewards import load_rewards
from streamtune.tasks.rewards.builtin import CodeLimits, count_passed_tests

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")

ADD = "def add(a, b):\n    return a + b\n"
TESTS = ["assert add(1, 2) == 3", "assert add(-1, 1) == 0", "assert add('a', 'b') == 'ab'"]
SHORT = 1.0  # for what does not end by itself


def run(code: str, *tests: str, seconds: float = 20.0) -> int:
    return count_passed_tests(code, tests or ["pass"], CodeLimits(seconds=seconds, memory_mib=256))


def gone(pid: int) -> bool:
    """Return True if a process has ended. A process that init has not reaped yet counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


def test_tests_are_counted() -> None:
    assert run(ADD, *TESTS) == 3
    assert run(ADD.replace("+", "-"), *TESTS) == 0
    assert run("def add(a, b):\n    return a + b if a else 0\n", "assert add(0, 1) == 1", *TESTS) == 3


def test_a_test_sees_nothing_of_the_one_before() -> None:
    assert run("x = 1", "x = 2", "assert x == 1", "x += 1\nassert x == 2") == 3


@pytest.mark.parametrize(
    "code",
    [
        "import sys; sys.exit(0)",
        "import os; os._exit(0)",
        "def broken(:",
        "raise KeyboardInterrupt",
        "x = 'a' * (1 << 30)",
        "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)",
        "import os, signal; os.kill(os.getppid(), signal.SIGKILL)",
        "import os, signal; os.killpg(0, signal.SIGKILL)",
        "import os\nfor fd in range(3, 64):\n    try: os.write(fd, b'1' * 40)\n    except OSError: pass",
        "open('big', 'wb').write(b'x' * (64 << 20))",
        "def f(): return f()\nf()",
    ],
)
def test_code_that_fails_passes_nothing(code: str) -> None:
    assert run(code) == 0


@pytest.mark.parametrize(
    "code", ["while True: pass", "import time; time.sleep(60)", "import os; os.read(0, 1); input()"]
)
def test_code_that_does_not_end_is_stopped_in_time(code: str) -> None:
    started = time.monotonic()
    assert run(code, seconds=SHORT) == 0
    assert time.monotonic() - started < SHORT + 5


def test_the_time_is_that_of_code_and_tests_together() -> None:
    assert run("import time", "time.sleep(0.7)", "time.sleep(0.7)", seconds=SHORT) == 0


SPAWN = """
import os, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        with open({file!r}, "w") as file:
            file.write(str(os.getpid()))
        time.sleep(60)
    os._exit(0)
while not (os.path.exists({file!r}) and os.path.getsize({file!r})):
    time.sleep(0.01)
{then}
"""


@pytest.mark.parametrize("then", ["", "time.sleep(60)", "os._exit(0)"], ids=["ends", "hangs", "exits"])
def test_processes_that_it_started_are_killed_with_it(then: str, tmp_path: Path) -> None:
    """A process in its own session whose parent has ended is found too."""
    file = tmp_path / "pid"
    passed = run(SPAWN.format(file=str(file), then=then), seconds=2 * SHORT if "sleep" in then else 20.0)
    assert passed == (1 if then == "" else 0)
    assert gone(int(file.read_text()))


def test_a_child_in_its_session_is_killed_even_if_the_supervisor_was(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    code = f"""
import os, signal, time
if os.fork() == 0:
    with open({str(file)!r}, "w") as file:
        file.write(str(os.getpid()))
    time.sleep(60)
while not (os.path.exists({str(file)!r}) and os.path.getsize({str(file)!r})):
    time.sleep(0.01)
os.kill(os.getppid(), signal.SIGKILL)
"""
    assert run(code) == 0
    assert gone(int(file.read_text()))


def test_too_many_processes_are_stopped_before_the_time() -> None:
    code = "import os, time\nfor _ in range(80):\n    if os.fork() == 0:\n        time.sleep(60)\ntime.sleep(60)"
    started = time.monotonic()
    assert run(code) == 0
    assert time.monotonic() - started < 10


def test_it_works_in_a_folder_of_its_own_without_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "not yours")
    told = tmp_path / "told"
    code = f"import os\nopen({str(told)!r}, 'w').write(os.getcwd())\nopen('left', 'w').write('x')"
    assert run(code, "assert 'HF_TOKEN' not in os.environ and os.environ['HOME'] == os.getcwd()") == 1
    folder = Path(told.read_text())
    assert folder != Path.cwd()
    assert not folder.exists()


def test_as_a_reward() -> None:
    fenced = f"Here it is:\n```python\n{ADD}```\nDone."
    wrong = f"```python\n{ADD.replace('+', '-')}```"
    columns = {"tests": [TESTS, "\n".join(TESTS), TESTS, None]}
    completions = [fenced, ADD, wrong, ADD]
    rewards = load_rewards(["unit_tests(timeout=5)", "unit_tests(partial=True)"], allow_code=True)
    scores = rewards(["?"] * 4, completions, columns)
    assert scores.by_function["unit_tests"] == [1.0, 1.0, 0.0, None]
    partly = rewards(["?"], [ADD], {"tests": [[*TESTS, "assert False"]]}).by_function
    assert partly == {"unit_tests": [0.0], "unit_tests_2": [0.75]}


def test_the_last_block_counts() -> None:
    rewards = load_rewards(["unit_tests"], allow_code=True)
    completion = f"```\nnot this\n```\nbut\n```py\n{ADD}```\n"
    assert rewards(["?"], [completion], {"tests": [TESTS]}).total == [1.0]


@pytest.mark.parametrize("tests", [[], "", [1], ["pass", " "]])
def test_rows_without_tests_are_an_error(tests: object) -> None:
    with pytest.raises(RunError, match="must be Python text, or a list of Python texts"):
        load_rewards(["unit_tests"], allow_code=True)(["?"], [ADD], {"tests": [tests]}, origins=["rows.jsonl:1"])


def test_no_time_is_an_error() -> None:
    with pytest.raises(RunError, match="timeout and memory limit must be positive and finite"):
        load_rewards(["unit_tests(timeout=0)"], allow_code=True)(["?"], [ADD], {"tests": [TESTS]})


def test_no_file_descriptor_is_left_open() -> None:
    run(ADD, *TESTS)
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        run(ADD, *TESTS)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
