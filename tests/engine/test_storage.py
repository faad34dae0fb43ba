"""The memory behind a streamed step: the arena, the tiers of device, host and disk, and what goes where."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

import streamtune
from streamtune import Schedule
from streamtune.engine.memory import host as arena_module
from streamtune.engine.memory.host import (
    CGROUP_FILES,
    PAGE,
    REGION,
    Arena,
    Stack,
    Tally,
    container_limit_bytes,
    exclude_from_forks,
    free_host_bytes,
    is_host_storage,
    map_pages,
    reserved_host_bytes,
    total_host_bytes,
    touch_pages,
)
from streamtune.engine.memory.placement import Tiers, best_segment_size, place_layers
from streamtune.engine.memory.tiers import StoredTensor, Tier
from streamtune.errors import OutOfMemoryError
from tests.exactness.families import SMALL, batch, build, gradients, reference

CPU, META = torch.device("cpu"), torch.device("meta")
GIB = 1 << 30
TIERS = ("device", "host", "disk")


def tier(name: Any, directory: Path) -> tuple[Tier, Tiers]:
    """A tier for tensors of the CPU, and what counts its bytes."""
    tiers = Tiers(Schedule(offload="disk", offload_dir=str(directory)))
    return tiers.get_tier(name, CPU), tiers


# --- the stack and the arena ----------------------------------------------------------------------------------------


def test_a_stack_is_whole_pages_and_sinks_past_what_was_freed() -> None:
    stack = Stack()
    assert [stack.allocate(nbytes) for nbytes in (1, PAGE, PAGE + 1, 0)] == [0, PAGE, 2 * PAGE, 4 * PAGE]
    assert stack.top == 5 * PAGE
    stack.free(PAGE)
    assert stack.top == 5 * PAGE, "there are blocks above it"
    stack.free(4 * PAGE)
    assert stack.top == 4 * PAGE
    stack.free(2 * PAGE)
    assert stack.top == PAGE, "it sinks past the block in the middle that was freed before"
    assert stack.allocate(5) == PAGE
    stack.free(0)
    stack.free(PAGE)
    assert stack.top == 0


def test_blocks_that_are_held_never_overlap() -> None:
    stack, choose = Stack(), random.Random(0)
    held: dict[int, int] = {}
    for _ in range(2000):
        if held and choose.random() < 0.5:
            offset = choose.choice(list(held))
            stack.free(offset)
            del held[offset]
        else:
            nbytes = choose.randrange(0, 5 * PAGE)
            held[stack.allocate(nbytes)] = nbytes
        ends = sorted((offset, offset + nbytes) for offset, nbytes in held.items())
        assert all(end <= start for (_, end), (start, _) in pairwise(ends))
        assert stack.top >= (ends[-1][1] if ends else 0)
    for offset in list(held):
        stack.free(offset)
    assert stack.top == 0


def test_space_below_the_top_is_allocated_again() -> None:
    """As where each forward begins before the one before it has gone backward."""
    stack = Stack()
    earlier = [stack.allocate(PAGE) for _ in range(3)]
    for _ in range(99):
        later = [stack.allocate(PAGE) for _ in range(3)]
        for offset in reversed(earlier):
            stack.free(offset)
        earlier = later
    assert stack.top == 6 * PAGE
    offset = stack.allocate(2 * PAGE)
    assert offset < stack.top - 2 * PAGE, "part of the space is enough"
    for each in (*earlier, offset):
        stack.free(each)
    assert stack.top == 0


def test_an_arena_uses_its_memory_again_and_counts() -> None:
    tally = Tally()
    arena = Arena(tally)
    first, second = arena.allocate(100, CPU), arena.allocate(3 * PAGE, CPU)
    assert (tally.live_bytes, tally.peak_bytes) == (100 + 3 * PAGE, 100 + 3 * PAGE)
    assert second.offset == PAGE
    arena.free(second)
    third = arena.allocate(10, CPU)
    assert third.offset == second.offset
    assert third.region is first.region
    assert (tally.live_bytes, tally.peak_bytes, tally.moved_bytes) == (110, 100 + 3 * PAGE, 0)
    assert [region.size for region in arena.regions] == [REGION]
    large = arena.allocate(REGION + 1, CPU)
    assert [region.size for region in arena.regions] == [REGION, REGION + PAGE], "no larger than is wanted"
    assert large.as_tensor(torch.Size([REGION + 1]), torch.uint8).data_ptr() % PAGE == 0
    assert arena.allocate(10, CPU).region is first.region


def test_what_is_reserved_is_mapped_once() -> None:
    arena = Arena(Tally())
    arena.reserve(2 * REGION, CPU)
    arena.reserve(REGION, CPU)
    assert [region.size for region in arena.regions] == [2 * REGION]
    arena.allocate(REGION, CPU)
    arena.allocate(REGION, CPU)
    assert len(arena.regions) == 1
    assert arena.tally.live_bytes == 2 * REGION


def test_a_host_that_has_no_room_says_so_and_is_not_made_to_swap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "free_host_bytes", lambda: reserved_host_bytes() + REGION)
    arena = Arena(Tally())
    arena.allocate(GIB // 64, CPU)
    monkeypatch.setattr(arena_module, "free_host_bytes", lambda: reserved_host_bytes() + GIB // 4)
    with pytest.raises(OutOfMemoryError) as caught:
        arena.allocate(3 * GIB, CPU)
    assert "0.02 GiB are offloaded, 3.00 GiB more are needed, 0.25 GiB are free" in caught.value.what
    assert "device_layers" in caught.value.fix
    monkeypatch.setattr(arena_module, "free_host_bytes", lambda: 0)
    with pytest.raises(OutOfMemoryError, match=r"0\.00 GiB are free"):
        arena.reserve(3 * GIB, CPU)
    assert len(arena.regions) == 1
    assert arena.tally.live_bytes == GIB // 64, "what was refused is not counted"
    arena.allocate(1 << 50, META)  # simulated memory takes none


def test_regions_grow_with_the_arena_as_far_as_there_is_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_module, "REGION", PAGE)
    arena = Arena(Tally())
    arena.allocate(320 * PAGE, CPU)
    arena.allocate(PAGE, CPU)
    assert [region.size for region in arena.regions] == [320 * PAGE, 20 * PAGE], "mapped ahead"
    monkeypatch.setattr(arena_module, "free_host_bytes", lambda: reserved_host_bytes() + 22 * PAGE - 1)
    arena.allocate(20 * PAGE, CPU)
    assert arena.regions[-1].size == 21 * PAGE, "what is left is given, to the last page"
    with pytest.raises(OutOfMemoryError):
        arena.allocate(22 * PAGE, CPU)


def test_a_step_on_a_host_without_room_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model, inputs = build("qwen3"), batch("plain")
    want = reference(model, inputs)
    model.zero_grad()
    with streamtune.stream(model, schedule=Schedule(chunk_size=8, offload="host")) as handle:
        monkeypatch.setattr(arena_module, "free_host_bytes", lambda: 0)
        with pytest.raises(OutOfMemoryError):
            model(**inputs)
        assert handle.tiers.host.live_bytes == 0
        assert all(parameter.grad is None for parameter in model.parameters())
        monkeypatch.undo()
        want.check(gradients(model, inputs))


def test_free_memory_is_that_of_the_container(tmp_path: Path) -> None:
    free = free_host_bytes(tmp_path)
    assert free > 0
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    assert free_host_bytes(tmp_path) == 300_000
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 200000\n")
    assert free_host_bytes(tmp_path) == 500_000
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 200000\nactive_file 100000\n")
    assert free_host_bytes(tmp_path) == 600_000, "files that were read twice can be dropped too"
    (tmp_path / "memory.max").write_text("max\n")
    assert free_host_bytes(tmp_path) > 1_000_000


@pytest.mark.parametrize("version", [1, 2])
def test_a_limit_below_the_mount_point_counts(version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Schedulers such as Slurm limit a group of the job's own, and the job's step is a group within it."""
    own, job = tmp_path / "own", tmp_path / ("memory/job" if version == 1 else "job")
    (job / "step").mkdir(parents=True)
    own.write_text("4:cpu,memory:/job/step\n0::/\n" if version == 1 else "0::/job/step\n")
    monkeypatch.setattr(arena_module, "OWN_GROUPS", own)
    limit, used = CGROUP_FILES[2 - version]
    (job / Path(limit).name).write_text("1000000\n")
    (job / Path(used).name).write_text("400000\n")
    (job / "step" / Path(limit).name).write_text(f"{2**63 - 4096}\n")
    assert free_host_bytes(tmp_path) == 600_000
    assert total_host_bytes(tmp_path) == container_limit_bytes(tmp_path) == 1_000_000
    own.write_text("0::/elsewhere\n")
    assert container_limit_bytes(tmp_path) is None


