"""Reads what a state dict of an optimizer has, and finds all that does not fit before anything is changed. Imports torch.

faults = []
groups, saved = outline(state_dict, [2], faults)       # faults: ["`state` is missing"]
count = whole(saved[0]["step"], "`step` of parameter 0", faults)
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch


def outline(
    state_dict: Mapping[str, Any], sizes: Sequence[int], faults: list[str]
) -> tuple[list[Mapping[str, Any]], Mapping[Any, Any]]:
    """The groups and the state by parameter id; of groups none where they are not those of `sizes` parameters.

    Appends to `faults` what is missing or of another kind, and ids that do not go with the groups one to one.
    """
    saved = state_dict.get("state")
    if not isinstance(saved, Mapping):
        faults.append(_absent(state_dict, "state", "a dict"))
        saved = {}
    groups = state_dict.get("param_groups")
    if not isinstance(groups, (list, tuple)):
        faults.append(_absent(state_dict, "param_groups", "a list of groups"))
        return [], saved
    wrong = [f"group {k}" for k, g in enumerate(groups) if not _is_group(g)]
    if wrong:
        faults.append(f"{', '.join(wrong)}: a group is a dict that has a list `params` of ids")
        return [], saved
    found = [len(g["params"]) for g in groups]
    if found != list(sizes):
        faults.append(f"it has groups of {found} parameters, the optimizer of {list(sizes)}")
        return [], saved
    faults += _unnamed(groups, saved)
    return list(groups), saved


def _absent(state_dict: Mapping[str, Any], key: str, wanted: str) -> str:
    if key not in state_dict:
        return f"`{key}` is missing"
    return f"`{key}` is {described(state_dict[key])}; it takes {wanted}"


def _is_group(group: Any) -> bool:
    ids = group.get("params") if isinstance(group, Mapping) else None
    return isinstance(ids, (list, tuple)) and all(isinstance(i, Hashable) for i in ids)


def _unnamed(groups: Sequence[Mapping[str, Any]], saved: Mapping[Any, Any]) -> list[str]:
    named = {i for g in groups for i in g["params"]}
    return [f"it has state of parameter {i!r:.40}, which no group names" for i in saved if i not in named]


def described(value: Any) -> str:
    """A value in the words of an error: what is long, or a tensor of several elements, by its kind."""
    if isinstance(value, torch.Tensor) and (value.numel() != 1 or value.is_meta):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, (Mapping, list, tuple, set)):
        return f"a {type(value).__name__}"
    return f"{value!r:.40}"


def number(value: Any, name: str, faults: list[str]) -> float:
    """A finite number, or what a tensor of one element has; 0 where it is none."""
    found = _number(value)
    if found is None:
        faults.append(f"{name} is {described(value)}; it takes a finite number")
    return found or 0.0


def whole(value: Any, name: str, faults: list[str]) -> int:
    """A count from 0, or what a tensor of one element has; 0 where it is none."""
    found = _number(value)
    if found is None or not found.is_integer() or not 0 <= found < 2**53:
        faults.append(f"{name} is {described(value)}; it takes a whole number that is not negative")
        return 0
    return int(found)


def _number(value: Any) -> float | None:
    if isinstance(value, torch.Tensor):
        if value.numel() != 1 or value.is_meta or value.layout != torch.strided:
            return None
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, Real):
        return None
    try:
        found = float(value)
    except OverflowError:
        return None
    return found if math.isfinite(found) else None


def fits(value: Any, param: torch.Tensor, name: str, faults: list[str]) -> bool:
    """Whether a value is a float tensor of the parameter's shape that can be copied."""
    if not isinstance(value, torch.Tensor):
        faults.append(f"{name} is {described(value)}; it takes a float tensor")
    elif not value.is_floating_point() or value.layout != torch.strided or value.is_meta:
        faults.append(f"{name} is {value.layout} {value.dtype} on {value.device}; it takes a dense float tensor")
    elif value.shape != param.shape:
        faults.append(f"{name} is {tuple(value.shape)}, its parameter {tuple(param.shape)}")
    else:
        return True
    return False
