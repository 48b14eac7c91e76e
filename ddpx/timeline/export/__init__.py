"""Writes timelines: files for trace viewers, pictures and HTML pages."""
