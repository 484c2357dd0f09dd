"""Following a launch script without executing it, up to the training commands that it would start."""

from __future__ import annotations

import datetime
import fnmatch
import operator
import posixpath
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from tree_sitter import Node

from hone.apps.verl.launch import (
    UNDECIDED,
    Argument,
    End,
    Started,
    Trouble,
    between,
    faults,
    is_arithmetic,
    is_open,
    is_setting,
    line_of,
    mark,
    names_around,
    open_names,
    parse,
    text_of,
    words_of,
)

Part = tuple[list[str], bool]
"""Texts that a part of a word becomes, and whether they are split at blanks."""
_TOO_LARGE = 2**63
_OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "**": lambda a, b: a**b if abs(a) < 2 or b < 64 else _TOO_LARGE,
    ">": operator.gt,
    "<": operator.lt,
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    "&&": lambda a, b: bool(a and b),
    "||": lambda a, b: bool(a or b),
    "/": lambda a, b: int(a / b),
    "%": lambda a, b: a - b * int(a / b),
}


_MOST_TEXT, _MOST_EDITED = 2**20, 2**14
"""Characters that all expansions of a script may have together, and those of a value that is edited by a pattern."""


class _OpenNumber(Exception):
    """Arithmetic depends on a value that the script does not set."""


