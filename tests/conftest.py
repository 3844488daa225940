"""Property tests have no deadline: on a busy machine an example may take any time, and be right."""

from contextlib import suppress

with suppress(ImportError):  # not every environment that runs some of the tests has it
    from hypothesis import settings

    settings.register_profile("without deadline", deadline=None)
    settings.load_profile("without deadline")
