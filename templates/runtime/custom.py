"""`CustomOp`: kernels that are written by hand, under the contract of all ops.

A subclass declares its tensors and makes its launches; shapes, dtypes, allocation, autograd, packing and every check of a call are
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

from collections.abc import Mapping, Sequence

from .custom_forward import CustomForward, Scratch, has_elements
from .differentiable import DifferentiableOp
from .plan import Given, Launch, Meta, Plan

__all__ = ["CustomOp", "Scratch"]


class CustomOp(CustomForward, DifferentiableOp):
    """The base of ops with hand-written kernels.

    A subclass sets `name`, `inputs`, `params`, `buffers`, `outputs`, what it saves beside them (`saved`), the kinds of its attrs
    (`kinds`), and for training `gradients` and `residuals`: what its backward reads. It defines `lower`, and where it has
    gradients `lower_backward_source`. Results and gradients are allocated row-major; axes have the extents that the inputs and
    params give them. Plans are kept by shapes, strides, dtypes and attrs: both methods must depend on nothing else.
    """

    @classmethod
    def check_declaration(cls) -> None:
        super().check_declaration()
        for member, value in (("gradients", cls.gradients), ("residuals", cls.residuals)):
            if not isinstance(value, tuple):
                raise TypeError(f"{cls.name}: its `{member}` are {value!r:.60}; they are a tuple of names")
        arguments = [t.name for t in (*cls.inputs, *cls.params)]
        every = [*arguments, *(t.name for t in (*cls.buffers, *cls.outputs, *cls.saved))]
        if cls.gradients and cls.lower_backward_source is CustomOp.lower_backward_source:
            raise TypeError(f"{cls.name}: it has gradients, but no `lower_backward_source`")
        for kind, names, known in (("gradients", cls.gradients, arguments), ("residuals", cls.residuals, every)):
            for name in names:
                if name not in known:
                    raise TypeError(f"{cls.name}: `{name}` of its {kind} is no tensor that it has there")
        for name in (*cls.gradients, *(t.name for t in cls.outputs)) if cls.gradients else ():
            if f"d{name}" in every:
                raise TypeError(f"{cls.name}: its tensor `d{name}` has the name of the gradient of `{name}`")

    def lower_backward_source(
        self, given: Mapping[str, Given], grads: Mapping[str, Meta], multiprocessors: int
    ) -> Sequence[Launch]:
        """The launches of the backward, in order.

        Args:
            given: beside the forward's, outputs, what was saved, and the cotangents as `d<output>`, None where one is absent.
            grads: what must be written, as `d<input>` and `d<param>`: only gradients that are needed and have elements.
            multiprocessors: of the device.
        """
        raise TypeError(f"{self.name} has no `lower_backward_source`")

    def _plan_backward(self, given: Mapping[str, Given], needed: Sequence[str], multiprocessors: int) -> Plan:
        grads = {}
        for name in needed:
            own = given.get(name)
            if not isinstance(own, Meta):
                raise TypeError(f"{self.name}: the gradient of `{name}` is needed, which is not given")
            grads[f"d{name}"] = Meta.dense(own.dtype, own.shape)
        cotangents = {f"d{t.name}" for t in self.outputs if t.differentiable}
        known = {n: v for n, v in given.items() if n not in grads}
        written = [n for n, m in grads.items() if has_elements(m)]
        asked = {n: grads[n] for n in written}
        if written:
            self._require_dense({n: v for n, v in known.items() if n in {*self.residuals, *cotangents}})
        launches = self.lower_backward_source(known, asked, multiprocessors) if written else ()
        metas = {n: m for n, m in {**known, **grads}.items() if isinstance(m, Meta)}
        readable = {*self.residuals, *cotangents, *written}
        launches, scratch = self._checked("lower_backward_source", launches, metas, readable, written)
        return Plan(grads, scratch, launches, self.compute_dtype(given), metas={**metas, **scratch})

    def _stranger(self, name: str, metas: Mapping[str, Meta]) -> str:
        if name in metas:  # the forward may name whatever there is
            return f"the backward reads `{name}`, which is not among the residuals"
        return super()._stranger(name, metas)
