"""Catalogue of methods: description and cost of each, and a recommendation for a situation.

Everything here is derived from the registries of :mod:`hone.algorithms`, the configuration tree and the presets. A
registered method appears automatically in ``hone algorithms`` and in ``docs/algorithms``.
"""

from hone.apps.explain.catalogue.methods import KINDS, Cost, Knob, Method, Need, find, methods
from hone.apps.explain.catalogue.pages import algorithm_pages, papers_page
from hone.apps.explain.catalogue.recommend import Recommendation, Situation, recommend

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
