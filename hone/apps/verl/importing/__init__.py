"""Translating a run of verl (a launch script, a YAML file, or override lines) into a configuration of Hone.

Nothing is executed. Every setting is translated with the table of :mod:`hone.config.migration`. Outcome and reason are stored
with it, so that the result can report the differences line by line.
"""

from hone.apps.verl.importing.sources import import_overrides, import_script, import_yaml
from hone.apps.verl.importing.translation import Addition, Line, Translation

__all__ = ["Addition", "Line", "Translation", "import_overrides", "import_script", "import_yaml"]
