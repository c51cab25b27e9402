"""With a GPU the kernels' tests run there, and `pytest -m gpu` picks them; without one, in Triton's interpreter."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest


def _gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def _patch_the_language_once() -> None:
    """Triton's interpreter patches its language anew at each launch and at each call of a helper: nearly half of the time of a small
    launch. No test of an interpreting process needs the language as it was, so one patch stands for all."""
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()


if not _gpu():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    _patch_the_language_once()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _gpu() and Path(__file__).parent / "kernels" in item.path.parents:
            item.add_marker(pytest.mark.gpu)
