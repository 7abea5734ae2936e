"""Reading a launch script without running it: which commands it would start, with which arguments.

A launch script is not executed, not even with harmless programs in the place of the real ones: it may
remove folders, write files, submit jobs or start containers, on a machine it was not written for. What is
needed of it is little: variables, arrays, conditions and loops over known words. That part of bash is
evaluated here. What only the cluster knows (the output of a program, a file, an unset variable) is carried
along as *unknown*, with the reason, and matters only where it reaches the command line of the run.
Commands other than the launch are taken to succeed and to set nothing.
"""

from __future__ import annotations

import ast
import fnmatch
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_scalevec.errors import ScaleVecError
from megatron_scalevec.explain.shell_syntax import (
    Assignment,
    Case,
    Command,
    For,
    Function,
    Group,
    If,
    Loop,
    Part,
    Word,
    parse,
    parse_word,
)

__all__ = ["Started", "commands_of", "is_unknown", "readable", "reasons", "several_words"]

# An unknown value within a string: its number between two marks. The second closing mark stands for a value
# that is not quoted and may become any number of words.
_OPEN, _ONE, _ANY = "\ue000", "\ue001", "\ue002"
_MARK = re.compile(f"{_OPEN}(\\d+)[{_ONE}{_ANY}]")
_MOST_REPETITIONS = 1000
# ${NAME}, ${NAME[index]}, ${NAME:-word}, ${NAME%pattern} and so on.
_EXPANSION = re.compile(r"(\w+)(?:\[([^\]]*)\])?(?:(:?[-+=?]|%%?|##?|//?|[,^]{1,2}|:)(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Started:
    """A command that the script would start; ``certain`` is false where a condition is not known."""

    line: int
    words: tuple[str, ...]
    environment: Mapping[str, str]
    certain: bool
    unless: str  # what it depends on, where it is not certain


def commands_of(
    text: str, arguments: Sequence[str], environment: Mapping[str, str]
) -> tuple[list[Started], list[str]]:
    """What a script starts, in order, and what was found unknown on the way, by number.

    Args:
        text: The script.
        arguments: Its own, ``$1`` and so on.
        environment: Variables that it would find set.

    Raises:
        ScaleVecError: It is written in a part of bash that is not understood.
    """
    shell = _Shell(arguments, environment)
    try:
        shell.run(parse(text))
    except (_Exit, _Leave):
        pass
    return shell.started, shell.unknown


def is_unknown(text: str) -> bool:
    return _OPEN in text


def several_words(text: str) -> bool:
    """Whether an unknown part may stand for no word or for several."""
    return _ANY in text


def reasons(text: str, unknown: Sequence[str]) -> list[str]:
    """Why parts of a string are unknown."""
    return [unknown[int(found[1])] for found in _MARK.finditer(text)]


def readable(text: str, unknown: Sequence[str]) -> str:
    """The string with what is unknown in angle brackets."""
    return _MARK.sub(lambda found: f"<{unknown[int(found[1])].split(': ', 1)[-1].split(' is ')[0]}>", text)


class _Exit(Exception):
    """The script ends here."""


class _Leave(Exception):
    """A function or a round of a loop ends here; ``word`` says what."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word = word


class _Shell:
    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str]) -> None:
        self.variables: dict[str, str | list[str]] = dict(environment)
        self.arguments = list(arguments)
        self.functions: dict[str, list] = {}
        self.started: list[Started] = []
        self.unknown: list[str] = []
        self.depends: str | None = None  # a condition that is not known
        self.prefix: list[str] = []  # what starts a shell: srun, a container
        self.line = 0
        self.depth = 0

    def mark(self, reason: str) -> str:
        self.unknown.append(f"line {self.line}: {reason}")
        return f"{_OPEN}{len(self.unknown) - 1}{_ONE}"

    # Control

    def run(self, items: list) -> bool | None:
        """Whether the last command succeeds; None where that is not known."""
        status: bool | None = True
        for joined, command in items:
            if (joined == "&&" and status is False) or (joined == "||" and status is True):
                continue
            if joined in ("&&", "||") and status is None:
                self.perhaps([(";", command)], f"the command before {joined}")
                continue
            status = self.one(command)
        return status

    def perhaps(self, items: list, what: str) -> None:
        """Commands that may run or not: what they set is not known afterwards."""
        before, keep = self.depends, dict(self.variables)
        self.depends = self.depends or f"line {self.line}: {what} is not known here"
        try:
            self.run(items)
        except (_Exit, _Leave):
            pass  # the launch lies behind it, or there is none
        for name in self.variables.keys() | keep.keys():
            if self.variables.get(name) != keep.get(name):
                self.variables[name] = self.mark(f"${name} is set under a condition that is not known here")
        self.depends = before

    def one(self, command) -> bool | None:
        if not isinstance(command, (Group, Function)):
            self.line = command.line
        if isinstance(command, Command):
            return self.simple(command)
        if isinstance(command, Group):
            return self.run(command.body)
        if isinstance(command, Function):
            self.functions[command.name] = command.body
        elif isinstance(command, If):
            self.conditional(command)
        elif isinstance(command, For):
            self.loop(command)
        elif isinstance(command, Loop):
            self.perhaps(command.body, "how often a loop runs")
        else:
            self.choice(command)
        return True

    def conditional(self, command: If) -> None:
        undecided = False
        for condition, body in command.branches:
            holds = self.run(condition)
            self.line = command.line
            if holds is None or undecided:
                undecided = True
                self.perhaps(body, "a condition")
            elif holds:
                self.run(body)
                return
        if undecided:
            self.perhaps(command.otherwise, "a condition")
        else:
            self.run(command.otherwise)

    def loop(self, command: For) -> None:
        words = self.fields(command.words)
        if len(words) > _MOST_REPETITIONS or any(map(several_words, words)):
            self.variables[command.name] = self.mark(f"${command.name} of a loop is not known here")
            self.perhaps(command.body, "how often a loop runs")
            return
        for word in words:
            self.variables[command.name] = word
            try:
                self.run(command.body)
            except _Leave as leaving:
                if leaving.word == "return":
                    raise
                if leaving.word == "break":
                    return

    def choice(self, command: Case) -> None:
        word = self.text(command.word)
        undecided = is_unknown(word)
        for patterns, body in command.branches:
            texts = [self.text(pattern) for pattern in patterns]
            if undecided or any(map(is_unknown, texts)):
                undecided = True
                self.perhaps(body, "a case")
            elif any(fnmatch.fnmatchcase(word, text) for text in texts):
                self.run(body)
                return

    # Commands

    def simple(self, command: Command) -> bool | None:
        own = {}
        for assignment in command.assignments:
            if command.words:
                own[assignment.name] = self.text(assignment.value)
            else:
                self.assign(assignment)
        if not command.words:
            return True
        if command.words[0] == (Part("text", "((", False),):
            value = self.arithmetic(command.words[1][0].value)
            return None if value is None else bool(value)
        words = self.fields(command.words)
        for assignment in command.declared:
            self.assign(assignment)
        return self.start(words, own) if words else True

    def start(self, words: list[str], own: Mapping[str, str]) -> bool | None:
        name, rest = words[0], words[1:]
        if name == "!":
            status = self.start(rest, own) if rest else True
            return None if status is None else not status
        if name in ("[", "[[", "test"):
            return _Test(rest[:-1] if name == "[" else rest).value()
        if name in ("true", ":"):
            return True
        if name == "false":
            return False
        if name == "exit":
            raise _Exit
        if name in ("return", "break", "continue"):
            raise _Leave(name)
        if name in self.functions:
            return self.call(name, rest)
        if name == "eval":
            return self.run(parse(" ".join(rest), self.line))
        if inline := _inline(words):
            outer, self.prefix = self.prefix, [*self.prefix, *words[: inline[0]]]
            status = self.run(parse(words[inline[1]], self.line))
            self.prefix = outer
            return status
        if name == "set":
            if "--" in rest:
                self.arguments = rest[rest.index("--") + 1 :]
        elif name == "shift":
            del self.arguments[: int(rest[0]) if rest and rest[0].isdigit() else 1]
        elif name == "unset":
            for variable in rest:
                self.variables.pop(variable, None)
        elif name in ("read", "mapfile", "readarray", "getopts"):
            for variable in rest:
                if re.fullmatch(r"[A-Za-z_]\w*", variable):
                    self.variables[variable] = self.mark(f"${variable} is read from somewhere")
        else:
            environment = {k: v for k, v in self.variables.items() if isinstance(v, str)} | dict(own)
            certain = self.depends is None
            whole = (*self.prefix, *words)
            self.started.append(Started(self.line, whole, environment, certain, self.depends or ""))
        return True

    def call(self, name: str, arguments: list[str]) -> bool | None:
        if self.depth > 20:
            raise ScaleVecError(f"line {self.line}: the function {name} calls itself too often to be read.")
        outer, self.arguments = self.arguments, arguments
        self.depth += 1
        try:
            return self.run(self.functions[name])
        except _Leave:
            return None
        finally:
            self.arguments = outer
            self.depth -= 1

    def assign(self, assignment: Assignment) -> None:
        name, old = assignment.name, self.variables.get(assignment.name)
        if assignment.element:
            self.variables[name] = self.mark(f"${name} is set by index")
        elif isinstance(assignment.value, list):
            values = self.fields(assignment.value)
            before = ([old] if isinstance(old, str) else old or []) if assignment.append else []
            self.variables[name] = [*before, *values]
        else:
            value = self.text(assignment.value)
            if assignment.append and isinstance(old, list):
                self.variables[name] = [(old[0] if old else "") + value, *old[1:]]
            else:
                self.variables[name] = (old or "") + value if assignment.append else value

    # Words

    def text(self, word: Word) -> str:
        """A word where it is not split: the right side of an assignment, a pattern."""
        return _as_one("".join(" ".join(self.part(part)) for part in word))

    def fields(self, words: Sequence[Word]) -> list[str]:
        """Words as the program gets them."""
        return [field for word in words for field in self.split(word)]

    def split(self, word: Word) -> Iterator[str]:
        current: str | None = None
        for part in word:
            values = self.part(part)
            if part.quoted or part.kind == "text":
                if _is_list(part) and not values:
                    continue
                for number, value in enumerate(values):
                    if number:
                        yield current or ""
                        current = None
                    current = (current or "") + value
                continue
            for number, value in enumerate(values):
                if (number or value[:1].isspace()) and current is not None:
                    yield current
                    current = None
                pieces = value.split()
                for place, piece in enumerate(pieces):
                    if place and current is not None:
                        yield current
                        current = None
                    current = (current or "") + piece.replace(_ONE, _ANY)
                if pieces and value[-1:].isspace():
                    yield current or ""
                    current = None
        if current is not None:
            yield current

    def part(self, part: Part) -> list[str]:
        """The values of a part: one, or those of an array."""
        if part.kind == "text":
            return [part.value]
        if part.kind == "command":
            return [self.mark(f"$({' '.join(part.value.split())[:60]}) is known only where the script runs")]
        if part.kind == "arithmetic":
            value = self.arithmetic(part.value)
            return [
                self.mark(f"$(({part.value.strip()})) is not known here") if value is None else str(value)
            ]
        return self.parameter(part.value, part.quoted)

    def parameter(self, text: str, quoted: bool) -> list[str]:
        if text in ("@", "*"):
            return self.joined(list(self.arguments), text, quoted)
        if length := re.fullmatch(r"#(\w+)(\[[@*]\])?", text):
            value = self.variables.get(length[1], "")
            if isinstance(value, str) and is_unknown(value):
                return [self.mark(f"the length of ${length[1]} is not known here")]
            whole = isinstance(value, list) and length[2]
            return [str(len(value if whole else self.scalar(value)))]
        if text == "#":
            return [str(len(self.arguments))]
        found = re.fullmatch(
            r"(\w+)(?:\[([^\]]*)\])?(?:(:?[-+=?]|%%?|##?|//?|[,^]{1,2}|:)(.*))?", text, re.DOTALL
        )
        if found is None:
            return [self.mark(f"${{{text}}} is not known here")]
        name, index, operation, word = found.groups()
        values = self.lookup(name, index)
        if operation is None:
            if values is None:
                return [self.mark(f"${name} is not set here")]
            return self.joined(values, index, quoted)
        known = values is not None and not any(map(is_unknown, values))
        if operation[-1] in "-+=?" and operation[0] not in "%#/":
            missing = values is None or (operation[0] == ":" and known and not "".join(values))
            if operation[-1] == "+":
                return [] if missing else self.default(word, quoted)
            if not missing:
                return self.joined(values, index, quoted)
            if operation[-1] == "?":
                return [self.mark(f"${name} is not set here")]
            default = self.default(word, quoted)
            if operation[-1] == "=":
                self.variables[name] = " ".join(default)
            return default
        if operation in ("%", "%%", "#", "##") and known:
            pattern = self.text(parse_word(word, self.line, quoted=False))
            if not is_unknown(pattern):
                return [_trimmed(value, operation, pattern) for value in values]
        if operation in (",,", "^^") and known and not word:
            return [value.lower() if operation == ",," else value.upper() for value in values]
        return [self.mark(f"${{{text}}} is not known here")]

    def default(self, word: str, quoted: bool) -> list[str]:
        parsed = parse_word(word, self.line, quoted=quoted)
        return [self.text(parsed)] if quoted else list(self.split(parsed))

    def lookup(self, name: str, index: str | None) -> list[str] | None:
        """The values of a variable, None where it is not set."""
        if name.isdigit():
            number = int(name)
            if number == 0:
                return [self.mark("$0 is the place of the script")]
            return [self.arguments[number - 1]] if number <= len(self.arguments) else None
        value = self.variables.get(name)
        if value is None:
            return None
        if index in ("@", "*"):
            return [value] if isinstance(value, str) else list(value)
        if index:
            place = self.arithmetic(index)
            values = [value] if isinstance(value, str) else value
            if place is None:
                return [self.mark(f"${{{name}[{index}]}} is not known here")]
            return [values[place]] if place < len(values) else None
        return [self.scalar(value)]

    @staticmethod
    def scalar(value: str | list[str]) -> str:
        return value if isinstance(value, str) else (value[0] if value else "")

    @staticmethod
    def joined(values: list[str], index: str | None, quoted: bool) -> list[str]:
        return [" ".join(values)] if index == "*" and quoted else values

    # Arithmetic

    def arithmetic(self, text: str) -> int | None:
        """The value of an expression of whole numbers, None where it is not known or of another kind."""
        expanded = self.text(parse_word(text, self.line, quoted=True))

        def value(found: re.Match) -> str:
            return self.scalar(self.variables.get(found[0], _OPEN)) or "0"

        named = re.sub(r"\b[A-Za-z_]\w*\b", value, expanded)
        if is_unknown(named):
            return None
        named = named.replace("&&", " and ").replace("||", " or ").replace("/", "//")
        try:
            return int(_calculate(ast.parse(named.strip(), mode="eval").body))
        except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
            return None


_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.LShift: operator.lshift,
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def _calculate(node: ast.AST) -> int:
    """Raises KeyError or ValueError for anything but arithmetic."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp):
        return _OPERATIONS[type(node.op)](_calculate(node.left), _calculate(node.right))
    if isinstance(node, ast.UnaryOp):
        return _OPERATIONS[type(node.op)](_calculate(node.operand))
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return int(_OPERATIONS[type(node.ops[0])](_calculate(node.left), _calculate(node.comparators[0])))
    if isinstance(node, ast.BoolOp):
        values = [bool(_calculate(value)) for value in node.values]
        return int(all(values) if isinstance(node.op, ast.And) else any(values))
    raise ValueError(node)


class _Test:
    """``[ ... ]`` and ``[[ ... ]]``. Values are True, False, or None where that is not known."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    def value(self) -> bool | None:
        value = self.alternatives()
        return None if self.words else value

    def alternatives(self) -> bool | None:
        value = self.conjunction()
        while self.words and self.words[0] in ("||", "-o"):
            self.words.pop(0)
            other = self.conjunction()
            value = True if True in (value, other) else None if None in (value, other) else False
        return value

    def conjunction(self) -> bool | None:
        value = self.term()
        while self.words and self.words[0] in ("&&", "-a"):
            self.words.pop(0)
            other = self.term()
            value = False if False in (value, other) else None if None in (value, other) else True
        return value

    def term(self) -> bool | None:
        words = self.words
        if not words:
            return False
        first = words.pop(0)
        if first == "!":
            value = self.term()
            return None if value is None else not value
        if first == "(":
            value = self.alternatives()
            if words and words[0] == ")":
                words.pop(0)
            return value
        if words and words[0] in _COMPARISONS:
            compare = _COMPARISONS[words.pop(0)]
            second = words.pop(0) if words else ""
            return None if is_unknown(first + second) else compare(first, second)
        if first in ("-z", "-n") and words and words[0] not in ("&&", "||"):
            text = words.pop(0)
            if is_unknown(text):
                return None
            return (text == "") == (first == "-z")
        if re.fullmatch(r"-[a-zA-Z]", first) and words and words[0] not in ("&&", "||"):
            words.pop(0)
            return None  # the cluster's files
        return None if is_unknown(first) else first != ""


def _numbers(compare):
    def compared(a: str, b: str) -> bool | None:
        try:
            return compare(int(a), int(b))
        except ValueError:
            return None

    return compared


_COMPARISONS = {
    "=": fnmatch.fnmatchcase,
    "==": fnmatch.fnmatchcase,
    "!=": lambda a, b: not fnmatch.fnmatchcase(a, b),
    "=~": lambda a, b: None,
    "-eq": _numbers(operator.eq),
    "-ne": _numbers(operator.ne),
    "-lt": _numbers(operator.lt),
    "-le": _numbers(operator.le),
    "-gt": _numbers(operator.gt),
    "-ge": _numbers(operator.ge),
}


def _as_one(text: str) -> str:
    return text.replace(_ANY, _ONE)


def _is_list(part: Part) -> bool:
    return part.kind == "parameter" and (part.value in ("@", "*") or "[@]" in part.value)


def _inline(words: list[str]) -> tuple[int, int] | None:
    """The places of the shell and of its script in ``srun ... bash -c SCRIPT``."""
    for place, word in enumerate(words):
        if word.rpartition("/")[2] in ("bash", "sh"):
            for number in range(place + 1, len(words) - 1):
                if re.fullmatch(r"-[a-z]*c[a-z]*", words[number]):
                    return place, number + 1
                if not words[number].startswith("-"):
                    return None
    return None


def _trimmed(value: str, operation: str, pattern: str) -> str:
    """``${X%pattern}`` and its relatives."""
    lengths = range(len(value) + 1)
    if operation in ("%%", "##"):
        lengths = reversed(lengths)
    for length in lengths:
        end = value[len(value) - length :] if operation[0] == "%" else value[:length]
        if fnmatch.fnmatchcase(end, pattern):
            return value[: len(value) - length] if operation[0] == "%" else value[length:]
    return value
