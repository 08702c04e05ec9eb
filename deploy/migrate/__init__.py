"""Settings files from other trainers' commands: shell reads, tables have names, convert and a file for each trainer
convert, write writes.
"""
