"""What is trained: one file for each task."""
