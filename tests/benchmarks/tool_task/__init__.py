"""A task that needs a tool: products that the tiny policy cannot work out, and a calculator that it may call.

`build_tool_task` writes `train.jsonl`, `eval.jsonl`, `warmstart.jsonl` and `model/` into a folder.

What is said, by the model's own chat template, in the `tools` environment:

    user       347 * 28
    model      <tool_call>{"name": "calculator", "arguments": {"expression": "347*28"}}</tool_call>
    tool       9716
    model      <answer>9716</answer>

Warm start shows the call's form on products of other numbers than those asked about; its last part shows a careless
caller (answers without a call, copies a digit wrongly). Reinforcement learning has to find out that calling, and
copying with care, pays. The reward is exact match of the last answer.
"""
