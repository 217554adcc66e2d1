"""torchrun and everything below it: start, watch, stop. The gate for psutil and subprocess."""
