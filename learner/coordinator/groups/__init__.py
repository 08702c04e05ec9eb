"""The open groups, the source of prompts, evaluations, and optional features. Reading order: group, open_groups."""
