"""Roofline of Hone's own code on a GPU that is not there: the code runs on tensors without storage, and its kernels are counted.

:mod:`.simulation`  runs code on torch's meta device as if that were a GPU, and records the kernels
:mod:`.kernels`     what one kernel is: bytes, operations, launches, and whether the host waits for it
:mod:`.operators`   how many bytes and operations each of torch's operators takes
:mod:`.timing`      seconds of recorded kernels on a device
:mod:`.passes`      Hone's update, log-prob pass and decode step, recorded

Simulated: nothing here has been compared with a GPU.
"""
