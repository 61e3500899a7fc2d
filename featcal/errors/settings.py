"""Mistakes in settings and in what is asked for."""

from featcal.errors.base import FeatCalError


class BadSetting(FeatCalError):
    """A value, key or section of a settings file that cannot be used."""

    def __init__(self, key: str, value: object, expected: str):
        self.key, self.value, self.expected = key, value, expected
        super().__init__(f"{key}: {value!r} cannot be used; it {expected}.")


class UnknownKey(FeatCalError):
    """A key that no setting has, with the nearest one that exists."""

    def __init__(self, place: str, key: str, known: list[str]):
        from difflib import get_close_matches

        near = get_close_matches(key, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known)) or 'none'}."
        super().__init__(f"{place}: {key!r} is not known here; {hint}")


class MissingOption(FeatCalError):
    """An option that the command needs in this case."""

    def __init__(self, option: str, way_out: str):
        super().__init__(f"missing option {option}.\n  - {way_out}")


class BadPage(FeatCalError):
    """A page of the report that cannot be kept as it was executed."""

    def __init__(self, page: object, problem: str, way_out: str):
        super().__init__(f"{page}: {problem}.\n  - {way_out}.")
