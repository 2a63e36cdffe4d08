"""Whose names and whose layout: one file for each project that writes GPTs."""