def test_what_stays_free_is_a_share_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A share of a large machine may be more than all of a small container."""
    memory = psutil.virtual_memory()
    monkeypatch.setattr(psutil, "virtual_memory", lambda: memory._replace(total=2048 * GIB, available=1900 * GIB))
    (tmp_path / "memory.max").write_text(f"{32 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{2 * GIB}\n")
    assert free_host_bytes(tmp_path) == 30 * GIB
    assert reserved_host_bytes(tmp_path) == int(0.02 * 32 * GIB)


@pytest.mark.full
def test_host_memory_is_told_from_the_device_where_both_are_the_cpu() -> None:
    for device in (CPU, META):
        arena, mine = Arena(Tally()), torch.empty(8, device=device)
        block = arena.allocate(100, device).as_tensor(torch.Size([25]), torch.float32)
        assert is_host_storage(block.untyped_storage())
        assert is_host_storage(block[3:].view(2, 11).untyped_storage())
        assert not is_host_storage(mine.untyped_storage())
        address = block.untyped_storage()._cdata
        del arena
        gc.collect()
        assert is_host_storage(block.untyped_storage()), "a tensor of it is still there"
        del block
        gc.collect()
        assert address not in arena_module._host_storages, "it may be another storage's next"


# --- round trips ----------------------------------------------------------------------------------------------------

DTYPES = (
    torch.float64,
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float8_e4m3fn,
    torch.complex64,
    torch.int64,
    torch.uint8,
    torch.bool,
)


def layouts(dtype: torch.dtype) -> list[Tensor]:
    """Tensors of a dtype: whole, cut, transposed, expanded, with gaps, of one element and of none."""
    torch.manual_seed(0)
    x = (torch.randn(3, 10, 6) * 4).to(dtype)
    return [
        x,
        x[:, 3:7],
        x.transpose(0, 2),
        x[:, :1].expand(3, 5, 6),
        x[::2, ::3, 1::2],
        x[0, 0, 0],
        x[:, 4:4],
        torch.zeros(0, dtype=dtype),
        (torch.randn(1, 1025) * 4).to(dtype),
    ]


@pytest.mark.parametrize("name", TIERS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_any_tensor_comes_back(dtype: torch.dtype, name: str, tmp_path: Path) -> None:
    place, tiers = tier(name, tmp_path)
    tensors = layouts(dtype)
    blocks = [place.put(x) for x in tensors]
    place.wait_for_copies()
    for block, x in reversed(list(zip(blocks, tensors, strict=True))):
        block.prefetch_to_device()
        back = block.get()
        assert (back.shape, back.dtype, back.device) == (x.shape, x.dtype, x.device)
        assert torch.equal(back.to(torch.complex128), x.to(torch.complex128))
        assert not is_host_storage(back.untyped_storage()), "it is the device's again"
        block.free()
        block.free()
    total = sum(x.nbytes for x in tensors)
    counted = {"device": None, "host": tiers.host, "disk": tiers.disk}[name]
    if counted is not None:
        assert (counted.live_bytes, counted.peak_bytes, counted.moved_bytes) == (0, total, 2 * total)


@pytest.mark.parametrize("name", ["host", "disk"])
def test_what_was_put_may_change_and_be_read_twice(name: str, tmp_path: Path) -> None:
    place, _ = tier(name, tmp_path)
    x = torch.arange(6.0)
    block = place.put(x)
    x.zero_()
    assert torch.equal(block.get(), torch.arange(6.0))
    block.get().zero_()
    assert torch.equal(block.get(), torch.arange(6.0))


@pytest.mark.parametrize("name", ["host", "disk"])
def test_simulated_tensors_count_and_copy_nothing(name: str, tmp_path: Path) -> None:
    tiers = Tiers(Schedule(offload="disk", offload_dir=str(tmp_path / "not made")))
    place = tiers.get_tier(name, META)  # type: ignore[arg-type]
    x = torch.empty(1 << 20, 1 << 20, dtype=torch.bfloat16, device=META)
    block = place.put(x)
    counted = tiers.host if name == "host" else tiers.disk
    assert counted.live_bytes == 2 << 40
    back = block.get()
    assert (back.shape, back.dtype, back.device) == (x.shape, x.dtype, x.device)
    block.free()
    assert (counted.live_bytes, counted.moved_bytes) == (0, 4 << 40)
    assert not list(tmp_path.iterdir())


def test_memory_on_its_way_to_the_disk_is_not_the_host_tier_s(tmp_path: Path) -> None:
    """Threads fill blocks at once, whereas a copy to a device may still read one that was freed."""
    tiers = Tiers(Schedule(offload="disk", offload_dir=str(tmp_path)))
    host: Any = tiers.get_tier("host", CPU)
    disk: Any = tiers.get_tier("disk", CPU)
    assert host.arena is not disk.arena
    assert host.arena.tally is disk.arena.tally is tiers.host


# --- what follows the sequence --------------------------------------------------------------------------------------


def slices(*ends: int) -> list[slice]:
    return [slice(start, stop) for start, stop in zip((0, *ends), ends, strict=False)]


@pytest.mark.parametrize("name", TIERS)
@pytest.mark.parametrize("along", [0, 1, 2])
def test_stored_is_read_in_other_chunks_than_it_was_written_in(name: str, along: int, tmp_path: Path) -> None:
    place, _ = tier(name, tmp_path)
    x = torch.randn([13 if dim == along else 3 for dim in range(3)])
    stored = StoredTensor(place, x, along)
    for chunk in slices(4, 8, 13):
        stored.put(chunk, x.narrow(along, chunk.start, chunk.stop - chunk.start))
    for chunks in (slices(4, 8, 13), slices(13), slices(1, 4, 5, 9, 12, 13), slices(6, 13)):
        stored.set_read_order(chunks[::-1])
        for chunk in chunks[::-1]:
            want = x.narrow(along, chunk.start, chunk.stop - chunk.start)
            assert torch.equal(stored.read_chunk(chunk), want), (chunks, chunk)
    stored.free()
    assert not stored.blocks


def test_the_chunk_that_comes_next_is_fetched_meanwhile(tmp_path: Path) -> None:
    place, tiers = tier("host", tmp_path)
    x, chunks = torch.randn(1, 12, 2), slices(3, 6, 9, 12)
    stored = StoredTensor(place, x, 1)
    for chunk in chunks:
        stored.put(chunk, x[:, chunk])
    each = x.nbytes // 4

    def fetched() -> list[int]:
        return [start for (start, _), block in stored.blocks.items() if getattr(block, "fetched", None) is not None]

    assert tiers.host.moved_bytes == 4 * each
    for order in (chunks[::-1], chunks):
        stored.set_read_order(order)
        before = tiers.host.moved_bytes
        for place_, chunk in enumerate(order):
            stored.read_chunk(chunk)
            assert fetched() == [following.start for following in order[place_ + 1 : place_ + 2]]
            assert tiers.host.moved_bytes == before + min(4, place_ + 2) * each, "each is copied once"


# --- which layer's input goes where ---------------------------------------------------------------------------------


def held_at_once(schedule: Schedule, count: int) -> list[tuple[int, int]]:
    """Inputs on the device and elsewhere while each segment goes backward: the stored ones before it, and its own."""
    places = place_layers(schedule, count)
    begins = [index for index, place in enumerate(places) if place.begins_segment and not place.unstreamed]
    found = []
    for begin in begins:
        segment = [begin]
        while not places[segment[-1]].ends_segment:
            segment.append(segment[-1] + 1)
        held = [places[index].tier for index in [*(b for b in begins if b < begin), *segment]]
        found.append((held.count("device"), len(held) - held.count("device")))
    return found


@pytest.mark.parametrize("count", [1, 2, 5, 12])
def test_one_level_stores_every_input(count: int) -> None:
    for kept in range(count + 3):
        places = place_layers(Schedule(offload="host", device_layers=kept), count)
        assert all(place.begins_segment and place.ends_segment and not place.unstreamed for place in places)
        on_device = [place.tier == "device" for place in places]
        assert on_device == [index >= count - kept for index in range(count)], "those the backward wants first"


@pytest.mark.parametrize("count", [1, 2, 3, 6, 7, 12])
def test_two_levels_hold_what_the_formula_says(count: int) -> None:
    for size in range(1, count + 3):
        stored, most = -(-count // size), -(-count // size) + size - 1
        for kept in range(most + 3):
            schedule = Schedule(offload="host", levels=2, segment_size=size, device_layers=kept)
            places = place_layers(schedule, count)
            assert [place.begins_segment for place in places] == [index % size == 0 for index in range(count)]
            assert sum(place.ends_segment for place in places) == stored
            on_device, elsewhere = zip(*held_at_once(schedule, count), strict=True)
            assert max(on_device) <= kept
            assert max(elsewhere) <= max(0, most - kept)
            if count % size == 0:
                assert max(on_device) == min(kept, most)
                assert max(elsewhere) == max(0, most - kept)


def test_layers_that_are_kept_whole_are_the_last() -> None:
    for kept in range(8):
        places = place_layers(Schedule(keep_layers=kept, levels=2, segment_size=2), 6)
        assert [place.unstreamed for place in places] == [index >= 6 - kept for index in range(6)]
        streamed = [place for place in places if not place.unstreamed]
        assert [place.begins_segment for place in streamed] == [index % 2 == 0 for index in range(len(streamed))]
        assert not streamed or streamed[-1].ends_segment


def test_the_best_segments_hold_fewest() -> None:
    for count in range(1, 200):
        held = {size: -(-count // size) + size - 1 for size in range(1, count + 1)}
        assert held[best_segment_size(count)] == min(held.values())
    assert [best_segment_size(count) for count in (0, 1, 16, 36, 100)] == [1, 1, 4, 6, 10]


@pytest.mark.parametrize("more", [{}, {"levels": 2, "segment_size": 2}, {"levels": 2, "segment_size": 3}])
@pytest.mark.parametrize("kept", [0, 1, 2, 4])
def test_a_step_holds_that_many_inputs_on_the_host(kept: int, more: dict[str, Any]) -> None:
    layers = 6
    model, inputs = build("qwen3", num_hidden_layers=layers), batch("plain")
    each = inputs["input_ids"].numel() * SMALL["hidden_size"] * 4
    schedule = Schedule(chunk_size=8, offload="host", device_layers=kept, **more)
    with streamtune.stream(model, schedule=schedule) as handle:
        gradients(model, inputs)
    after_forward = sum(place.begins_segment and place.tier == "host" for place in place_layers(schedule, layers))
    norm = 0 if kept else 1  # what the norm behind the layers is given waits where they do, unless some stay
    in_backward = max(elsewhere for _, elsewhere in held_at_once(schedule, layers))
    assert handle.tiers.host.peak_bytes == max(after_forward + norm, in_backward) * each


@pytest.mark.skipif(sys.platform != "linux", reason="huge pages are Linux's")
def test_pages_are_huge_and_those_of_an_accelerator_not_a_childs() -> None:
    """After a fork a write would give the parent another page than the one that an accelerator copies to."""
    (mapped := map_pages(1 << 22))[0] = 1
    exclude_from_forks(mapped)
    address, flags, inside = torch.frombuffer(mapped, dtype=torch.uint8).data_ptr(), [], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in (span := line.split()[0]):
            start, end = span.split("-")
            inside = int(start, 16) <= address < int(end, 16)
        elif inside and span == "VmFlags:":
            flags = line.split()
    assert "dc" in flags
    assert "hg" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="pages are a child's elsewhere")
@pytest.mark.full
def test_a_child_may_map_what_it_likes_where_an_arena_was(tmp_path: Path) -> None:
    """A child that drops an arena of its parent does not unmap what it has mapped there itself."""
    code = """
