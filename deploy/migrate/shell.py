"""Words of a training command in a shell script. The script is read, never run: variables that it sets are replaced,
and what only a running shell knows stays as it is written.
"""

import ast
import operator
import re
import shlex

_BEGIN = r"^[ \t]*(?:(?:then|do|else)\s+)?(?:(?:export|readonly|local|declare|typeset)(?:\s+-\w+)*\s+)?"
_TEXT = r""""(?:[^"\\]|\\.)*"|'[^']*'"""
_ARRAY = re.compile(rf"{_BEGIN}(\w+)(\+?)=\(((?>{_TEXT}|\$\(\([^()]*\)\)|\$\([^()]*\)|[^()])*)\)", re.M)
_QUOTED = re.compile(rf"{_BEGIN}\w+\+?=(?:{_TEXT})", re.M)
_UNREAD_ARRAY = re.compile(rf"{_BEGIN}\w+\+?=\(")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)(\+?)=(.*)", re.S)
_PERHAPS = re.compile(r"(?:&&|\|\||^\s*[^\s()]+\))\s*(?:\{\s*)?([A-Za-z_]\w*)\+?=")  # a condition's, or a case's
_SET_BY = re.compile(  # a command that reads, counts or removes a variable
    r"\b(?:let|unset|(?:read|mapfile|readarray)(?:\s+-\w+)*|printf\s+-v)\s+([A-Za-z_]\w*)"
    r"|^\s*(?:for|select)\s+([A-Za-z_]\w*)\s+in\b"
    r"|\(\(\s*([A-Za-z_]\w*)\s*(?:[-+*/]?=(?!=)|\+\+|--)"
)
_FUNCTION = re.compile(r"\s*(?:function\s+([\w-]+)\s*(?:\(\s*\))?|([\w-]+)\s*\(\s*\))\s*(?:\{(.*))?$")
_SETS_DEFAULT = re.compile(r"\$\{(\w+):?=([^{}]*)\}")
_SPEAKS = re.compile(r"\s*(?:echo|printf|pkill|pgrep)\s[^&|]*")  # a command that names another one
_OPTION = re.compile(r"\s*(?:--\w|[+~]*\w+(?:\.[\w@/]+)+=|[\"']?\$)")
_CUT = "\x01"  # place where a shell ends a command that its writer goes on with
_PARTS = re.compile(r""";(?=(?:[^"']|"[^"]*"|'[^']*')*$)""")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\]|:?[-=]([^{}]*))?\}|(\w+))")
_ARGUMENTS = re.compile(r"\$[@*]|\$\{[@*](:\d+)?\}")
_END = re.compile(r"(\|&?|&|&&|;|\|\||\d?>.*|&>.*)$")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
}


def words_after(script: str, launcher: re.Pattern[str]) -> list[tuple[re.Match[str], str, list[str], bool]]:
    """Return each command that a script starts: the launcher's match, the text before it, the words after it, and
    whether a shell ends it before the last of them.
    """
    text = _join_lines(script)
    for pattern in (_QUOTED, _ARRAY):
        text = pattern.sub(lambda match: match[0].replace("\n", " "), text)
    values, outside = {"HOME": "~", "PWD": "."}, dict[str, str]()
    functions: dict[str, dict[str, str]] = {}  # the variables that each one sets
    found, depth, function = [], 0, ""
    for line in (part for whole in text.splitlines() for part in _PARTS.split(whole)):
        word = line.strip().partition(" ")[0]
        depth += (word in ("if", "case")) - (word in ("fi", "esac"))
        if begun := _FUNCTION.match(line):
            function, outside, line = begun[1] or begun[2], dict(values), begun[3] or ""
        elif word == "}" and function:  # a definition runs nothing
            functions[function] = {name: value for name, value in values.items() if outside.get(name) != value}
            values, function = outside, ""
        elif word in functions:
            values |= {name: value if depth == 0 else f"${{{name}}}" for name, value in functions[word].items()}
        if _assign(line, values, is_sure=depth == 0):
            continue
        if not launcher.search(line):
            _note_commands(line, values, word, is_sure=depth == 0)
            line = expand(line, values)
        if (match := launcher.search(line)) and not _SPEAKS.fullmatch(line[: match.start()]):
            words = _words(line[match.end() :], values)
            head = expand(line[: match.end()], values)
            match = launcher.search(head) or match
            is_cut = _CUT in words[:-1]
            found.append((match, head[: match.start()], [each for each in words if each != _CUT], is_cut))
    return found


def _join_lines(script: str) -> str:
    """Return a script without remarks and with each continued command in one line.

    A remark, or a space behind the backslash, ends a command for a shell: _CUT is there, if more options follow.
    """
    lines: list[str] = []
    is_cut = False
    for line in script.splitlines():
        is_continued = bool(lines) and lines[-1].endswith("\\")
        if re.match(r"\s*#", line):
            is_cut |= is_continued
            continue
        if is_cut and is_continued:
            lines[-1] = lines[-1][:-1] + (f" {_CUT} \\" if _OPTION.match(line) else "")
        code = _without_remark(line).rstrip()
        is_cut = code.endswith("\\") and code != line
        lines.append(code)
    return re.sub(r"\\\n", " ", "\n".join(lines))


