"""Tokenizers with chat templates in the form of four families, as far as calls of tools need them.

Bytes are tokens, and control tokens are what each family has. The templates are of our own making: what stands where is
the families', what they say is not.
"""

from dataclasses import dataclass
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

CHATML = ("<|im_start|>", "<|im_end|>")
HEADERS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>")
BRACKETS = ("<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]",
            "[TOOL_RESULTS]", "[/TOOL_RESULTS]")  # fmt: skip

QWEN = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}Write {{ '<tool_call>{"name": .., "arguments": ..}</tool_call>' }}<|im_end|>
{% endif %}{% for m in messages %}{% set before = messages[loop.index0 - 1] %}{% if m.role == 'tool' %}
{% if before.role != 'tool' %}<|im_start|>user
{% endif %}<tool_response>
{{ m.content }}
</tool_response>{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>
{% endif %}{% else %}<|im_start|>{{ m.role }}
{% if m.role == 'assistant' and loop.last %}<think>

</think>

{% endif %}{{ m.content }}{% for c in m.tool_calls %}{% set f = c.function %}
<tool_call>
{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}
</tool_call>{% endfor %}<|im_end|>
{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""
CODER = QWEN.replace(
    """{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}""",
    "<function={{ f.name }}>{% for key, value in f.arguments.items() %}\n<parameter={{ key }}>\n{{ value }}\n"
    "</parameter>\n{% endfor %}</function>",
)
LLAMA = """<|begin_of_text|>{% for m in messages %}{% if m.role == 'tool' %}<|start_header_id|>ipython<|end_header_id|>

{{ {"output": m.content} | tojson }}<|eot_id|>{% else %}<|start_header_id|>{{ m.role }}<|end_header_id|>

{% if tools and loop.first %}{{ tools | tojson }}{% endif %}{{ m.content | trim }}{% for c in m.tool_calls %}\
{"name": "{{ c.function.name }}", "parameters": {{ c.function.arguments | tojson }}}\
{% endfor %}<|eot_id|>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""
MISTRAL = """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{% if tools %}[AVAILABLE_TOOLS] \
{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST] {{ m.content }}[/INST]\
{% elif m.role == 'assistant' %}{% if m.tool_calls %}[TOOL_CALLS] [\
{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", \
"arguments": {{ c.function.arguments | tojson }}}{% if not loop.last %}, {% endif %}{% endfor %}]{% else %} \
{{ m.content | trim }}{% endif %}</s>\
{% elif m.tool_call_id | length != 9 %}{{ raise_exception('ids have 9 characters') }}{% else %}[TOOL_RESULTS] {\
"content": {{ m.content | string }}, "call_id": "{{ m.tool_call_id }}"}[/TOOL_RESULTS]{% endif %}\
{% endfor %}"""


def byte_core(*names: str) -> Tokenizer:
    """Return what cuts text into these names, which come first, and single bytes: without merges or control tokens."""
    tokens = [*names, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    core = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return core


@dataclass(frozen=True)
class ToolModel:
    """One family's tokenizer, and how a call and the result behind it are written."""

    template: str
    control: tuple[str, ...]  # names of its control tokens
    end: str  # the one that ends a turn
    call: str  # a turn that calls {name} with {arguments}, without its end
    result: str  # what stands between the end of a turn and the policy's next token; {text}

    def tokenizer(self) -> Any:
        names = {"eos_token": self.end, "additional_special_tokens": list(self.control)}
        if "<s>" in self.control:
            names["bos_token"] = "<s>"
        return PreTrainedTokenizerFast(tokenizer_object=byte_core(), chat_template=self.template, **names)


_CHATML_RESULT = "\n<|im_start|>user\n<tool_response>\n{text}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
FAMILIES = {
    "hermes": ToolModel(
        QWEN,
        CHATML,
        "<|im_end|>",
        '<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>',
        _CHATML_RESULT,
    ),
    "qwen3_coder": ToolModel(
        CODER,
        CHATML,
        "<|im_end|>",
        "<tool_call>\n<function={name}>\n{arguments}\n</function>\n</tool_call>",
        _CHATML_RESULT,
    ),
    "llama3": ToolModel(
        LLAMA,
        HEADERS,
        "<|eot_id|>",
        '{{"name": "{name}", "parameters": {arguments}}}',
        '<|start_header_id|>ipython<|end_header_id|>\n\n{{"output": "{text}"}}<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "mistral": ToolModel(
        MISTRAL,
        BRACKETS,
        "</s>",
        '[TOOL_CALLS] [{{"name": "{name}", "arguments": {arguments}}}]',
        '[TOOL_RESULTS] {{"content": {text}, "call_id": "call00000"}}[/TOOL_RESULTS]',
    ),
}
