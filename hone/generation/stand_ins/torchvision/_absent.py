"""What every name of the absent package is: importable, and an error when it is used."""


class Absent:
    """A name of torchvision."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, name):
        return Absent(f"{self._name}.{name}")

    def __call__(self, *_args, **_kwargs):
        raise NotImplementedError(f"torchvision.{self._name} is absent: this environment serves models of text")


def names_of(module):
    """The ``__getattr__`` of a module that has no names of its own."""

    def get(name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent(f"{module}.{name}")

    return get