@dataclass
class Variables:
    """Variables that the script has set so far."""

    directory: str  # directory of the script, as text
    output: Callable[[Node], str]  # returns the output of a command substitution
    values: dict[str, str | list[str]] = field(default_factory=dict)  # variables; a list is an array
    arguments: list[str] = field(default_factory=list)  # the positional parameters
    _room: int = _MOST_TEXT

    def fields(self, word: Iterable[Node]) -> list[str]:
        """Return the words that a word, given by its parts, becomes: none, one, or several."""
        fields: list[str] = []
        current: str | None = None
        for texts, splits in (part for node in word for part in self._parts(node)):
            pieces = [piece for text in texts for piece in text.split()] if splits else texts
            if not pieces:
                continue
            fields += [(current or "") + pieces[0], *pieces[1:]][:-1]
            current = pieces[-1] if len(pieces) > 1 else (current or "") + pieces[0]
        return fields if current is None else [*fields, current]

    def text(self, word: Node | None) -> str:
        """Return the word as the value of a variable: not split."""
        return _joined(self._parts(word)) if word is not None else ""

    def arithmetic(self, node: Node) -> str:
        """Return the value of ``$((...))`` or ``((...))``, as a mark when it depends on something open."""
        try:
            return str(int(self._number(node.named_children[-1])))
        except _OpenNumber as name:
            return mark(str(name))
        except (ValueError, KeyError, IndexError, ZeroDivisionError) as error:
            raise ValueError(f"{text_of(node).strip()} cannot be calculated") from error

    def _parts(self, node: Node, quoted: bool = False) -> list[Part]:
        text = text_of(node)
        match node.type:
            case "string":
                first, last = node.children[0], node.children[-1]
                return self._within(node, first.end_byte, last.start_byte, quoted=True) or [([""], False)]
            case "heredoc_body":
                return self._within(node, node.start_byte, node.end_byte, quoted=True)
            case "raw_string":
                return [([text[1:-1]], False)]
            case "ansi_c_string":
                return [([text[2:-1].encode("latin-1", "backslashreplace").decode("unicode_escape")], False)]
            case "concatenation":
                return self._within(node, node.start_byte, node.end_byte, quoted=quoted)
            case "simple_expansion" | "expansion":
                return self._charged(self._parameter(node, quoted))
            case "command_substitution" if is_arithmetic(node):
                return self._parts(parse(f": {text}").children[0].children[-1], quoted)
            case "command_substitution":
                return [([self.output(node)], not quoted)]
            case "arithmetic_expansion":
                return [([self.arithmetic(node)], False)]
            case "process_substitution":
                return [([mark("OUTPUT")], False)]
            case "regex" | "extglob_pattern" if "$" in text:
                return self._parts(parse(f': "{text}"').children[0].children[-1], True)
        if node.type == "word" and not quoted and (text == "~" or text.startswith("~/")):
            text = mark("HOME") + text[1:]
        return _literal(text, quoted)

    def _within(self, node: Node, start: int, end: int, *, quoted: bool) -> list[Part]:
        segments = between(node, start, end)
        return [
            part
            for piece in segments
            for part in (_literal(piece, quoted) if isinstance(piece, str) else self._parts(piece, quoted))
        ]

    def _charged(self, parts: list[Part]) -> list[Part]:
        """Count the characters and words that variables became so far: ``X=$X$X`` doubles them in each round of a loop."""
        self._room -= sum(len(text) + 8 for texts, _ in parts for text in texts)
        if self._room < 0:
            raise ValueError(f"the script's variables become more than {_MOST_TEXT} characters")
        return parts

    def _parameter(self, node: Node, quoted: bool) -> list[Part]:
        inner = node.children[1:-1] if node.type == "expansion" else node.children[1:]
        before = inner.pop(0).type if len(inner) > 1 and not inner[0].is_named else ""
        target = inner.pop(0)
        index = text_of(target.child_by_field_name("index")) if target.type == "subscript" else ""
        name = text_of(target.child_by_field_name("name") if target.type == "subscript" else target)
        how = inner[0].type if inner else ""
        rest = self._within(node, inner[0].end_byte, node.end_byte - 1, quoted=quoted) if inner else []
        whole = name in ("@", "*") or index in ("@", "*")
        value = self._value(name, index)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if before == "#":
            return [([str(len(items) if whole else len("".join(items[:1])))], False)] if items else _open(name)
        if not whole:
            items = items[:1]
        unset = not items or (how.startswith(":") and items == [""])
        if how in (":+", "+"):
            return [] if unset else rest
        if how in (":-", "-", ":=", "=") and unset:
            if "=" in how:
                self.values[name] = _joined(rest)
            return rest or [([""], not quoted)]
        if whole:
            if how == ":":
                items = _slice([f"{self.directory}/script.sh", *items] if name == "@" else items, _joined(rest))
            else:
                items = [_edited(item, how, _joined(rest)) for item in items]
            return [([" ".join(items)] if quoted and "*" in (name, index) else items, not quoted)]
        if not items:
            return _open(name)
        if before == "!":
            items = [str(self.values.get(items[0], mark(items[0])))]
        return [([_edited(items[0], how, _joined(rest))], not quoted)]

    def _value(self, name: str, index: str) -> str | list[str] | None:
        if name in ("@", "*"):
            return self.arguments
        if name.isdigit() and name != "0":
            return self.arguments[int(name) - 1] if int(name) <= len(self.arguments) else None
        if name in ("0", "BASH_SOURCE"):
            return f"{self.directory}/script.sh"
        if name == "#":
            return str(len(self.arguments)) if self.arguments else mark("ARGUMENTS")
        if name in ("$", "!", "?", "-"):
            return "0"
        value = self.values.get(name)
        if isinstance(value, list) and index.lstrip("-").isdigit():
            return value[int(index)] if -len(value) <= int(index) < len(value) else None
        return value

    def _number(self, node: Node) -> int:
        match node.type:
            case "parenthesized_expression":
                return self._number(node.named_children[0])
            case "binary_expression":
                left, how, right = node.children
                value = _OPERATIONS[how.type](self._number(left), self._number(right))
                if abs(value) >= _TOO_LARGE:
                    raise ValueError("the number has more than 64 bits")
                return value
            case "unary_expression":
                value = self._number(node.children[1])
                return {"-": -value, "+": value, "!": int(not value)}[node.children[0].type]
            case "ternary_expression":
                condition, yes, no = node.named_children
                return self._number(yes if self._number(condition) else no)
            case "variable_name" | "word":
                value = self.values.get(text_of(node))
                text = value if isinstance(value, str) else mark(text_of(node))
            case _:
                text = self.text(node)
        if is_open(text):
            raise _OpenNumber(text_of(node) if node.type in ("variable_name", "word") else open_names(text)[0])
        return int(text, 0)


def _open(name: str) -> list[Part]:
    return [([mark(f"ARG{name}" if name.isdigit() else name)], False)]


def _joined(parts: Iterable[Part]) -> str:
    return "".join(" ".join(texts) for texts, _ in parts)


