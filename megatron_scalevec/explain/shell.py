"""Reading a launch script without running it: which commands it would start, with which arguments.

A launch script is not executed, not even with harmless programs in the place of the real ones: it may
remove folders, write files, submit jobs or start containers, on a machine it was not written for. What is
needed of it is little: variables, arrays, conditions and loops over known words. That part of bash is
evaluated here. What only the cluster knows (the output of a program, a file, an unset variable) is carried
along as *unknown*, with the reason, and matters only where it reaches the command line of the run.
Commands other than the launch are taken to succeed and to set nothing; what a variable becomes where such a
command decides it is unknown.
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
    DECLARING,
    Assignment,
    Case,
    Command,
    For,
    Function,
    Group,
    If,
    Loop,
    Not,
    Part,
    Pipeline,
    Word,
    parse,
    parse_word,
    plain,
)

__all__ = ["Started", "commands_of", "is_unknown", "readable", "reasons", "several_words"]

# An unknown value within a string: its number between two marks. The second closing mark stands for a value
# that is not quoted and may become any number of words.
_OPEN, _ONE, _ANY = "\ue000", "\ue001", "\ue002"
_MARK = re.compile(f"{_OPEN}(\\d+)[{_ONE}{_ANY}]")
_MOST_REPETITIONS = 1000
# The status of a program that is taken to succeed, but is not known to.
_TAKEN = "taken to succeed"
_BRACES = re.compile(r"\{[^{}]*(?:,|\.\.)[^{}]*\}")
_SETS = re.compile(r"\+\+|--|(?<![<>=!])=(?!=)|<<=|>>=")


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

    def __init__(self, word: str, status: bool | None = None) -> None:
        super().__init__()
        self.word = word
        self.status = status


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
        self.attributes: dict[str, str] = {}  # letters of declare: i, r and so on
        # For every function that runs: what its own names were before.
        self.local: list[dict[str, tuple]] = []
        self.left: list[tuple[str, tuple]] = []  # where a function or a round of a loop may have ended before

    def mark(self, reason: str, closing: str = _ONE) -> str:
        self.unknown.append(f"line {self.line}: {reason}")
        return f"{_OPEN}{len(self.unknown) - 1}{closing}"

    def forget(self, name: str, reason: str) -> None:
        """A variable, or an element of an array, gets a value that is not known."""
        found = re.match(r"([A-Za-z_]\w*)(\[)?", name)
        if found is None:
            raise ScaleVecError(f"line {self.line}: which variable is set here is not known.")
        many = found[2] or isinstance(self.variables.get(found[1]), list)
        self.variables[found[1]] = self.mark(f"${found[1]} {reason}", _ANY if many else _ONE)

    # Control

    def run(self, items: list) -> bool | str | None:
        """Whether the last command succeeds; None where that is not known."""
        status: bool | str | None = True
        for joined, command in items:
            if (joined == "&&" and status is False) or (joined == "||" and status is True):
                continue
            if joined in ("&&", "||") and status is None:
                self.perhaps([(";", command)], f"the command before {joined}")
                continue
            if joined in ("&&", "||") and status is _TAKEN:
                status = self.expected(command, joined)
                continue
            status = self.one(command)
        return status

    def expected(self, command, joined: str) -> bool | str | None:
        """After a program that is taken to succeed: it does not decide over a launch, but over variables."""
        started, before = len(self.started), self.state()
        if joined == "||":
            self.perhaps([(";", command)], "the command before ||")
            del self.started[started:]
            return _TAKEN
        try:
            status = self.one(command)
        except _Exit:
            self.variables, self.arguments = before
            return None
        except _Leave as leaving:
            self.left.append((leaving.word, self.state()))
            status = None
        self.merge([before, self.state()])
        return status and _TAKEN

    def state(self) -> tuple[dict, list]:
        return dict(self.variables), list(self.arguments)

    def merge(self, outcomes: list[tuple[dict, list]]) -> None:
        """What is the same in every outcome is known."""
        first, arguments = outcomes[0]
        if any(other != arguments for _, other in outcomes):
            arguments = [self.mark("$@ is set under a condition that is not known here", _ANY)]
        self.variables, self.arguments = dict(first), list(arguments)
        for name in sorted({name for variables, _ in outcomes for name in variables}):
            values = [variables.get(name) for variables, _ in outcomes]
            if any(value != values[0] for value in values):
                closing = _ANY if any(isinstance(value, list) for value in values) else _ONE
                reason = f"${name} is set under a condition that is not known here"
                self.variables[name] = self.mark(reason, closing)

    def perhaps(self, items: list, what: str) -> None:
        """Commands that may run or not: what they set is not known afterwards."""
        self.one_of([items, []], what)

    def one_of(self, alternatives: list[list], what: str) -> None:
        """One of several lists of commands runs: what they do not agree on is not known afterwards."""
        before, start, outcomes = self.depends, self.state(), []
        self.depends = self.depends or f"line {self.line}: {what} is not known here"
        for items in alternatives:
            self.variables, self.arguments = dict(start[0]), list(start[1])
            try:
                self.run(items)
            except _Exit:
                continue  # the launch lies behind it, or there is none
            except _Leave as leaving:
                self.left.append((leaving.word, self.state()))
            outcomes.append(self.state())
        self.depends = before
        if not outcomes:
            raise _Exit
        self.merge(outcomes)

    def apart(self, items: list) -> bool | str | None:
        """Commands in a shell of their own: nothing that they set stays."""
        keep, functions, attributes = self.state(), dict(self.functions), dict(self.attributes)
        left = list(self.left)
        try:
            return self.run(items)
        except (_Exit, _Leave):
            return None
        finally:
            (self.variables, self.arguments), self.functions = keep, functions
            self.attributes, self.left = attributes, left

    def one(self, command) -> bool | str | None:
        if not isinstance(command, (Group, Function)):
            self.line = command.line
        if isinstance(command, Command):
            return self.simple(command)
        if isinstance(command, Group):
            return self.apart(command.body) if command.subshell else self.run(command.body)
        if isinstance(command, Pipeline):
            return [self.apart([(";", part)]) for part in command.commands][-1]
        if isinstance(command, Not):
            status = self.one(command.command)
            return not status if isinstance(status, bool) else None
        if isinstance(command, Function):
            self.functions[command.name] = command.body
        elif isinstance(command, If):
            return self.conditional(command)
        elif isinstance(command, For):
            self.loop(command)
        elif isinstance(command, Loop):
            self.repeatedly(command.body)
        else:
            self.choice(command)
        return True

    def conditional(self, command: If) -> bool | str | None:
        possible = []
        for condition, body in command.branches:
            if possible:  # whether this condition is looked at is not known
                self.perhaps(condition, "a condition")
                possible.append(body)
                continue
            holds = self.run(condition)
            self.line = command.line
            if holds is True:
                return self.run(body)
            if holds is not False:
                possible.append(body)
        if not possible:
            return self.run(command.otherwise)
        self.one_of([*possible, command.otherwise], "a condition")
        return None

    def loop(self, command: For) -> None:
        words = self.fields(command.words)
        if len(words) > _MOST_REPETITIONS or any(map(several_words, words)):
            self.variables[command.name] = self.mark(f"${command.name} of a loop is not known here")
            self.repeatedly(command.body)
            return
        before = len(self.left)
        for word in words:
            self.variables[command.name] = word
            try:
                self.run(command.body)
            except _Leave as leaving:
                if leaving.word == "return":
                    raise
                if leaving.word == "break":
                    break
        self.rejoin(before)

    def repeatedly(self, body: list) -> None:
        """A loop that runs an unknown number of times; what a later round would find is looked at too."""
        started, before = len(self.started), len(self.left)
        for _ in range(3):
            del self.started[started:]
            self.perhaps(body, "how often a loop runs")
        self.rejoin(before)

    def rejoin(self, before: int) -> None:
        """After a loop: the rounds that may have left it early."""
        left = self.left[before:]
        if left:
            self.merge([self.state(), *(state for _, state in left)])
        self.left[before:] = [one for one in left if one[0] == "return"]

    def choice(self, command: Case) -> None:
        word = self.text(command.word)
        possible = []
        for patterns, body in command.branches:
            texts = [self.pattern(pattern) for pattern in patterns]
            if "*" in texts or (not is_unknown(word) and any(_matches(word, text) for text in texts)):
                break
            if is_unknown(word) or any(map(is_unknown, texts)):
                possible.append(body)
        else:
            body = []
        if possible:
            self.one_of([*possible, body], "a case")
        else:
            self.run(body)

    # Commands

    def simple(self, command: Command) -> bool | str | None:
        own, unknown = {}, len(self.unknown)
        for assignment in command.assignments:
            if command.words:
                own[assignment.name] = self.text(assignment.value)
            else:
                self.assign(assignment)
        if not command.words:
            return True if len(self.unknown) == unknown else _TAKEN
        if command.words[0] == (Part("text", "((", False),):
            value = self.arithmetic(command.words[1][0].value)
            return None if value is None else bool(value)
        if plain(command.words[0]) == "[[":
            return _Test(self.operands(command.words[1:]), patterns=True).value()
        if plain(command.words[0]) in DECLARING:
            self.declare(plain(command.words[0]), self.fields(command.words[1:]), command.declared)
            return True
        words = self.fields(command.words)
        return self.start(words, own) if words else True

    def operands(self, words: list[Word]) -> list[str]:
        """Of ``[[ ]]``: nothing is split, and what is compared with is a pattern."""
        found: list[str] = []
        for word in words:
            compared = found and found[-1] in ("=", "==", "!=")
            found.append(self.pattern(word) if compared else self.text(word))
        return found

    def declare(self, command: str, words: list[str], assignments: list[Assignment]) -> None:
        letters = "".join(word[1:] for word in words if word.startswith("-"))
        letters += "r" if command == "readonly" else ""
        off = any(word.startswith("+") for word in words)
        names = [word for word in words if word[:1] not in ("-", "+")]
        own = self.local and command in ("local", "declare", "typeset") and "g" not in letters
        for name in [*names, *(assignment.name for assignment in assignments)]:
            name = name.partition("=")[0].rstrip("+")
            if own and name not in self.local[-1]:
                self.local[-1][name] = self.variables.get(name), self.attributes.pop(name, "")
                self.variables.pop(name, None)
            if off and name in self.variables:
                self.forget(name, "is declared with +")
            self.attributes[name] = self.attributes.get(name, "") + re.sub("[^ilucnA]", "", letters)
        for name in names:
            if "=" in name:
                name, _, value = name.partition("=")
                self.assign(Assignment(name.rstrip("+"), (Part("text", value, True),), name.endswith("+")))
        for assignment in assignments:
            self.assign(assignment)
        if "r" in letters:
            for name in [*names, *(assignment.name for assignment in assignments)]:
                self.attributes[name.partition("=")[0]] = "r"

    def start(self, words: list[str], own: Mapping[str, str]) -> bool | str | None:
        name, rest = words[0], words[1:]
        if name in ("[", "test"):
            return _Test(rest[:-1] if name == "[" else rest, patterns=False).value()
        if name in ("true", ":", "echo"):
            return True
        if name == "let":
            value = [self.arithmetic(expression) for expression in rest or ["0"]][-1]
            return None if value is None else bool(value)
        if name == "false":
            return False
        if name == "exit":
            raise _Exit
        if name in ("return", "break", "continue"):
            raise _Leave(name, int(rest[0]) == 0 if rest and rest[0].isdigit() else None)
        if name in self.functions:
            return self.call(name, rest)
        if name == "eval":
            return self.run(parse(" ".join(rest), self.line))
        if inline := _inline(words):
            outer, self.prefix = self.prefix, [*self.prefix, *words[: inline[0]]]
            self.apart(parse(words[inline[1]], self.line))
            self.prefix = outer
            return _TAKEN
        if name == "set":
            if "--" in rest:
                self.arguments = rest[rest.index("--") + 1 :]
        elif name == "shift":
            del self.arguments[: int(rest[0]) if rest and rest[0].isdigit() else 1]
        elif name == "unset":
            for variable in rest:
                if "[" in variable:
                    self.forget(variable, "is changed by index")
                elif "-f" in rest:
                    self.functions.pop(variable, None)
                elif self.attributes.get(variable) != "r":
                    self.variables.pop(variable, None)
                    self.attributes.pop(variable, None)
        elif name == "printf" and rest and rest[0].startswith("-v"):
            self.forget(rest[0][2:] or "".join(rest[1:2]), "is set by printf")
        elif name in ("read", "mapfile", "readarray", "getopts"):
            for variable in rest:
                if re.fullmatch(r"[A-Za-z_]\w*", variable):
                    closing = _ONE if name in ("read", "getopts") and "-a" not in rest else _ANY
                    self.variables[variable] = self.mark(f"${variable} is read from somewhere", closing)
            return None
        else:
            environment = {k: v for k, v in self.variables.items() if isinstance(v, str)} | dict(own)
            certain = self.depends is None
            whole = (*self.prefix, *words)
            self.started.append(Started(self.line, whole, environment, certain, self.depends or ""))
            return _TAKEN
        return True

    def call(self, name: str, arguments: list[str]) -> bool | str | None:
        if self.depth > 20:
            raise ScaleVecError(f"line {self.line}: the function {name} calls itself too often to be read.")
        outer, self.arguments = self.arguments, arguments
        left, self.left = self.left, []
        self.local.append({})
        self.depth += 1
        try:
            status = self.run(self.functions[name])
            return status if not self.left else None
        except _Leave as leaving:
            return leaving.status if not self.left else None
        finally:
            if self.left:
                self.merge([(self.variables, []), *((state[0], []) for _, state in self.left)])
            self.left = left
            for own, (value, attributes) in self.local.pop().items():
                self.variables.pop(own, None)
                if value is not None:
                    self.variables[own] = value
                self.attributes[own] = attributes
            self.arguments = outer
            self.depth -= 1

    def assign(self, assignment: Assignment) -> None:
        name, old = assignment.name, self.variables.get(assignment.name)
        attributes = self.attributes.get(name, "")
        if assignment.element:
            self.forget(name + "[", "is set by index")
        elif attributes == "i" and not assignment.append and not isinstance(assignment.value, list):
            value = self.arithmetic(self.text(assignment.value))
            self.variables[name] = self.mark(f"${name} is not known here") if value is None else str(value)
        elif attributes:
            self.forget(name + "[", "is declared with an attribute")
        elif isinstance(assignment.value, list) and any(
            "[" in part.value and not part.quoted
            for word in assignment.value
            for part in word[:1]
            if part.kind == "text"
        ):
            self.forget(name + "[", "is set by index")
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

    def pattern(self, word: Word) -> str:
        """A word that is a pattern: what is quoted in it stands for itself."""
        values = ((part, " ".join(self.part(part))) for part in word)
        return _as_one("".join(re.sub(r"([*?[])", r"[\1]", v) if p.quoted else v for p, v in values))

    def fields(self, words: Sequence[Word]) -> list[str]:
        """Words as the program gets them."""
        return [field for word in words for field in (self.braces(word) or self.split(word))]

    def braces(self, word: Word) -> list[str] | None:
        """``{1..3}`` and ``{a,b}``; None where a word has no such part."""
        skeleton = "".join("\0" if p.quoted or p.kind != "text" else p.value for p in word)
        if not _BRACES.search(skeleton):
            return None
        if found := re.fullmatch(r"\{(0|-?[1-9]\d{0,5})\.\.(0|-?[1-9]\d{0,5})\}", skeleton):
            first, last = int(found[1]), int(found[2])
            step = 1 if first <= last else -1
            return [str(number) for number in range(first, last + step, step)]
        if found := re.fullmatch(r"([^{}\0]*)\{((?:[^{}\0,]+,)+[^{}\0,]+)\}([^{}\0]*)", skeleton):
            return [found[1] + piece + found[3] for piece in found[2].split(",")]
        return [self.mark(f"{skeleton.replace(chr(0), '...')} is not expanded here", _ANY)]

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
            if any(map(is_unknown, [value] if isinstance(value, str) else value)):
                return [self.mark(f"the length of ${length[1]} is not known here")]
            whole = isinstance(value, list) and length[2]
            return [str(len(value if whole else self.scalar(value)))]
        if text == "#" and any(map(several_words, self.arguments)):
            return [self.mark("$# is not known here")]
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
                if self.attributes.get(name):
                    self.forget(name, "is declared with an attribute")
            return default
        if operation in ("%", "%%", "#", "##") and known:
            pattern = self.pattern(parse_word(word, self.line, quoted=False))
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
            if any(map(several_words, self.arguments)):
                return [self.mark(f"${name} is not known here")]
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
            if any(map(several_words, values)):
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
            return f"({self.scalar(self.variables.get(found[0], _OPEN)) or '0'})"

        if _SETS.search(expanded):
            return self.calculated(expanded)
        named = re.sub(r"\b[A-Za-z_]\w*\b", value, expanded)
        if is_unknown(named) or "#" in named:
            return None
        named = named.replace("&&", " and ").replace("||", " or ").replace("/", "//")
        try:
            return int(_calculate(ast.parse(named.strip(), mode="eval").body))
        except (SyntaxError, ValueError, KeyError, ZeroDivisionError):
            return None

    def calculated(self, expression: str) -> int | None:
        """An expression that sets a variable: ``X = ...``, ``X += ...``, ``X++``; others are not known."""
        expression = re.sub(r"^\s*(\w+)\s*(\+|-)\2\s*$", r"\1 \2= 1", expression)
        found = re.fullmatch(r"\s*([A-Za-z_]\w*)\s*([-+*/%]?)=(?!=)([^,]*)", expression, re.DOTALL)
        if found and not _SETS.search(found[3]) and not self.attributes.get(found[1]):
            old = self.variables.get(found[1])
            value = self.arithmetic(f"{found[1]} {found[2]} ({found[3]})" if found[2] else found[3])
            if value is not None and not isinstance(old, list):
                self.variables[found[1]] = str(value)
                # X++ has the value before; where only zero or not counts, that is a condition: not known.
                return value if "1" != found[3].strip() or found[2] not in ("+", "-") else None
        for name in set(re.findall(r"\b[A-Za-z_]\w*", expression)):
            self.forget(name, "is set in an arithmetic expression")
        return None


def _quotient(a: int, b: int) -> int:
    """Towards zero, as bash divides."""
    return a // b if (a < 0) == (b < 0) else -(-a // b)


_OPERATIONS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: _quotient,
    ast.Mod: lambda a, b: a - b * _quotient(a, b),
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

    def __init__(self, words: list[str], *, patterns: bool) -> None:
        self.words = words
        self.patterns = patterns

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
            comparison = words.pop(0)
            compare = _COMPARISONS[comparison]
            if not self.patterns and comparison in ("=", "==", "!="):
                compare = operator.ne if comparison == "!=" else operator.eq
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


def _matches(text: str, pattern: str) -> bool:
    return fnmatch.fnmatchcase(text, pattern.replace("[^", "[!"))


_COMPARISONS = {
    "=": _matches,
    "==": _matches,
    "!=": lambda a, b: not _matches(a, b),
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
