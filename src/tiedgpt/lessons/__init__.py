"""Lessons on a live model: what `tiedgpt explain` shows, and `tiedgpt.explain` returns."""

from tiedgpt.lessons.lesson import TOPICS, explain

__all__ = ["TOPICS", "explain"]
