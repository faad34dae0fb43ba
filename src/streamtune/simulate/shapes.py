"""Cache results on ``meta``: an operator is called once for each form of its arguments.

Shape functions of many operators are written in Python and take longer than their kernels; a step calls them with the
same forms for every chunk and layer. (The same idea as torch's cache of fake tensors.)
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import Tensor

__all__ = ["ResultKind", "Shapes", "result_kind_of"]

MOVES = {"resize_", "set_", "t_", "transpose_", "squeeze_", "unsqueeze_", "as_strided_", "swapaxes_", "detach_"}
"""Operators in place that leave their tensor in another form."""

ResultKind = Literal["in place", "new", "grouped", "other"]
"""The result of an operator: its first argument, a tensor of its own, that of a grouped product, or something else."""


class Shapes:
    """Calls operators on ``meta`` tensors; used inside of a dispatch mode."""

    def __init__(self) -> None:
        self._known: dict[Any, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}

    def call(self, func: Any, kind: ResultKind, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return ``func(*args, **kwargs)``, from the cache if it is there; ``kind`` is :func:`result_kind_of` it."""
        if kind == "other":
            return func(*args, **kwargs)
        if kind == "in place":
            first = args[0]
            return first if first.is_meta else func(*args, **kwargs)
        if kind == "grouped" and args[0].is_meta:
            return _grouped(func, args, kwargs)
        try:
            key = (id(func), _key(args), _key(tuple(kwargs.items())) if kwargs else ())
            form = self._known.get(key)
        except TypeError:  # of something that cannot be compared
            return func(*args, **kwargs)
        if form is not None:
            return torch.empty_strided(form[0], form[1], dtype=form[2], device="meta")
        out = func(*args, **kwargs)
        if isinstance(out, Tensor) and out.device.type == "meta" and not _aliases(out, args):
            self._known[key] = (out.shape, out.stride(), out.dtype)
        return out


def result_kind_of(func: Any) -> ResultKind:
    """Return the way in which the form of an operator's result is found."""
    if func is torch.ops.aten._grouped_mm.default:
        return "grouped"
    schema = func._schema
    name = schema.name.removeprefix("aten::")
    if len(schema.returns) != 1 or str(schema.returns[0].type) != "Tensor":
        return "other"
    alias = schema.returns[0].alias_info
    if alias is None:
        return "other" if schema.is_mutable else "new"
    writes_first = schema.arguments[0].alias_info is not None and schema.arguments[0].alias_info.is_write
    return "in place" if alias.is_write and writes_first and name not in MOVES else "other"


def _grouped(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Return a grouped product, whose shape function supports only bf16 while its kernels support more."""

    def narrow(x: Tensor) -> Tensor:
        return torch.empty_strided(x.shape, x.stride(), dtype=torch.bfloat16, device="meta")

    out = func(narrow(args[0]), narrow(args[1]), *args[2:], **kwargs)
    return torch.empty_strided(out.shape, out.stride(), dtype=args[0].dtype, device="meta")


def _aliases(out: Tensor, args: tuple[Any, ...]) -> bool:
    """Return True if ``out`` is a view of one of ``args`` or of another tensor (some views are not declared so)."""
    storage = out.untyped_storage()
    if any(isinstance(item, Tensor) and item.untyped_storage()._cdata == storage._cdata for item in args):
        return True
    alike = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device="meta")
    return bool(out.storage_offset()) or storage.nbytes() != alike.untyped_storage().nbytes()


def _key(items: tuple[Any, ...]) -> tuple[Any, ...]:
    out: list[Any] = []
    for item in items:
        if isinstance(item, Tensor):
            out.append((item.shape, item.stride(), item.dtype, item.is_meta))
        elif isinstance(item, (list, tuple)):
            out.append(_key(tuple(item)))
        else:
            out.append((type(item), item))
    return tuple(out)
