"""Checkpoints: their format, where they are stored, when they are saved, and how a run resumes."""
