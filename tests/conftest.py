"""What all tests share: hypothesis without deadlines (a busy machine is no bug), the same examples each run."""

from hypothesis import settings

settings.register_profile("kvguard", deadline=None, derandomize=True)
settings.load_profile("kvguard")
