"""Judge a generated answer of a drawn test: a number, a letter, checkable instructions, a program.

Only the first line of an answer counts. Programs are not run as Python: only the grammar of the
drawn tasks is known, one function of one argument that returns an expression. All others fail.
"""

import ast
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

TestRow = Mapping[str, Any]
NUMBER = re.compile(r"-?\d+(?:\.\d+)?")
LETTER = re.compile(r"\b[A-Z]\b")
WORD = re.compile(r"[a-z]+", re.IGNORECASE)

STEPS = 10_000  # evaluated expressions of one call
LONGEST = 1_000  # characters or items of a value
LARGEST = 10**12  # of a number

BINARY: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Mod: operator.mod,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le,
    ast.Gt: operator.gt, ast.GtE: operator.ge,
}  # fmt: skip
CALLS: dict[str, Callable[..., Any]] = {"len": len, "sorted": sorted, "sum": sum}
METHODS: dict[str, Callable[..., Any]] = {"join": str.join, "replace": str.replace}
FAILURES = (
    ArithmeticError, LookupError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError,
)  # fmt: skip


def first_line(answer: str) -> str:
    """Return the part of a generated text that counts."""
    return answer.split("\n", 1)[0]


def arithmetic(row: TestRow, answer: str) -> bool:
    """Return whether the last numbers of answer and target are equal."""
    number, expected = last_number(first_line(answer)), last_number(row["target"])
    return number is not None and number == expected


def last_number(text: str) -> float | None:
    """Return the last number in a text. A minus after a digit is an operator: 35-3 gives 3."""
    matches = NUMBER.findall(re.sub(r"(?<=\d)-", " ", text))
    return float(matches[-1]) if matches else None


def letter(row: TestRow, answer: str) -> bool:
    """Return whether the last single capitals of answer and target are equal."""
    letters, expected = LETTER.findall(first_line(answer)), LETTER.findall(row["target"])
    return bool(letters) and letters[-1:] == expected[-1:]


def program(row: TestRow, answer: str) -> bool:
    """Return whether the row's header, continued by the answer, passes the row's tests."""
    return passes(row["header"] + first_line(answer) + "\n", row["tests"])


def instructions(row: TestRow, answer: str) -> bool:
    """Return whether an answer fulfils every check in the row's JSON list `instructions`: words in
    order, joined by a sign, wrapped in signs, an end word.
    """
    checks = {check["check"]: check for check in json.loads(row["instructions"])}
    text, right = first_line(answer).strip(), bool(checks)
    body = text  # without the last word
    if "ends" in checks:
        last = checks["ends"]["with"]
        right &= WORD.findall(text)[-1:] == [last] and text.endswith(f" {last}")
        body = text.removesuffix(last).rstrip()
    inner = body  # and without the wrapping
    if "wrapped" in checks:
        begin, end = checks["wrapped"]["left"], checks["wrapped"]["right"]
        right &= len(body) > 1 and body.startswith(begin) and body.endswith(end)
        inner = body.removeprefix(begin).removesuffix(end)
    if "words" in checks:
        right &= WORD.findall(body) == checks["words"]["words"]
    if "joined" in checks:
        right &= inner == checks["joined"]["by"].join(WORD.findall(inner))
    return right


CHECKS: dict[str, Callable[[TestRow, str], bool]] = {
    "arithmetic": arithmetic, "letter": letter, "instructions": instructions, "program": program,
}  # fmt: skip


def passes(source: str, tests: Sequence[str]) -> bool:
    """Return whether a program passes its tests, each `assert f(<literal>) == <literal>`."""
    try:
        name, body = _function(source)
        for test in tests:
            argument, expected = _example(test)
            if _Evaluation().value(body, {name: argument}) != expected:
                return False
    except FAILURES:
        return False
    return True


def _function(source: str) -> tuple[str, ast.expr]:
    """Return the argument and the body of `def f(x): return body` or `f = lambda x: body`."""
    match ast.parse(source).body:
        case [ast.FunctionDef(name="f", args=args, body=[ast.Return(value=ast.expr() as body)])]:
            pass
        case [ast.Assign(targets=[ast.Name(id="f")], value=ast.Lambda(args=args, body=body))]:
            pass
        case _:
            raise ValueError("not one function f that returns an expression")
    (argument,) = args.args
    return argument.arg, body


def _example(test: str) -> tuple[Any, Any]:
    """Return argument and expected result of an assertion."""
    match ast.parse(test).body:
        case [ast.Assert(ast.Compare(ast.Call(args=[argument]), [ast.Eq()], [expected]))]:
            return ast.literal_eval(argument), ast.literal_eval(expected)
    raise ValueError(f"not an assertion about f: {test}")


class _Evaluation:
    """Evaluate one expression within STEPS, LONGEST and LARGEST."""

    def __init__(self) -> None:
        self.steps_left = STEPS

    def value(self, node: ast.expr, names: dict[str, Any]) -> Any:
        self.steps_left -= 1
        if self.steps_left < 0:
            raise ValueError("too many steps")
        result = self._value(node, names)
        if isinstance(result, int) and abs(result) > LARGEST:
            raise ValueError("too large")
        if isinstance(result, (str, list)) and len(result) > LONGEST:
            raise ValueError("too long")
        return result

    def _value(self, node: ast.expr, names: dict[str, Any]) -> Any:
        match node:
            case ast.Constant(value=int() | str() as constant):
                return constant
            case ast.Name(id=name):
                return names[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self.value(operand, names)
            case ast.BinOp(left, sign, right) | ast.Compare(left, [sign], [right]):
                return self._binary(sign, self.value(left, names), self.value(right, names))
            case ast.Subscript(sequence, ast.Slice(lower, upper, step)):
                ends = [part and self.value(part, names) for part in (lower, upper, step)]
                return self.value(sequence, names)[slice(*ends)]
            case ast.Subscript(value=sequence, slice=index):
                return self.value(sequence, names)[self.value(index, names)]
            case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]):
                return CALLS[name](self.value(argument, names))
            case ast.Call(func=ast.Attribute(value=text, attr=name), args=arguments, keywords=[]):
                values = [self.value(argument, names) for argument in arguments]
                return METHODS[name](self.value(text, names), *values)
            case ast.ListComp(element, [ast.comprehension(ast.Name(name), items, conditions)]):
                elements = []
                for item in self.value(items, names):
                    inner = {**names, name: item}
                    if all(self.value(condition, inner) for condition in conditions):
                        elements.append(self.value(element, inner))
                return elements
        raise ValueError(f"{type(node).__name__} is not in the grammar")

    def _binary(self, sign: ast.AST, left: Any, right: Any) -> Any:
        if isinstance(sign, ast.Mod) and not isinstance(left, int):
            raise ValueError("% formats no text here")
        if isinstance(sign, ast.Mult):
            for text, times in ((left, right), (right, left)):
                if isinstance(text, (str, list)) and len(text) * times > LONGEST:
                    raise ValueError("too long")
        return BINARY[type(sign)](left, right)
