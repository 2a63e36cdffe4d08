"""Controlled comparisons: models that differ in one thing, on the same data, over several seeds.

`tied_vs_untied`: is one matrix that reads and predicts better than two?
"""

from tiedgpt.study.comparison import Study, tied_vs_untied

__all__ = ["Study", "tied_vs_untied"]
