"""For all tests: hypothesis judges results, not how long an example took on a busy machine."""

from hypothesis import settings

settings.register_profile("unhurried", deadline=None)
settings.load_profile("unhurried")
