"""One file for each advantage."""
