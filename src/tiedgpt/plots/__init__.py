"""Figures from plain data: curves in the terminal, and as PNG, SVG or PDF."""
