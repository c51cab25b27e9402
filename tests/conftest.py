"""With a GPU the kernels' tests run there, and `pytest -m gpu` picks them; without one, in Triton's interpreter."""

import dataclasses
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


def _quicken_the_interpreter() -> None:
    """Takes out of Triton's interpreter what costs most of a small launch's time and shows nothing here.

    It patches its language anew at each launch and at each call of a helper; no test of an interpreting process needs the language
    as it was, so one patch stands for all. And it computes for each sum and product of integers whether it overflows, for an
    assertion that is off.
    """
    try:
        import triton.language as tl
        from triton.runtime import interpreter
    except ImportError:
        return
    if hasattr(interpreter, "_patch_lang") and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))
        interpreter._patch_lang = lambda fn: interpreter._LangPatchScope()
    options = getattr(interpreter.interpreter_builder, "options", None)
    if options is not None and not options.debug:
        interpreter.interpreter_builder.options = dataclasses.replace(options, sanitize_overflow=False)


if not _gpu():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
    _quicken_the_interpreter()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _gpu() and Path(__file__).parent / "kernels" in item.path.parents:
            item.add_marker(pytest.mark.gpu)
