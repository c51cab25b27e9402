"""What the generated ops share. Plain Python and Triton: read it, change it, it is yours.

abi      kernel parameters: their order, names and types, once; argument visitors
views    tensors as addresses, shapes and strides, without torch
layout   from shapes and strides to the iteration space of a kernel
op       `RuntimeOp`, the contract between an op and whatever launches it
stepwise  `StepOp`, the contract of an op that updates state, over many tensors in a launch
optim    optimizers on torch's parameters, made of steps
steps    `@triton.jit` helpers of the kernels of steps
kernels  `@triton.jit` helpers that the kernels call
host     functions of attrs, with IEEE's infinities and NaN where Python raises
math     functions that `triton.language` lacks, or computes too coarsely
polynomials  what `math` evaluates, fitted by `tools/fit.py` of the generator
binding  torch: autograd, allocation, launch
"""
