"""Lessons on a live model: what `tiedgpt explain` shows, and `tiedgpt.explain` returns."""

from tiedgpt.lessons.topics import TOPICS, explain

__all__ = ["TOPICS", "explain"]
