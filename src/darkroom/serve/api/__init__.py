"""The HTTP API: the application, its guard, and the dialects over the same jobs."""
