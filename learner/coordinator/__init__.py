"""Leases prompts to servers, assigns groups to steps, accounts for both.

Reading order: process, loop, coordinator, window, mailbox.
"""