def _note_commands(line: str, values: dict[str, str], word: str, *, is_sure: bool) -> None:
    """Set or forget the variables that a command may set. word: the line's first one."""
    names = [*_PERHAPS.findall(line), *("".join(groups) for groups in _SET_BY.findall(line))]
    values |= {name: f"${{{name}}}" for name in names}
    for name, default in _SETS_DEFAULT.findall(line) if word == ":" else ():
        values.setdefault(name, expand(default, values).strip("\"'") if is_sure else f"${{{name}}}")


def _assign(line: str, values: dict[str, str], *, is_sure: bool) -> bool:
    """Set the variables that a line sets; return whether it does nothing else. is_sure: it is in no branch."""
    if array := _ARRAY.fullmatch(line.rstrip()):
        said = shlex.join(each for each in _words(array[3], values) if each != _CUT)
        given = [(array[1], array[2], f" {said}", said)]
    else:
        is_sure = is_sure and not _UNREAD_ARRAY.match(line)
        words = _split(re.sub(_BEGIN, "", line))
        matches = [_ASSIGNMENT.fullmatch(word) for word in words]
        given = [(match[1], match[2], said, said) for match in matches if match for said in [expand(match[3], values)]]
        if not words or len(given) < len(words):
            return False
    for name, is_more, more, said in given:
        if is_more:
            values[name] = values.get(name, "") + (more if is_sure else f" ${{{name}+=..}}")
        else:
            said = re.sub(rf"\$(?:\{{{name}(?:\[[@*]\])?\}}|{name}\b)", f"${{{name}+=..}}", said)  # it was not known
            values[name] = said if is_sure else f"${{{name}}}"  # a branch may not be taken
    return True


def expand(word: str, values: dict[str, str]) -> str:
    """Return a word with the script's variables, and sums and products of them, replaced.

    Example: "${BATCH:-64}" with {} -> "64"
    """
    word = word.replace("$(pwd)", ".")
    for _ in range(8):  # a default may hold a variable
        expanded = _VARIABLE.sub(lambda match: _value(match, values), word)
        expanded = re.sub(r"\$\(\((.+?)\)\)(?!\))", lambda match: _number(match, values), expanded)
        if expanded == word:
            break
        word = expanded
    return word.replace("\u00a0", " ")


def _value(match: re.Match[str], values: dict[str, str]) -> str:
    return values.get(match[1] or match[3], match[0] if match[2] is None else match[2].strip("\"'"))


def _number(match: re.Match[str], values: dict[str, str]) -> str:
    """Return the value of $((..)); the text itself for what is not plain arithmetic."""
    text = re.sub(r"[A-Za-z_]\w*", lambda name: values.get(name[0], name[0]), match[1].replace("\u00a0", " "))
    try:
        return str(_calculate(ast.parse(text.strip(), mode="eval").body))
    except (SyntaxError, ValueError, ZeroDivisionError):
        return match[0]


def _calculate(node: ast.expr) -> int:
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
        return int(_OPERATORS[type(node.op)](_calculate(node.left), _calculate(node.right)))
    raise ValueError


def _words(text: str, values: dict[str, str]) -> list[str]:
    """Return the words of a command up to a pipe or redirection; a variable that holds several becomes several."""
    words: list[str] = []
    for word in _split(text):
        if _END.match(word):
            break
        expanded = expand(word, values)
        is_list = _VARIABLE.fullmatch(word) and (expanded.lstrip().startswith("-") or "=" in expanded)
        if not _ARGUMENTS.fullmatch(expanded):
            words += [expand(each, values) for each in _split(expanded)] if is_list else [expanded]
    return words


def _split(text: str) -> list[str]:
    """Return the words of a line; a quote that began before the line ends it."""
    text = re.sub(r"\$\(\(.+?\)\)(?!\))|\$\([^()]*\)", lambda match: match[0].replace(" ", "\u00a0"), text)
    text = re.sub(r"(?<![^\s=])\$'((?:[^'\\]|\\.)*)'", _without_escapes, text)
    for _ in range(3):
        try:
            return shlex.split(text)
        except ValueError:
            text = text[: max(text.rfind('"'), text.rfind("'"))]
    return text.split()


def _without_escapes(match: re.Match[str]) -> str:
    """Return the text of $'..' in plain quotes."""
    return shlex.quote(match[1].encode("latin-1", "backslashreplace").decode("unicode_escape"))


def _without_remark(line: str) -> str:
    """Return a line without the remark at its end, if no quote is open there."""
    for match in re.finditer(r"\s#", line):
        before = line[: match.start()]
        if before.count('"') % 2 == 0 and before.count("'") % 2 == 0:
            return before
    return line
