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
_PERHAPS = re.compile(r"(?:&&|\|\||^\s*[^\s()]+\))\s*([A-Za-z_]\w*)\+?=")  # a condition's, or a case's
_SET_BY = re.compile(  # a command that reads, counts or removes a variable
    r"\b(?:let|unset|read(?:\s+-\w+)*|printf\s+-v)\s+([A-Za-z_]\w*)"
    r"|\(\(\s*([A-Za-z_]\w*)\s*(?:[-+*/]?=(?!=)|\+\+|--)"
)
_PARTS = re.compile(r""";(?=(?:[^"']|"[^"]*"|'[^']*')*$)""")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[[@*]\]|:?[-=]([^{}]*))?\}|(\w+))")
_ARGUMENTS = re.compile(r"\$[@*]|\$\{[@*](:\d+)?\}")
_END = re.compile(r"(\||&|&&|;|\|\||\d?>.*|&>.*)$")
_OPERATORS = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
}


def words_after(script: str, launcher: re.Pattern[str]) -> list[tuple[re.Match[str], str, list[str]]]:
    """Return each command that a script starts: the launcher's match, the text before it and the words after it."""
    lines = [line for line in script.splitlines() if not re.match(r"\s*#", line)]
    text = re.sub(r"\\[ \t]*\n", " ", "\n".join(map(_without_remark, lines)))
    for pattern in (_QUOTED, _ARRAY):
        text = pattern.sub(lambda match: match[0].replace("\n", " "), text)
    values = {"HOME": "~", "PWD": "."}
    found, depth = [], 0
    for line in (part for whole in text.splitlines() for part in _PARTS.split(whole)):
        word = line.strip().partition(" ")[0]
        depth += (word in ("if", "case")) - (word in ("fi", "esac"))
        if _assign(line, values, is_sure=depth == 0):
            continue
        if not launcher.search(line):
            names = [*_PERHAPS.findall(line), *(one or other for one, other in _SET_BY.findall(line))]
            values |= {name: f"${{{name}}}" for name in names}
            line = expand(line, values)
        if match := launcher.search(line):
            found.append((match, line[: match.start()], list(_words(line[match.end() :], values))))
    return found


def _assign(line: str, values: dict[str, str], *, is_sure: bool) -> bool:
    """Set the variables that a line sets; return whether it does nothing else. is_sure: it is in no branch."""
    if array := _ARRAY.fullmatch(line.rstrip()):
        said = shlex.join(_words(array[3], values))
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
    for _ in range(3):
        try:
            return shlex.split(text)
        except ValueError:
            text = text[: max(text.rfind('"'), text.rfind("'"))]
    return text.split()


def _without_remark(line: str) -> str:
    """Return a line without the remark at its end, if no quote is open there."""
    for match in re.finditer(r"\s#", line):
        before = line[: match.start()]
        if before.count('"') % 2 == 0 and before.count("'") % 2 == 0:
            return before
    return line
