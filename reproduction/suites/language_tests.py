"""The tests of a suite's language models: on texts drawn here, or the public ones by the harness's
own names.
"""

from collections.abc import Mapping
from pathlib import Path

from reproduction.language.harness import Loaded
from reproduction.language.local_tests import local_test
from reproduction.language.public_tests import load_public
from reproduction.suites.language import Language
from reproduction.suites.texts import open_rows, read_text_sources


def load_tests(texts: Path, language: Language, split: str = "test") -> Mapping[str, Loaded]:
    """Every test by its key. Raises: BadEnvironment with all that is lacking; whatever opening the
    rows raises.
    """
    if language.texts is None or language.texts.source != "mini":
        told = read_text_sources(texts)
        return load_public(
            language.tests, {key: told[key].revision or "" for key in language.tests if key in told}
        )
    from reproduction.mini.language.domains import TESTS

    found = {}
    for key in language.tests:
        rows = open_rows(texts, key, split)[0].to_list()
        found[key] = local_test(key, rows, TESTS[key].check, TESTS[key].new_tokens)
    return found
