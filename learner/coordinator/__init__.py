"""Leases prompts to servers and assigns groups to steps. Reading order: process, loop, coordinator, window, leases."""
