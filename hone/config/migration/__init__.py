"""Keys of verl's configuration, and what becomes of each: the one table, and how a setting is read with it.

Every key that verl's trainer has had is one of: a key here; another name of one (older spellings included); always so
here; not supported yet, which is refused with what to do instead; or without meaning here, because it belongs to a backend
that is not used. The file ``verl.yaml`` says which, and :func:`read_setting` reads one setting with it.
"""

from hone.config.migration.reading import Outcome, Reading, read_by, read_setting
from hone.config.migration.table import DEFAULTS, LLAMA_FACTORY, TABLES, VALUES, trl_table

__all__ = [
    "DEFAULTS",
    "LLAMA_FACTORY",
    "TABLES",
    "VALUES",
    "Outcome",
    "Reading",
    "read_by",
    "read_setting",
    "trl_table",
]
