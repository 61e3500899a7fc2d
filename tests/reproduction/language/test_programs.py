"""Programs of the drawn grammar: judged as Python's own interpreter judges them, all others fail."""

import time

import pytest

from reproduction.language.answers import passes
from reproduction.mini.language.domains import test_items as drawn_items

SETS = (drawn_items(key, "validation", 60, 0) for key in ("humaneval_plus", "mbpp_plus"))
DRAWN = [item for items in SETS for item in items]


def executed(source: str, tests) -> bool:
    """Run a program as Python; those below are this project's own."""
    names: dict = {}
    try:
        exec(source, names)
        for test in tests:
            exec(test, names)
    except (AssertionError, SyntaxError, NameError, TypeError):
        return False
    return True


def test_drawn_programs_pass_as_python_says():
    programs = [
        (item.header + answer, item.tests)
        for item, other in zip(DRAWN, [*DRAWN[1:], DRAWN[0]], strict=True)
        for answer in (item.target, item.careless, other.target, item.target[:-1])
    ]
    verdicts = [passes(*program) for program in programs]
    assert verdicts == [executed(*program) for program in programs]
    assert all(verdicts[::4]) and not all(verdicts[1::4])


HOSTILE = {
    "import": "import os\nf=lambda a:a",
    "call": "f=lambda a:__import__('os').getpid()",
    "attribute": "f=lambda a:a.__class__",
    "loop": "def f(a):\n while True: pass",
    "recursion": "f=lambda a:f(a)",
    "memory": "f=lambda a:[0]*10**10",
    "numbers": "f=lambda a:9*9*9*9*9*9*9*9*9*9*9*9*9*9*9*9",
    "format": "f=lambda a:'%9999999999d'%5",
    "growth": "f=lambda a:'A'.replace('A','A'*999).replace('A','A'*999).replace('A','A'*999)",
    "steps": "f=lambda a:[[[y for y in 'x'*999] for x in 'x'*999] for z in 'x'*999]",
    "depth": f"f=lambda a:{'(' * 5000}a{')' * 5000}",
    "statements": "f=lambda a:1\nf=lambda a:2",
    "two arguments": "def f(a, b): return 1",
    "nothing": "def f(a):\n return",
    "syntax": "f=lambda a:",
    "a number with parts": "f=lambda a:1.0",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_program_outside_the_grammar_or_its_bounds_fails_at_once(name):
    start = time.perf_counter()
    assert not passes(HOSTILE[name], ["assert f(1) == 1"])
    assert time.perf_counter() - start < 1


def test_every_assertion_counts_and_is_about_f():
    assert passes("f=lambda a:a+1", ["assert f(1) == 2", "assert f(-1) == 0"])
    assert not passes("f=lambda a:a+1", ["assert f(1) == 2", "assert f(-1) == 1"])
    assert not passes("f=lambda a:1", ["assert True"])
    assert not passes("f=lambda a:1", ["f(1)"])
