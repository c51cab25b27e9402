"""`CustomOp`: kernels that are written by hand, under the contract of all ops.

A subclass declares its tensors and makes its launches; shapes, dtypes, allocation, packing and every check of a call are
those of a generated op.

    class Scale(CustomOp):
        name = "scale"
        inputs = (Tensor("x", "..., N"),)
        outputs = (Tensor("y", "..., N"),)
        kinds = {"factor": "float"}

        def lower(self, given, outputs):
            n = math.prod(outputs["y"].shape)
            return [self.launch(scale_kernel, cdiv(n, 1024), x_ptr="x", y_ptr="y", n=n, factor=self.attrs["factor"], BLOCK=1024)]

    call(Scale(factor=2.0), {"x": x})

Operands that are not row-major are copied before the launches, unless the class says `strided = True`.
"""

from __future__ import annotations

from .custom_forward import CustomForward, Scratch

__all__ = ["CustomOp", "Scratch"]


class CustomOp(CustomForward):
    """The base of ops with hand-written kernels.

    A subclass sets `name`, `inputs`, `params`, `buffers`, `outputs` and the kinds of its attrs (`kinds`), and defines `lower`. Results
    are allocated row-major; axes have the extents that the inputs and params give them. Plans are kept by shapes, strides, dtypes and
    attrs: `lower` must depend on nothing else.
    """
