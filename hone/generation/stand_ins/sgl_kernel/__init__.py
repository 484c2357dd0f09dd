"""Replacement for SGLang's CUDA kernels in an environment without a GPU.

SGLang imports their names on every machine; with PyTorch's attention on a CPU it calls none. A call raises an error.
`hone engines install sglang` copies this file to the environment.
"""

__version__ = "0.4.10"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU: this environment was made for CPUs")

    kernel.__name__ = name
    return kernel
