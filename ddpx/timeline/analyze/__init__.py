"""Evaluates recorded steps: intervals, figures, summaries and advice."""
