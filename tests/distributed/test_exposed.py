"""Exposure of a run of several ranks: its open ports, how it handles received bytes, and its outgoing connections."""

from __future__ import annotations

import json
import os
import secrets
import selectors
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from streamtune.distributed.agree import check_ranks_agree
from streamtune.distributed.environment import RankEnvironment, read_environment
from streamtune.distributed.hosts import free_port, listen_at, rank_0_ports, read_hostfile
from streamtune.distributed.launcher import launch
from streamtune.distributed.remote_ranks import SSH
from streamtune.distributed.wire import MAX_CALLERS, Admission, Channel, connect_to_rank_0, listen_for_ranks, make_proof
from streamtune.errors import ArgumentError, DistributedError
from tests.distributed.ranks_kit import SRC
from tests.distributed.running import Running, command
from tests.sft_kit import FIXED, RECIPE, write_recipe, write_rows

HERE = "127.0.0.1"
TINY: dict[str, Any] = {
    **RECIPE,
    "max_length": 256,
    "engine": FIXED,
    "train_batch_size": 4,
    "max_steps": 60,
    "save_steps": 0,
}
ENGINES: dict[str, dict[str, Any]] = {
    "ddp": {},
    "zero1": {"deepspeed": "zero1"},
    "zero2": {"deepspeed": "zero2"},
    "zero3": {"deepspeed": "zero3"},
    "fsdp": {"fsdp": True},
}


def rank_of_two(rank: int, port: int, run_id: str) -> RankEnvironment:
    return RankEnvironment(rank, rank, 2, 2, HERE, port, launcher="streamtune", run_id=run_id, one_machine=True)


def await_(seen: Callable[[], bool], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not seen():
        assert time.monotonic() < until
        time.sleep(0.01)


# --- names of hosts ----------------------------------------------------------------------------------------------

NO_HOSTS = (
    "-oProxyCommand=touch${IFS}x",
    "user@-oProxyCommand=x",
    "-l@host",
    "a@b@-oProxyCommand=x",
    "@host",
    "host@",
    "host;reboot",
    "$(reboot)",
    "`reboot`",
    "host|x",
    "host&",
    "host>x",
    "host\\x",
    "'host'",
    '"host"',
    "host/../x",
    "host\x1b[31m",
    "host\x00x",
    "h\u00f6st",
    "a" * 300,
)


@pytest.mark.parametrize("name", NO_HOSTS, ids=ascii)
def test_a_name_that_ssh_or_a_shell_would_take_for_something_else_is_refused(tmp_path: Path, name: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"# hosts\ngood slots=1\n{name} slots=1\n")
    with pytest.raises(ArgumentError) as caught:
        read_hostfile(path)
    assert caught.value.where == f"{path}:3"
    assert str(caught.value).isprintable() or "\n" in str(caught.value)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    "name", ["node-a", "n_1.cluster.example", "10.0.0.1", "fe80::1%eth0", "::1", "me@node", "first.last+x@10.0.0.1"]
)
def test_an_ordinary_name_is_taken(tmp_path: Path, name: str) -> None:
    path = tmp_path / "hosts"
    path.write_text(f"{name} slots=1\n")
    assert read_hostfile(path)[0].name == name