def _literal(text: str, quoted: bool) -> list[Part]:
    """Return the literal text of a word, without its backslashes."""
    text = re.sub(r"\\([\\\"$`\n])" if quoted else r"\\(.|\n)", lambda m: m[1].strip("\n"), text)
    return [([text], False)] if text else []


def _slice(whole: list[str], bounds: str) -> list[str]:
    """Return ``${list[@]:offset:length}``, or the whole list when the bounds are not plain numbers."""
    numbers = re.fullmatch(r"\s*(-?\d+)\s*(?::\s*(-?\d+)\s*)?", bounds)
    if numbers is None:
        return whole
    rest = whole[int(numbers[1]) :]
    return rest if numbers[2] is None else rest[: int(numbers[2])]


def _edited(value: str, how: str, argument: str) -> str:
    """Apply ``${name#pattern}`` or another edit to a value."""
    if is_open(value):
        return value
    if len(value) > _MOST_EDITED or (how == "//" and len(value) * len(argument) > _MOST_TEXT):
        raise ValueError(f"a value of {len(value)} characters is edited")
    ends = range(len(value) + 1)
    match how:
        case ":":
            return "".join(_slice(list(value), argument))
        case "#" | "##":
            order = ends if how == "#" else reversed(ends)
            return next((value[end:] for end in order if fnmatch.fnmatchcase(value[:end], argument)), value)
        case "%" | "%%":
            order = reversed(ends) if how == "%" else ends
            return next((value[:start] for start in order if fnmatch.fnmatchcase(value[start:], argument)), value)
        case "/" | "//":
            old, _, new = argument.partition("/")
            return value.replace(old, new, -1 if how == "//" else 1)
        case "^" | "^^" | "," | ",,":
            changed = value.upper() if "^" in how else value.lower()
            return changed if len(how) == 2 else changed[:1] + value[1:]
    return value


_SHELLS = ("bash", "sh", "zsh")


def output_of(words: list[str], folder: str) -> str | None:
    """Return the output of a command if its words, and the folder that the script changed to, determine it; else None."""
    match words:
        case ["date", *arguments]:
            pattern = next((a[1:] for a in arguments if a.startswith("+")), "%c")
            return datetime.datetime.now().strftime(pattern.replace("%s", "%Y%m%d%H%M%S"))
        case ["pwd"]:
            return folder
        case ["dirname", *_, path]:
            return posixpath.dirname(path) or "."
        case ["basename", path, *suffix]:
            return posixpath.basename(path).removesuffix(suffix[0] if suffix else "")
        case ["realpath" | "readlink" | "echo", *rest]:
            return " ".join(word for word in rest if not re.fullmatch(r"-[a-z]+", word))
        case ["printf", text] if "%" not in text and "\\" not in text:
            return text
        case ["printf", *_]:
            return mark("OUTPUT")
    return None


def inner_script(words: list[str]) -> int | None:
    """Return the index of a script that is given as text (``bash -c 'script'``), or None."""
    for at, word in enumerate(words[:-1]):
        if word.rpartition("/")[2] in _SHELLS:
            option = next((i for i in range(at + 1, len(words) - 1) if re.fullmatch(r"-[a-z]*c", words[i])), None)
            return option + 1 if option is not None else None
    return None


_NUMBERS = {f"-{name}": getattr(operator, name) for name in ("eq", "ne", "gt", "ge", "lt", "le")}


def holds(words: list[str]) -> bool | None:
    """Return whether ``[ words ]`` is true; None when it depends on the machine (a file's existence, a program's output).

    A variable that the script does not set counts as unset for ``-z`` and ``-n``, and as undecided for comparisons.
    """
    for joint, decides in (("||", True), ("-o", True), ("&&", False), ("-a", False)):
        if joint in words:
            at = words.index(joint)
            sides = (holds(words[:at]), holds(words[at + 1 :]))
            return decides if decides in sides else None if None in sides else not decides
    match words:
        case []:
            return False
        case ["!", *rest]:
            truth = holds(rest)
            return None if truth is None else not truth
        case ["-z", text]:
            return _is_empty(text)
        case ["-n", text] | [text]:
            empty = _is_empty(text)
            return None if empty is None else not empty
        case [left, "=" | "==" | "!=" | "=~" as how, right]:
            return _compared(left, how, right)
        case [left, how, right] if how in _NUMBERS:
            numbers = [re.fullmatch(r"\s*[-+]?\d+\s*", side) for side in (left, right)]
            return _NUMBERS[how](int(left), int(right)) if all(numbers) else None
    return None


