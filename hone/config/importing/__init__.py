"""Translating a run of verl (a launch script, a YAML file, or override lines) into a configuration of Hone.

Nothing is executed. Every setting is read with the one table of :mod:`hone.config.migration`; what it became, and why, is
kept beside it, so that the result can say line by line what differs.
"""

from hone.config.importing.sources import import_overrides, import_script, import_yaml
from hone.config.importing.translation import Addition, Line, Translation

__all__ = ["Addition", "Line", "Translation", "import_overrides", "import_script", "import_yaml"]
