"""Where checkpoints live: one interface, a directory and an S3 implementation, and wrappers."""
