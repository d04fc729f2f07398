"""The experiments of the papers: plans with the papers' figures as data."""

from __future__ import annotations

from polytier.papers import plan

__all__ = ["plan"]
