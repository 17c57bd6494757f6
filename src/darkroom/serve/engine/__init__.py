"""The engine: one thread owns the model and packs rows of any requests into a batch, each step anew."""
