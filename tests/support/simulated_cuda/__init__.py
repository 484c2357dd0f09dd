"""A CUDA device for tests on machines without one: tensors that say ``cuda:0``, with their numbers in host memory.

:mod:`.driver.cpp`  what torch asks of a driver; compiled by :mod:`.build` and loaded before torch
:mod:`.tensors`     the tensors: every operator computes on the host, and mixing devices is an error
:mod:`.counters`    kernel launches, waits of the host and copies between the devices, with the code that caused them
:mod:`.graphs`      CUDA graphs, and copies that arrive when the host waits
:mod:`.streams`     streams and events: use of memory that another stream may still be using is an error
:mod:`.sharing`     CUDA IPC between two processes
:mod:`.device`      turns the device on: ``torch.cuda`` answers, and the kernels that only CUDA has
:mod:`.machine`     runs whole programs on it, each in a process of its own

Unlike the roofline's simulation (:mod:`gpu_simulation`), which has no numbers and costs kernels, this device computes:
tokens and losses can be held against those of the CPU. Both share the list of operators that launch nothing, and the launches of the others.
Not simulated: memory limits, the rounding of CUDA's kernels, NCCL, and time.
"""
