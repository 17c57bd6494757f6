"""Several processes: ranks, DDP and FSDP2, weights across ranks, and starting them."""
