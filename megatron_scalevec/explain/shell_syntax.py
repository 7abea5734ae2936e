"""The grammar of launch scripts: the part of bash that they are written in, as a tree.

Nothing is evaluated here; :mod:`megatron_scalevec.explain.shell` does that. What is outside of this part of
the language is refused with its line number.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from megatron_scalevec.errors import ScaleVecError

__all__ = [
    "Assignment",
    "Case",
    "Command",
    "For",
    "Function",
    "Group",
    "If",
    "Loop",
    "Not",
    "Part",
    "Pipeline",
    "Word",
    "parse",
]

NAME = r"[A-Za-z_][A-Za-z0-9_]*"
_ASSIGNMENT = re.compile(rf"({NAME})(\[[^\]]*\])?(\+?)=")
DECLARING = ("export", "declare", "local", "readonly", "typeset")
_ENDS_A_WORD = " \t\n;&|<>()"


@dataclass(frozen=True)
class Part:
    """A piece of a word. ``kind``: text, parameter (of ``$X`` and ``${...}``), command, arithmetic."""

    kind: str
    value: str
    quoted: bool


Word = tuple[Part, ...]


@dataclass(frozen=True)
class Assignment:
    name: str
    value: Word | list[Word]
    append: bool = False
    element: bool = False  # of an array, by index


@dataclass
class Command:
    line: int
    assignments: list[Assignment] = field(default_factory=list)
    words: list[Word] = field(default_factory=list)
    declared: list[Assignment] = field(default_factory=list)


@dataclass
class If:
    line: int
    branches: list[tuple[list, list]]  # condition, body
    otherwise: list


@dataclass
class For:
    line: int
    name: str
    words: list[Word]
    body: list


@dataclass
class Loop:
    line: int
    body: list


@dataclass
class Case:
    line: int
    word: Word
    branches: list[tuple[list[Word], list]]


@dataclass
class Function:
    line: int
    name: str
    body: list


@dataclass
class Group:
    line: int
    body: list
    subshell: bool = False  # what it sets is lost at its end


@dataclass
class Pipeline:
    line: int
    commands: list


@dataclass
class Not:
    line: int
    command: object


def parse(text: str, first_line: int = 1) -> list:
    """A script as a list of (operator before it, command).

    Operators are ``;``, ``&&`` and ``||``; a newline counts as ``;``, what is before ``&`` is a subshell.

    Raises:
        ScaleVecError: Something in it is not understood.
    """
    return _Reader(text, first_line).script()


def parse_word(text: str, line: int, *, quoted: bool) -> Word:
    """The word in ``${X:-word}``."""
    reader = _Reader(text, line)
    return tuple(reader.double_quoted(end=None)) if quoted else reader.word(everything=True)


class _Reader:
    def __init__(self, text: str, first_line: int) -> None:
        self.text = text
        self.at = 0
        self.first_line = first_line
        self.documents: list[tuple[str, bool]] = []

    # Characters

    @property
    def line(self) -> int:
        return self.first_line + self.text.count("\n", 0, self.at)

    def fail(self, what: str):
        raise ScaleVecError(
            f"line {self.line}: {what}, which is not understood here; put the arguments of the run behind -- "
            "instead, as in: scalevec explain -- pretrain_gpt.py --num-layers 22 ..."
        )

    def ahead(self, length: int = 1) -> str:
        return self.text[self.at : self.at + length]

    def take(self, text: str) -> bool:
        if self.text.startswith(text, self.at):
            self.at += len(text)
            return True
        return False

    def match(self, pattern: str) -> re.Match | None:
        found = re.compile(pattern).match(self.text, self.at)
        if found:
            self.at = found.end()
        return found

    def blanks(self) -> None:
        self.match(r"(?:[ \t]|\\\n)*")
        if self.ahead() == "#":
            self.match(r"[^\n]*")

    def newlines(self) -> None:
        self.blanks()
        while self.ahead() in ("\n", ";") and self.ahead() and self.ahead(2) != ";;":
            self.at += 1
            if self.text[self.at - 1] == "\n":
                self.skip_documents()
            self.blanks()

    def skip_documents(self) -> None:
        """The text of here-documents is input of some program, and no part of its command line."""
        for end, tabs in self.documents:
            while self.at < len(self.text):
                line = self.match(r"[^\n]*\n?")[0].rstrip("\n")
                if (line.lstrip("\t") if tabs else line) == end:
                    break
        self.documents.clear()

    # Words

    def word(self, *, everything: bool = False) -> Word:
        parts: list[Part] = []
        while self.at < len(self.text):
            character = self.ahead()
            if not everything and character in _ENDS_A_WORD:
                break
            if self.take("\\\n"):
                continue
            if self.take("\\"):
                parts.append(Part("text", self.ahead(), True))
                self.at += 1
            elif self.take("'"):
                parts.append(Part("text", self.until("'"), True))
            elif self.take("$'"):
                self.fail("$'...' quoting")
            elif self.take('"'):
                parts.extend(self.double_quoted(end='"') or [Part("text", "", True)])
            elif character == "$":
                parts.append(self.dollar(quoted=False))
            elif self.take("`"):
                parts.append(Part("command", self.until("`"), False))
            else:
                end = "" if everything else re.escape(_ENDS_A_WORD)
                parts.append(Part("text", self.match(rf"[^\\'\"$`{end}]+")[0], False))
        return tuple(parts)

    def until(self, end: str) -> str:
        stop = self.text.find(end, self.at)
        if stop < 0:
            self.fail(f"a {end} that is never closed")
        found = self.text[self.at : stop]
        self.at = stop + 1
        return found

    def double_quoted(self, end: str | None) -> list[Part]:
        parts: list[Part] = []
        while True:
            if self.at >= len(self.text):
                if end is None:
                    return parts
                self.fail('a " that is never closed')
            if end is not None and self.take(end):
                return parts
            if self.take("\\\n"):
                continue
            if self.ahead() == "\\" and self.ahead(2)[1:] in ("$", "`", '"', "\\"):
                parts.append(Part("text", self.ahead(2)[1], True))
                self.at += 2
            elif self.ahead() == "$":
                parts.append(self.dollar(quoted=True))
            elif self.take("`"):
                parts.append(Part("command", self.until("`"), True))
            elif found := self.match(r'[^\\"$`]+' if end else r"[^\\$`]+"):
                parts.append(Part("text", found[0], True))
            else:
                parts.append(Part("text", self.ahead(), True))
                self.at += 1

    def dollar(self, *, quoted: bool) -> Part:
        self.at += 1
        if self.take("(("):
            return Part("arithmetic", self.closed("))"), quoted)
        if self.take("("):
            return Part("command", self.closed(")"), quoted)
        if self.take("{"):
            return Part("parameter", self.closed("}"), quoted)
        if found := self.match(NAME + r"|[0-9@*#?$!-]"):
            return Part("parameter", found[0], quoted)
        return Part("text", "$", quoted)

    def closed(self, end: str) -> str:
        """The text up to the bracket that belongs to the one before; quotes and brackets nest."""
        start, depth = self.at, 0
        opening = {")": "(", "))": "(", "}": "{"}[end]
        while self.at < len(self.text):
            if depth == 0 and self.take(end):
                return self.text[start : self.at - len(end)]
            character = self.ahead()
            self.at += 1
            if character == "\\":
                self.at += 1
            elif character == "'" and end != "}":
                self.until("'")
            elif character == '"':
                self.double_quoted('"')
            elif character == opening:
                depth += 1
            elif character == end[0]:
                depth -= 1
        self.fail(f"a {end} that is missing")

    # Commands

    def script(self) -> list:
        items = self.items(())
        if self.at < len(self.text):
            self.fail(f"{self.ahead(10)!r}")
        return items

    def items(self, until: tuple[str, ...]) -> list:
        """Commands up to, and without, one of the words that end them."""
        found: list = []
        operator = ";"
        while True:
            self.newlines()
            if self.at >= len(self.text) or self.ahead() == ")" or self.ahead(2) == ";;":
                return found
            if any(self.is_word(word) for word in until):
                return found
            found.append((operator, self.pipeline()))
            operator = ";"
            if self.take("&&"):
                operator = "&&"
            elif self.take("||"):
                operator = "||"
            elif self.ahead(2) != "&>" and self.take("&"):
                start = max(place for place, (before, _) in enumerate(found) if before == ";")
                found[start:] = [(";", Group(self.line, found[start:], subshell=True))]
            if self.ahead(2) == ";;":
                return found

    def pipeline(self):
        line = self.line
        if self.keyword("!"):
            self.blanks()
            return Not(line, self.pipeline())
        commands = [self.command()]
        self.blanks()
        while self.ahead(2) != "||" and self.match(r"\|&?"):
            self.newlines()
            commands.append(self.command())
            self.blanks()
        return commands[0] if len(commands) == 1 else Pipeline(line, commands)

    def is_word(self, word: str) -> bool:
        return bool(re.compile(re.escape(word) + r"(?=[\s;&|()]|$)").match(self.text, self.at))

    def keyword(self, word: str) -> bool:
        return self.is_word(word) and self.take(word)

    def expect(self, word: str) -> None:
        self.newlines()
        if not self.keyword(word):
            self.fail(f"a missing {word!r}")

    def body(self, *until: str) -> list:
        return self.items(until)

    def command(self):
        line = self.line
        if self.keyword("if"):
            return self.after(self.conditional(line))
        if self.keyword("for"):
            return self.after(self.counted(line))
        if self.keyword("while") or self.keyword("until"):
            condition = self.body("do")
            self.expect("do")
            found = Loop(line, [*condition, *self.body("done")])
            self.expect("done")
            return self.after(found)
        if self.keyword("case"):
            return self.after(self.choice(line))
        if self.keyword("{"):
            found = Group(line, self.body("}"))
            self.expect("}")
            return self.after(found)
        if self.take("(("):
            test = (Part("text", "((", False),), (Part("text", self.closed("))"), False),)
            return Command(line, words=list(test))
        if self.take("("):
            found = Group(line, self.body(), subshell=True)
            self.expect_closing()
            return self.after(found)
        function = self.match(rf"(?:function\s+({NAME})\s*(?:\(\s*\))?|({NAME})\s*\(\s*\))\s*(?=[{{(])")
        if function:
            return Function(line, function[1] or function[2], [(";", self.command())])
        return self.simple(line)

    def expect_closing(self) -> None:
        self.newlines()
        if not self.take(")"):
            self.fail("a ) that is missing")

    def after(self, compound):
        while True:
            self.blanks()
            if not self.redirection():
                return compound

    def conditional(self, line: int) -> If:
        branches = []
        while True:
            condition = self.body("then")
            self.expect("then")
            branches.append((condition, self.body("elif", "else", "fi")))
            self.newlines()
            if not self.keyword("elif"):
                break
        otherwise = self.body("fi") if self.keyword("else") else []
        self.expect("fi")
        return If(line, branches, otherwise)

    def counted(self, line: int) -> For:
        self.blanks()
        name = self.match(NAME)
        if name is None:
            self.fail("a for loop without a name")
        words: list[Word] = []
        self.blanks()
        if self.keyword("in"):
            self.blanks()
            while self.ahead() not in ("\n", ";", ""):
                words.append(self.word())
                self.blanks()
        else:
            words.append((Part("parameter", "@", True),))
        self.expect("do")
        body = self.body("done")
        self.expect("done")
        return For(line, name[0], words, body)

    def choice(self, line: int) -> Case:
        self.blanks()
        word = self.word()
        self.expect("in")
        branches = []
        while True:
            self.newlines()
            if self.keyword("esac"):
                return Case(line, word, branches)
            self.take("(")
            patterns = []
            while True:
                self.blanks()
                patterns.append(self.word())
                self.blanks()
                if not self.take("|"):
                    break
            if not self.take(")"):
                self.fail("a pattern without )")
            body = self.body("esac")
            branches.append((patterns, body))
            if self.match(r";;&|;&"):
                self.fail("a case that goes on with the next one")
            self.take(";;")

    def simple(self, line: int) -> Command:
        command = Command(line)
        double_bracket = False
        while True:
            self.blanks()
            if not double_bracket and self.redirection():
                continue
            character = self.ahead()
            if double_bracket and character:
                if self.keyword("]]"):
                    return self.after(command)
                if operator := self.match(r"&&|\|\||[<>()|&]|\n"):
                    command.words.append((Part("text", operator[0], False),))
                    continue
            if not character or character in "\n;&|)":
                break
            if character == "(":
                self.fail("a (")
            if not command.words and (found := self.assignment()):
                command.assignments.append(found)
                continue
            if command.words and plain(command.words[0]) in DECLARING and (found := self.assignment()):
                command.declared.append(found)
                continue
            command.words.append(self.word())
            double_bracket = double_bracket or (len(command.words) == 1 and plain(command.words[0]) == "[[")
        if not command.words and not command.assignments:
            self.fail(f"{self.ahead() or 'the end'!r} in the place of a command")
        return command

    def assignment(self) -> Assignment | None:
        found = _ASSIGNMENT.match(self.text, self.at)
        if found is None:
            return None
        self.at = found.end()
        if not self.take("("):
            return Assignment(found[1], self.word(), bool(found[3]), bool(found[2]))
        words = []
        self.newlines()
        while not self.take(")"):
            if self.at >= len(self.text):
                self.fail(f"the array {found[1]} that is never closed")
            if self.ahead() in ";&|<>(":
                self.fail(f"{self.ahead()!r} in the array {found[1]}")
            words.append(self.word())
            self.newlines()
        return Assignment(found[1], words, bool(found[3]))

    def redirection(self) -> bool:
        found = self.match(r"(?:[0-9]+|&)?(<<<|<<-?|<&|>&|>>|>\||<>|[<>])[ \t]*")
        if found is None:
            return False
        target = self.word()
        if found[1] in ("<<", "<<-"):
            self.documents.append(("".join(part.value for part in target), found[1] == "<<-"))
        return True


def plain(word: Word) -> str:
    return word[0].value if len(word) == 1 and word[0].kind == "text" else ""
