"""What `lowering` asks for where a model is for training: here nothing is."""

from __future__ import annotations

from typing import NoReturn


def lower_for_training(*model: object) -> NoReturn:
    """Raises RuntimeError."""
    raise RuntimeError("this package was generated for inference: none of its ops has a backward")
