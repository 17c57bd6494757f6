"""The HTTP API: the application, its guard, and one file for each dialect over the same jobs."""
