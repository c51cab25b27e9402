"""What the generated ops share. Plain Python and Triton: read it, change it, it is yours.

abi      kernel parameters: their order, names and types, once; argument visitors
views    tensors as addresses, shapes and strides, without torch
layout   from shapes and strides to the iteration space of a kernel
groups   which nodes of a recorded graph one kernel can do, and where a fused op stands for its steps
fusion   the same for the ops of this package
op       `RuntimeOp`, the contract between an op and whatever launches it, forward
differentiable  `DifferentiableOp`, the same with the backward: for training alone, as is all that says so below
stepwise  for training: `StepOp`, the contract of an op that updates state, over many tensors in a launch
optim    for training: optimizers on torch's parameters, made of steps
state_dicts  for training: what of a state dict does not fit an optimizer
steps    for training: `@triton.jit` helpers of the kernels of steps
sums     for training: `@triton.jit` helpers of gradients that are summed over what was broadcast
kernels  `@triton.jit` helpers that the kernels call
host     functions of attrs, with IEEE's infinities and NaN where Python raises
math     functions that `triton.language` lacks, or computes too coarsely
polynomials  what `math` evaluates, fitted by `tools/fit.py` of the generator
device   torch, looked up once, and what devices allow
prepared what calls of one kind come to: allocation and launches, to be run again
binding  calls on torch's tensors: checked, and run
autograd  for training: torch's autograd
launcher launches from a packed buffer, as a host of another language has it
custom   `CustomOp`, the base of ops with kernels that are written by hand
custom_forward  what such ops are without a backward
accesses  which pointers a kernel reads and writes, by its source
linalg   products of matrices and lookups of rows, written so
linalg_forward, linalg_ops  their kernels and launches: forward alone, and with the backward
"""
