"""The policy calls tools in its chat template's form. Reading order: tool_use, call_formats, arguments."""
