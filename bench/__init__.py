"""Measurements side by side with torchrun: `python -m bench.all [--quick]`; see README.md here."""
