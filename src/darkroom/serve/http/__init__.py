"""The doors: one file a dialect, each a router made from a `Core`. `common` has what they share."""
