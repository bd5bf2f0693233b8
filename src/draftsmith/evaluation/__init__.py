"""Measuring: prompts, speed with intervals, losslessness, pictures and reports."""
