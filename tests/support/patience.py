"""How long tests wait for what must happen: guards against waiting for ever, not measures, because other machines are several times slower."""

SOON = 60.0
"""Seconds until a process that was told to end has ended, a server answers, something that stands still is noticed."""

LONG = 600.0
"""Seconds until a command has done its work. The guard of a whole test is longer: ``timeout`` of pytest in pyproject.toml."""

STALL = 12.0
"""Seconds that a server is silent if one request holds all others up; one that answers them takes a tenth of a second."""