def _compared(left: str, how: str, right: str) -> bool | None:
    if is_open(left) or is_open(right):
        return None
    if how == "=~":
        try:
            return re.search(right, left) is not None
        except re.error:
            return None
    return fnmatch.fnmatchcase(left, right) == (how != "!=")


def _is_empty(text: str) -> bool | None:
    if not is_open(text):
        return text == ""
    name = open_names(text)[0]
    return True if text == mark(name) and name not in UNDECIDED else None


_DEPTH, _STEPS, _ROUNDS = 20, 20_000, 100
"""Bounds of nesting, of commands, and of the rounds of one loop."""


@dataclass
class Trace:
    """The commands that a script would start, and what could not be followed."""

    started: list[Started] = field(default_factory=list)
    troubles: list[Trouble] = field(default_factory=list)
    remarks: list[Trouble] = field(default_factory=list)
    end: End | None = None


class _Exit(Exception):
    end: End | None = None


def follow(
    source: str, *, directory: str = ".", arguments: Iterable[str] = (), variables: Mapping[str, str] | None = None
) -> Trace:
    """Follow a script and return the commands that it would start, with these variables in the environment."""
    walk = _Walk(directory, list(arguments), dict(variables or {}))
    try:
        walk.script(source)
    except _Exit as left:
        walk.trace.end = left.end
    except RecursionError:
        walk.trace.troubles.append(Trouble(1, "the script is nested too deeply"))
    return walk.trace


