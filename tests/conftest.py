"""With a GPU the kernels' tests run there, and `pytest -m gpu` picks them; without one, in Triton's interpreter."""

import os
from pathlib import Path

import pytest


def _gpu() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


if not _gpu():
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _gpu() and Path(__file__).parent / "kernels" in item.path.parents:
            item.add_marker(pytest.mark.gpu)
