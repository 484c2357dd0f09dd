"""Stands in for SGLang's CUDA kernels in an environment without a GPU.

SGLang imports their names wherever it runs; with PyTorch's own attention on a CPU it calls none. One that is called after all says so.
`hone engines install sglang --cpu` puts this file there.
"""

__version__ = "0.4.10"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU: this environment was made for CPUs")

    kernel.__name__ = name
    return kernel
