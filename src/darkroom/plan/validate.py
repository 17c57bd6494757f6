"""Published tables, predicted: see `published`."""
