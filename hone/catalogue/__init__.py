"""The map of methods: what there is, what each costs, and which one fits a situation.

Everything here is derived from the registries of :mod:`hone.algorithms`, the configuration tree and the presets; a
method that is registered appears by itself in ``hone algorithms`` and in ``docs/algorithms``.
"""

from hone.catalogue.candidates import Situation
from hone.catalogue.methods import find, methods
from hone.catalogue.pages import algorithm_pages
from hone.catalogue.recommend import Recommendation, recommend
from hone.catalogue.records import KINDS, Cost, Knob, Method, Need

__all__ = [
    "KINDS",
    "Cost",
    "Knob",
    "Method",
    "Need",
    "Recommendation",
    "Situation",
    "algorithm_pages",
    "find",
    "methods",
    "recommend",
]
