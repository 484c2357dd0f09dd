"""Catalogue of methods: description and cost of each, and a recommendation for a situation.

Everything here is derived from the registries of :mod:`hone.algorithms`, the configuration tree and the presets. A
registered method appears automatically in ``hone algorithms`` and in ``docs/algorithms``.
"""

from hone.catalogue.candidates import Situation
from hone.catalogue.methods import find, methods
from hone.catalogue.pages import algorithm_pages
from hone.catalogue.papers import papers_page
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
    "papers_page",
    "recommend",
]
