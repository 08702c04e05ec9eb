"""Words of a training command in a shell script. The script is read, never run: variables that it sets are replaced,
and what only a running shell knows stays as it is written.
"""

import ast
import operator
import re
import shlex

_ARRAY = re.compile(r"^[ \t]*(\w+)\+?=\(((?:[^()]|\$\([^()]*\)|\$\(\([^()]*\)\))*)\)", re.M)
_QUOTED = re.compile(r"""^[ \t]*\w+=(["'])[^"']*\1""", re.M)
_ASSIGNMENT = re.compile(r"(?:(?:export|readonly|local|declare(?: -\w)?)\s+)?([A-Za-z_]\w*)=(.*)")
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?:\[@\]|:?[-=]([^{}]*))?\}|(\w+))")
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
    text = _QUOTED.sub(lambda match: match[0].replace("\n", " "), text)
    values = {"HOME": "~", "PWD": "."}
    values |= {name: " ".join(words.split("\n")) for name, words in _ARRAY.findall(text)}
    found, depth = [], 0
    for line in text.splitlines():
        word = line.strip().partition(" ")[0]
        depth += (word in ("if", "case")) - (word in ("fi", "esac"))
        assigned = _ASSIGNMENT.fullmatch(line.strip())
        if assigned and not assigned[2].startswith("(") and len(words := _split(assigned[2])) < 2:
            said = expand(words[0], values) if words else ""
            values[assigned[1]] = f"${{{assigned[1]}}}" if depth > 0 else said  # a branch may not be taken
            continue
        if not launcher.search(line):
            line = expand(line, values)
        if match := launcher.search(line):
            found.append((match, line[: match.start()], list(_words(line[match.end() :], values))))
    return found


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
        if expanded not in ("$@", "$*"):
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
