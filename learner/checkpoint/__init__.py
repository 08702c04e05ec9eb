"""Checkpoint folders: written aside, sealed, found again. Reading order: folder, manifest, sealed_files."""
