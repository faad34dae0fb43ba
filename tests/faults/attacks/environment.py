"""Environment variables, limits and clocks of a stranger's machine."""

from __future__ import annotations

from tests.faults.attacks.lab import STOP, Attacks, Lab, complete_checkpoints

ATTACKS = Attacks("Environment, limits, clocks")


def with_environment(lab: Lab, **values: str) -> None:
    """Train whole with these variables set, and end as the undisturbed run does."""
    lab.write()
    lab.trained(acts=[("start", 0, f"os.environ.update({values!r})")])
    lab.goes_on()


def limited(name: str, value: int) -> str:
    """Return lines that set a limit of the process."""
    return f"import resource; resource.setrlimit(resource.{name}, ({value}, {value}))"


@ATTACKS("the clock jumps back by a year in step 4, and forward by ten in step 6")
def clock(lab: Lab) -> str:
    lab.write()
    jump = "import time as t; real = t.time; t.time = lambda: real() + {}"
    lab.trained(acts=[("step", 4, jump.format(-3.2e7)), ("step", 6, jump.format(3.2e8))])
    lab.goes_on()
    return "bit-identical"


@ATTACKS("checkpoints with times in the future")
def future(lab: Lab) -> str:
    lab.half()
    for path in lab.path.rglob("*"):
        import os

        os.utime(path, (4e9, 4e9))
    lab.goes_on()
    return "goes on bit-identical"


@ATTACKS("a stop and a start under different PYTHONHASHSEED")
def hash_seed(lab: Lab) -> str:
    lab.write()
    environment = ("start", 0, "os.environ['PYTHONHASHSEED'] = '7'")
    assert lab.start(acts=[environment, ("step", 5, STOP)]).status == 143
    lab.goes_on()
    return "goes on bit-identical"


@ATTACKS("torch's default dtype, device and threads changed between stop and start")
def torch_settings(lab: Lab) -> str:
    lab.half()
    lines = "import torch; torch.set_num_threads(1); torch.manual_seed(123); torch.rand(7)"
    lab.trained(acts=[("start", 0, lines)])
    lab.goes_on()
    return "goes on bit-identical"


@ATTACKS("umask 0777: files without any permission")
def umask(lab: Lab) -> str:
    lab.write()
    done = lab.start(acts=[("start", 0, "os.umask(0o777)")])
    assert done.status in (0, 1, 2), done.output
    return "trained to the end (as root)" if done.status == 0 else "refused by name"


@ATTACKS("at most 40 open files")
def few_files(lab: Lab) -> str:
    lab.write()
    done = lab.start(acts=[("start", 0, limited("RLIMIT_NOFILE", 40))])
    assert done.status in (0, 1), done.output
    lab.goes_on()
    return "trained to the end" if done.status == 0 else "one error; without the limit it goes on bit-identical"


@ATTACKS("files of at most 20 KiB (ulimit -f)")
def short_files(lab: Lab) -> str:
    lab.write()
    done = lab.start(acts=[("start", 0, limited("RLIMIT_FSIZE", 20480))])
    assert done.status == 1, (done.status, done.output)
    lab.goes_on()
    return "one error; without the limit it goes on bit-identical"


@ATTACKS("no further process may be started (ulimit -u)")
def no_processes(lab: Lab) -> str:
    lab.write()
    # Root has no such limit: the call itself fails.
    lines = "import subprocess\ndef no(*a, **k): raise BlockingIOError(11, 'Resource temporarily unavailable')\n"
    lines += "subprocess.Popen.__init__ = no"
    done = lab.start(acts=[("start", 0, lines)])
    assert done.status in (0, 1), (done.status, done.output)
    lab.goes_on()
    return "trained to the end" if done.status == 0 else "one error; without the limit it goes on bit-identical"


@ATTACKS("no further thread may be started")
def no_threads(lab: Lab) -> str:
    lab.write()
    lines = 'import threading\ndef no(self): raise RuntimeError("can\'t start new thread")\nthreading.Thread.start = no'
    done = lab.start(acts=[("step", 1, lines)])
    assert done.status in (0, 1), (done.status, done.output)
    lab.goes_on()
    return "trained to the end" if done.status == 0 else "one error; goes on bit-identical"


