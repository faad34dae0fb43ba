"""Messages between ranks are JSON: values are decoded exactly, and other values are errors."""

from __future__ import annotations

import ast
import json
import math
import struct
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch

import streamtune
from streamtune.base.privacy import OfflineError
from streamtune.errors import ArgumentError, DistributedError, RunError
from streamtune.train.world import decode_value, describe_error, encode_value, rebuild_error
from tests.distributed import exchange_cases
from tests.distributed.rank_group import run_ranks

PACKAGE = Path(streamtune.__file__).parent
PICKLING = (
    "all_gather_object", "broadcast_object_list", "gather_object", "scatter_object_list", "send_object_list",
    "recv_object_list", "_object_to_tensor", "_tensor_to_object", "broadcast_from_rank0",
)  # fmt: skip
"""Functions of torch.distributed that send objects as pickles."""
READS_PICKLES = {
    "data/record_table.py",
    "data/rendering/pool.py",
    "base/child.py",
    "data/templates/worker.py",
    "data/templates/__init__.py",
}
"""Read what the same process wrote, or its own parent over a pipe: no rank and no file."""


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -1, 2**53 + 1, -(2**63), 2**63, -(2**200), 10**5000, 0.1, -0.0, 5e-324, 1.7976931348623157e308,
        "", "text", "\u00f6\u4e2d\U0001f600", "\ud800", "\x00", b"", b"\x00\xff", [], (), {}, set(),
        {(1, "a")}, [1, (2, [3])], (1,),
        {"d": {}, "t": [1], "m": [[1, 2]]}, {1: "a", "1": "b"}, {(1, 2): {None: 0.5}}, {True: 1}, Path("a/b"),
        [[(1, 0.1, {"a": None})]] * 3,
    ],
    ids=lambda value: repr(value)[:40] if not isinstance(value, int) else f"int of {value.bit_length()} bits",
)  # fmt: skip
def test_a_value_comes_back_exactly(value: Any) -> None:
    found = decode_value(encode_value(value), 1)
    assert found == value
    assert type(found) is type(value) or isinstance(value, Path)
    assert repr(found) == repr(value) if not isinstance(value, int) else True
    assert encode_value(found) == encode_value(value)


@pytest.mark.parametrize("bits", ["7ff0000000000000", "fff0000000000000", "7ff8000000000000", "fff8000000000123"])
def test_floats_that_are_not_finite_come_back_bit_by_bit(bits: str) -> None:
    (value,) = struct.unpack(">d", bytes.fromhex(bits))
    (found,) = decode_value(encode_value((value,)), 0)
    assert struct.pack(">d", found).hex() == bits
    assert not math.isfinite(found)


def test_of_subclasses_the_plain_value_comes_back() -> None:
    found = decode_value(encode_value([torch.Size([2, 3]), OrderedDict(a=1)]), 0)
    assert found == [(2, 3), {"a": 1}]
    assert [type(each) for each in found] == [tuple, dict]


