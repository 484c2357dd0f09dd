"""Placeholders for the names of the absent package, which raise an error when they are called."""


class Absent:
    """A name of torchvision."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        return Absent(f"{self._name}.{name}")

    def __call__(self, *_args, **_kwargs):
        raise NotImplementedError(f"torchvision.{self._name} is absent: Hone does not use it")


def names_of(module):
    """Return the ``__getattr__`` of a module without names."""

    def get(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{module}.{name}")

    return get