import gc, mmap, os, sys, torch
from streamtune.engine.memory.host import exclude_from_forks, map_pages

mapped = [map_pages(1 << 24) for _ in range(4)]
for each in mapped:
    exclude_from_forks(each)
regions = [torch.frombuffer(each, dtype=torch.uint8) for each in mapped]
mapped.clear()
del each
if os.fork() == 0:
    own = [mmap.mmap(-1, 1 << 24, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) for _ in range(16)]
    regions.clear()
    gc.collect()
    for each in own:
        each[:: mmap.PAGESIZE] = b"x" * (len(each) // mmap.PAGESIZE)
    sys.exit(0)
_, status = os.wait()
print(status)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    assert done.stdout.strip() == "0", done.stderr


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
def test_a_forked_child_trains_beside_its_parent(tmp_path: Path) -> None:
    """On a CPU: with host memory that was mapped before the fork, both compute the gradient at the same time."""
    code = """
import os, torch, streamtune
from tests.exactness.families import batch, build, gradients

torch.set_num_threads(1)
model = build("qwen3", num_hidden_layers=4)
rows = [batch("plain"), {name: x.flip(1) for name, x in batch("plain").items()}]
wanted = [gradients(model, inputs)[1] for inputs in rows]
schedule = streamtune.Schedule(chunk_size=8, offload="host", keep_attention="host", keep_kv="host")
streamtune.stream(model, schedule=schedule)
gradients(model, rows[0])
child = os.fork()
number, right = int(child == 0), True
want, inputs = wanted[number], rows[number]
for _ in range(10):
    _, found = gradients(model, inputs)
    right &= all((found[name] - want[name]).norm() <= 1e-4 * (want[name].norm() + 1e-3) for name in want)
if child == 0:
    os._exit(0 if right else 3)
_, status = os.waitpid(child, 0)
print(right, os.waitstatus_to_exitcode(status))
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "True 0", done.stderr


def test_touched_pages_are_there_and_zero() -> None:
    region = torch.frombuffer(map_pages(1 << 25), dtype=torch.uint8)
    before = psutil.Process().memory_info().rss
    touch_pages(region)
    assert psutil.Process().memory_info().rss - before > 1 << 24
    assert not region.any()