@pytest.mark.parametrize(
    "value", [object(), {1, (2, object())}, torch.zeros(2), ValueError("x"), lambda: None, [1, {2: object()}]]
)
def test_nothing_else_is_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent to other ranks"):
        encode_value(value)


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x80\x04N.", b"cos\nsystem\n(S'x'\ntR.", b"{", b"[1,", b'"\xff"', b"NaN", b"Infinity", b"[" * 100_000,
        b'{"d":1}', b'{"m":[[1]]}', b'{"m":[[{"d":{}},1]]}', b'{"t":{}}', b'{"s":[[]]}',
        b'{"b":"*"}', b'{"b":[]}', b'{"f":"00"}',
        b'{"f":"zz"}', b'{"i":"x"}', b'{"i":1}', b'{"x":1}', b"{}", b'{"d":{},"t":[]}', b'{"p":1}', b"1 2",
        b"9" * 5000,
    ],
    ids=lambda data: ascii(data[:24]),
)  # fmt: skip
def test_what_is_no_value_is_an_error_that_names_the_rank(data: bytes) -> None:
    with pytest.raises(DistributedError, match=f"rank 3 sent {len(data)} bytes"):
        decode_value(data, 3)


def test_an_error_is_made_anew_from_its_name_and_text() -> None:
    error = ArgumentError("what", where="a:1", fix="mend")
    made = rebuild_error(decode_value(encode_value(describe_error(error)), 1), 1, has_rank_prefix=False)
    assert (type(made), made.what, made.where, made.fix, made.exit_code) == (ArgumentError, "what", "a:1", "mend", 2)
    error.exit_code = 77
    assert rebuild_error(describe_error(error), 1, has_rank_prefix=True).exit_code == 77
    assert rebuild_error(describe_error(error), 1, has_rank_prefix=True).what == "rank 1: what"
    assert type(rebuild_error(describe_error(OfflineError("x")), 1, has_rank_prefix=False)) is RunError
    assert str(rebuild_error(describe_error(KeyError("x")), 2, has_rank_prefix=True)) == "rank 2 failed: KeyError: 'x'"


@pytest.mark.parametrize(
    "described",
    [None, 1, [], {}, {"kinds": []}, {"kinds": [], "text": ""}, {"kinds": ["did_you_mean"], "text": "", "what": ""},
     {"kinds": ["__import__", "os"], "text": "x", "what": "w", "where": "", "fix": "", "exit_code": "x"}],
    ids=repr,
)  # fmt: skip
def test_an_error_that_cannot_be_read_is_one_all_the_same(described: Any) -> None:
    assert isinstance(rebuild_error(described, 1, has_rank_prefix=False), DistributedError)


@pytest.mark.parametrize("kind", ["did_you_mean", "annotations", "get_close_matches", "__doc__", "Iterable", "eval"])
def test_the_class_of_an_error_is_one_of_ours(kind: str) -> None:
    described = {**describe_error(ArgumentError("w")), "kinds": [kind]}
    assert type(rebuild_error(described, 1, has_rank_prefix=False)) is RunError


def test_the_sources_send_no_pickles_and_read_none_but_their_own() -> None:
    wrong = []
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            words = [getattr(node, "attr", None), getattr(node, "id", None), getattr(node, "arg", None)]
            if isinstance(node, ast.ImportFrom | ast.Import):
                words += [alias.name for alias in node.names] + [getattr(node, "module", None)]
                words += [
                    "pickle module" if set(words) & {"pickle", "_pickle", "cPickle", "dill", "cloudpickle"} else ""
                ]
            for word in words:
                if word in PICKLING or (word == "pickle module" and name not in READS_PICKLES):
                    imports_error = isinstance(node, ast.ImportFrom) and [a.name for a in node.names] == [
                        "UnpicklingError"
                    ]
                    wrong += [] if imports_error else [f"{name}:{node.lineno} {word}"]
            if isinstance(node, ast.Attribute) and ast.unparse(node) in ("torch.load", "torch.save"):
                wrong.append(f"{name}:{node.lineno} {ast.unparse(node)}")
    assert wrong == []


def test_ranks_exchange_values_and_errors_and_stay_in_step() -> None:
    found = run_ranks(2, "tests.distributed.exchange_cases", list(exchange_cases.CASES))
    assert found["values"] is True
    assert found["sequence"] == [0]
    ours, theirs = found["unsendable"]
    linear = "a torch.nn.modules.linear.Linear cannot be sent to other ranks"
    tensor = "a torch.Tensor cannot be sent to other ranks"
    assert ours == [f"RunError: rank 1 failed: TypeError: {linear}", f"TypeError: {tensor}"]
    assert theirs == [f"TypeError: {linear}", f"RunError: rank 0 failed: TypeError: {tensor}"]
    ours, theirs = found["errors"]
    assert ours[0] == ["TemplateLimitError", "too long", "a.jinja:3", "shorten it", 2]
    assert theirs[0] == ["ArgumentError", "too long", "a.jinja:3", "shorten it", 2]
    assert (ours[1], theirs[1][:2]) == (
        ["ZeroDivisionError", "by nothing"],
        ["RunError", "rank 0 failed: ZeroDivisionError: by nothing"],
    )
    assert ours[2] == ["DataError", "rank 1: no rows", "rows.jsonl:7", "add some", 2]
    assert theirs[2] == ["DataError", "no rows", "rows.jsonl:7", "add some", 2]
    assert found["garbage"][0] == []
    assert found["garbage"][1] == [
        ["DistributedError", "rank 0 sent 4 bytes that StreamTune cannot decode"],
        ["DistributedError", f"rank 0 announced a message with an impossible size ({1 << 60} bytes)"],
        ["DistributedError", "rank 0 announced a message with an impossible size (-1 bytes)"],
    ]
    assert json.dumps(found)
