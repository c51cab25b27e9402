"""Tensors by dotted key in safetensors files. A file that does not fit changes nothing.

save({"fc1.weight": weight}, Path("model.safetensors"))
load_into(run.state_dict(), read(Path("model.safetensors")), "model.safetensors")
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise ImportError("saving and loading needs the package `safetensors`: pip install safetensors") from None
    return safetensors


def save(tensors: Mapping[str, torch.Tensor], path: Path) -> None:
    """Writes a file beside its place and renames it: it is there whole, or not at all."""
    library = _safetensors()
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path}: there is no folder {path.parent}")
    whole = {n: t.detach().contiguous() for n, t in tensors.items()}
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    os.close(handle)
    try:
        library.torch.save_file(whole, name)
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(name, 0o666 & ~mask)  # as any new file; a temporary one is for its owner alone
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read(path: Path) -> dict[str, torch.Tensor]:
    """All tensors of a file, on the CPU. Raises ValueError where it is no whole safetensors file."""
    library = _safetensors()
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    try:
        found: dict[str, Any] = library.torch.load_file(str(path))
    except library.SafetensorError as error:
        raise ValueError(f"{path}: no whole safetensors file: {error}") from error
    return found


def load_into(own: Mapping[str, torch.Tensor], given: Mapping[str, torch.Tensor], source: str) -> None:
    """Copies, if names, shapes and dtypes are the same; what is in float32 there may be in half precision here: it is the master.

    Raises:
        TypeError: what is given is no mapping of tensors.
        ValueError: with every difference; nothing is copied.
    """
    import torch

    def whole(tensor: object) -> bool:
        return isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and tensor.device.type != "meta"

    if not isinstance(given, Mapping) or not all(whole(t) for t in given.values()):
        raise TypeError(f"{source}: a state is a mapping of names to tensors that are dense in memory")
    halves = (torch.float16, torch.bfloat16)
    wrong = [f"`{n}` is missing" for n in own if n not in given]
    wrong += [f"`{n}` is not of this model" for n in given if n not in own]
    for name in (n for n in own if n in given):
        ours, theirs = own[name], given[name]
        if ours.shape != theirs.shape:
            wrong.append(f"`{name}` is {list(theirs.shape)} there, {list(ours.shape)} here")
        if ours.dtype != theirs.dtype and not (ours.dtype in halves and theirs.dtype == torch.float32):
            wrong.append(f"`{name}` is {theirs.dtype} there, {ours.dtype} here")
    if wrong:
        raise ValueError("\n  ".join([f"{source} does not fit, nothing is loaded:", *wrong]))
    for name, tensor in own.items():
        tensor.detach().copy_(given[name])
