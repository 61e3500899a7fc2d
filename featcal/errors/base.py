"""The common parent of every mistake outside this package."""


class FeatCalError(Exception):
    """A mistake outside this package: one message that names the place, what was expected, and what to do. Exit code 2."""

    def __reduce__(self) -> tuple[type, tuple[str]]:  # from a worker process only the message comes back
        return FeatCalError, (str(self),)
