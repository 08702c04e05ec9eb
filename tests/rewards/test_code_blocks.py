"""The block of a response that is its code."""

import time

from rewards.code_tests import code_of


def test_code_behind_many_blanks_is_read_in_linear_time() -> None:
    started = time.monotonic()
    assert code_of("```" + " " * 300_000 + "```" + "\t" * 300_000 + "~" * 300_000) is None
    assert time.monotonic() - started < 2


def test_last_block_of_python_is_the_code() -> None:
    assert code_of("```python\na\n```\nNo:\n```py\nb\n```") == "b\n"
    assert code_of("```\nc\n```") == "c\n"
    assert code_of("`d`") is None
    assert code_of("```Python\ne\n```\nprints\n```\n9\n```") == "e\n"
    assert code_of("```c++\nf;\n```\nor\n```python\ng\n```") == "g\n"
    assert code_of("```c++\nf;\n```") is None
    assert code_of("~~~py3\nh\n~~~") == "h\n"
    assert code_of("```python\r\ni\r\n```\r\n") == "i\n"
    assert code_of("1. ```python3 {linenos} title='k'\nk\n```\n```text of=k\n9\n```") == "k\n"
    assert code_of("```{.python}\nl\n```") == "l\n"
    for prose in ("``` marks code.\n", "``` So the code is:\n", "- ``` Note: a block\n", ""):
        assert code_of(f"{prose}```python\no\n```\n```python output\n9\n```") == "o\n"
    assert code_of("```js title=m\nm\n```\nor ``` as in\n```PYTHON:n.py\nn\n```") == "n\n"
    assert code_of("``` \no\n```") == "o\n"
    assert code_of('````python3\nj = "```"\n````') == 'j = "```"\n'


def test_block_in_a_list_is_code_too() -> None:
    assert code_of("1. Add:\n   ```python\n   def f():\n       return 1\n   ```") == "def f():\n    return 1\n"
