"""Products of matrices and lookups of rows, as `linalg` calls them in a package for inference."""

from __future__ import annotations

from .linalg_forward import BatchedMatmulForward, EmbeddingForward, LinearForward


class Linear(LinearForward):
    """How `linear` is launched."""


class BatchedMatmul(BatchedMatmulForward):
    """How `batched_matmul` is launched."""


class Embedding(EmbeddingForward):
    """How `embedding` is launched."""
