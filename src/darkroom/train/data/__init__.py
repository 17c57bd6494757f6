"""What a training step reads: rows and their order, local data sets, precomputed latents, online encoding."""
