"""The policy calls tools as its chat template taught it. Reading order: call_formats, arguments, toolbox, tool_use."""