@pytest.mark.parametrize("name", ["-oProxyCommand=x", "a b", "a;b", "a\nb", "me@host"])
def test_rank_0s_address_is_a_name_of_a_host(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    with pytest.raises(ArgumentError, match="is not a valid host name") as caught:
        read_environment({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": name})
    assert caught.value.where == "MASTER_ADDR"
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("MASTER_ADDR", name)
    with pytest.raises(ArgumentError, match="is not a valid host name"):
        launch(["sft"], nproc=2, hostfile=None, device="cpu")


def test_ssh_takes_nothing_behind_its_options_for_another() -> None:
    assert SSH.split()[-1] == "--"


# --- who is let in -----------------------------------------------------------------------------------------------


def test_rank_0_listens_where_it_is_called_and_nowhere_else() -> None:
    with closing(listen_at(HERE, 0)) as server:
        assert server.getsockname()[0] == HERE
    with closing(listen_at("localhost", 0)) as server:
        assert server.getsockname()[0] in (HERE, "::1")
    with closing(listen_at("192.0.2.1", 0)) as server:  # of no machine: behind a translation of addresses
        assert server.getsockname()[0] == "0.0.0.0"
    with closing(listen_at(HERE, 0)) as taken, pytest.raises(OSError, match="in use"):
        listen_at(HERE, taken.getsockname()[1])


def test_a_secret_of_the_user_makes_the_run_id_of_other_launchers_unknown() -> None:
    variables = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    known = read_environment(variables).run_id
    ours = read_environment({**variables, "STREAMTUNE_SECRET": "one"}).run_id
    assert len({known, ours, read_environment({**variables, "STREAMTUNE_SECRET": "two"}).run_id}) == 3


@pytest.fixture
def admission() -> Any:
    """Admit callers as rank 0 of two, in a thread; ``found`` has the admitted ones."""
    env = rank_of_two(0, free_port(), secrets.token_hex(16))
    found: list[tuple[Channel, dict[str, Any]]] = []
    done = threading.Event()
    selector = selectors.DefaultSelector()
    entry = Admission(listen_for_ranks(env, "test"), env, "test", {"about": 1}, selector)

    def serve() -> None:
        while not done.is_set():
            for key, _ in selector.select(0.05):
                if (admitted := entry.process_ready_socket(key.fileobj)) is not None:
                    found.append(admitted)
            entry.close_overdue_callers()

    thread = threading.Thread(target=serve)
    thread.start()
    yield env, found
    done.set()
    thread.join()
    entry.close()
    for line, _ in found:
        line.close()
    selector.close()


def connect(env: RankEnvironment) -> socket.socket:
    return socket.create_connection((HERE, rank_0_ports(env.master_port)[0]), timeout=5)


def test_a_rank_gets_in_past_500_that_say_nothing_half_a_word_or_garbage(admission: Any) -> None:
    env, found = admission
    words = (
        b"",
        b'{"nonce": "a',
        b"\x00" * 100,
        b"[" * 8000 + b"\n",
        b"{}\n",
        b'{"nonce": 1}\n',
        b"x" * 100_000,
        b"1\n",
    )
    with ExitStack() as open_:
        for number in range(500):
            stranger = open_.enter_context(connect(env))
            stranger.setblocking(False)
            with suppress(OSError):
                stranger.send(words[number % len(words)])
        began = time.monotonic()
        with closing(connect_to_rank_0(rank_of_two(1, env.master_port, env.run_id), "test", {"x": 1}, 20)) as line:
            assert time.monotonic() - began < 5
            assert line.greeting["about"] == 1
            await_(lambda: len(found) == 1)
    assert [said["rank"] for _, said in found] == [1]


def test_the_run_id_is_what_lets_in(admission: Any) -> None:
    env, found = admission
    with pytest.raises(DistributedError, match="cannot reach rank 0"):
        connect_to_rank_0(rank_of_two(1, env.master_port, "guessed"), "test", {}, 0.5)
    with pytest.raises(DistributedError, match="cannot reach rank 0"):
        connect_to_rank_0(rank_of_two(1, env.master_port, env.run_id), "another purpose", {}, 0.5)
    assert not found


def test_what_one_rank_said_lets_nobody_in_a_second_time(admission: Any) -> None:
    env, found = admission
    with closing(Channel(connect(env))) as first, closing(Channel(connect(env))) as second:
        first.send({"nonce": "a"})
        heard = first.receive(3)
        proof = {"proof": make_proof(env, "test", "caller", f"a/{heard['nonce']}"), "rank": 1, "host": "h"}
        second.send({"nonce": "a"})
        assert second.receive(3)["nonce"] != heard["nonce"]
        second.send(proof)
        with pytest.raises(ConnectionError):
            second.receive(3)
        first.send(proof)
        assert first.receive(3)["welcome"] is True
        await_(lambda: len(found) == 1)


@pytest.mark.parametrize("rank", [0, 2, -1, "x", None])
def test_a_rank_is_one_of_the_run(admission: Any, rank: Any) -> None:
    env, found = admission
    with closing(Channel(connect(env))) as line:
        line.send({"nonce": "a"})
        nonces = f"a/{line.receive(3)['nonce']}"
        line.send({"proof": make_proof(env, "test", "caller", nonces), "rank": rank, "host": "h"})
        with pytest.raises(ConnectionError):
            line.receive(3)
    assert not found


def test_a_program_that_took_the_port_before_rank_0_learns_nothing_and_is_passed_by() -> None:
    port, run_id, heard = free_port(), secrets.token_hex(16), []
    with socket.create_server((HERE, rank_0_ports(port)[0])) as server:

        def answer() -> None:
            with suppress(OSError):
                while True:
                    caller, _ = server.accept()
                    with caller:
                        heard.append(caller.recv(65536))
                        caller.sendall(b'{"nonce": "b", "proof": "c"}\n')
                        heard.append(caller.recv(65536))

        threading.Thread(target=answer, daemon=True).start()
        main = threading.Thread(target=lambda: check_ranks_agree({"recipe": "a"}, rank_of_two(0, port, run_id), 30))
        main.start()
        check_ranks_agree({"recipe": "a"}, rank_of_two(1, port, run_id), 30)
        main.join()
        server.shutdown(socket.SHUT_RDWR)
    said = b"".join(heard)
    assert b"nonce" in said
    assert run_id.encode() not in said
    assert b"proof" not in said


def test_the_oldest_of_too_many_is_let_go(admission: Any) -> None:
    env, _ = admission
    with ExitStack() as open_:
        callers = [open_.enter_context(connect(env)) for _ in range(MAX_CALLERS + 40)]
        callers[0].settimeout(5)
        assert callers[0].recv(1) == b""


# --- a run ---------------------------------------------------------------------------------------------------

NO_PICKLES = """
import os
if os.environ.get("RANK") and os.environ.get("PICKLES_SEEN"):
    import pickle, sys

    def note(name):
        frames, frame = [], sys._getframe(2)
        while frame is not None and len(frames) < 4:
            frames.append(f"{frame.f_code.co_filename}:{frame.f_lineno}")
            frame = frame.f_back
        with open(os.environ["PICKLES_SEEN"] + "." + os.environ["RANK"], "a") as file:
            print(name, *frames, file=file)
        if not frames[0].rpartition(":")[0].endswith("/streamtune/base/child.py"):
            raise RuntimeError("a rank reads a pickle")

    class Unpickler(pickle.Unpickler):
        def __init__(self, *arguments, **named):
            note("Unpickler")
            super().__init__(*arguments, **named)

    def refuse(name, real):
        def call(*arguments, **named):
            note(name)
            return real(*arguments, **named)
        return call

    pickle.Unpickler = Unpickler
    pickle._Unpickler.load = refuse("_Unpickler.load", pickle._Unpickler.load)
    pickle.loads, pickle.load = refuse("loads", pickle.loads), refuse("load", pickle.load)
    open(os.environ["PICKLES_SEEN"] + "." + os.environ["RANK"], "a").close()
"""
"""In every rank: reading a pickle raises, but those that this process itself has written."""


def start(folder: Path, engine: str, *, steps: int = 60, **environment: str) -> Running:
    """Start ``--nproc 2`` with an engine; the ranks cannot load pickles."""
    write_rows(folder, 20)
    write_recipe(folder, {**TINY, **ENGINES[engine], "max_steps": steps})
    (folder / "sitecustomize.py").write_text(NO_PICKLES)
    variables = {"PYTHONPATH": f"{folder}{os.pathsep}{SRC}", "PICKLES_SEEN": str(folder / "pickles"), **environment}
    return Running(folder, command("sft", "tiny.yaml", "--nproc", "2"), **variables)


def listening(process: int) -> list[tuple[str, int]]:
    """Return the addresses and ports at which a process and its children listen."""
    whole = psutil.Process(process)
    return sorted(
        {
            (each.laddr.ip, each.laddr.port)
            for one in [whole, *whole.children(recursive=True)]
            for each in one.net_connections(kind="inet")
            if each.status == psutil.CONN_LISTEN or not each.raddr
        }
    )


def check_unexposed(running: Running) -> list[tuple[str, int]]:
    """Check that the run listens only at the loopback."""
    places = listening(running.process.pid)
    assert places, "rank 0's store, at least"
    assert {address for address, _ in places} <= {HERE, "::1"}, places
    return places


def check_no_pickles(folder: Path) -> None:
    for rank in (0, 1):
        seen = (folder / f"pickles.{rank}").read_text().splitlines()
        assert seen == []


def attack(places: list[tuple[str, int]], seconds: float) -> list[socket.socket]:
    """Send what a stranger on this machine could send to open ports: garbage, half a word, much, nothing; 500 calls."""
    words = (
        b"", b"\x00", b"\xff" * 64, b"GET / HTTP/1.0\r\n\r\n", b'{"nonce": "', os.urandom(4096), b"\x00" * 65536,
        b"[" * 60_000 + b"\n", b'{"token": "x", "rank": 1, "host": "h", "process": ["", 1]}\n',
    )  # fmt: skip
    held: list[socket.socket] = []
    until = time.monotonic() + seconds
    for number in range(500):
        address, port = places[number % len(places)]
        try:
            caller = socket.create_connection((address, port), timeout=0.3)
        except OSError:
            continue
        caller.setblocking(False)
        with suppress(OSError):
            caller.send(words[number // len(places) % len(words)])
        held.append(caller)
        if time.monotonic() > until:
            break
    return held


def rob_store(places: list[tuple[str, int]]) -> dict[int, list[str]]:
    """Set and then delete every key of the PyTorch stores among these ports, as a stranger could."""
    program = f"""
import json, os, threading
from datetime import timedelta
from torch.distributed import TCPStore
found = {{}}
def rob(port):
    store = TCPStore("{HERE}", port, is_master=False, timeout=timedelta(seconds=3), wait_for_workers=False)
    store.set("default_pg/0//0", "garbage")
    found[port] = keys = store.list_keys() if hasattr(store, "list_keys") else []
    for key in keys:
        store.set(key, b"cos\\nsystem\\n(S'touch robbed'\\ntR.")
        store.delete_key(key)
robbers = [threading.Thread(target=rob, args=(port,), daemon=True) for port in {[port for _, port in places]}]
[one.start() for one in robbers]
[one.join(8) for one in robbers]
print(json.dumps(found), flush=True)
os._exit(0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    return {int(port): keys for port, keys in json.loads(done.stdout.splitlines()[-1]).items()}


@pytest.mark.full
def test_a_run_listens_on_the_loopback_alone_and_reads_no_pickle(tmp_path: Path) -> None:
    with start(tmp_path, "ddp", steps=400) as running:
        running.wait_for_step(2)
        places = check_unexposed(running)
        run_id = running.rank(0).environ()["STREAMTUNE_RUN_ID"]
        assert not [one for one in psutil.process_iter(["cmdline"]) if run_id in " ".join(one.info["cmdline"] or ())]
        held = attack(places, 5)
        reached = running.step
        running.wait_for_step(reached + 3, 60)
        for each in held:
            each.close()
        running.process.terminate()
        assert running.wait(60) == 143, running.stderr
    check_no_pickles(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_a_run_that_is_attacked_at_every_port_trains_on_and_ends_right(tmp_path: Path, engine: str) -> None:
    with start(tmp_path, engine, steps=40) as running:
        running.wait_for_step(1)
        places = check_unexposed(running)
        held = attack(places, 10)
        robbed = rob_store(places)
        code = running.wait(300)
        for each in held:
            each.close()
        assert code == 0, running.stderr
        assert running.step == 40
    assert robbed, "one of the ports is the store's"
    assert not list(tmp_path.rglob("robbed"))
    check_no_pickles(tmp_path)


@pytest.mark.slow
def test_a_port_that_another_program_takes_while_the_run_starts_is_named(tmp_path: Path) -> None:
    port = free_port()
    with start(tmp_path, "ddp", MASTER_PORT=str(port)) as running:
        await_(lambda: len(psutil.Process(running.process.pid).children()) == 2, 60)
        with socket.create_server((HERE, port)):  # after the launcher has looked, before rank 0 does
            code = running.wait(200)
        assert code == 1
        assert f"cannot listen at port {port} of {HERE}: another program uses it" in running.stderr