@ATTACKS("the working directory deleted before the start")
def no_directory(lab: Lab) -> str:
    lab.write()
    lines = "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')"
    done = lab.start(acts=[("start", 0, lines)])
    assert done.status == 2, (done.status, done.output)
    return "one error"


@ATTACKS("the working directory deleted while the run trains")
def directory_deleted(lab: Lab) -> str:
    lab.write(output_dir=str(lab.path))
    done = lab.start(acts=[("step", 3, "os.mkdir('gone'); os.chdir('gone'); os.rmdir('../gone')")])
    assert done.status == 0, (done.status, done.output)
    return "an absolute output_dir: trained to the end"


@ATTACKS("the working directory changed by a library while the run trains")
def directory_changed(lab: Lab) -> str:
    lab.write()
    done = lab.start(acts=[("step", 3, "os.chdir('/')")])
    assert done.status in (0, 1), (done.status, done.output)
    if done.status == 0:
        lab.goes_on()
        return "of no effect: a relative output_dir stays where it was"
    return "one error"


@ATTACKS("RANK, WORLD_SIZE, LOCAL_RANK that are no numbers, negative or contradict each other")
def odd_ranks(lab: Lab) -> str:
    lab.write()
    odd = [{"RANK": "x", "WORLD_SIZE": "2"}, {"RANK": "5", "WORLD_SIZE": "2"}, {"RANK": "-1", "WORLD_SIZE": "2"},
           {"RANK": "0", "WORLD_SIZE": "0"}, {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "9"},
           {"RANK": "0", "WORLD_SIZE": "1" * 30}, {"RANK": "0"}, {"WORLD_SIZE": "2"}]  # fmt: skip
    ended = []
    for values in odd:
        done = lab.start("--dry-run", acts=[("start", 0, f"os.environ.update({values!r})")])
        assert done.status in (0, 1, 2), (values, done.output)
        ended.append(done.status)
    return f"{ended.count(2) + ended.count(1)} of {len(odd)} refused, the rest are one process"


@ATTACKS("MASTER_ADDR of `-oProxyCommand=...`, a name with blanks, and MASTER_PORT of 99999")
def odd_master(lab: Lab) -> str:
    lab.write()
    canary = lab.folder / "canary"
    base = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_PORT": "29511", "MASTER_ADDR": "127.0.0.1"}
    for values in ({"MASTER_ADDR": f"-oProxyCommand=touch {canary}"}, {"MASTER_ADDR": "a b"}, {"MASTER_PORT": "99999"},
                   {"MASTER_PORT": "x"}, {"MASTER_ADDR": "x@-oProxyCommand=x"}):  # fmt: skip
        done = lab.start(acts=[("start", 0, f"os.environ.update({ {**base, **values}!r})")])
        assert done.status in (1, 2), (values, done.output)
    assert not canary.exists()
    return "refused by name"


@ATTACKS("HOME, TMPDIR, XDG_CACHE_HOME and HF_HOME that do not exist or are files")
def no_home(lab: Lab) -> str:
    lab.write()
    for place in (str(lab.folder / "nowhere"), str(lab.folder / "tiny.yaml")):
        values = dict.fromkeys(("HOME", "XDG_CACHE_HOME", "HF_HOME"), place)
        done = lab.start("--dry-run", acts=[("start", 0, f"os.environ.update({values!r})")])
        assert done.status in (0, 1, 2), done.output
    return "a run that needs none of them is not held up"


@ATTACKS("the disk is so full that not one directory can be made")
def no_room_at_all(lab: Lab) -> str:
    lab.write()
    full = "def no(*a, **k): raise OSError(28, 'No space left on device')\nos.mkdir = no"
    done = lab.start(acts=[("start", 0, full)])
    assert done.status in (1, 2), (done.status, done.output)
    assert "space" in done.output or "room" in done.output, done.output
    lab.goes_on()
    return "one error that says so; with room it trains bit-identical"


@ATTACKS("memory runs out (MemoryError) in a save")
def memory_in_a_save(lab: Lab) -> str:
    lab.write(save_async=False)
    done = lab.start(acts=[("save", 2, "raise MemoryError")])
    assert done.status in (0, 1), (done.status, done.output)
    assert complete_checkpoints(lab.path)
    lab.goes_on()
    return "one error; goes on bit-identical" if done.status else "trained to the end"