class _Walk:
    """Follows commands in order. Each one's truth is True, False, or None where only the machine decides it."""

    def __init__(self, directory: str, arguments: list[str], variables: dict[str, str]) -> None:
        self.trace = Trace()
        self._variables = Variables(directory, self._output, values={"PWD": ".", **variables}, arguments=arguments)
        self._functions: dict[str, Node] = {}
        self._printed: list[str] | None = None
        """What a command substitution has printed so far; None outside of one."""
        self._folder, self._depth, self._steps, self._lines_before = ".", 0, 0, 0

    def script(self, source: str, lines_before: int = 0) -> bool | None:
        """Follow a script's text; ``lines_before`` is where it begins inside the outer script."""
        root, outer, self._lines_before = parse(source), self._lines_before, lines_before
        for fault in list(faults(root))[:1]:
            self._note(self.trace.troubles, fault, f"not shell: {text_of(fault).strip()[:60] or fault.type}")
        try:
            return self._all(root.named_children)
        finally:
            self._lines_before = outer

    def _note(self, notes: list[Trouble], node: Node, what: str) -> None:
        notes.append(Trouble(self._lines_before + line_of(node), what))

    def _all(self, nodes: Iterable[Node]) -> bool | None:
        truth: bool | None = True
        for node in nodes:
            truth = self._one(node) if node.type != "comment" else truth
        return truth

    def _one(self, node: Node) -> bool | None:
        self._steps += 1
        if self._steps > _STEPS:
            self._note(self.trace.troubles, node, f"more than {_STEPS} commands run before this line")
            raise _Exit
        match node.type:
            case "command":
                return self._command(node)
            case "variable_assignment":
                self._assign(node)
            case "variable_assignments" | "declaration_command":
                self._all(child for child in node.named_children if child.type == "variable_assignment")
            case "unset_command":
                for child in node.named_children:
                    self._variables.values.pop(text_of(child), None)
            case "test_command":
                return holds(self._flat(node)[1:-1])
            case "list":
                return self._list(node)
            case "negated_command":
                truth = self._all(node.named_children)
                return None if truth is None else not truth
            case "pipeline":
                if self._printed is None:
                    self._all(node.named_children)
                self._print(mark("OUTPUT"))
                return None
            case "redirected_statement":
                return self._redirected(node)
            case "if_statement":
                self._if(node)
            case "case_statement":
                self._case(node)
            case "for_statement":
                self._for(node)
            case "while_statement" | "c_style_for_statement":
                if _sets(node):
                    self._note(self.trace.remarks, node, "a loop that only the machine can decide about is left out")
            case "function_definition":
                self._functions[text_of(node.child_by_field_name("name"))] = node.children[-1]
            case "compound_statement" if node.children[0].type == "((":
                value = "".join(self._guarded(node, lambda: [self._variables.arithmetic(node)]))
                return None if not value or is_open(value) else value != "0"
            case "compound_statement" | "subshell" | "do_group" | "ERROR":
                return self._all(node.named_children)
        return True

    def _guarded(self, node: Node, expand: Callable[[], list[str]]) -> list[str]:
        """Expand a node; one without a value is a trouble, and becomes nothing."""
        try:
            return expand()
        except ValueError as error:
            self._note(self.trace.troubles, node, str(error))
            return []

    def _fields(self, nodes: Iterable[Node]) -> list[Argument]:
        """Expand written words, each with its line."""
        return [
            Argument(text, self._lines_before + line_of(word[0]))
            for word in words_of(node for node in nodes if node.type != "comment")
            for text in self._guarded(word[0], lambda word=word: self._variables.fields(word))
        ]

    def _text(self, node: Node | None) -> str:
        return "".join(self._guarded(node, lambda: [self._variables.text(node)])) if node is not None else ""

    def _flat(self, node: Node) -> list[str]:
        """The operators and operands of a condition, in their order."""
        if node.type.endswith("_expression") or node.type == "test_command":
            return [word for child in node.children for word in self._flat(child)]
        return [self._text(node) if node.is_named else node.type]

    def _list(self, node: Node) -> bool | None:
        left, how, right = (child for child in node.children if child.type != "comment")
        before = len(self._printed or ())
        truth = self._one(left)
        if self._printed is not None and truth is None:  # a probe of the machine, taken as failed
            del self._printed[before:]
            truth = False
        if how.type == "&&":
            return False if truth is False else self._one(right)
        if truth or (truth is None and not _sets(right)):
            return truth
        return self._one(right)

    def _redirected(self, node: Node) -> bool | None:
        body = node.child_by_field_name("body")
        if body is None:
            return True
        document = next((child for child in node.children if child.type == "heredoc_redirect"), None)
        if document is None or text_of(body) != "cat":
            return self._one(body)
        start, text = (next(c for c in document.children if c.type == f"heredoc_{n}") for n in ("start", "body"))
        self._print(text_of(text) if text_of(start)[0] in "'\"\\" else self._text(text))
        return True

    def _if(self, node: Node) -> None:
        undecided: list[Node] | None = None
        for clause in (node, *(child for child in node.children if child.type in ("elif_clause", "else_clause"))):
            parts = [c for c in clause.children if c.type not in ("elif_clause", "else_clause")]
            then = next((at for at, child in enumerate(parts) if child.type == "then"), 0)
            truth = self._all(child for child in parts[:then] if child.is_named)
            body = [child for child in parts[then:] if child.is_named]
            if truth is None:
                self._note(self.trace.remarks, clause, "only the machine can decide this condition: taken as false")
                undecided = body if undecided is None else undecided
            if truth:
                try:
                    self._all(body)
                except _Exit:
                    if undecided is None:
                        raise
                    self._note(self.trace.remarks, node, "the script ends otherwise: the condition is taken as true")
                    self._all(undecided)
                return

    def _case(self, node: Node) -> None:
        value = self._text(node.child_by_field_name("value"))
        for item in (child for child in node.children if child.type == "case_item"):
            patterns = item.children_by_field_name("value")
            if not any(fnmatch.fnmatchcase(value, self._text(pattern)) for pattern in patterns):
                continue
            try:
                self._all(child for child in item.named_children if child not in patterns)
            except _Exit:
                if not is_open(value):
                    raise
            return

    def _for(self, node: Node) -> None:
        words = node.children_by_field_name("value")
        values = [word.text for word in self._fields(words)] if words else self._variables.arguments
        for value in values[:_ROUNDS]:
            self._variables.values[text_of(node.child_by_field_name("variable"))] = value
            self._all(node.children_by_field_name("body"))

    def _command(self, node: Node) -> bool | None:
        name = node.child_by_field_name("name")
        if name is None or not text_of(name):
            return True
        words = self._fields([name.children[0], *node.children_by_field_name("argument")])
        assigned = (child for child in node.children if child.type == "variable_assignment")
        environment = tuple(text_of(child.child_by_field_name("name")) for child in assigned)
        try:
            return self._run(words, environment) if words else True
        except _Exit as left:
            left.end = left.end or End(self._lines_before + line_of(node), text_of(node), names_around(node))
            raise

    def _run(self, arguments: list[Argument], environment: tuple[str, ...]) -> bool | None:
        words = [argument.text for argument in arguments]
        match words:
            case ["test", *inside]:
                return holds(inside)
            case ["false", *_]:
                return False
            case ["exit" | "return", *_]:
                raise _Exit
            case ["shift", *count]:
                del self._variables.arguments[: int(count[0]) if count and count[0].isdigit() else 1]
                return True
            case ["set", "--", *given]:
                self._variables.arguments = given
                return True
            case ["cd", *_, folder]:
                self._folder = self._variables.values["PWD"] = posixpath.normpath(folder)
                return True
            case ["true" | ":" | "set" | "source" | "." | "mkdir" | "ulimit", *_]:
                return True
            case ["eval", *rest]:
                return self._nested(lambda: self.script(" ".join(rest), arguments[0].line - 1))
        if words[0] in self._functions:
            return self._call(words)
        printed = output_of(words, self._folder)
        if printed is not None:
            self._print(printed)
            return True
        inner = inner_script(words)
        if inner is not None:
            return self._nested(lambda: self.script(words[inner], arguments[inner].line - 1))
        if self._printed is None:
            self.trace.started.append(Started(tuple(arguments), environment, arguments[0].line))
        self._print(mark("OUTPUT"))
        return None

    def _print(self, text: str) -> None:
        if self._printed is not None:
            self._printed.append(text)

    def _output(self, node: Node) -> str:
        """Return the output of a command substitution; a mark when it depends on the machine."""
        if node.child_by_field_name("redirect") is not None:
            return mark("OUTPUT")
        outer = self._printed, self._folder, self._variables.values
        self._printed, self._variables.values = [], dict(self._variables.values)
        try:
            self._nested(lambda: self._all(node.named_children))
            return "\n".join(self._printed).rstrip("\n")
        finally:
            self._printed, self._folder, self._variables.values = outer

    def _assign(self, node: Node) -> None:
        target, value = node.child_by_field_name("name"), node.child_by_field_name("value")
        values, name = self._variables.values, text_of(target)
        appends, before = any(child.type == "+=" for child in node.children), values.get(name)
        if value is not None and value.type == "array":
            items = [item.text for item in self._fields(value.named_children)]
            old = [before] if isinstance(before, str) else before or []
            values[name] = [*old, *items] if appends else items
            return
        text = self._text(value)
        if any(text == mark(undecided) for undecided in UNDECIDED):
            text = mark(name, computed=True)
        if isinstance(before, list) and appends:
            values[name] = ["".join([*before[:1], text]), *before[1:]]
        else:
            values[name] = f"{before or ''}{text}" if appends else text

    def _call(self, words: list[str]) -> bool | None:
        outer, self._variables.arguments = self._variables.arguments, words[1:]
        try:
            return self._nested(lambda: self._one(self._functions[words[0]]))
        finally:
            self._variables.arguments = outer

    def _nested(self, follow_: Callable[[], bool | None]) -> bool | None:
        """Follow a function, a substitution or a script inside a word; its end is not the end of the outer script."""
        if self._depth >= _DEPTH:
            return None
        self._depth += 1
        try:
            return follow_()
        except _Exit:
            return None
        finally:
            self._depth -= 1


def _sets(node: Node) -> bool:
    """Tell whether something inside a command sets a variable, or a key of a training run."""
    if node.type == "variable_assignment" or (node.type in ("word", "concatenation") and is_setting(text_of(node))):
        return True
    return any(_sets(child) for child in node.children)
