"""The final answer in a model's last message, as answers of samples are compared with each other."""

_LONGEST = 200
_OPEN, _CLOSE = "<answer>", "</answer>"
_BOX = "\\boxed{"
_HASHES = "####"


def final_answer(text: str) -> str:
    """Return the last `<answer>`, `\\boxed{}` or `####` answer, or else the last line; "" for a blank text.

    Case and spaces do not count; at most 200 characters. Example: "It is <answer> Paris </answer>" gives "paris".
    """
    found = _tagged(text) or _boxed(text) or _after_hashes(text) or _last_line(text)
    return " ".join(found.casefold().split())[:_LONGEST].strip()


def _tagged(text: str) -> str:
    end = text.rfind(_CLOSE)
    start = text.rfind(_OPEN, 0, end) if end >= 0 else -1
    return text[start + len(_OPEN) : end] if start >= 0 else ""


def _boxed(text: str) -> str:
    """Return what the last box holds, braces inside it included."""
    start = text.rfind(_BOX)
    depth, begin = 1, start + len(_BOX)
    for place in range(begin, len(text)) if start >= 0 else ():
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if not depth:
            return text[begin:place]
    return ""


def _after_hashes(text: str) -> str:
    start = text.rfind(_HASHES)
    return _last_line(text[start + len(_HASHES) :].strip().partition("\n")[0]) if start >= 0 else ""


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else ""
